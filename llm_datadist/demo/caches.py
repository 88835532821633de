"""The demo's caches: their descriptions, and the model's keys and values kept in them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_datadist import CacheDesc, DataType, KvCache
from llm_datadist.demo.model import HEAD_SIZE, KV_HEADS, TENSORS, KvStore
from llm_datadist.demo.reports import MAX_TOKENS

__all__ = [
    "BULK_BLOCKS",
    "PAGED_BLOCKS",
    "ContiguousKv",
    "PagedKv",
    "blocks_for",
    "bulk_desc",
    "bulk_words",
    "contiguous_desc",
    "digest",
    "paged_desc",
    "plain",
    "scattered",
    "views",
]

Rows = npt.NDArray[np.float16]

BLOCK_TOKENS = 16
PAGED_BLOCKS = 2 * MAX_TOKENS // BLOCK_TOKENS
BULK_TENSORS = 64
BULK_BLOCKS = 64
_BULK_WORDS = 8192  # 64 KiB
_NUMPY: dict[DataType, np.dtype[Any]] = {
    DataType.DT_FLOAT16: np.dtype(np.float16),
    DataType.DT_UINT64: np.dtype(np.uint64),
}


def contiguous_desc() -> CacheDesc:
    """Describe a cache with one slot, long enough for a whole request."""
    return CacheDesc(TENSORS, [1, MAX_TOKENS, KV_HEADS, HEAD_SIZE], DataType.DT_FLOAT16)


def paged_desc() -> CacheDesc:
    """Describe a cache of small blocks, with room for two requests."""
    return CacheDesc(TENSORS, [PAGED_BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE], DataType.DT_FLOAT16)


def bulk_desc() -> CacheDesc:
    """Describe 256 MiB: 64 tensors of 64 blocks of 64 KiB."""
    return CacheDesc(BULK_TENSORS, [BULK_BLOCKS, _BULK_WORDS], DataType.DT_UINT64)


def bulk_words(tensor: int, block: int) -> npt.NDArray[np.uint64]:
    """Give the content of a block of the bulk cache: every word of all its blocks is different."""
    words = np.arange(_BULK_WORDS, dtype=np.uint64)
    words += np.uint64(tensor * BULK_BLOCKS + block) << np.uint64(32)
    return words


def scattered(seed: int, blocks: int, count: int) -> list[int]:
    """Draw different blocks in random order."""
    return [int(block) for block in np.random.default_rng(seed).permutation(blocks)[:count]]


def blocks_for(tokens: int) -> int:
    """Say how many blocks of the paged cache hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def views(cache: KvCache) -> list[npt.NDArray[Any]]:
    """Give the tensors of a cache as arrays on its memory. They are valid as long as the cache lives."""
    desc = cache.cache_desc
    memory = [(ctypes.c_uint8 * desc.size).from_address(address) for address in cache.per_device_tensor_addrs[0]]
    return [np.frombuffer(memoryview(part), _NUMPY[desc.data_type]).reshape(desc.shape) for part in memory]


def plain(desc: CacheDesc) -> list[npt.NDArray[Any]]:
    """Give tensors of the same form in memory of this process alone."""
    return [np.zeros(desc.shape, _NUMPY[desc.data_type]) for _ in range(desc.num_tensors)]


class ContiguousKv:
    """A request in the one slot of a contiguous cache."""

    def __init__(self, tensors: Sequence[Rows]) -> None:
        self._tensors = tensors

    def write(self, tensor: int, position: int, rows: npt.NDArray[Any]) -> None:
        """Store rows from a token position on."""
        self._tensors[tensor][0, position : position + len(rows)] = rows

    def read(self, tensor: int, length: int) -> Rows:
        """Give the first rows."""
        rows: Rows = self._tensors[tensor][0, :length]
        return rows


class PagedKv:
    """A request in scattered blocks: ``table[i]`` is the block of its tokens ``16 * i`` to ``16 * i + 15``."""

    def __init__(self, tensors: Sequence[Rows], table: Sequence[int]) -> None:
        self._tensors = tensors
        self._table = np.asarray(table)

    def write(self, tensor: int, position: int, rows: npt.NDArray[Any]) -> None:
        """Store rows from a token position on."""
        positions = np.arange(position, position + len(rows))
        self._tensors[tensor][self._table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = rows

    def read(self, tensor: int, length: int) -> Rows:
        """Give the first rows, gathered."""
        blocks = self._table[: blocks_for(length)]
        rows: Rows = self._tensors[tensor][blocks].reshape(-1, KV_HEADS, HEAD_SIZE)[:length]
        return rows


def digest(store: KvStore, length: int) -> str:
    """Give the SHA-256 of the keys and values of the first tokens."""
    sha = hashlib.sha256()
    for tensor in range(TENSORS):
        sha.update(store.read(tensor, length).tobytes())
    return sha.hexdigest()
