"""transfer_cache_async by keys, in remote-accessible mode; and a task that ends whatever happens."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ends import End, desc
from peer import Peer
from refusals import PARAM_INVALID, Expected, name_of, refuses
from stall import Stalled

from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

SUCCESS = LLMStatusCode.LLM_SUCCESS
INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
LIMIT_MS = 30000
OF = desc(8, 2, 32)
TO = desc(12, 4, 32)


class Always(LayerSynchronizer):
    """Every layer is ready."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class Scene:
    """Sources here, a plain and a paged destination in the peer."""

    def __init__(self, there: End, here: End) -> None:
        self.there, self.here = there, here
        self.source = here.allocate(OF, salt=0)
        self.plain, self.paged = there.register(TO), there.allocate(TO, BlocksCacheKey(1), blocks=True)
        here.link(there)

    def slot(self, batch_index: int, cluster: int = 1) -> CacheKeyByIdAndIndex:
        return CacheKeyByIdAndIndex(cluster, self.there.id(self.plain), batch_index)

    def results(self, *configs: Any, **more: Any) -> list[LLMStatusCode | None]:
        """Transfer, wait, and give the results."""
        source = more.pop("source", self.source)
        task: CacheTask = self.here.manager.transfer_cache_async(source, Always(), list(configs), **more)
        return task.get_results(LIMIT_MS)

    def data(self, tensor: int) -> bytes:
        return self.here.expected(OF, tensor)


@pytest.fixture
def scene(remote_cm: tuple[End, End]) -> Scene:
    return Scene(*remote_cm)


def test_s93_a_slot_to_a_slot(scene: Scene) -> None:
    """S-93, S-94: the destination layer counts from the destination range, whatever the source's first layer is."""
    config = TransferWithCacheKeyConfig(scene.slot(2), range(1, 3), range(4, 6), 1)
    assert scene.results(config) == [SUCCESS]
    scene.there.check(scene.plain, TO, {t + 6: [(64, scene.data(t)[32:])] for t in range(2, 6)})


def test_s93_blocks_to_blocks(scene: Scene) -> None:
    """S-93: pairs by a blocks key."""
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(4), range(2, 6))
    assert scene.results(config, src_block_indices=[0, 1], dst_block_indices=[3, 1]) == [SUCCESS]
    scene.there.check(scene.paged, TO, {t + 4: [(96, scene.data(t)[:32]), (32, scene.data(t)[32:])] for t in range(8)})


def test_s93_blocks_count_from_the_slot_of_the_key(scene: Scene) -> None:
    """S-93: the destination is the key's slot, and blocks are counted from there; they must lie inside the tensor."""
    config = TransferWithCacheKeyConfig(scene.slot(1), range(4), range(4))
    assert scene.results(config, src_block_indices=[0, 1], dst_block_indices=[2, 0]) == [SUCCESS]
    pieces = {t: [(96, scene.data(t)[:32]), (32, scene.data(t)[32:])] for t in range(8)}
    scene.there.check(scene.plain, TO, pieces)
    assert scene.results(config, src_block_indices=[0, 1], dst_block_indices=[3, 0]) == [INVALID]
    scene.there.check(scene.plain, TO, pieces)


def test_s93_a_slot_cut_into_blocks(scene: Scene) -> None:
    """S-93, S-56: chunks of the said size, the last one short."""
    of = desc(2, 2, 40)
    source = scene.here.allocate(of, salt=3)
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(5, 6))
    assert scene.results(config, source=source, dst_block_indices=[3, 0], dst_block_memory_size=32) == [SUCCESS]
    data = [scene.here.expected(of, t, 3) for t in range(2)]
    scene.there.check(scene.paged, TO, {t + 10: [(96, data[t][:32]), (0, data[t][32:40])] for t in range(2)})


def row(expected: LLMStatusCode, key: Any, to: range = range(4), **more: Any) -> Any:
    return pytest.param(expected, key, to, more, id=name_of("E-332", {"key": expected.name, "to": to, **more}))


@pytest.mark.parametrize(
    ("expected", "key", "to", "more"),
    [
        row(NOT_EXIST, CacheKeyByIdAndIndex(1, 77, 0)),
        row(NOT_EXIST, BlocksCacheKey(1, 5)),
        row(INVALID, CacheKeyByIdAndIndex(1, 1, 4)),
        row(INVALID, BlocksCacheKey(1), range(4, 8)),
        row(INVALID, BlocksCacheKey(1), src_block_indices=[0, 1], dst_block_indices=[0, 4]),
        row(INVALID, BlocksCacheKey(1), src_block_indices=[0, 2], dst_block_indices=[0, 1]),
        row(INVALID, BlocksCacheKey(1), src_block_indices=[0], dst_block_indices=[0], dst_block_memory_size=16),
        row(INVALID, BlocksCacheKey(1), dst_block_indices=[0, 1, 2], dst_block_memory_size=16),
        row(NOT_YET_LINK, BlocksCacheKey(9)),
    ],
)
def test_e332(scene: Scene, expected: LLMStatusCode, key: Any, to: range, more: dict[str, Any]) -> None:
    """E-332, E-328, E-331, S-99: what the peer lacks becomes the config's result, and the layer is not written."""
    more = dict(more)
    first = range(4) if to.stop <= 4 else range(2, 4)
    config = TransferWithCacheKeyConfig(key, first, range(to.start + 2, to.start + 4) if to.stop > 4 else to)
    assert scene.results(config, **more) == [expected]
    scene.there.untouched(scene.plain, TO)
    scene.there.untouched(scene.paged, TO)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_e332_not_accessible(remote_cm: tuple[End, End], side: str) -> None:
    """E-332, S-99: both caches must be remote accessible."""
    there, here = remote_cm
    source = here.register(OF, salt=0, remote_accessible=side == "destination")
    target = there.register(TO, remote_accessible=side == "source")
    here.link(there)
    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, there.id(target), 0), range(4), range(4))
    task = here.manager.transfer_cache_async(source, Always(), [config])
    assert task.get_results(LIMIT_MS) == [INVALID]
    there.untouched(target, TO)


@pytest.mark.parametrize(
    ("expected", "words", "configs"),
    [
        (TypeError, "TransferWithCacheKeyConfig", [TransferConfig(1, [1] * 8)]),
        (PARAM_INVALID, "4 layers", [TransferWithCacheKeyConfig(BlocksCacheKey(1), range(3, 5), range(2))]),
    ],
)
def test_e314_e322_refused(scene: Scene, expected: Expected, words: str, configs: Any) -> None:
    """E-314, E-322, S-99: the class of the mode, and layers that the source has."""
    with refuses(expected, words):
        scene.here.manager.transfer_cache_async(scene.source, Always(), configs)


def test_s105_no_key_is_released(scene: Scene) -> None:
    """S-60: transfers release nothing."""
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(4), range(4))
    for _ in range(2):
        assert scene.results(config, src_block_indices=[0], dst_block_indices=[0]) == [SUCCESS]


# ---------------------------------------------------------------------- layers as they become ready (B27)


class Released(LayerSynchronizer):
    """Fills a layer just before it says that it is ready, and spoils the layer before."""

    def __init__(self, end: End, cache: Any, of: Any, stop_at: int, how: Any) -> None:
        self.end, self.cache, self.of, self.stop_at, self.how = end, cache, of, stop_at, how

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        addresses = self.end.addresses(self.cache)
        if layer_index:
            # Layers go one after the other, so the one before has been written to all targets.
            for address in addresses[2 * layer_index - 2 : 2 * layer_index]:
                self.end.write(address, b"\xee" * self.of.size)
        if layer_index == self.stop_at:
            return self.how()  # type: ignore[no-any-return]
        for t in (2 * layer_index, 2 * layer_index + 1):
            self.end.write(addresses[t], self.end.expected(self.of, t))
        return True


def raises() -> bool:
    raise RuntimeError("the compute of a layer failed")


WIDE = desc(88, 1, 64)


@pytest.mark.parametrize(
    ("stop_at", "how", "expected"),
    [(44, None, SUCCESS), (7, lambda: False, INVALID), (9, raises, LLMStatusCode.LLM_FAILED)],
)
@pytest.mark.parametrize("by_key", [False, True])
def test_b27_layers_are_sent_when_ready(peer: Peer, by_key: bool, stop_at: int, how: Any, expected: Any) -> None:
    """B27, S-92, E-325, E-326: no byte before its release, none of what is written later; a result for each target."""
    there, here = End(peer, 1, remote=by_key), End(None, 2, remote=by_key)
    try:
        source = here.allocate(WIDE)
        targets = [there.allocate(WIDE), there.allocate(WIDE)]
        here.link(there)
        configs: list[Any] = [
            TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, there.id(target), 0), range(44), range(44))
            if by_key
            else TransferConfig(1, there.addresses(target))
            for target in targets
        ]
        task = here.manager.transfer_cache_async(source, Released(here, source, WIDE, stop_at, how), configs)
        assert task.synchronize(LIMIT_MS) is expected
        assert task.get_results(0) == [expected] * 2
        pieces = {t: [(0, here.expected(WIDE, t))] for t in range(2 * stop_at)}
        for target in targets:
            there.check(target, WIDE, pieces)
    finally:
        here.close()


def test_b27_a_synchronizer_that_never_returns(remote_cm: tuple[End, End]) -> None:
    """B27, E-324: waits end by their own limits, earlier layers have arrived, and finalize goes through."""
    there, here = remote_cm
    source, target = here.allocate(OF), there.allocate(OF)
    here.link(there)
    for_ever, blocked = threading.Event(), threading.Event()

    def block() -> bool:
        blocked.set()
        return for_ever.wait(60)

    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, there.id(target), 0), range(4), range(4))
    task = here.manager.transfer_cache_async(source, Released(here, source, OF, 2, block), [config])
    try:
        assert blocked.wait(30)
        assert task.synchronize(20) is LLMStatusCode.LLM_TIMEOUT
        there.check(target, OF, {t: [(0, here.expected(OF, t)[:32])] for t in range(4)})
        here.close()
    finally:
        for_ever.set()
    # The layer became ready after the engine's end, and was not sent.
    assert task.get_results(LIMIT_MS) == [LLMStatusCode.LLM_ENGINE_FINALIZED]


def test_b04_a_dropped_task(remote_cm: tuple[End, End]) -> None:
    """B04: the task object is dropped while a layer is on its way; the cache it writes to is not reused meanwhile."""
    there, here = remote_cm
    source, target = here.allocate(OF, salt=0), there.allocate(OF)
    here.link(there)
    addresses = there.addresses(target)
    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, there.id(target), 0), range(4), range(4))
    tasks = []

    def transfer() -> None:
        tasks.append(here.manager.transfer_cache_async(source, Always(), [config]))

    with Stalled(here.dd, transfer, 10) as stalled:
        stalled.wait()
        there.manager.deallocate_cache(target)
        reusers = [there.allocate(OF) for _ in range(4)]
        assert all(set(there.addresses(reuser)).isdisjoint(addresses) for reuser in reusers)
        stalled.finish()
    assert tasks[0].get_results(LIMIT_MS) == [NOT_EXIST]
    for reuser in reusers:
        there.untouched(reuser, OF)
    # The peer has unpinned: now the memory is free again.
    assert there.addresses(there.allocate(OF)) == addresses


def test_e327_one_target_dies(start_peer: Any, peer: Peer) -> None:
    """B27, E-327, E-328: a target that dies ends the job with NOT_YET_LINK for it; each target has a result."""
    doomed_peer = start_peer()
    there, doomed, here = End(peer, 1, remote=True), End(doomed_peer, 3, remote=True), End(None, 2, remote=True)
    try:
        source = here.allocate(OF, salt=0)
        targets = {end: end.allocate(OF) for end in (there, doomed)}
        for end in targets:
            here.link(end)

        class Killer(LayerSynchronizer):
            def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
                if layer_index == 2:
                    doomed_peer.kill()
                return True

        configs = [
            TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(end.cluster_id, end.id(cache), 0), range(4), range(4))
            for end, cache in targets.items()
        ]
        task = here.manager.transfer_cache_async(source, Killer(), configs)
        assert task.get_results(LIMIT_MS) == [None, NOT_YET_LINK]
        there.check(targets[there], OF, {t: [(0, here.expected(OF, t)[:32])] for t in range(6)})
    finally:
        here.close()
