"""Big memory and very many blocks (B18, B25)."""

from __future__ import annotations

from typing import Any

import memory
import numpy as np
import pytest
from expect import failure
from pairs import Decoder, Prompt, bytes_desc

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, KvCache, LLMStatusCode

KEY = BlocksCacheKey(1, 0)
GIB = 1 << 30
KIB = 1 << 10


def available() -> int:
    """Give the bytes that the machine could still give."""
    with open("/proc/meminfo") as info:
        return next(int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable:"))


def mark(prompt: Prompt, address: int, offsets: list[int]) -> None:
    """Write 64 bytes that tell the offset, at each offset of a tensor."""
    for offset in offsets:
        prompt.peer.make("memory:fill", address + offset, offset + 1, 64)


@pytest.mark.skipif(available() < 12 * GIB, reason="needs 12 GiB of free memory")
def test_b18_blocks_of_six_gib(linked: tuple[Prompt, Decoder]) -> None:
    """B18, S-2, S-50: blocks on both sides of 2 and 4 GiB, one by one and in one call, and a sum above 4 GiB."""
    prompt, decoder = linked
    size = 64 * KIB
    source = prompt.manager.allocate_blocks_cache(bytes_desc(1, 98_304, size), KEY)
    blocks = [0, 32_767, 32_768, 65_535, 65_536, 98_303]
    mark(prompt, source.get("per_device_tensor_addrs")[0][0], [block * size for block in blocks])
    cache = decoder.allocate(bytes_desc(1, 6, size), blocks=True)
    address = cache.per_device_tensor_addrs[0][0]
    for i, block in enumerate(blocks):
        decoder.manager.pull_blocks(KEY, cache, [block], [i])
        assert memory.word(address + i * size, 64) == block * size + 1
    decoder.manager.pull_blocks(KEY, cache, blocks, range(5, -1, -1))
    assert [memory.word(address + (5 - i) * size, 64) for i in range(6)] == [block * size + 1 for block in blocks]
    decoder.manager.pull_blocks(KEY, cache, [*range(70_000), 98_303], [1] * 70_001)
    assert memory.word(address + size, 64) == 98_303 * size + 1


@pytest.mark.skipif(available() < 12 * GIB, reason="needs 12 GiB of free memory")
def test_b18_slot_beyond_four_gib(linked: tuple[Prompt, Decoder]) -> None:
    """B18, S-30 to S-34: offsets and sizes around 4 GiB."""
    prompt, decoder = linked
    slot = 4 * GIB + (64 << 20)
    source = prompt.manager.allocate_cache(bytes_desc(1, 1, slot), [CacheKey(1, 1)])
    offsets = [0, 4 * GIB - 64, 4 * GIB, slot - 64]
    mark(prompt, source.get("per_device_tensor_addrs")[0][0], offsets)
    cache = decoder.allocate(bytes_desc(1, 1, 128))
    for offset in offsets:
        decoder.prefill(cache)
        decoder.manager.pull_cache(CacheKey(1, 1), cache, 0, 64, src_cache_offset=offset, dst_cache_offset=32)
        decoder.check(cache, {0: [(32, (offset + 1).to_bytes(8, "little") * 8)]})
    decoder.prefill(cache)
    for size in (4 * GIB - 1, 4 * GIB, 4 * GIB + 1, 4 * GIB + 64):
        with failure(LLMStatusCode.LLM_PARAM_INVALID, str(size)):
            decoder.manager.pull_cache(CacheKey(1, 1), cache, 0, size, dst_cache_offset=0)
    with failure(LLMStatusCode.LLM_PARAM_INVALID):
        decoder.manager.pull_cache(CacheKey(1, 1), cache, 0, 64, src_cache_offset=slot - 63)
    decoder.untouched(cache)


def test_b18_product_beyond_int64(decoder: Decoder) -> None:
    """B18, S-19, E-34: too large to be counted: refused, and nothing is taken."""
    for desc in (
        CacheDesc(1, [2**31, 2**31, 2], DataType.DT_FLOAT16),
        CacheDesc(1, [2**62, 1], DataType.DT_FLOAT),
        CacheDesc(2**20, [2**43], DataType.DT_UINT8),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            decoder.manager.allocate_cache(desc)
        assert caught.value.status_code in (  # type: ignore[attr-defined]
            LLMStatusCode.LLM_PARAM_INVALID,
            LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
        )
    decoder.allocate(bytes_desc(1, 1, 64))


COUNT, BLOCK = 200_000, 576


def blocks_of(decoder: Decoder, cache: KvCache, tensor: int) -> np.ndarray[Any, Any]:
    """Give the blocks of a tensor."""
    return np.frombuffer(decoder.tensor(cache, tensor), np.uint8).reshape(COUNT, BLOCK)


def resident(kind: str) -> int:
    """Give the memory of a kind (RssAnon: private, RssShmem: shared) that this process has mapped in, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{kind}:"))


@pytest.mark.needs("sparse")
def test_b25_a_small_pull_from_a_large_cache(linked: tuple[Prompt, Decoder]) -> None:
    """B18, B25, S-180: what is not copied is not touched, so the size of the source cache costs nothing."""
    prompt, decoder = linked
    desc = bytes_desc(2, 2048, 64 * KIB)
    prompt.manager.allocate_cache(desc, [CacheKey(1, request) for request in range(2048)])
    prompt.manager.allocate_blocks_cache(desc, KEY)
    cache = decoder.allocate(bytes_desc(2, 4, 64 * KIB))
    before = resident("RssShmem")
    for request in (0, 1024, 2047):
        decoder.manager.pull_cache(CacheKey(1, request), cache)
        decoder.manager.pull_blocks(KEY, cache, [request], [1])
    # Two tensors six times, each of them on one huge page perhaps; the caches have 256 MiB each.
    assert resident("RssShmem") - before < 32 << 20


def test_b25_very_many_small_blocks(linked: tuple[Prompt, Decoder]) -> None:
    """B25, S-50: random, consecutive and reversed lists, as list and as array, byte by byte; no memory piles up."""
    prompt, decoder = linked
    decoder.dd._engine.transfers._timeout_ms = 60000
    desc = bytes_desc(2, COUNT, BLOCK)
    prompt.allocate_blocks(desc, KEY)
    expected = [np.frombuffer(prompt.expected(desc, t), np.uint8).reshape(COUNT, BLOCK) for t in range(2)]
    cache = decoder.manager.allocate_blocks_cache(desc)
    random = np.random.default_rng(25)
    plans = [
        (random.choice(COUNT, 15_000, replace=False), random.choice(COUNT, 15_000, replace=False)),
        (np.arange(100_000, 115_000), np.arange(7, 15_007)),
        (np.arange(COUNT), np.arange(COUNT)[::-1]),
    ]
    for source, destination in plans:
        for kind in (np.asarray, np.ndarray.tolist):
            decoder.prefill(cache)
            decoder.manager.pull_blocks(KEY, cache, kind(source), kind(destination))
            for t in range(2):
                mine = blocks_of(decoder, cache, t)
                assert np.array_equal(mine[destination], expected[t][source])
                if len(source) < COUNT:
                    rest = np.ones(COUNT, bool)
                    rest[destination] = False
                    assert np.all(mine[rest] == 0xA5)
    source, destination = plans[0]
    before = resident("RssAnon")
    for _ in range(25):
        decoder.manager.pull_blocks(KEY, cache, source, destination)
    assert resident("RssAnon") - before < 16 << 20
