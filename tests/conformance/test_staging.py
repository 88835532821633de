"""Registered memory that can't be reached directly: the same results, piece by piece.

The owner lives in a peer; the initiator in this process finds the direct way forbidden, if its backend has one.
"""

from __future__ import annotations

import itertools
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import members
import memory
import numpy as np
import pytest
from members import Member
from pairs import PREFILL, bytes_desc
from peer import Peer
from refusals import PARAM_INVALID, refuses
from stall import Stalled, set_faults

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist import LLMStatusCode as Code
from llm_datadist._engine.links import Link
from llm_datadist._engine.paths import Path
from llm_datadist._engine.staging import AREA_BYTES, PIECES
from llm_datadist._engine.wire import Frame, Kind

OK = Code.LLM_SUCCESS
pytestmark = pytest.mark.filterwarnings("ignore:registered memory of cluster:RuntimeWarning")


class Ready(LayerSynchronizer):
    """Every layer is ready."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class Pair:
    """An owner of registered memory, and this process, which can't reach it."""

    def __init__(self, peer: Peer, remote: bool, timeout_ms: int = 30_000) -> None:
        self.peer = peer
        how: dict[str, Any] = {"enable_remote_cache_accessible": remote, "sync_kv_timeout": timeout_ms}
        self.owner = Member(1, peer, **how)
        self.here = Member(2, listen=False, **how)
        members.forbid_process()

    def link(self) -> Link:
        """Link, and give the link."""
        self.here.link(self.owner)
        link: Link = self.here.dd._engine.links.to(1)
        return link

    def register(self, desc: CacheDesc, keys: Any, blocks: bool, fill: bool = True) -> tuple[Any, list[int]]:
        """Register a cache of the owner's, full of a pattern; give it and its addresses."""
        addresses = self.peer.make("members:user_memory", desc.size, desc.num_tensors)
        if fill:
            for tensor, address in enumerate(addresses):
                self.peer.make("memory:write", address, memory.pattern(1, tensor, desc.size))
        make = self.owner.manager.register_blocks_cache if blocks else self.owner.manager.register_cache
        return make(desc, addresses, keys, True), addresses

    def local(
        self, desc: CacheDesc, blocks: bool, registered: bool = True, fill: bool = False
    ) -> tuple[Any, list[int]]:
        """Make a cache of this process."""
        if registered:
            addresses = members.user_memory(desc.size, desc.num_tensors)
            make = self.here.manager.register_blocks_cache if blocks else self.here.manager.register_cache
            cache = make(desc, addresses, remote_accessible=True)
        else:
            make = self.here.manager.allocate_blocks_cache if blocks else self.here.manager.allocate_cache
            cache = make(desc)
            addresses = list(cache.tensor_addrs)
        for tensor, address in enumerate(addresses):
            memory.write(address, memory.pattern(2, tensor, desc.size) if fill else bytes([PREFILL]) * desc.size)
        return cache, addresses

    def check_owner(
        self, addresses: Sequence[int], desc: CacheDesc, expected: Callable[[int], np.ndarray[Any, Any]]
    ) -> None:
        """Compare every byte of the owner's memory."""
        for tensor, address in enumerate(addresses):
            assert self.peer.make("memory:read", address, desc.size) == expected(tensor).tobytes(), tensor


def shaped(data: bytes, slots: int) -> np.ndarray[Any, Any]:
    """Show bytes as rows, which may be changed."""
    return np.frombuffer(bytearray(data), np.uint8).reshape(slots, -1)


def blank(desc: CacheDesc) -> np.ndarray[Any, Any]:
    """Give rows full of 0xA5."""
    return shaped(bytes([PREFILL]) * desc.size, desc.shape[0])


def own(cluster: int, tensor: int, desc: CacheDesc) -> np.ndarray[Any, Any]:
    """Give the rows of a filled tensor."""
    return shaped(memory.pattern(cluster, tensor, desc.size), desc.shape[0])


@pytest.fixture
def pair(peer: Peer) -> Iterator[Pair]:
    """Give a pair whose pulls go by keys."""
    made = Pair(peer, remote=False)
    yield made
    made.here.finalize()


@pytest.fixture
def remote(peer: Peer) -> Iterator[Pair]:
    """Give a pair in remote-accessible mode."""
    made = Pair(peer, remote=True)
    yield made
    made.here.finalize()


# ---------------------------------------------------------------------- pulls


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("stride", [1, 13, 4096, AREA_BYTES - 1, AREA_BYTES // 2 + 3])
def test_pull_blocks(pair: Pair, stride: int, registered: bool) -> None:
    """S-50, S-54: blocks of any size, in any order, some layers, one destination twice."""
    slots = 6 if stride < AREA_BYTES // 4 else 3
    desc = bytes_desc(4 if stride < AREA_BYTES // 4 else 2, slots, stride)
    if not registered:
        desc = bytes_desc(2, slots, min(stride, 4096))
    pair.register(desc, BlocksCacheKey(1, 7), blocks=True)
    cache, addresses = pair.local(desc, blocks=True, registered=registered)
    pair.link()
    source, destination = [2, 0, 2, 1], [0, 2, 1, 1]
    for layers in (None, range(desc.num_tensors // 2 - 1, desc.num_tensors // 2)):
        for address in addresses:
            memory.write(address, bytes([PREFILL]) * desc.size)
        pair.here.manager.pull_blocks(
            BlocksCacheKey(1, 7), cache, source, destination, src_layer_range=layers, dst_layer_range=layers
        )
        for tensor, address in enumerate(addresses):
            expected = blank(desc)
            if layers is None or tensor // 2 in layers:
                for s, d in zip(source, destination, strict=True):
                    expected[d] = own(1, tensor, desc)[s]
            assert memory.read(address, desc.size) == expected.tobytes(), (layers, tensor)


@pytest.mark.parametrize("size", [-1, 1, AREA_BYTES, AREA_BYTES + 1, 3 * AREA_BYTES - 7])
def test_pull_cache(pair: Pair, size: int) -> None:
    """S-31: a slot or its beginning, over several areas; keys of registered caches stay."""
    desc = bytes_desc(3, 2, 3 * AREA_BYTES)
    pair.register(desc, [CacheKey(1, 5), CacheKey(1, 6)], blocks=False)
    cache, addresses = pair.local(desc, blocks=False)
    pair.link()
    for key in (CacheKey(1, 6), CacheKeyByIdAndIndex(1, 3, 1)):
        pair.here.manager.pull_cache(key, cache, 0, size)
        for tensor, address in enumerate(addresses):
            expected = blank(desc)
            stop = 3 * AREA_BYTES if size < 0 else size
            expected[0, :stop] = own(1, tensor, desc)[1, :stop]
            assert memory.read(address, desc.size) == expected.tobytes(), tensor


def test_pull_slot_into_blocks(pair: Pair) -> None:
    """A slot cut into blocks, the last one short."""
    desc, blocks = bytes_desc(2, 2, 7000), bytes_desc(2, 8, 1024)
    pair.register(desc, [CacheKey(1, 5), CacheKey(1, 6)], blocks=False)
    cache, addresses = pair.local(blocks, blocks=True)
    pair.link()
    order = [7, 0, 3, 1, 2, 6, 5]
    pair.here.manager.pull_blocks(CacheKey(1, 6), cache, [], order)
    for tensor, address in enumerate(addresses):
        expected, slot = blank(blocks), own(1, tensor, desc)[1]
        for i, block in enumerate(order):
            part = slot[i * 1024 : (i + 1) * 1024]
            expected[block, : len(part)] = part
        assert memory.read(address, blocks.size) == expected.tobytes(), tensor


def test_more_pieces_than_a_request_takes(pair: Pair) -> None:
    """B25: thousands of scattered blocks."""
    count = 3 * PIECES + 5
    desc = bytes_desc(2, count, 40)
    pair.register(desc, BlocksCacheKey(1, 7), blocks=True)
    cache, addresses = pair.local(desc, blocks=True)
    pair.link()
    order = np.random.default_rng(1).permutation(count)
    pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), cache, range(count), order)
    for tensor, address in enumerate(addresses):
        expected = blank(desc)
        expected[order] = own(1, tensor, desc)
        assert memory.read(address, desc.size) == expected.tobytes()


def test_said_once_a_link(pair: Pair) -> None:
    """S-203: a RuntimeWarning, once for each link; memory of pools needs none."""
    pair.register(members.DESC, BlocksCacheKey(1, 7), blocks=True)
    for _ in range(2):
        pair.link()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pair.here.pull(pair.owner)
            assert not caught
            for _ in range(3):
                pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), pair.here.room, [0], [0])
        assert [w.category for w in caught] == [RuntimeWarning]
        assert "cluster 1" in str(caught[0].message)
        pair.here.unlink(pair.owner)


def test_areas_are_given_back(pair: Pair) -> None:
    """Links that come and go share what there is for staging."""
    pair.register(members.DESC, BlocksCacheKey(1, 7), blocks=True)
    pair.peer.make("members:shrink_staging", 2)
    for _ in range(5):
        pair.link()
        pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), pair.here.room, range(4), range(4))
        pair.here.unlink(pair.owner)
    assert memory.read(pair.here.room.tensor_addrs[1], members.DESC.size) == own(1, 1, members.DESC).tobytes()


def test_no_area_is_left(pair: Pair) -> None:
    """Staging for one link more than there are areas is refused; the link stays good for what needs no staging."""
    pair.register(members.DESC, BlocksCacheKey(1, 7), blocks=True)
    # Before the first link: an area that is given back by the owner's thread would still be counted after.
    pair.peer.make("members:shrink_staging", 0)
    pair.link()
    with refuses(Code.LLM_FAILED, "too many links"):
        pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), pair.here.room, [0], [0])
    pair.here.pull(pair.owner)


# ---------------------------------------------------------------------- pushes


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("stride", [1, 1000, AREA_BYTES + 5])
def test_push(remote: Pair, stride: int, registered: bool) -> None:
    """Blocks and slots, layer after layer, into registered memory of the peer."""
    desc = bytes_desc(4, 3, stride)
    if not registered:
        desc = bytes_desc(4, 3, min(stride, 4000))
    blocks, at_blocks = remote.register(desc, BlocksCacheKey(1, 7), blocks=True, fill=False)
    slots, at_slots = remote.register(desc, [], blocks=False, fill=False)
    source, _ = remote.local(desc, blocks=True, registered=registered, fill=True)
    plain, _ = remote.local(desc, blocks=False, registered=registered, fill=True)
    remote.link()
    remote.here.manager.push_blocks(BlocksCacheKey(1, 7), source, [2, 0], [0, 1], range(1, 2), range(0, 1))
    remote.here.manager.push_cache(CacheKeyByIdAndIndex(1, slots.get("cache_id"), 2), plain, 1)

    def blocks_expected(tensor: int) -> np.ndarray[Any, Any]:
        expected = blank(desc)
        if tensor < 2:
            expected[[0, 1]] = own(2, tensor + 2, desc)[[2, 0]]
        return expected

    def slots_expected(tensor: int) -> np.ndarray[Any, Any]:
        expected = blank(desc)
        expected[2] = own(2, tensor, desc)[1]
        return expected

    remote.check_owner(at_blocks, desc, blocks_expected)
    remote.check_owner(at_slots, desc, slots_expected)
    assert blocks.get("cache_id") == 3


def test_async_to_addresses(pair: Pair) -> None:
    """TransferConfig: slots, blocks and a slot cut into blocks, inside registered tensors only."""
    desc = bytes_desc(4, 4, 96)
    _, addresses = pair.register(desc, BlocksCacheKey(1, 7), blocks=True, fill=False)
    source, _ = pair.local(desc, blocks=False, fill=True)
    paged, _ = pair.local(desc, blocks=True, fill=True)
    pair.link()
    manager = pair.here.manager
    slot = TransferConfig(1, [a + 96 for a in addresses], range(0, 2), 2)
    assert manager.transfer_cache_async(source, Ready(), [slot]).synchronize() is OK
    pair.check_owner(addresses, desc, lambda t: rows(desc, {1: own(2, t, desc)[2]}))
    blocks = TransferConfig(1, addresses[2:], range(1, 2))
    assert manager.transfer_cache_async(paged, Ready(), [blocks], [0, 3], [3, 0]).synchronize() is OK
    cut = TransferConfig(1, addresses[:2], range(0, 1), 3)
    assert manager.transfer_cache_async(source, Ready(), [cut], None, [11, 0, 1], 40).synchronize() is PARAM_INVALID
    assert manager.transfer_cache_async(source, Ready(), [cut], None, [8, 0, 1], 40).synchronize() is OK

    def expected(tensor: int) -> np.ndarray[Any, Any]:
        found = rows(desc, {1: own(2, tensor, desc)[2]})
        if tensor >= 2:
            found[3], found[0] = own(2, tensor, desc)[0], own(2, tensor, desc)[3]
        else:
            flat, data = found.reshape(-1), own(2, tensor, desc)[3]
            flat[320:360], flat[0:40], flat[40:56] = data[:40], data[40:80], data[80:]
        return found

    pair.check_owner(addresses, desc, expected)
    outside = TransferConfig(1, [a + desc.size - 8 for a in addresses], range(0, 2))
    assert manager.transfer_cache_async(source, Ready(), [outside]).synchronize() is PARAM_INVALID
    pair.check_owner(addresses, desc, expected)


def rows(desc: CacheDesc, filled: dict[int, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Give rows of which some are filled."""
    made = blank(desc)
    for row, data in filled.items():
        made[row] = data
    return made


def test_async_by_key(remote: Pair) -> None:
    """Layers of the source into other layers of a registered cache that a key names."""
    desc = bytes_desc(6, 2, 64)
    _, addresses = remote.register(desc, BlocksCacheKey(1, 7), blocks=True, fill=False)
    source, _ = remote.local(desc, blocks=True, fill=True)
    remote.link()
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1, 7), range(1, 3), range(0, 2))
    task = remote.here.manager.transfer_cache_async(source, Ready(), [config], [1], [0])
    assert task.synchronize() is OK
    remote.check_owner(addresses, desc, lambda t: rows(desc, {0: own(2, t + 2, desc)[1]}) if t < 4 else rows(desc, {}))


@pytest.mark.needs("self_link")
def test_push_to_oneself(remote: Pair) -> None:
    """S-130: over the own listener too."""
    remote.here.finalize()
    member = Member(2, enable_remote_cache_accessible=True)
    try:
        members.forbid_process()
        addresses = members.user_memory(members.DESC.size, 2)
        member.manager.register_blocks_cache(members.DESC, addresses, BlocksCacheKey(2, 7), True)
        member.link(member)
        member.manager.push_blocks(BlocksCacheKey(2, 7), member.source, [3], [1])
        for tensor, address in enumerate(addresses):
            expected = rows(members.DESC, {1: own(2, tensor, members.DESC)[3]})
            assert memory.read(address, members.DESC.size) == expected.tobytes()
    finally:
        member.finalize()
        remote.here.start()


# ---------------------------------------------------------------------- failures


@pytest.mark.needs("any_memory")
def test_no_memory_at_the_address(pair: Pair) -> None:
    """An error that names the address, no signal in either process; the link goes on."""
    pair.peer.make("members:register_nowhere", members.DESC, BlocksCacheKey(1, 7))
    pair.link()
    for _ in range(2):
        with refuses(PARAM_INVALID, "0x1"):
            pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), pair.here.room, [0], [0])
    pair.here.pull(pair.owner)


@pytest.mark.parametrize("chunks_done", [0, 1])
def test_released_during_a_pull(pair: Pair, chunks_done: int) -> None:
    """S-192: KV_CACHE_NOT_EXIST, never other bytes as a success; unregistering does not wait for it."""
    desc = bytes_desc(2, 1, 2 * AREA_BYTES)
    source, addresses = pair.register(desc, [CacheKey(1, 5)], blocks=False)
    cache, _ = pair.local(desc, blocks=False)
    pair.link()
    staging = pair.here.dd._engine.staging
    if chunks_done:
        with (
            before_request(staging, chunks_done, lambda: release(pair, source, addresses)),
            refuses(Code.LLM_KV_CACHE_NOT_EXIST, "undefined"),
        ):
            pair.here.manager.pull_cache(CacheKey(1, 5), cache)
        return
    with Stalled(pair.here.dd, lambda: pair.here.manager.pull_cache(CacheKey(1, 5), cache), at=AREA_BYTES // 2) as pull:
        release(pair, source, addresses)
        error: Any = pull.finish()
    assert error.status_code is Code.LLM_KV_CACHE_NOT_EXIST


def release(pair: Pair, source: Any, addresses: Sequence[int]) -> None:
    """Unregister, and use the memory for something else."""
    pair.owner.manager.unregister_cache(source.get("cache_id"))
    for address in addresses:
        pair.peer.make("memory:write", address, b"\xee" * AREA_BYTES * 2)


@contextmanager
def before_request(staging: Any, number: int, then: Callable[[], None]) -> Iterator[None]:
    """Do something before the owner is asked for the n-th time."""
    ask, asked = staging._ask, itertools.count()

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(asked) == number:
            then()
        return ask(*args, **kwargs)

    staging._ask = counted
    try:
        yield
    finally:
        staging._ask = ask


def test_unregister_waits_for_a_push(peer: Peer) -> None:
    """While a push is under way the memory stays registered; afterwards it goes."""
    pair = Pair(peer, remote=True)
    try:
        desc = bytes_desc(2, 1, AREA_BYTES)
        target, addresses = pair.register(desc, BlocksCacheKey(1, 7), blocks=True, fill=False)
        source, _ = pair.local(desc, blocks=True, fill=True)
        pair.link()
        peer.make("members:set_timeout", 100)
        push = lambda: pair.here.manager.push_blocks(BlocksCacheKey(1, 7), source, [0], [0])  # noqa: E731
        with Stalled(pair.here.dd, push, at=64) as stalled:
            with refuses(Code.LLM_TIMEOUT, "still used"):
                pair.owner.manager.unregister_cache(target.get("cache_id"))
            # It was out of sight for a while, which ends the push before anything of it is in place.
            error: Any = stalled.finish()
        assert error is None or error.status_code is Code.LLM_KV_CACHE_NOT_EXIST
        push()
        pair.check_owner(addresses, desc, lambda t: own(2, t, desc))
        pair.owner.manager.unregister_cache(target.get("cache_id"))
    finally:
        pair.here.finalize()


@pytest.mark.parametrize("write", [False, True])
def test_owner_does_not_answer(peer: Peer, write: bool) -> None:
    """S-180, B04: TIMEOUT within the limit; what the owner finds when it goes on again it does not do."""
    pair = Pair(peer, remote=True, timeout_ms=300)
    try:
        desc = members.DESC
        target, addresses = pair.register(desc, BlocksCacheKey(1, 7), blocks=True)
        pair.link()
        push = lambda: pair.here.manager.push_blocks(BlocksCacheKey(1, 7), pair.here.source, [0], [0])  # noqa: E731
        pull = lambda: pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), pair.here.room, [0], [0])  # noqa: E731
        # For a push the owner gives the area, and stops before it is asked to copy.
        with before_request(pair.here.dd._engine.staging, int(write), peer.stop):
            try:
                begin = time.monotonic()
                with refuses(Code.LLM_TIMEOUT, "300 ms"):
                    (push if write else pull)()
                assert 0.29 <= time.monotonic() - begin < 5
                with refuses(Code.LLM_NOT_YET_LINK, "timed out"):
                    pull()
            finally:
                peer.signal(signal.SIGCONT)
        pair.link()
        pull()
        pair.check_owner(addresses, desc, lambda t: own(1, t, desc))
        assert target.get("cache_id") == 3
    finally:
        pair.here.finalize()


@pytest.mark.parametrize("end", ["kill", "unlink", "finalize"])
def test_owner_goes_away(start_peer: Callable[[], Peer], end: str) -> None:
    """B06: NOT_YET_LINK at once, however long the limit; no thread is left."""
    peer = start_peer()
    pair = Pair(peer, remote=False)
    try:
        desc = bytes_desc(2, 1, 4 * AREA_BYTES)
        pair.register(desc, [CacheKey(1, 5)], blocks=False)
        cache, _ = pair.local(desc, blocks=False)
        pair.link()
        ends = {"kill": peer.kill, "unlink": lambda: pair.owner.unlink(pair.here), "finalize": pair.owner.finalize}
        begin = time.monotonic()
        with before_request(pair.here.dd._engine.staging, 2, ends[end]), refuses(Code.LLM_NOT_YET_LINK):
            pair.here.manager.pull_cache(CacheKey(1, 5), cache)
        assert time.monotonic() - begin < 5
    finally:
        pair.here.finalize()


def test_failed_transfer(pair: Pair) -> None:
    """A failure of the copy between area and destination is told like any other."""
    pair.register(members.DESC, BlocksCacheKey(1, 7), blocks=True)
    pair.link()
    set_faults(pair.here.dd, fail_nth=1)
    with refuses(Code.LLM_FAILED):
        pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), pair.here.room, [0], [0])
    pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), pair.here.room, [0], [0])


def test_two_links_at_once(pair: Pair, start_peer: Callable[[], Peer]) -> None:
    """S-191: links don't mix up their areas."""
    second = start_peer()
    second.make("members:make_mine", 3)
    second.make("members:forbid_process")
    desc = bytes_desc(2, 4, 20_000)
    _, addresses = pair.register(desc, BlocksCacheKey(1, 7), blocks=True)
    cache, own_addresses = pair.local(desc, blocks=True)
    pair.link()
    expected = [own(1, tensor, desc).tobytes() for tensor in range(2)]
    second.start("make", "members:pull_registered", pair.owner.address, desc, 100)
    for i in range(100):
        pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), cache, [i % 4], [i % 4])
    assert second.answer() == expected
    assert [memory.read(address, desc.size) for address in own_addresses] == expected
    assert len(addresses) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"pieces": [0, 0]},
        {"pieces": [2, 0, 1]},
        {"pieces": [0, 255, 2]},
        {"pieces": [0, 0, 0]},
        {"pieces": [0, 2**64 - 1, 2**64 - 1]},
        {"pieces": [0, 0, -1]},
        {"pieces": [0, 0, 256] * (AREA_BYTES // 256 + 1)},
        {"pieces": [0, 0, 1] * (PIECES + 1)},
        {"pieces": "all"},
        {"write": 2},
        {"cache": None},
        {"generation": 2**64},
        {"deadline_ns": 0},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_requests_are_not_trusted(pair: Pair, changes: dict[str, Any]) -> None:
    """What a peer asks for is checked by the owner, who answers with a failure and goes on."""
    pair.register(members.DESC, BlocksCacheKey(1, 7), blocks=True)
    link = pair.link()
    pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), pair.here.room, [0], [0])
    found = next(kept.found for kept in link.kept.values() if isinstance(kept, Path))
    body: dict[str, Any] = {
        "cache": found.record.cache_id,
        "generation": found.record.generation,
        "pieces": [0, 0, 1],
        "write": 1,
        "deadline_ns": time.monotonic_ns() + 10**10,
    }
    ask = pair.here.dd._engine.links.ask
    end = time.monotonic_ns() + 10**10
    assert ask(link, Kind.STAGE, end, {**body, "write": 0}).number("at") == 0
    answer: Frame = ask(link, Kind.STAGE, end, {**body, **changes})
    assert answer.body["failed"] == "failed"
    assert ask(link, Kind.STAGE, end, {**body, "generation": 1}).body["failed"] == "stale"
    pair.here.manager.pull_blocks(BlocksCacheKey(1, 7), pair.here.room, [0], [0])
