"""What tests have done inside a peer with its CacheManager."""

from __future__ import annotations

import time
from typing import Any

import memory
import users

from llm_datadist import BlocksCacheKey, CacheDesc

KEY = BlocksCacheKey(1)
OWN = 0x5A5A5A5A5A5A5A5A
PUSHED = 1


def reuse_under_pushes(manager: Any, desc: CacheDesc, registered: bool, rounds: int) -> tuple[int, int]:
    """Release a cache that peers push to, use its memory otherwise, and look; give violations and reuses."""
    violations = reused = 0
    given = [users.take(desc.size) for _ in range(desc.num_tensors)]
    for _ in range(rounds):
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
