"""Two sides do things at the same moment, hundreds of times: never foreign bytes, and no key is lost or stays.

Every cache is filled with one word, so bytes of two caches can't pass for bytes of one.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator

import inside
import memory
import pytest
from expect import failure
from pairs import Decoder, Prompt, bytes_desc, cluster_info, options
from peer import Peer

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMException, LLMRole, LLMStatusCode

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
FOREIGN = 0xEEEEEEEEEEEEEEEE
#: Long enough that a release often meets a copy: about 100 us.
WIDE = bytes_desc(4, 1, 256 << 10)
SMALL = bytes_desc(8, 1, 4096)


def words(decoder: Decoder, cache: object) -> set[int | None]:
    """Give the words that fill the tensors of a cache; None stands for a torn tensor."""
    desc = cache.cache_desc  # type: ignore[attr-defined]
    return {memory.word(address, desc.size) for address in cache.per_device_tensor_addrs[0]}  # type: ignore[attr-defined]


def pull(decoder: Decoder, key: object, cache: object, **kwargs: object) -> set[int | None] | None:
    """Pull and give the words; None when the source did not exist."""
    try:
        decoder.manager.pull_cache(key, cache, 0, **kwargs)
    except LLMException as e:
        if e.status_code != NOT_EXIST:
            raise
        return None
    return words(decoder, cache)


@pytest.mark.needs("mapped_words")
@pytest.mark.parametrize("how", ["by key", "by id", "without a key"])
def test_release_against_pull(linked: tuple[Prompt, Decoder], how: str) -> None:
    """S-24, S-38, S-192, B01: a pull gives the old bytes, whole, or an error; never what the memory holds next."""
    prompt, decoder = linked
    cache = decoder.allocate(WIDE)
    own = CacheKey(1, 10)
    outcomes = {"whole": 0, "error": 0}
    for number in range(1, 301):
        keys = [] if how == "without a key" else [own]
        cache_id, addresses = prompt.peer.make("inside:offer", WIDE, keys, number)
        source = own if how == "by key" else CacheKeyByIdAndIndex(1, cache_id, 0)
        prompt.peer.start("make", "inside:withdraw", cache_id, keys, WIDE, FOREIGN)
        inside.spin(number % 40 * 10_000)
        found = pull(decoder, source, cache)
        assert found in (None, {number})
        outcomes["error" if found is None else "whole"] += 1
        assert prompt.peer.answer() == addresses, "the memory was not used again, so this round shows nothing"
        assert pull(decoder, source, cache) is None
    assert all(outcomes.values()), outcomes


@pytest.mark.needs("mapped_words")
def test_key_bound_anew_while_its_old_cache_lives(linked: tuple[Prompt, Decoder]) -> None:
    """S-24, S-60, S-63, B01: a pull gives one of the two caches, whole, and spends the binding that it has pulled."""
    prompt, decoder = linked
    peer = prompt.peer
    key = CacheKey(1, 10)
    # Memory that a cache gets again keeps its bytes, so a cache shows its word at the moment when its key is bound.
    for word in range(1, 61):
        peer.make("inside:offer", WIDE, [], word)
    peer.make("inside:drop_all")
    cache = decoder.allocate(WIDE)
    outcomes = {"old": 0, "new": 0, "error": 0}
    for number in range(300):
        if number % 20 == 0:
            peer.make("inside:drop_all")
            old = peer.make("inside:rebind", WIDE, key)
        peer.start("make", "inside:rebind", WIDE, key)
        inside.spin(number % 40 * 10_000)
        found = pull(decoder, key, cache)
        new = peer.answer()
        assert None not in (old, new)
        assert old != new
        assert found in (None, {old}, {new})
        again = pull(decoder, key, cache)
        if found == {new}:
            outcomes["new"] += 1
            assert again is None
        else:
            outcomes["error" if found is None else "old"] += 1
            assert again == {new}
        old = peer.make("inside:rebind", WIDE, key)
    assert outcomes["old"], outcomes
    assert outcomes["new"], outcomes


@pytest.fixture
def second(start_peer: Callable[[], Peer], prompt: Prompt) -> Peer:
    """Give another decoder in a process of its own, linked to the same prompt."""
    peer = start_peer()
    dd = peer.make("llm_datadist:LLMDataDist", LLMRole.DECODER, 4)
    dd.init(options())
    assert dd.link_clusters([prompt.info()], 5000)[0] == LLMStatusCode.LLM_SUCCESS
    return peer


def test_two_decoders_on_one_key(linked: tuple[Prompt, Decoder], second: Peer) -> None:
    """S-60, S-64, S-195: one gets the data, or both do, whole; then the key and the memory are gone."""
    prompt, decoder = linked
    peer = second
    cache = decoder.allocate(WIDE)
    peer.make("inside:bind", WIDE, [])
    both = 0
    for number in range(1, 201):
        key = CacheKey(1, number)
        prompt.peer.make("inside:offer", WIDE, [key], number, False)
        peer.start("make", "inside:pull_first", key)
        inside.spin(number % 20 * 10_000)
        mine = pull(decoder, key, cache)
        others = peer.answer()
        assert mine in (None, {number})
        assert others in (None, number)
        assert mine or others
        both += bool(mine and others)
        assert pull(decoder, key, cache) is None
        assert not prompt.peer.make("inside:is_bound", key, WIDE)
    assert prompt.peer.make("inside:used") == [0]


def test_parts_pulled_by_two_decoders(linked: tuple[Prompt, Decoder], second: Peer) -> None:
    """S-60, S-61: the key is there until all parts have been pulled by whomever, and then gone at once."""
    prompt, decoder = linked
    peer = second
    cache = decoder.allocate(SMALL)
    peer.make("inside:bind", SMALL, [])
    for number in range(1, 301):
        key = CacheKey(1, number)
        prompt.peer.make("inside:offer", SMALL, [key], number, False)
        assert pull(decoder, key, cache, src_layer_range=range(1), dst_layer_range=range(1)) is not None
        assert prompt.peer.make("inside:is_bound", key, SMALL)
        peer.start("make", "inside:pull_layers", key, [(1, 2), (2, 3)] if number % 2 else [(1, 3)])
        inside.spin(number % 30 * 5_000)
        assert pull(decoder, key, cache, src_layer_range=range(3, 4), dst_layer_range=range(3, 4)) is not None
        assert peer.answer() == number
        assert not prompt.peer.make("inside:is_bound", key, SMALL)
        assert pull(decoder, key, cache) is None
    assert prompt.peer.make("inside:used") == [0]


def test_spends_against_the_owner(linked: tuple[Prompt, Decoder]) -> None:
    """S-60, S-63, S-64: the owner allocates and removes other keys all the time; each pulled key ends exactly once."""
    prompt, decoder = linked
    cache = decoder.allocate(SMALL)
    numbers = itertools.count(1)
    for _ in range(12):
        batch = [next(numbers) for _ in range(32)]
        for number in batch:
            prompt.peer.make("inside:offer", SMALL, [CacheKey(1, number)], number, False)
        prompt.peer.start("make", "inside:churn", SMALL, 1_000_000, 200)
        for number in batch:
            assert pull(decoder, CacheKey(1, number), cache) == {number}
            assert pull(decoder, CacheKey(1, number), cache) is None
        prompt.peer.answer()
        for number in batch:
            assert not prompt.peer.make("inside:is_bound", CacheKey(1, number), SMALL)
        assert prompt.peer.make("inside:used") == [0]


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Let threads take turns fifty times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_link_and_unlink_against_pulls(linked: tuple[Prompt, Decoder]) -> None:
    """S-140, S-144, S-190: in a second thread a pull is right, or the link is missing or busy; no call hangs."""
    prompt, decoder = linked
    prompt.peer.make("inside:offer", SMALL, [CacheKey(1, 1)], 7)
    cache = decoder.allocate(SMALL)
    stop = threading.Event()
    codes: set[LLMStatusCode] = set()
    found: set[int | None] = set()

    def keep_pulling() -> None:
        while not stop.is_set():
            try:
                decoder.manager.pull_cache(CacheKey(1, 1), cache, 0, dst_cache_offset=0)
            except LLMException as e:
                codes.add(e.status_code)
            else:
                codes.add(LLMStatusCode.LLM_SUCCESS)
                found.update(words(decoder, cache))

    thread = threading.Thread(target=keep_pulling, daemon=True)
    thread.start()
    unlinked = 0
    end = time.monotonic() + 20
    while unlinked < 100 and time.monotonic() < end:
        code = decoder.dd.unlink_clusters([prompt.info()], 5000)[1][0]
        assert code in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_BUSY)
        if code == LLMStatusCode.LLM_SUCCESS:
            unlinked += 1
            decoder.link(prompt)
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert unlinked == 100
    assert found == {7}
    allowed = {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_BUSY}
    assert codes <= allowed


def test_prompt_unlinks_against_pulls(linked: tuple[Prompt, Decoder]) -> None:
    """S-140, S-144, S-183: the prompt removes its end during pulls; they are right or refused, and linking helps."""
    prompt, decoder = linked
    prompt.peer.make("inside:offer", WIDE, [CacheKey(1, 1)], 7)
    cache = decoder.allocate(WIDE)
    refused = 0
    for number in range(200):
        prompt.peer.start("call", prompt.dd, "unlink_clusters", [cluster_info(2, ["192.168.0.9:1"])])
        inside.spin(number % 20 * 20_000)
        for _ in range(3):
            try:
                decoder.manager.pull_cache(CacheKey(1, 1), cache, 0, dst_cache_offset=0)
            except LLMException as e:
                if e.status_code != LLMStatusCode.LLM_NOT_YET_LINK:
                    raise
                refused += 1
            else:
                assert words(decoder, cache) == {7}
        assert prompt.peer.answer()[0] == LLMStatusCode.LLM_SUCCESS
        with failure(LLMStatusCode.LLM_NOT_YET_LINK):
            decoder.manager.pull_cache(CacheKey(1, 1), cache, 0, dst_cache_offset=0)
        decoder.link(prompt)
    assert refused
    decoder.manager.pull_cache(CacheKey(1, 1), cache, 0)
    assert words(decoder, cache) == {7}


def test_two_threads_on_one_link(linked: tuple[Prompt, Decoder]) -> None:
    """S-190, E-239: the second of two operations on a link is told LINK_BUSY; neither result is mixed up."""
    prompt, decoder = linked
    prompt.peer.make("inside:offer", SMALL, [CacheKey(1, 1)], 7)
    cache, other = decoder.allocate(SMALL), decoder.allocate(SMALL)
    faults = inside.inject(decoder.dd, stall_at_byte=4096)
    thread = threading.Thread(
        target=decoder.manager.pull_cache, args=(CacheKey(1, 1), cache, 0), kwargs={"dst_cache_offset": 0}, daemon=True
    )
    with inside.resumed(faults):
        thread.start()
        assert faults.stall_entered.wait(10)
        for _ in range(100):
            with failure(LLMStatusCode.LLM_LINK_BUSY):
                decoder.manager.pull_cache(CacheKey(1, 1), other)
            with failure(LLMStatusCode.LLM_LINK_BUSY):
                decoder.dd.check_link_status(1)
            assert decoder.dd.unlink_clusters([prompt.info()])[1] == [LLMStatusCode.LLM_LINK_BUSY]
    thread.join(10)
    assert words(decoder, cache) == {7}
    decoder.untouched(other)
