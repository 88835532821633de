"""pull_cache refuses what it must, with the right words, in the right order, and writes nothing then."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pairs import Decoder, Prompt, bytes_desc
from peer import Remote
from refusals import PARAM_INVALID, Expected, name_of, refuses

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMRole,
    LLMStatusCode,
    Placement,
)

NONE = 2**64 - 1
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
SOURCE = bytes_desc(4, 2, 32)


def host_cache() -> KvCache:
    desc = CacheDesc(4, [4, 32], DataType.DT_UINT8, placement=Placement.HOST)
    return KvCache.create_cpu_cache(desc, [4096] * 4)


@dataclass
class Scene:
    """A linked pair with one cache on each side, and a pull between them that works."""

    prompt: Prompt
    decoder: Decoder
    source: Remote
    cache: KvCache

    def pull(self, **changes: Any) -> None:
        """Pull by request 10, but for the changes."""
        arguments: dict[str, Any] = {"cache_key": CacheKey(1, 10), "kv_cache": self.cache, **changes}
        self.decoder.manager.pull_cache(**arguments)

    def check_unharmed(self) -> None:
        """Check that nothing was written, that both keys are still bound, and that a retry works (S-212)."""
        self.decoder.untouched(self.cache)
        for slot, request in enumerate((10, 11)):
            self.pull(cache_key=CacheKey(1, request), batch_index=slot)
        expected = [self.prompt.expected(SOURCE, t) for t in range(4)]
        self.decoder.check(self.cache, {t: [(0, expected[t])] for t in range(4)})


@pytest.fixture
def scene(linked: tuple[Prompt, Decoder]) -> Scene:
    prompt, decoder = linked
    source = prompt.allocate(SOURCE, [CacheKey(1, 10), CacheKey(1, 11)])
    return Scene(prompt, decoder, source, decoder.allocate(bytes_desc(4, 4, 32)))


def row(rule: str, expected: Expected, *words: object, **changes: Any) -> Any:
    return pytest.param(expected, words, changes, id=name_of(rule, changes))


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        row("E-201", TypeError, "cache_key", cache_key=BlocksCacheKey(1)),
        row("E-201", TypeError, "cache_key", cache_key=None),
        row("E-201", TypeError, "cache_key", cache_key=10),
        row("E-203", TypeError, "kv_cache", kv_cache=None),
        row("E-203", TypeError, "kv_cache", kv_cache=1),
        row("E-204", PARAM_INVALID, "kv_cache", "HOST", "DEVICE", kv_cache=host_cache()),
        row("E-206", TypeError, "size", "int", size="1"),
        row("E-206", TypeError, "size", "int", size=1.0),
        row("E-206", TypeError, "size", "int", size=True),
        row("E-206", TypeError, "size", "int", size=None),
        row("E-206", ValueError, "size", 2**63, 2**63 - 1, size=2**63),
        row("E-206", ValueError, "size", -(2**63), size=-(2**63) - 1),
        row("E-207", PARAM_INVALID, "size is 0", "-1", size=0),
        row("E-207", PARAM_INVALID, "size is -2", "-1", size=-2),
        row("E-208", TypeError, "batch_index", "int", batch_index="0"),
        row("E-208", TypeError, "batch_index", "int", batch_index=0.0),
        row("E-208", TypeError, "batch_index", "int", batch_index=False),
        row("E-208", TypeError, "batch_index", "int", batch_index=None),
        row("E-208", ValueError, "batch_index", "-1", 2**32 - 1, batch_index=-1),
        row("E-208", ValueError, "batch_index", 2**32, 2**32 - 1, batch_index=2**32),
        row("E-209", PARAM_INVALID, "batch_index", 4, "0 to 3", batch_index=4),
        row("E-210", TypeError, "src_cache_offset", "int", src_cache_offset="0"),
        row("E-210", TypeError, "src_cache_offset", "int", src_cache_offset=True),
        row("E-210", TypeError, "dst_cache_offset", "int", dst_cache_offset=0.0),
        row("E-210", ValueError, "src_cache_offset", "-1", src_cache_offset=-1),
        row("E-210", ValueError, "dst_cache_offset", "-1", dst_cache_offset=-1),
        row("E-210", ValueError, "dst_cache_offset", 2**64, dst_cache_offset=2**64),
        row("E-211", PARAM_INVALID, "req_id", "prefix_id", cache_key=CacheKey(1, NONE)),
        row("E-211", PARAM_INVALID, "req_id", "prefix_id", cache_key=CacheKey(1, 10, prefix_id=3)),
        row("E-212", PARAM_INVALID, "33", "32", "destination", size=33),
        row("E-212", PARAM_INVALID, "25", "dst_cache_offset", "8", "32", size=25, dst_cache_offset=8),
        row("E-212", PARAM_INVALID, "destination", 2**63 - 1, size=2**63 - 1),
        row("E-213", PARAM_INVALID, "32", "src_cache_offset", "24", "source", src_cache_offset=24),
        row("E-213", PARAM_INVALID, "src_cache_offset", "32", "source", src_cache_offset=32, size=1),
        row("E-213", PARAM_INVALID, "src_cache_offset", 2**64 - 1, src_cache_offset=2**64 - 1, size=1),
        row("E-214", PARAM_INVALID, "dst_cache_offset", "32", "0 to 31", dst_cache_offset=32),
        row("E-214", PARAM_INVALID, "dst_cache_offset", 2**64 - 1, "0 to 31", dst_cache_offset=2**64 - 1),
        row("E-215", TypeError, "tensor_num_per_layer", "int", tensor_num_per_layer=1.0),
        row("E-215", TypeError, "tensor_num_per_layer", "int", tensor_num_per_layer="x"),
        row("E-215", TypeError, "tensor_num_per_layer", "int", tensor_num_per_layer=True),
        row("E-217", ValueError, "tensor_num_per_layer", "-1", tensor_num_per_layer=-1),
        row("E-217", ValueError, "tensor_num_per_layer", 2**32, tensor_num_per_layer=2**32),
        row("E-218", PARAM_INVALID, "tensor_num_per_layer is 0", tensor_num_per_layer=0),
        row("E-219", PARAM_INVALID, "tensor_num_per_layer is 5", "1 to 4", tensor_num_per_layer=5),
        row("E-220", PARAM_INVALID, "tensor_num_per_layer is 3", "4", tensor_num_per_layer=3, src_layer_range=range(1)),
        row("E-220", PARAM_INVALID, "tensor_num_per_layer is 3", "4", tensor_num_per_layer=3, dst_layer_range=range(1)),
        row("E-222", TypeError, "src_layer_range", "range", src_layer_range=[0, 1]),
        row("E-222", TypeError, "dst_layer_range", "range", dst_layer_range=slice(0, 1)),
        row("E-222", TypeError, "dst_layer_range", "range", dst_layer_range=1),
        row("E-223", PARAM_INVALID, "src_layer_range", "range(0, 2, 2)", "step 1", src_layer_range=range(0, 2, 2)),
        row("E-223", PARAM_INVALID, "dst_layer_range", "step 1", dst_layer_range=range(2, 0, -1)),
        row("E-223", PARAM_INVALID, "src_layer_range", "range(-1, 1)", src_layer_range=range(-1, 1)),
        row("E-224", PARAM_INVALID, "src_layer_range", "range(0, 0)", src_layer_range=range(0)),
        row("E-224", PARAM_INVALID, "dst_layer_range", "range(3, 3)", dst_layer_range=range(3, 3)),
        row("S-44", ValueError, "src_layer_range", 2**32, src_layer_range=range(2**32)),
        row("E-225", PARAM_INVALID, "2 source", "4 destination", src_layer_range=range(1)),
        row("E-225", PARAM_INVALID, "4 source", "2 destination", dst_layer_range=range(1, 2)),
        row("E-226", PARAM_INVALID, "src_layer_range", "6", "4", src_layer_range=range(1, 3), dst_layer_range=range(2)),
        row("E-226", PARAM_INVALID, "dst_layer_range", "6", "4", src_layer_range=range(2), dst_layer_range=range(1, 3)),
        row("E-226", PARAM_INVALID, "src_layer_range", src_layer_range=range(2**32 - 2, 2**32 - 1)),
        row("E-229", NOT_YET_LINK, "cluster 9", cache_key=CacheKey(9, 10)),
        row("E-230", NOT_YET_LINK, "cluster 2", cache_key=CacheKey(2, 10)),
        row("E-232", NOT_EXIST, "req_id=99", cache_key=CacheKey(1, 99)),
        row("E-232", NOT_EXIST, "model_id=1", cache_key=CacheKey(1, 10, model_id=1)),
        row("E-232", NOT_EXIST, "prefix_id=10", cache_key=CacheKey(1, NONE, prefix_id=10)),
        row("E-233", NOT_EXIST, "cache 7", cache_key=CacheKeyByIdAndIndex(1, 7, 0)),
        row("E-233", NOT_EXIST, "slot 2", cache_key=CacheKeyByIdAndIndex(1, 1, 2)),
        row("E-233", NOT_EXIST, "cache", cache_key=CacheKeyByIdAndIndex(1, 0, 0)),
        row("E-233", NOT_EXIST, "cache", cache_key=CacheKeyByIdAndIndex(1, -1, 0)),
    ],
)
def test_refused(scene: Scene, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-212, S-60: the call is refused with the right words, and both sides are as if it had not been made."""
    with refuses(expected, *words):
        scene.pull(**changes)
    scene.check_unharmed()


@pytest.mark.parametrize("role", [LLMRole.PROMPT, LLMRole.MIX])
def test_e200_only_a_decoder_pulls(scene: Scene, role: LLMRole) -> None:
    """E-200: the role is looked at before anything else."""
    scene.decoder.manager._role = role
    with refuses(PARAM_INVALID, "pull_cache", "DECODER", role):
        scene.pull(cache_key=None, kv_cache=None, size="x")
    scene.decoder.manager._role = LLMRole.DECODER
    scene.check_unharmed()


def test_s40_earlier_checks_win(scene: Scene) -> None:
    """S-40, api 9.2: of two mistakes the one that stands first in the order of checks is reported."""
    gone = scene.decoder.allocate(bytes_desc(4, 4, 32))
    scene.decoder.manager.deallocate_cache(gone)
    order: list[tuple[dict[str, Any], Expected, str]] = [
        ({"cache_key": None}, TypeError, "cache_key"),
        ({"kv_cache": None}, TypeError, "kv_cache"),
        ({"kv_cache": host_cache()}, PARAM_INVALID, "kv_cache"),
        ({"size": "1"}, TypeError, "size"),
        ({"batch_index": "0"}, TypeError, "batch_index"),
        ({"size": 0}, PARAM_INVALID, "size"),
        ({"src_cache_offset": -1}, ValueError, "src_cache_offset"),
        ({"dst_cache_offset": -1}, ValueError, "dst_cache_offset"),
        ({"cache_key": CacheKey(9, NONE)}, PARAM_INVALID, "req_id"),
        ({"tensor_num_per_layer": 0}, PARAM_INVALID, "tensor_num_per_layer"),
        ({"src_layer_range": 1}, TypeError, "src_layer_range"),
        ({"dst_layer_range": range(0)}, PARAM_INVALID, "dst_layer_range"),
        ({"kv_cache": gone}, NOT_EXIST, str(gone.cache_id)),
        ({"batch_index": 4}, PARAM_INVALID, "batch_index"),
        ({"cache_key": CacheKey(9, 99)}, NOT_YET_LINK, "cluster 9"),
        ({"cache_key": CacheKey(1, 99)}, NOT_EXIST, "req_id=99"),
    ]
    for (first, expected, word), (second, *_) in itertools.combinations(order, 2):
        with refuses(expected, word):
            scene.pull(**{**second, **first})
    # Of the remote checks the source comes first: a slot is compared only with a source that exists.
    with refuses(NOT_EXIST, "req_id=99"):
        scene.pull(cache_key=CacheKey(1, 99), src_cache_offset=24)
    scene.check_unharmed()


def test_e227_unequal_tensor_totals(scene: Scene) -> None:
    """E-227, S-42: without ranges both caches must have equally many tensors; a range on one side repairs it."""
    small = scene.decoder.allocate(bytes_desc(2, 2, 32))
    with refuses(PARAM_INVALID, "4 source", "2 destination"):
        scene.pull(kv_cache=small)
    scene.decoder.untouched(small)
    with refuses(PARAM_INVALID, "4 source", "2 destination"):
        scene.pull(kv_cache=small, dst_layer_range=range(1))
    scene.decoder.untouched(small)
    scene.pull(kv_cache=small, src_layer_range=range(1, 2), batch_index=1)
    scene.decoder.check(small, {t: [(32, scene.prompt.expected(SOURCE, t + 2)[:32])] for t in range(2)})


def test_e213_a_longer_destination_slot_is_refused_not_truncated(scene: Scene) -> None:
    """E-213, S-32: the length comes from the destination, and the source must have it."""
    wide = scene.decoder.allocate(bytes_desc(4, 2, 64))
    with refuses(PARAM_INVALID, "64", "32", "source"):
        scene.pull(kv_cache=wide)
    scene.decoder.untouched(wide)
    scene.pull(kv_cache=wide, size=32)
    scene.decoder.check(wide, {t: [(0, scene.prompt.expected(SOURCE, t)[:32])] for t in range(4)})


def test_e216_none_means_the_default(scene: Scene) -> None:
    """E-216, S-45: None for each optional argument is as if it were not given, so the pull releases the key."""
    scene.pull(
        tensor_num_per_layer=None,
        src_layer_range=None,
        dst_layer_range=None,
        src_cache_offset=None,
        dst_cache_offset=None,
    )
    with refuses(NOT_EXIST, "req_id=10"):
        scene.pull()


def test_e221_default_layers_on_an_odd_total(scene: Scene) -> None:
    """E-221, S-45: the default of two tensors a layer needs no even total as long as the range is inside."""
    desc = bytes_desc(3, 1, 32)
    scene.prompt.allocate(desc, [CacheKey(1, 30)])
    cache = scene.decoder.allocate(desc)
    with refuses(PARAM_INVALID, "src_layer_range", "4", "3"):
        scene.pull(cache_key=CacheKey(1, 30), kv_cache=cache, src_layer_range=range(1, 2), dst_layer_range=range(1))
    scene.decoder.untouched(cache)
    scene.pull(cache_key=CacheKey(1, 30), kv_cache=cache, src_layer_range=range(1), dst_layer_range=range(1))
    scene.decoder.check(cache, {t: [(0, scene.prompt.expected(desc, t))] for t in range(2)})


def test_e205_e235_paged_caches_are_allowed(scene: Scene) -> None:
    """E-205, E-235, S-39: in this mode a block is a slot, on both sides."""
    paged = scene.decoder.allocate(bytes_desc(4, 4, 32), blocks=True)
    source = scene.prompt.allocate_blocks(bytes_desc(4, 8, 32), BlocksCacheKey(1), salt=1)
    scene.pull(kv_cache=paged, batch_index=2)
    by_id = CacheKeyByIdAndIndex(1, source.get("cache_id"), 5)
    scene.pull(cache_key=by_id, kv_cache=paged, batch_index=3)
    blocks = [scene.prompt.expected(bytes_desc(4, 8, 32), t, salt=1)[160:192] for t in range(4)]
    scene.decoder.check(paged, {t: [(64, scene.prompt.expected(SOURCE, t)[:32]), (96, blocks[t])] for t in range(4)})


def test_e228_local_cache_is_gone(scene: Scene) -> None:
    """E-228: a deallocated destination does not exist any more, and its memory is not written."""
    gone = scene.decoder.allocate(bytes_desc(4, 4, 32))
    scene.decoder.manager.deallocate_cache(gone)
    reuser = scene.decoder.allocate(bytes_desc(4, 4, 32))
    with refuses(NOT_EXIST, f"cache {gone.cache_id}"):
        scene.pull(kv_cache=gone)
    scene.decoder.untouched(reuser)
    scene.check_unharmed()


def test_e228_caches_of_a_finalized_engine_are_unknown(peer: Any, prompt: Prompt) -> None:
    """E-228, S-173: a cache object of an earlier engine never stands for a cache of this one with the same id."""
    former = Decoder()
    old = former.allocate(bytes_desc(4, 4, 32))
    former.dd.finalize()
    decoder = Decoder()
    try:
        decoder.link(prompt)
        prompt.allocate(SOURCE, [CacheKey(1, 10), CacheKey(1, 11)])
        new = decoder.allocate(bytes_desc(4, 4, 32))
        assert new.cache_id == old.cache_id
        with refuses(NOT_EXIST):
            decoder.manager.pull_cache(CacheKey(1, 10), old)
        with refuses(NOT_EXIST):
            decoder.manager.get_cache_tensors(old)
        decoder.manager.deallocate_cache(old)
        decoder.untouched(new)
        decoder.manager.pull_cache(CacheKey(1, 10), new)
    finally:
        decoder.dd.finalize()


def test_e232_released_and_removed_keys_are_gone(scene: Scene) -> None:
    """E-232, S-63: after its pull, or its removal, a key is unknown, and the destination stays as it was."""
    scene.pull()
    scene.prompt.manager.remove_cache_key(CacheKey(1, 11))
    scene.decoder.prefill(scene.cache)
    for request in (10, 11):
        with refuses(NOT_EXIST, f"req_id={request}"):
            scene.pull(cache_key=CacheKey(1, request))
    scene.decoder.untouched(scene.cache)


def test_e233_cache_by_id_after_its_end(scene: Scene) -> None:
    """E-233: an id is never used again, and stands for nothing once handle and keys are gone."""
    number = scene.source.get("cache_id")
    scene.prompt.manager.deallocate_cache(scene.source)
    for slot, request in enumerate((10, 11)):
        scene.pull(cache_key=CacheKey(1, request), batch_index=slot)
    scene.prompt.allocate(SOURCE, [CacheKey(1, 12)])
    scene.decoder.prefill(scene.cache)
    with refuses(NOT_EXIST, f"cache {number}"):
        scene.pull(cache_key=CacheKeyByIdAndIndex(1, number, 0))
    scene.decoder.untouched(scene.cache)


def test_e234_slot_of_a_prefix_key_by_id(scene: Scene) -> None:
    """E-234, S-38: pulling by id the slot of a prefix key works and releases nothing."""
    source = scene.prompt.allocate(SOURCE, [CacheKey(1, NONE, prefix_id=5)], salt=1)
    for _ in range(2):
        scene.pull(cache_key=CacheKeyByIdAndIndex(1, source.get("cache_id"), 0))
        scene.pull(cache_key=CacheKey(1, NONE, prefix_id=5), batch_index=1)
    expected = [scene.prompt.expected(SOURCE, t, salt=1)[:32] for t in range(4)]
    scene.decoder.check(scene.cache, {t: [(0, expected[t] * 2)] for t in range(4)})


def test_e241_unknown_arguments_are_ignored_with_one_warning(scene: Scene) -> None:
    """E-241, S-203: an unknown keyword argument changes nothing, and is told of once."""
    with pytest.warns(RuntimeWarning, match="pull_cache.*'layers'") as caught:
        scene.pull(layers=7)
    assert [warning.filename for warning in caught] == [__file__], "the warning must point to the caller"
    scene.pull(cache_key=CacheKey(1, 11), batch_index=1, layers=8)
    expected = [scene.prompt.expected(SOURCE, t) for t in range(4)]
    scene.decoder.check(scene.cache, {t: [(0, expected[t])] for t in range(4)})


def test_numpy_scalars_are_no_integers_of_python(scene: Scene) -> None:
    """E-206, E-208: what has no integer type of Python is a wrong type, before anything is written."""
    with refuses(TypeError, "size"):
        scene.pull(size=np.float64(1))
    with refuses(TypeError, "batch_index"):
        scene.pull(batch_index=np.array([1]))
    scene.check_unharmed()
