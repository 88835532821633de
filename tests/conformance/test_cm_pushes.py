"""Pushes: what is written, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from ends import End, desc
from refusals import PARAM_INVALID, Expected, name_of, refuses
from stall import Stalled, clear_faults, set_faults

from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    KvCache,
    LayerSynchronizer,
    LLMStatusCode,
    Placement,
    TransferWithCacheKeyConfig,
)

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
DEVICE, HOST = Placement.DEVICE, Placement.HOST
OF = desc(4, 2, 32)
TO = desc(4, 3, 48)


class Ready(LayerSynchronizer):
    """Every layer is."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


@dataclass
class Scene:
    """Sources in this process, destinations in the peer, linked; cluster 1 holds what is written."""

    there: End
    here: End
    plain: Any
    paged: Any
    to: Any
    to_paged: Any

    def push(self, **changes: Any) -> None:
        """Push slot 1 into slot 2, but for the changes."""
        key = CacheKeyByIdAndIndex(1, self.there.id(self.to), 2)
        arguments = {"dst_cache_key": key, "src_cache": self.plain, "src_batch_index": 1, **changes}
        self.here.manager.push_cache(**arguments)

    def push_blocks(self, **changes: Any) -> None:
        """Push two blocks, but for the changes."""
        arguments: dict[str, Any] = {"dst_cache_key": BlocksCacheKey(1), "src_cache": self.paged, "src_blocks": [1, 0]}
        self.here.manager.push_blocks(**{**arguments, "dst_blocks": [0, 3], **changes})

    def check_unharmed(self) -> None:
        """Check that nothing has been written."""
        self.there.untouched(self.to, TO)
        self.there.untouched(self.to_paged, desc(4, 4, 32))


@pytest.fixture
def scene(remote_cm: tuple[End, End]) -> Scene:
    there, here = remote_cm
    made = Scene(
        there,
        here,
        here.allocate(OF, salt=0),
        here.register(OF, salt=1, blocks=True),
        there.register(TO),
        there.allocate(desc(4, 4, 32), BlocksCacheKey(1), blocks=True),
    )
    here.link(there)
    return made


def test_s100_a_slot_goes_to_a_slot(scene: Scene) -> None:
    """S-100: a source slot goes to where the key's slot begins by the destination's own stride, no byte further."""
    there, here = scene.there, scene.here
    scene.push()
    there.check(scene.to, TO, {t: [(96, here.expected(OF, t)[32:])] for t in range(4)})
    scene.push(dst_cache_key=CacheKeyByIdAndIndex(1, there.id(scene.to), 0), src_batch_index=0)
    there.check(scene.to, TO, {t: [(0, here.expected(OF, t)[:32]), (96, here.expected(OF, t)[32:])] for t in range(4)})


def test_s100_blocks_go_to_blocks(scene: Scene) -> None:
    """S-100: pair by pair; of a repeated destination the last counts."""
    there, here = scene.there, scene.here
    scene.push_blocks(src_blocks=[0, 1, 0], dst_blocks=[3, 3, 1])
    data = [here.expected(OF, t, 1) for t in range(4)]
    there.check(scene.to_paged, desc(4, 4, 32), {t: [(96, data[t][32:]), (32, data[t][:32])] for t in range(4)})


@pytest.mark.parametrize("n", [1, 2, 3])
def test_s103_layers(remote_cm: tuple[End, End], n: int) -> None:
    """S-103, S-100: ranges are equally long and need not be the same; a layer has any number of tensors."""
    there, here = remote_cm
    of = desc(3 * n, 2, 32)
    plain, paged = here.allocate(of, salt=0), here.allocate(of, salt=1, blocks=True)
    to = desc(4 * n, 2, 32)
    target, blocks = there.allocate(to), there.allocate(to, BlocksCacheKey(1), blocks=True)
    here.link(there)
    layers = {"src_layer_range": range(2), "dst_layer_range": range(2, 4), "tensor_num_per_layer": n}
    here.manager.push_cache(CacheKeyByIdAndIndex(1, there.id(target), 1), plain, **layers)
    here.manager.push_blocks(BlocksCacheKey(1), paged, [1], [0], **layers)
    there.check(target, to, {t + 2 * n: [(32, here.expected(of, t)[:32])] for t in range(2 * n)})
    there.check(blocks, to, {t + 2 * n: [(0, here.expected(of, t, 1)[32:])] for t in range(2 * n)})


def test_s101_layers_before_the_failing_one_stay_written(scene: Scene) -> None:
    """S-101: the first failing layer raises, and what went before it stays."""
    there, here = scene.there, scene.here
    with refuses(PARAM_INVALID, "destination", 4):
        scene.push(src_layer_range=range(2), dst_layer_range=range(1, 3))
    there.check(scene.to, TO, {t + 2: [(96, here.expected(OF, t)[32:])] for t in range(2)})


def test_s102_layers_without_a_layer(remote_cm: tuple[End, End]) -> None:
    """S-102: with one tensor and the default of two there is no layer: success, and nothing is sent; 3 of 10 is not."""
    there, here = remote_cm
    one, ten = desc(1, 1, 32), desc(10, 1, 32)
    sources = here.allocate(one, salt=0), here.allocate(ten, salt=0)
    targets = there.allocate(one), there.allocate(ten)
    here.link(there)
    here.manager.push_cache(CacheKeyByIdAndIndex(1, there.id(targets[0]), 0), sources[0])
    there.untouched(targets[0], one)
    with refuses(PARAM_INVALID, 3, 10):
        here.manager.push_cache(CacheKeyByIdAndIndex(1, there.id(targets[1]), 0), sources[1], tensor_num_per_layer=3)
    there.untouched(targets[1], ten)


def test_s102_the_destination_layer_must_exist(scene: Scene) -> None:
    """S-102, E-344: a layer beyond the destination's tensors is refused."""
    for push in (scene.push, scene.push_blocks):
        with refuses(PARAM_INVALID, "destination", 4):
            push(src_layer_range=range(2), dst_layer_range=range(2, 4))
    scene.check_unharmed()


def test_what_was_found_before_refuses_nothing(remote_cm: tuple[End, End]) -> None:
    """S-100: arguments are judged by the target that is there, not by the one that a key stood for before."""
    there, here = remote_cm
    sources = here.allocate(desc(4, 8, 32), salt=1, blocks=True)
    here.link(there)
    for tensors, blocks in ((2, 4), (4, 8), (2, 4)):
        of = desc(tensors, blocks, 32)
        target = there.allocate(of, BlocksCacheKey(1), blocks=True)
        layers = range(tensors // 2)
        here.manager.push_blocks(BlocksCacheKey(1), sources, [7], [blocks - 1], layers, layers)
        data = [here.expected(desc(4, 8, 32), t, 1)[7 * 32 :] for t in range(tensors)]
        there.check(target, of, {t: [((blocks - 1) * 32, data[t])] for t in range(tensors)})
        with refuses(PARAM_INVALID, blocks):
            here.manager.push_blocks(BlocksCacheKey(1), sources, [7], [blocks], layers, layers)
        there.manager.deallocate_blocks_cache(target)
    with refuses(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        here.manager.push_blocks(BlocksCacheKey(1), sources, [7], [0], range(1), range(1))


def test_each_push_goes_where_it_says(remote_cm: tuple[End, End]) -> None:
    """S-100: what one push found out of its target is not what another needs: caches, tensors and forms differ."""
    there, here = remote_cm
    of = desc(4, 2, 32)
    plain, other, paged = here.allocate(of, salt=0), here.allocate(of, salt=5), here.allocate(of, salt=7, blocks=True)
    target = there.allocate(of)
    blocks = there.allocate(of, BlocksCacheKey(1), blocks=True)
    here.link(there)
    key = CacheKeyByIdAndIndex(1, there.id(target), 0)
    whole, first, second = range(2), range(1), range(1, 2)
    for source, salt in ((plain, 0), (other, 5), (plain, 0)):
        for mine, theirs in ((whole, whole), (first, first), (second, first), (first, second), (second, second)):
            there.fill(target, of, None)
            there.fill(blocks, of, None)
            here.manager.push_cache(key, source, 0, mine, theirs)
            here.manager.push_blocks(BlocksCacheKey(1), paged, [1], [0], mine, theirs)
            tensors = [(2 * a + i, 2 * b + i) for a, b in zip(mine, theirs, strict=True) for i in range(2)]
            there.check(target, of, {b: [(0, here.expected(of, a, salt)[:32])] for a, b in tensors})
            there.check(blocks, of, {b: [(0, here.expected(of, a, 7)[32:])] for a, b in tensors})
    # By its id a blocks cache can be sent to layer by layer, but not pushed to as a contiguous one.
    by_id = CacheKeyByIdAndIndex(1, there.id(blocks), 0)
    sent = here.manager.transfer_cache_async(plain, Ready(), [TransferWithCacheKeyConfig(by_id, first, first)])
    assert sent.synchronize() is LLMStatusCode.LLM_SUCCESS
    with refuses(PARAM_INVALID, "blocks cache"):
        here.manager.push_cache(by_id, plain, 0, first, first)
    # What has gone is not written to, though the next cache lies where it lay.
    there.manager.deallocate_cache(target)
    after = there.allocate(of)
    with refuses(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        here.manager.push_cache(key, plain, 0)
    there.untouched(after, of)


def test_s180_the_time_limit_is_that_of_a_layer(remote_cm: tuple[End, End]) -> None:
    """S-180: sync_kv_timeout bounds a layer, so two layers may take twice as long."""
    there, here = remote_cm
    source, target = here.allocate(OF, salt=0), there.allocate(OF)
    here.link(there)
    key = CacheKeyByIdAndIndex(1, there.id(target), 0)
    here.dd._engine.transfers._timeout_ms = 1500
    set_faults(here.dd, delay_s=2.0)
    here.manager.push_cache(key, source)
    there.check(target, OF, {t: [(0, here.expected(OF, t)[:32])] for t in range(4)})
    with refuses(LLMStatusCode.LLM_TIMEOUT, "1500"):
        here.manager.push_cache(key, source, 0, range(1), range(1))
    clear_faults(here.dd)


def test_s104_room_at_the_destination(scene: Scene) -> None:
    """S-104, E-259: a source slot must fit into the destination's, blocks must be equal."""
    there, here = scene.there, scene.here
    wide = desc(4, 1, 49)
    with refuses(PARAM_INVALID, 49, 48):
        scene.push(src_cache=here.allocate(wide, salt=0), src_batch_index=0)
    with refuses(PARAM_INVALID, 31, 32):
        scene.push_blocks(src_cache=here.allocate(desc(4, 2, 31), salt=0, blocks=True))
    scene.check_unharmed()
    there.untouched(scene.to, TO)


def test_s105_a_push_releases_no_key(remote_cm: tuple[End, End]) -> None:
    """S-105: keys of source and destination stay bound."""
    there, here = remote_cm
    source = here.allocate(OF, [CacheKey(2, 10)], salt=0)
    target = there.allocate(OF, [CacheKey(1, 10)])
    here.link(there)
    here.manager.push_cache(CacheKeyByIdAndIndex(1, there.id(target), 0), source)
    for end in (here, there):
        with refuses(PARAM_INVALID, "already bound"):
            end.manager.allocate_cache(OF, [CacheKey(1, 10)])


@pytest.mark.parametrize("registered", [False, True])
def test_the_listening_side_pushes(remote_cm: tuple[End, End], registered: bool) -> None:
    """S-130: the side that was linked to pushes over the same link."""
    there, here = remote_cm
    make = {False: End.allocate, True: End.register}[registered]
    source, target = there.allocate(OF, salt=0), make(here, OF)
    here.link(there)
    there.manager.push_cache(CacheKeyByIdAndIndex(2, here.id(target), 1), source)
    here.check(target, OF, {t: [(32, there.expected(OF, t)[:32])] for t in range(4)})


@pytest.mark.parametrize(("source", "destination"), [(DEVICE, HOST), (HOST, DEVICE), (HOST, HOST)])
def test_s59_pushes_between_placements(remote_cm: tuple[End, End], source: Placement, destination: Placement) -> None:
    """S-59, S-114: pool memory of either kind; nothing goes from host to host."""
    there, here = remote_cm
    of, to = desc(4, 2, 32, source), desc(4, 2, 32, destination)
    cache, target = here.allocate(of, salt=0), there.allocate(to)
    here.link(there)
    key = CacheKeyByIdAndIndex(1, there.id(target), 1)
    if source is destination:
        with refuses(LLMStatusCode.LLM_FEATURE_NOT_ENABLED):
            here.manager.push_cache(key, cache)
        there.untouched(target, to)
    else:
        here.manager.push_cache(key, cache)
        there.check(target, to, {t: [(32, here.expected(of, t)[:32])] for t in range(4)})


# ---------------------------------------------------------------------- refusals


def row(rule: str, expected: Expected, *words: object, **changes: Any) -> Any:
    return pytest.param(expected, words, changes, id=name_of(rule, changes))


HOST_CACHE = KvCache.create_cpu_cache(desc(4, 2, 32, HOST), [4096] * 4)
SHARED = [
    row("E-341", TypeError, "src_cache", src_cache=None),
    row("E-341", TypeError, "src_cache", src_cache=HOST_CACHE),
    row("E-344", TypeError, "src_layer_range", src_layer_range=[0]),
    row("E-344", PARAM_INVALID, "src_layer_range", src_layer_range=range(0)),
    row("E-344", PARAM_INVALID, "dst_layer_range", dst_layer_range=range(1, 1)),
    row("E-344", PARAM_INVALID, "src_layer_range", src_layer_range=range(0, 2, 2)),
    row("E-344", PARAM_INVALID, "dst_layer_range", dst_layer_range=range(-1, 1)),
    row("S-103, E-344", PARAM_INVALID, "equally long", src_layer_range=range(1)),
    row("S-103, E-344", PARAM_INVALID, "equally long", dst_layer_range=range(1)),
    row("E-344", PARAM_INVALID, "src_layer_range", "2 layers", src_layer_range=range(1, 3), dst_layer_range=range(2)),
    row("E-345", ValueError, "tensor_num_per_layer", tensor_num_per_layer=-1),
    row("E-345", PARAM_INVALID, "tensor_num_per_layer is 0", tensor_num_per_layer=0),
    row("E-345", TypeError, "tensor_num_per_layer", tensor_num_per_layer=2.0),
    row("E-345", TypeError, "tensor_num_per_layer", tensor_num_per_layer="x"),
    row("E-346", PARAM_INVALID, "tensor_num_per_layer is 3", "4", tensor_num_per_layer=3),
]


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        row("E-341", TypeError, "dst_cache_key", dst_cache_key=CacheKey(1, 10)),
        row("E-341", TypeError, "dst_cache_key", dst_cache_key=BlocksCacheKey(1)),
        row("E-341", TypeError, "dst_cache_key", dst_cache_key=None),
        row("E-343", PARAM_INVALID, "size is 32", size=32),
        row("E-343", PARAM_INVALID, "size is 0", size=0),
        row("E-343", TypeError, "size", size=1.0),
        row("E-208", TypeError, "src_batch_index", src_batch_index="0"),
        row("E-208", ValueError, "src_batch_index", src_batch_index=-1),
        row("E-209", PARAM_INVALID, "src_batch_index", "0 to 1", src_batch_index=2),
        row("E-349", NOT_EXIST, "cache 7", dst_cache_key=CacheKeyByIdAndIndex(1, 7, 0)),
        row("E-349", NOT_EXIST, "cache", dst_cache_key=CacheKeyByIdAndIndex(1, -1, 0)),
        row("E-332", PARAM_INVALID, "batch_index of the key", "0 to 2", dst_cache_key=CacheKeyByIdAndIndex(1, 1, 3)),
        row("E-342", PARAM_INVALID, "blocks cache", dst_cache_key=CacheKeyByIdAndIndex(1, 2, 0)),
        row("E-350", NOT_YET_LINK, "cluster 9", dst_cache_key=CacheKeyByIdAndIndex(9, 1, 0)),
        *SHARED,
    ],
)
def test_push_cache(scene: Scene, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-212: what is wrong is refused before the first byte."""
    with refuses(expected, *words):
        scene.push(**changes)
    scene.check_unharmed()


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        row("E-341", TypeError, "dst_cache_key", dst_cache_key=CacheKeyByIdAndIndex(1, 2, 0)),
        row("E-347", PARAM_INVALID, "dst_blocks", dst_blocks=[]),
        row("E-348", PARAM_INVALID, "src_blocks", src_blocks=[]),
        row("E-347", PARAM_INVALID, "dst_blocks", src_blocks=[], dst_blocks=[]),
        row("E-255", PARAM_INVALID, "1", "2", src_blocks=[0]),
        row("E-251", TypeError, "src_blocks", src_blocks=[0, "1"]),
        row("E-256", ValueError, "dst_blocks", dst_blocks=[0, -1]),
        row("E-257", PARAM_INVALID, "source block 2", src_blocks=[0, 2]),
        row("E-257", PARAM_INVALID, "destination block 4", dst_blocks=[0, 4]),
        row("E-349", NOT_EXIST, "model_id=3", dst_cache_key=BlocksCacheKey(1, 3)),
        row("E-350", NOT_YET_LINK, "cluster 9", dst_cache_key=BlocksCacheKey(9)),
        *SHARED,
    ],
)
def test_push_blocks(scene: Scene, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-212: what is wrong is refused before the first byte."""
    with refuses(expected, *words):
        scene.push_blocks(**changes)
    scene.check_unharmed()


def test_e342_forms(scene: Scene) -> None:
    """E-342: a paged source is pushed by blocks, a plain one by slots."""
    with refuses(PARAM_INVALID, "src_cache"):
        scene.push(src_cache=scene.paged)
    with refuses(PARAM_INVALID, "src_cache"):
        scene.push_blocks(src_cache=scene.plain)
    scene.check_unharmed()


def test_e340_without_remote_accessible_mode(cm: tuple[End, End]) -> None:
    """E-340: pushes need the mode, and say so before they look at anything else."""
    _, here = cm
    for push in (here.manager.push_cache, here.manager.push_blocks):
        with refuses(PARAM_INVALID, "EnableRemoteCacheAccessible"):
            push(None, None)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_s114_both_caches_must_be_accessible(remote_cm: tuple[End, End], side: str) -> None:
    """S-114, E-238, S-111: memory registered as not accessible, or after the link, takes no part."""
    there, here = remote_cm
    source = here.register(OF, salt=0, remote_accessible=side == "destination")
    before = there.register(OF, remote_accessible=side == "source")
    here.link(there)
    sources = [source, here.register(OF, salt=0)] if side == "source" else [source]
    for cache in sources:
        with refuses(PARAM_INVALID, "not remote accessible"):
            here.manager.push_cache(CacheKeyByIdAndIndex(1, there.id(before), 0), cache)
        there.untouched(before, OF)


def test_e228_source_is_gone(scene: Scene) -> None:
    """E-228, S-21: a deallocated source does not exist."""
    scene.here.manager.deallocate_cache(scene.plain)
    with refuses(NOT_EXIST, f"cache {scene.plain.cache_id}"):
        scene.push()
    scene.check_unharmed()


def test_e350_a_push_that_takes_too_long(peer: Any) -> None:
    """E-350, S-180: TIMEOUT; the link is made anew, and then pushes work."""
    there, here = End(peer, 1, remote=True), End(None, 2, remote=True, sync_kv_timeout=100)
    try:
        source, target = here.allocate(OF, salt=0), there.allocate(OF)
        here.link(there)
        key = CacheKeyByIdAndIndex(1, there.id(target), 0)
        with Stalled(here.dd, lambda: here.manager.push_cache(key, source), 5) as stalled:
            error = stalled.wait()
        assert getattr(error, "status_code", None) is LLMStatusCode.LLM_TIMEOUT, error
        # B04: what timed out does not land any more.
        there.fill(target, OF, None)
        with refuses(NOT_YET_LINK, "timed out"):
            here.manager.push_cache(key, source)
        there.untouched(target, OF)
        here.link(there)
        here.manager.push_cache(key, source)
        there.check(target, OF, {t: [(0, here.expected(OF, t)[:32])] for t in range(4)})
    finally:
        here.close()
