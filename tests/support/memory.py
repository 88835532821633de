"""Fill and read cache memory behind the engine's back, in the process that owns it.

A suite that used the library to look at bytes would prove the library by itself. Each backend has its own way to reach
memory; tests use only these two functions.
"""

import ctypes
import os

import ascend_memory


def write(address: int, data: bytes) -> None:
    """Put bytes at an address of a cache of this process."""
    if in_driver():
        ascend_memory.write(address, data)
    else:
        ctypes.memmove(address, data, len(data))


def read(address: int, nbytes: int) -> bytes:
    """Give the bytes at an address of a cache of this process."""
    return ascend_memory.read(address, nbytes) if in_driver() else ctypes.string_at(address, nbytes)


def in_driver() -> bool:
    """Say whether the memory of caches is a driver's; else it is plain memory of this process."""
    backend = os.environ["LLM_DATADIST_BACKEND"]
    assert backend in ("simulator", "asked", "acl"), f"nobody has told how to reach the memory of {backend}"
    return backend == "acl"


def pattern(cluster: int, tensor: int, nbytes: int, salt: int = 0) -> bytes:
    """Give bytes in which every 8-byte word is different, and differs between clusters, tensors and salts."""
    import numpy as np

    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    seed = (cluster * 1_000_003 + tensor * 7919 + salt * 104_729 + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (words + np.uint64(seed)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return mixed.tobytes()[:nbytes]


def fill(address: int, word: int, nbytes: int) -> None:
    """Fill memory of this process with one 8-byte word, so that a single look tells whose bytes they are."""
    write(address, word.to_bytes(8, "little") * (nbytes // 8))


def word(address: int, nbytes: int) -> int | None:
    """Give the one word that fills this memory, or None if different words are in it."""
    data = read(address, nbytes)
    return int.from_bytes(data[:8], "little") if data == data[:8] * (nbytes // 8) else None
