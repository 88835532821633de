"""Memory is short: the call that asks for it says so, and everything else goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from expect import failure
from pairs import Decoder, Prompt, bytes_desc
from peer import Peer

from llm_datadist import CacheKey, LLMStatusCode

SHORT = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
MIB = 1 << 20


def available() -> int:
    """Give the bytes that the machine could still give."""
    with open("/proc/meminfo") as info:
        return next(int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable:"))


def check_usable(prompt: Prompt, decoder: Decoder, request: int) -> None:
    """A small cache can be allocated, filled and pulled."""
    desc = bytes_desc(2, 1, MIB)
    prompt.peer.make("inside:offer", desc, [CacheKey(1, request)], request, False)
    cache = decoder.allocate(desc)
    decoder.manager.pull_cache(CacheKey(1, request), cache)
    decoder.check(cache, {t: [(0, request.to_bytes(8, "little") * (MIB // 8))] for t in range(2)})
    decoder.manager.deallocate_cache(cache)


@pytest.mark.needs("sparse")
def test_more_than_the_machine_has(prompt: Prompt, decoder: Decoder) -> None:
    """S-18: refused at once, not by a signal at the first touch, and all that was taken is given back."""
    decoder.link(prompt)
    desc = bytes_desc(4, 1, available() // 4 + 256 * MIB)
    for round_ in range(3):
        with failure(SHORT):
            prompt.manager.allocate_cache(desc, [CacheKey(1, 1)])
        with failure(SHORT):
            decoder.manager.allocate_cache(desc)
        assert prompt.peer.make("inside:used") == [0]
        check_usable(prompt, decoder, 100 + round_)


@pytest.mark.needs("sparse")
def test_cgroup_limit(prompt: Prompt, decoder: Decoder) -> None:
    """S-18: tensors that fit are taken back when a later one does not; what was freed is used again."""
    decoder.link(prompt)
    prompt.peer.make("inside:pretend_room", 8 * MIB)
    for round_ in range(3):
        with failure(SHORT, "memory.max"):
            prompt.manager.allocate_cache(bytes_desc(9, 1, MIB), [CacheKey(1, 1)])
        assert prompt.peer.make("inside:used") == [0]
        check_usable(prompt, decoder, 100 + round_)
        cache = prompt.manager.allocate_cache(bytes_desc(7, 1, MIB), [CacheKey(1, 1)])
        with failure(SHORT, "1 keys|caches are allocated"):
            prompt.manager.allocate_cache(bytes_desc(2, 1, MIB))
        prompt.manager.remove_cache_key(CacheKey(1, 1))
        prompt.manager.deallocate_cache(cache)


def test_pool_limit(peer: Peer, decoder: Decoder) -> None:
    """S-18, S-64, S-124, B02: the pool is full until keys are pulled or removed; the text names who waits."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize=str(64 * MIB), mem_utilization=1.0)
    decoder.link(prompt)
    desc = bytes_desc(4, 1, 4 * MIB)
    for request in range(4):
        prompt.peer.make("inside:offer", desc, [CacheKey(1, request)], request + 1, False)
    with failure(SHORT, "4 keys.*req_id=0"):
        prompt.manager.allocate_cache(desc)
    cache = decoder.allocate(desc)
    decoder.manager.pull_cache(CacheKey(1, 2), cache)
    prompt.manager.allocate_cache(desc, [CacheKey(1, 9)])
    with failure(SHORT):
        prompt.manager.allocate_cache(desc)
    prompt.manager.remove_cache_key(CacheKey(1, 0))
    prompt.manager.allocate_cache(desc, [CacheKey(1, 0)])


@pytest.mark.needs("sparse")
@pytest.mark.parametrize("more", [3 << 30, 5 << 30])
def test_address_limit(start_quick: Callable[[], Peer], more: int) -> None:
    """S-18, S-175: under ulimit -v the pool is smaller; linking, pulling and the out-of-memory error work as ever."""
    peer = start_quick()
    peer.make("inside:limit_addresses", more)
    prompt = Prompt(peer)
    decoder = Decoder(llm__Simulator__AddressSpace=str(256 * MIB))
    try:
        decoder.link(prompt)
        check_usable(prompt, decoder, 1)
        with failure(SHORT):
            prompt.manager.allocate_cache(bytes_desc(1, 1, more))
        check_usable(prompt, decoder, 2)
    finally:
        decoder.dd.finalize()


@pytest.mark.needs("sparse")
def test_no_addresses_at_all(start_quick: Callable[[], Peer]) -> None:
    """S-175: `init` fails with the reason and leaves nothing; it works once there is room."""
    peer = start_quick()
    prompt = Prompt(peer)
    prompt.dd.finalize()
    peer.make("inside:limit_addresses", 100 * MIB)
    for _ in range(3):
        with failure(SHORT, "ulimit -v|could not be mapped"):
            prompt.dd.init(prompt.options)
    peer.make("inside:limit_addresses", 8 << 30)
    prompt.dd.init(prompt.options)
    prompt.peer.make("inside:offer", bytes_desc(1, 1, MIB), [], 1)
