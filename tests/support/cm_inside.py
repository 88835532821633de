"""What tests have done inside a peer with its CacheManager."""

from __future__ import annotations

import time
import warnings
from typing import Any

import memory
import users

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey

KEY = BlocksCacheKey(1)
OWN = 0x5A5A5A5A5A5A5A5A
PUSHED = 1
#: How often released memory must be used again for a test to have seen something.
ENOUGH = 10


def reuse_under_pushes(manager: Any, desc: CacheDesc, registered: bool, rounds: int) -> tuple[int, int]:
    """Release a cache that peers push to, use its memory otherwise, and look; give violations and reuses.

    Memory that is being pushed to at its release is not used again, so there are more rounds until some was.
    """
    violations = reused = number = 0
    given = [users.take(desc.size) for _ in range(desc.num_tensors)]
    limit = time.monotonic() + 40
    while number < rounds or reused < ENOUGH:
        assert time.monotonic() < limit, f"memory was used again {reused} times in {number} rounds"
        number += 1
        if registered:
            cache = manager.register_blocks_cache(desc, given, KEY, True)
        else:
            cache = manager.allocate_blocks_cache(desc, KEY)
        addresses = list(cache.tensor_addrs)
        memory.fill(addresses[-1], 0, 8)
        end = time.monotonic() + 5
        while memory.word(addresses[-1], 8) != PUSHED:
            assert time.monotonic() < end, "no push arrived"
        if registered:
            manager.unregister_cache(cache.cache_id)
            mine = addresses
        else:
            manager.deallocate_blocks_cache(cache)
            other = manager.allocate_cache(desc)
            mine = list(other.tensor_addrs)
        for address in mine:
            memory.fill(address, OWN, desc.size)
        end = time.monotonic() + 0.0005
        while time.monotonic() < end:
            pass
        violations += any(memory.word(address, desc.size) != OWN for address in mine)
        reused += mine == addresses
        if not registered:
            manager.deallocate_cache(other)
    return violations, reused


def register_wild(manager: Any, desc: CacheDesc, addresses: list[int], keys: list[Any]) -> Any:
    """Register memory that is not there, of which the warning is expected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = manager.register_cache(desc, addresses, keys)
    assert [warning.category for warning in caught] == [RuntimeWarning]
    return cache


def offer_word(manager: Any, desc: CacheDesc, key: CacheKey) -> Any:
    """Register fresh memory that is full of one word."""
    given = [users.take(desc.size) for _ in range(desc.num_tensors)]
    for address in given:
        memory.fill(address, PUSHED, desc.size)
    return manager.register_cache(desc, given, [key])


def take_back(manager: Any, cache: Any, unmap: bool) -> None:
    """Unregister, and fill the memory with another word or unmap it."""
    manager.unregister_cache(cache.cache_id)
    if not unmap:
        for address in cache.tensor_addrs:
            memory.fill(address, OWN, cache.cache_desc.size)
    users.give_back()
