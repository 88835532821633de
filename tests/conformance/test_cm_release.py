"""Memory that is released while transfers use it: never a byte into reused memory, never foreign bytes as success."""

from __future__ import annotations

import threading
from typing import Any

import memory
import pytest
from ends import End, desc
from refusals import refuses
from stall import Running, Stalled

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMException, LLMStatusCode

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
SUCCESS = LLMStatusCode.LLM_SUCCESS
OF = desc(4, 1, 4096)


@pytest.fixture
def pair(peer: Any) -> Any:
    """Destinations in the peer, whose limit for unregistering is short; the source's transfers may take long."""
    there, here = End(peer, 1, remote=True, sync_kv_timeout=100), End(None, 2, remote=True, sync_kv_timeout=20000)
    yield there, here
    here.close()


def test_s113_unregistering_waits_for_a_push(pair: tuple[End, End]) -> None:
    """S-113, S-110: while a peer writes the cache stays registered, also when asked again; afterwards it goes."""
    there, here = pair
    source, target = here.register(OF, salt=0), there.register(OF)
    here.link(there)
    number = there.id(target)
    key = CacheKeyByIdAndIndex(1, number, 0)
    with Stalled(here.dd, lambda: here.manager.push_cache(key, source), 1000) as stalled:
        for _ in range(3):
            with refuses(TIMEOUT, f"cache {number}", "registered"):
                there.manager.unregister_cache(number)
        error = stalled.finish()
    # The push was in time for its bytes, yet its destination was withdrawn meanwhile.
    assert error is None or getattr(error, "status_code", None) is NOT_EXIST, error
    here.manager.push_cache(key, source)
    there.check(target, OF, {t: [(0, here.expected(OF, t))] for t in range(4)})
    there.manager.unregister_cache(number)
    there.fill(target, OF, None)
    with refuses(NOT_EXIST, f"cache {number}"):
        here.manager.push_cache(key, source)
    there.untouched(target, OF)


def test_s113_unregistering_returns_when_the_transfer_has_ended(remote_cm: tuple[End, End]) -> None:
    """S-113: the owner's own transfers are waited for too, and nothing of the cache is left afterwards."""
    there, here = remote_cm
    source, target = here.register(OF, salt=0), there.register(OF)
    here.link(there)
    key = CacheKeyByIdAndIndex(1, there.id(target), 0)
    with (
        Stalled(here.dd, lambda: here.manager.push_cache(key, source), 1000) as stalled,
        Running(lambda: here.manager.unregister_cache(source.cache_id)) as unregistering,
    ):
        assert not unregistering.ended(0.05)
        assert stalled.finish() is None
        assert unregistering.wait() is None
    with refuses(NOT_EXIST, f"cache {source.cache_id}"):
        here.manager.push_cache(key, source)


def test_s113_what_unregistering_leaves_alone(cm: tuple[End, End]) -> None:
    """S-113, E-184: allocated caches, unknown ids and a second call are no-ops; keys go with their cache."""
    there, here = cm
    allocated = there.allocate(OF, [CacheKey(1, 10)], salt=0)
    registered = there.register(OF, [CacheKey(1, 11)], salt=1)
    for number in (there.id(allocated), 99, 0, -1, -(2**63), 2**63 - 1):
        there.manager.unregister_cache(number)
    cache = here.allocate(OF)
    here.manager.pull_cache(CacheKey(1, 11), cache)
    for _ in range(2):
        there.manager.unregister_cache(there.id(registered))
    with refuses(NOT_EXIST, "req_id=11"):
        here.manager.pull_cache(CacheKey(1, 11), cache)
    here.check(cache, OF, {t: [(0, there.expected(OF, t, 1))] for t in range(4)})
    here.manager.pull_cache(CacheKey(1, 10), cache)
    there.manager.register_cache(OF, there.addresses(registered), [CacheKey(1, 11)])


@pytest.mark.parametrize("registered", [False, True])
def test_late_pushes_never_reach_reused_memory(remote_cm: tuple[End, End], registered: bool) -> None:
    """S-192, S-113: a cache goes while pushes come without pause; its memory then keeps what its owner writes."""
    there, here = remote_cm
    of = desc(2, 1, 1 << 16)
    source = here.allocate(of, blocks=True)
    for address in here.addresses(source):
        memory.fill(address, 1, of.size)
    here.link(there)
    stop = threading.Event()
    outcomes = set()

    def push() -> None:
        while not stop.is_set():
            try:
                here.manager.push_blocks(BlocksCacheKey(1), source, [0], [0])
                outcomes.add(SUCCESS)
            except LLMException as e:
                outcomes.add(e.status_code)

    with Running(push) as pushing:
        try:
            violations, _ = there.peer.make("cm_inside:reuse_under_pushes", there.manager, of, registered, 200)
        finally:
            stop.set()
        assert pushing.wait() is None
    assert violations == 0
    assert outcomes == {SUCCESS, NOT_EXIST}


@pytest.mark.parametrize("unmap", [False, True])
def test_pulls_meet_an_unregistration(cm: tuple[End, End], unmap: bool) -> None:
    """S-192, S-113: memory is unregistered, then filled anew or unmapped, while peers pull: old bytes or an error."""
    there, here = cm
    of = desc(2, 1, 1 << 17)
    cache = here.allocate(of)
    stop = threading.Event()
    outcomes = set()
    pulled = threading.Event()

    def pull() -> None:
        while not stop.is_set():
            try:
                here.manager.pull_cache(CacheKey(1, 10), cache)
                outcomes.add(SUCCESS)
            except LLMException as e:
                outcomes.add(e.status_code)
                continue
            pulled.set()
            words = {memory.word(address, of.size) for address in here.addresses(cache)}
            assert words == {1}, words

    with Running(pull) as pulling:
        try:
            for number in range(200):
                offered = there.peer.make("cm_inside:offer_word", there.manager, of, CacheKey(1, 10))
                if number % 10 == 0:
                    pulled.clear()
                    assert pulled.wait(30), "no pull came"
                there.peer.make("cm_inside:take_back", there.manager, offered, unmap)
        finally:
            stop.set()
        assert pulling.wait() is None
    assert outcomes == {SUCCESS, NOT_EXIST}
