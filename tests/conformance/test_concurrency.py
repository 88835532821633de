"""Calls at the same time: one operation a link, links apart from each other, and release against a running pull."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import memory
import pytest
from pairs import Decoder, Prompt, bytes_desc, options
from peer import Peer
from refusals import PARAM_INVALID, refuses
from stall import Stalled

from llm_datadist import BlocksCacheKey, CacheKey, LLMRole
from llm_datadist import LLMStatusCode as Code

DESC = bytes_desc(2, 2, 64)
NOT_EXIST = Code.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture
def patient(prompt: Prompt) -> Iterator[tuple[Prompt, Decoder]]:
    """Give a linked pair whose pulls may stand still for long."""
    decoder = Decoder(sync_kv_timeout=60000)
    decoder.link(prompt)
    yield prompt, decoder
    decoder.dd.finalize()


@pytest.fixture
def other_peer(start_peer: Callable[[], Peer]) -> Peer:
    """Give a third process."""
    peer = start_peer()
    return peer


def test_e239_second_operation_on_a_link(patient: tuple[Prompt, Decoder]) -> None:
    """E-239, S-190: it is refused at once and harms nothing; both pulls then bring the right bytes."""
    prompt, decoder = patient
    prompt.allocate(DESC, [CacheKey(1, 10), CacheKey(1, 11)])
    prompt.allocate_blocks(DESC, BlocksCacheKey(1))
    first, second = decoder.allocate(DESC), decoder.allocate(DESC)
    with Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), first), at=10) as pull:
        start = time.monotonic()
        for call in (
            lambda: decoder.manager.pull_cache(CacheKey(1, 11), second),
            lambda: decoder.manager.pull_cache(CacheKey(1, 10), second),
            lambda: decoder.manager.pull_blocks(BlocksCacheKey(1), second, [0], [0]),
            # S-40: the link comes before the peer's side ...
            lambda: decoder.manager.pull_cache(CacheKey(1, 99), second),
            lambda: decoder.manager.pull_blocks(BlocksCacheKey(1), second, [7], [0]),
        ):
            with refuses(Code.LLM_LINK_BUSY, "cluster 1"):
                call()
        # ... and after this side.
        with refuses(PARAM_INVALID, "batch_index"):
            decoder.manager.pull_cache(CacheKey(1, 11), second, 2)
        assert decoder.dd.link_clusters([prompt.info()], 5000) == (Code.LLM_SUCCESS, [Code.LLM_ALREADY_LINK])
        assert time.monotonic() - start < 10
        decoder.untouched(second)
        assert pull.finish() is None
    decoder.manager.pull_cache(CacheKey(1, 11), second)
    for slot, cache in enumerate((first, second)):
        decoder.check(cache, {t: [(0, prompt.expected(DESC, t)[64 * slot :][:64])] for t in range(2)})


def test_s190_local_calls_during_a_pull(patient: tuple[Prompt, Decoder]) -> None:
    """S-190: caches can be allocated, shown and given back while a pull stands still."""
    prompt, decoder = patient
    prompt.allocate(DESC, [CacheKey(1, 10)])
    cache = decoder.allocate(DESC)
    with Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache), at=10) as pull:
        other = decoder.allocate(DESC)
        assert decoder.manager.get_cache_tensors(other)
        decoder.manager.deallocate_cache(other)
        assert pull.finish() is None


def test_s191_links_are_independent(patient: tuple[Prompt, Decoder], other_peer: Peer) -> None:
    """S-191: a pull that stands still on one link does not hold up another one, nor its unlink."""
    prompt, decoder = patient
    other = Prompt(other_peer, 3)
    decoder.link(other)
    prompt.allocate(DESC, [CacheKey(1, 10)])
    other.allocate(DESC, [CacheKey(3, 10)])
    first, second = decoder.allocate(DESC), decoder.allocate(DESC)
    with Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), first), at=10) as pull:
        decoder.manager.pull_cache(CacheKey(3, 10), second)
        decoder.dd.check_link_status(3)
        assert decoder.dd.unlink_clusters([other.info()], 5000) == (Code.LLM_SUCCESS, [Code.LLM_SUCCESS])
        assert pull.finish() is None
    for owner, cache in ((prompt, first), (other, second)):
        decoder.check(cache, {t: [(0, owner.expected(DESC, t)[:64])] for t in range(2)})


@pytest.mark.parametrize("at", [0, 65, 128])
def test_s192_source_is_released_during_a_pull(patient: tuple[Prompt, Decoder], at: int) -> None:
    """S-192, case B01: never foreign bytes as a success, wherever the pull stands; the owner does not wait for it."""
    prompt, decoder = patient
    source = prompt.allocate(DESC, [CacheKey(1, 10)])
    addresses = source.get("per_device_tensor_addrs")
    cache = decoder.allocate(DESC)
    with Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache), at) as pull:
        prompt.manager.remove_cache_key(CacheKey(1, 10))
        prompt.manager.deallocate_cache(source)
        reuser = prompt.allocate(DESC, [CacheKey(1, 10)], salt=1)
        assert reuser.get("per_device_tensor_addrs") == addresses, "the test needs the same memory again"
        error = pull.finish()
    with refuses(NOT_EXIST, "req_id=10", "undefined"):
        raise error or AssertionError("the pull did not fail")
    # The key's new cache is untouched by what happened to the old one.
    decoder.prefill(cache)
    decoder.manager.pull_cache(CacheKey(1, 10), cache)
    decoder.check(cache, {t: [(0, prompt.expected(DESC, t, salt=1)[:64])] for t in range(2)})


def test_s192_deallocated_but_keyed_source_is_complete(patient: tuple[Prompt, Decoder]) -> None:
    """S-192, S-20: a cache that its key keeps alive gives its old data to a running pull."""
    prompt, decoder = patient
    source = prompt.allocate(DESC, [CacheKey(1, 10)])
    cache = decoder.allocate(DESC)
    with Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache), at=65) as pull:
        prompt.manager.deallocate_cache(source)
        prompt.allocate(DESC, salt=1)
        assert pull.finish() is None
    decoder.check(cache, {t: [(0, prompt.expected(DESC, t)[:64])] for t in range(2)})


def test_s192_destination_is_deallocated_during_a_pull(patient: tuple[Prompt, Decoder]) -> None:
    """S-192: the destination's memory goes to nobody else before the pull has ended."""
    prompt, decoder = patient
    prompt.allocate(DESC, [CacheKey(1, 10)])
    cache = decoder.allocate(DESC)
    with Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache), at=10) as pull:
        decoder.manager.deallocate_cache(cache)
        other = decoder.allocate(DESC)
        assert pull.finish() is None
    decoder.untouched(other)
    again = decoder.manager.allocate_cache(DESC)
    assert decoder.dd._engine.caches.used() == [2 * 2 * 512]
    assert again.cache_id == 3


def test_s193_all_bytes_are_there_when_a_pull_returns(linked: tuple[Prompt, Decoder]) -> None:
    """S-193: also of a pull large enough for several threads; and a change after it is not seen by it."""
    prompt, decoder = linked
    desc = bytes_desc(4, 1, 3 << 20)
    source = prompt.allocate_blocks(desc, BlocksCacheKey(1))
    cache = decoder.manager.allocate_blocks_cache(desc)
    decoder.manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
    for t, address in enumerate(source.get("per_device_tensor_addrs")[0]):
        assert decoder.tensor(cache, t) == prompt.expected(desc, t)
        prompt.peer.make("memory:write", address, bytes(1000))
    assert all(decoder.tensor(cache, t) == prompt.expected(desc, t) for t in range(4))


@pytest.mark.parametrize("collected", [False, True])
def test_s195_two_decoders_and_one_key(patient: tuple[Prompt, Decoder], other_peer: Peer, collected: bool) -> None:
    """S-195: one gets the data; the other gets it too, or KV_CACHE_NOT_EXIST, but never wrong bytes."""
    prompt, decoder = patient
    prompt.allocate(DESC, [CacheKey(1, 10)])
    cache = decoder.allocate(DESC)
    rival = other_peer.make("llm_datadist:LLMDataDist", LLMRole.DECODER, 5)
    rival.init(options())
    other_peer.make("conftest_support:link", rival, 1, prompt.addresses)
    manager = rival.get("kv_cache_manager")
    theirs = manager.allocate_cache(DESC)
    with Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache), at=65) as pull:
        manager.pull_cache(CacheKey(1, 10), theirs)
        if collected:
            # Any call on the owner's table takes in what was spent, and the key is gone for good.
            prompt.manager.remove_cache_key(CacheKey(1, 99))
        error = pull.finish()
    if collected:
        with refuses(NOT_EXIST, "req_id=10"):
            raise error or AssertionError("the pull did not fail")
    else:
        assert error is None
        decoder.check(cache, {t: [(0, prompt.expected(DESC, t)[:64])] for t in range(2)})
    for t, address in enumerate(theirs.get("per_device_tensor_addrs")[0]):
        assert other_peer.make("memory:read", address, 64) == prompt.expected(DESC, t)[:64]
    with refuses(NOT_EXIST, "req_id=10"):
        decoder.manager.pull_cache(CacheKey(1, 10), cache)


@pytest.mark.parametrize("how", ["unlink", "finalize"])
def test_prompt_ends_the_link_during_a_pull(patient: tuple[Prompt, Decoder], how: str) -> None:
    """S-172, S-144: the pull fails as not linked, soon and not by its time limit."""
    prompt, decoder = patient
    prompt.allocate(DESC, [CacheKey(1, 10)])
    cache = decoder.allocate(DESC)
    stalled = Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache), at=10)
    start = time.monotonic()
    if how == "finalize":
        prompt.dd.finalize()
    else:
        prompt.peer.make("conftest_support:unlink", prompt.dd, 2, [], False)
    error: Any = stalled.wait()
    assert time.monotonic() - start < 20
    with refuses(Code.LLM_NOT_YET_LINK, "cluster 1", "gone"):
        raise error
    decoder.prefill(cache)
    stalled.finish()
    decoder.untouched(cache)


def test_finalize_during_a_pull(patient: tuple[Prompt, Decoder]) -> None:
    """S-172: the pull ends with an LLMException, finalize returns, and a link from a new engine works."""
    prompt, decoder = patient
    prompt.allocate(DESC, [CacheKey(1, 10)])
    cache = decoder.allocate(DESC)
    stalled = Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache), at=10)
    start = time.monotonic()
    decoder.dd.finalize()
    assert time.monotonic() - start < 20
    with refuses(Code.LLM_NOT_YET_LINK, "cluster 1"):
        raise stalled.wait() or AssertionError("the pull did not fail")
    again = Decoder()
    try:
        again.link(prompt)
        mine = again.allocate(DESC)
        again.manager.pull_cache(CacheKey(1, 10), mine)
        again.check(mine, {t: [(0, prompt.expected(DESC, t)[:64])] for t in range(2)})
    finally:
        again.dd.finalize()


def test_many_threads_on_one_link(linked: tuple[Prompt, Decoder]) -> None:
    """S-190: whoever gets the link brings right bytes, all others are told LINK_BUSY, nothing else happens."""
    prompt, decoder = linked
    prompt.allocate_blocks(DESC, BlocksCacheKey(1))
    caches = [decoder.allocate(DESC) for _ in range(4)]
    done, wrong = [0] * 4, []

    def run(i: int) -> None:
        for _ in range(200):
            try:
                decoder.manager.pull_blocks(BlocksCacheKey(1), caches[i], [0, 1], [1, 0])
                done[i] += 1
            except Exception as error:
                if getattr(error, "status_code", None) is not Code.LLM_LINK_BUSY:
                    wrong.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    for i, cache in enumerate(caches):
        if done[i]:
            for t, address in enumerate(cache.per_device_tensor_addrs[0]):
                expected = prompt.expected(DESC, t)
                assert memory.read(address, 128) == expected[64:] + expected[:64]
    assert sum(done)
