"""What once went wrong: signals between two steps, caches that change hands meanwhile, threads that can't start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import memory
import pytest
import traces
import users
from ends import End, desc
from expect import failure
from pairs import Decoder, Prompt, bytes_desc, rank_table
from peer import Peer
from refusals import PARAM_INVALID, refuses
from stall import Running, Stalled, clear_faults, set_faults

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMRole,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
    TransferConfig,
)
from llm_datadist._engine import caches as caches_module
from llm_datadist._engine.uses import Turn

SUCCESS = LLMStatusCode.LLM_SUCCESS
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
OF = desc(2, 2, 4096)
KEYS = [CacheKey(1, 7), CacheKey(1, 8)]


def interrupt_after(patch: pytest.MonkeyPatch, owner: Any, name: str, calls: int = 1) -> None:
    """Let a signal come just after the n-th call of a method has done its work, and at no other."""
    real, count = getattr(owner, name), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        result = real(*args, **kwargs)
        if count == calls:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, interrupted)


def interrupt_before(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let a signal come just before the first call of a method does its work."""
    real, calls = getattr(owner, name), iter([True])

    def interrupted(*args: Any) -> Any:
        if next(calls, False):
            raise KeyboardInterrupt
        return real(*args)

    patch.setattr(owner, name, interrupted)


# ---------------------------------------------------------------------- signals


@pytest.mark.parametrize("mode", ["kv", "cm"])
@pytest.mark.parametrize("published", [1, 2, 3])
def test_interrupted_allocation_leaves_no_key(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, mode: str, published: int
) -> None:
    """S-11: whether the cache or a key of it was findable already, nothing stays, and all can be taken anew."""
    here = End(None, 1, LLMRole.PROMPT, cm=mode == "cm")
    there = End(peer, 2, LLMRole.DECODER, cm=mode == "cm")
    try:
        there.link(here)
        engine = here.dd._engine
        with monkeypatch.context() as patch:
            interrupt_after(patch, engine._directory, "publish", published)
            with pytest.raises(KeyboardInterrupt):
                here.manager.allocate_cache(OF, KEYS)
        assert not any(engine.caches.used())
        room = there.allocate(OF)
        for source in (*KEYS, CacheKeyByIdAndIndex(1, 1, 0)):
            with failure(NOT_EXIST):
                there.manager.pull_cache(source, room)
        source = here.allocate(OF, KEYS, salt=3)
        there.manager.pull_cache(KEYS[1], room)
        there.check(room, OF, {i: [(0, here.expected(OF, i, 3)[4096:])] for i in range(2)})
        here.manager.deallocate_cache(source)
        here.manager.remove_cache_key(KEYS[0])
        assert not any(engine.caches.used())
    finally:
        here.close()


@pytest.mark.parametrize("where", ["begin", "claim", "take", "give_back"])
def test_interrupted_pull_gives_back_what_it_took(
    linked: tuple[Prompt, Decoder], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """S-190, S-21: a signal right after a cache or link was taken, or right before it is given back."""
    prompt, decoder = linked
    of = bytes_desc(2, 2, 4096)
    prompt.allocate_blocks(of, BlocksCacheKey(1, 1))
    cache = decoder.allocate(of, blocks=True)
    engine = decoder.dd._engine
    assert engine is not None

    def pull() -> None:
        decoder.manager.pull_blocks(BlocksCacheKey(1, 1), cache, [0], [1])

    with monkeypatch.context() as patch:
        if where == "give_back":
            interrupt_before(patch, engine.transfers, where)
        else:
            owner = {"begin": engine.caches, "claim": Turn, "take": engine.links}[where]
            interrupt_after(patch, owner, where)
        with pytest.raises(KeyboardInterrupt):
            pull()
    pull()
    decoder.dd.check_link_status(1)
    decoder.check(cache, {i: [(4096, prompt.expected(of, i)[:4096])] for i in range(2)})
    decoder.manager.deallocate_cache(cache)
    assert engine.caches.used() == [0]


@pytest.fixture
def registered(remote_cm: tuple[End, End]) -> tuple[End, End, Any, Callable[[], None]]:
    """Give two ends, a registered cache of this one, and a pull into it."""
    there, here = remote_cm
    there.allocate(OF, BlocksCacheKey(1), salt=0, blocks=True)
    cache = here.register(OF, BlocksCacheKey(2, 9), salt=1, blocks=True)
    here.link(there)
    there.link(here)
    return there, here, cache, lambda: here.manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])


def test_interrupted_unregister_keeps_the_cache(
    registered: tuple[End, End, Any, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-113: a user who interrupts unregister_cache goes on to own a registered cache that peers can pull."""
    there, here, cache, pull = registered

    def signal(seconds: float) -> None:
        raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=signal, monotonic=time.monotonic, monotonic_ns=time.monotonic_ns)
    with Stalled(here.dd, pull, 100), monkeypatch.context() as patch:
        patch.setattr(caches_module, "time", clock)
        with pytest.raises(KeyboardInterrupt):
            here.manager.unregister_cache(cache.cache_id)
    room = there.allocate(OF, blocks=True)
    there.manager.pull_blocks(BlocksCacheKey(2, 9), room, [0], [0])
    there.check(room, OF, {i: [(0, here.expected(OF, i, 1)[:4096])] for i in range(2)})
    here.manager.unregister_cache(cache.cache_id)
    with failure(NOT_EXIST):
        there.manager.pull_blocks(BlocksCacheKey(2, 9), room, [0], [0])


def test_second_unregister_waits_too(registered: tuple[End, End, Any, Callable[[], None]]) -> None:
    """S-113: whoever returns from unregister_cache may free the memory."""
    _, here, cache, pull = registered
    with Stalled(here.dd, pull, 100) as pulling:
        calls = [Running(lambda: here.manager.unregister_cache(cache.cache_id)) for _ in range(2)]
        assert not any(call.ended(0.1) for call in calls)
        assert pulling.finish() is None
        assert [call.finish() for call in calls] == [None, None]


# ---------------------------------------------------------------------- caches that change meanwhile


@pytest.mark.parametrize("by", ["update_dim", "in place"])
def test_a_description_changed_later_changes_no_cache(linked: tuple[Prompt, Decoder], by: str) -> None:
    """S-2, S-4, S-85: what was allocated has the shape that the description had then, however it grows or shrinks."""
    prompt, decoder = linked
    prompt.allocate_blocks(bytes_desc(1, 8, 64), BlocksCacheKey(1, 1))
    data = prompt.expected(bytes_desc(1, 8, 64), 0)
    given = [CacheDesc(1, [4, 64], DataType.DT_UINT8, placement=p) for p in (Placement.DEVICE, Placement.HOST)]
    cache = decoder.manager.allocate_blocks_cache(given[0])
    host_address = users.take(8 * 64, Placement.HOST)
    host = KvCache.create_cpu_cache(given[1], [host_address])
    for length in (1, 8):
        for each in {id(d): d for d in (*given, cache.cache_desc, host.cache_desc)}.values():
            if by == "update_dim":
                each.update_dim(0, length)
            else:
                each.shape[0] = length  # type: ignore[index]
        memory.write(cache.per_device_tensor_addrs[0][0], bytes(256))
        memory.write(host_address, bytes(512))
        (tensor,) = decoder.manager.get_cache_tensors(cache)
        assert tensor.numpy().shape == (4, 64)
        del tensor
        decoder.manager.pull_blocks(BlocksCacheKey(1, 1), cache, [7], [3])
        assert memory.read(cache.per_device_tensor_addrs[0][0], 256) == bytes(192) + data[448:]
        decoder.manager.swap_blocks(cache, host, {3: 3})
        assert memory.read(host_address, 512) == bytes(192) + data[448:] + bytes(256)
        with refuses(PARAM_INVALID, "4"):
            decoder.manager.pull_blocks(BlocksCacheKey(1, 1), cache, [0], [4])
        for mapping in ({4: 0}, {0: 4}):
            with refuses(PARAM_INVALID, "block 4"):
                decoder.manager.swap_blocks(host, cache, mapping)


@pytest.mark.parametrize("when", ["before the copy", "before its caches are kept"])
def test_swap_against_the_next_owner(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """S-21, E-295: released under a swap, a cache is refused, or its memory waits; what comes next is never written."""
    of = bytes_desc(1, 4, 4096)
    host = KvCache.create_cpu_cache(
        CacheDesc(1, [4, 4096], DataType.DT_UINT8, placement=Placement.HOST), [users.take(of.size, Placement.HOST)]
    )
    engine = decoder.dd._engine
    assert engine is not None
    cache = decoder.allocate(of, blocks=True)
    (tensors,) = cache.per_device_tensor_addrs
    before = list(tensors)
    owner, name = (engine.backend, "copy") if when == "before the copy" else (engine.caches, "keep")
    real, next_ones = getattr(owner, name), []

    def released(*args: Any, **kwargs: Any) -> Any:
        decoder.manager.deallocate_cache(cache)
        next_ones.append(decoder.allocate(of, blocks=True))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, released)
    if when == "before the copy":
        decoder.manager.swap_blocks(host, cache, {0: 0, 1: 1})
    else:
        with refuses(PARAM_INVALID, "deallocated"):
            decoder.manager.swap_blocks(host, cache, {0: 0, 1: 1})
    (next_one,) = next_ones
    assert (list(next_one.per_device_tensor_addrs[0]) == before) == (when != "before the copy")
    decoder.untouched(next_one)
    decoder.manager.deallocate_cache(next_one)
    assert engine.caches.used() == [0]


# ---------------------------------------------------------------------- links


def test_threads_that_cannot_start_do_not_use_up_the_listener(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-131: more links are lost than an engine serves at a time, then the next one is served."""
    here, there = End(None, 2), End(peer, 1)
    try:
        start, refused = threading.Thread.start, []

        def limited(thread: threading.Thread) -> None:
            if thread.name == "llm_datadist link" and len(refused) < 20:
                refused.append(thread)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)
        for _ in range(20):
            code, _ = peer.make("conftest_support:link", there.dd, 2, [here.address])
            assert code is not SUCCESS
        there.link(here)
        assert len(refused) == 20
    finally:
        here.close()


def test_the_longest_time_to_meet(peer: Peer) -> None:
    """S-150, S-152: 136 years are longer than any wait of the system; members wait, meet and unlink all the same."""
    there, here = End(peer, 1, link_total_time=2**32 - 1), End(None, 2, link_total_time=2**32 - 1)
    try:
        members = ({1: 0, 2: 1}, rank_table(2))
        comm = here.dd.link("both come", *members)
        time.sleep(0.2)
        assert here.dd.query_register_mem_status(comm) is RegisterMemStatus.PREPARING
        begin = time.monotonic()
        here.dd.unlink(comm)
        assert time.monotonic() - begin < 5
        comm = here.dd.link("both come", *members)
        there.dd.link("both come", *members)
        traces.wait_until(
            lambda: here.dd.query_register_mem_status(comm) is not RegisterMemStatus.PREPARING, "the end of preparation"
        )
        assert here.dd.query_register_mem_status(comm) is RegisterMemStatus.OK
        here.dd.unlink(comm)
    finally:
        here.close()


class Ready(LayerSynchronizer):
    """All layers are ready."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


@pytest.mark.needs("any_memory")
def test_a_wild_address_does_not_stop_transfers_to_others(cm: tuple[End, End]) -> None:
    """S-93: a peer registered what no address of a process can be; its other caches are found by address."""
    there, here = cm
    small = desc(2, 1, 64)
    there.peer.make("cm_inside:register_wild", there.manager, small, [2**63, 2**63 + 4096], [CacheKey(1, 10)])  # type: ignore[union-attr]
    target, source = there.allocate(small), here.allocate(small, salt=0)
    task = here.manager.transfer_cache_async(source, Ready(), [TransferConfig(1, there.addresses(target), range(1), 0)])
    assert task.synchronize(20_000) is SUCCESS
    there.check(target, small, {i: [(0, here.expected(small, i))] for i in range(2)})


def test_waiting_for_a_link_is_not_the_operations_own_time(peer: Peer) -> None:
    """S-180: of two pulls on one link the second waits for the first, then has its whole time limit."""
    there, here = End(peer, 1), End(None, 2, sync_kv_timeout=1500)
    try:
        here.link(there)
        there.allocate(OF, BlocksCacheKey(1), salt=0, blocks=True)
        rooms = [here.allocate(OF, blocks=True) for _ in range(2)]

        def pull(i: int) -> None:
            here.manager.pull_blocks(BlocksCacheKey(1), rooms[i], [0, 1], [0, 1])

        with Stalled(here.dd, lambda: pull(0), 100) as first:
            faults = set_faults(here.dd, stall_at_byte=100)
            with Running(lambda: pull(1)) as second:
                try:
                    assert not second.ended(0.9)
                    assert not faults.stall_entered.is_set()
                    assert first.finish() is None
                    assert faults.stall_entered.wait(5)
                    assert not second.ended(0.9)
                finally:
                    faults.resume.set()
                assert second.wait() is None
        clear_faults(here.dd)
        pull(0)
        for room in rooms:
            here.check(room, OF, {i: [(0, there.expected(OF, i))] for i in range(2)})
    finally:
        here.close()


# ---------------------------------------------------------------------- numbers


class Liar(int):
    """An integer that says what its hearer likes to hear."""

    def __le__(self, other: int) -> bool:
        return True

    def __ge__(self, other: int) -> bool:
        return other <= 0

    def __lt__(self, other: int) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return other <= 0


@pytest.mark.parametrize("wrong", [{"batch_index": Liar(2)}, {"batch_index": Liar(10**9)}, {"size": Liar(3 * 4096)}])
def test_integers_that_lie_are_their_numbers(linked: tuple[Prompt, Decoder], wrong: dict[str, int]) -> None:
    """S-32: a subclass of int counts by its number, so nothing is written outside the cache."""
    prompt, decoder = linked
    of = bytes_desc(2, 2, 4096)
    source = prompt.allocate(bytes_desc(2, 1, 3 * 4096) if "size" in wrong else bytes_desc(2, 1, 4096))
    cache, neighbour = decoder.allocate(of), decoder.allocate(of)
    key = CacheKeyByIdAndIndex(1, source.get("cache_id"), 0)
    with refuses(PARAM_INVALID, int(next(iter(wrong.values())))):
        decoder.manager.pull_cache(key, cache, **wrong)
    decoder.untouched(cache)
    decoder.untouched(neighbour)
    decoder.manager.pull_cache(key, cache, Liar(1), Liar(4096))
    data = prompt.expected(bytes_desc(2, 1, 3 * 4096) if "size" in wrong else bytes_desc(2, 1, 4096), 0)
    assert decoder.tensor(cache, 0)[4096:] == data[:4096]
