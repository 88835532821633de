"""pull_blocks refuses what it must, with the right words, in the right order, and writes nothing then."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pairs import Decoder, Prompt, bytes_desc
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

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
SOURCE = bytes_desc(4, 8, 64)
DESTINATION = bytes_desc(4, 6, 64)


def host_cache() -> KvCache:
    desc = CacheDesc(4, [6, 64], DataType.DT_UINT8, placement=Placement.HOST)
    return KvCache.create_cpu_cache(desc, [4096] * 4)


class Index:
    """An integer by its ``__index__``."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


@dataclass
class Scene:
    """A linked pair with a paged cache on each side, and a pull between them that works."""

    prompt: Prompt
    decoder: Decoder
    cache: KvCache

    def pull(self, **changes: Any) -> None:
        """Pull blocks 7, 0, 3 into 0, 5, 2, but for the changes."""
        arguments: dict[str, Any] = {
            "prompt_cache_key": BlocksCacheKey(1),
            "decoder_kv_cache": self.cache,
            "prompt_blocks": [7, 0, 3],
            "decoder_blocks": [0, 5, 2],
            **changes,
        }
        self.decoder.manager.pull_blocks(**arguments)

    def check_pulled(self) -> None:
        """Check every byte after the pull that works."""
        pieces = {}
        for t in range(4):
            source = self.prompt.expected(SOURCE, t)
            pieces[t] = [(d * 64, source[s * 64 : s * 64 + 64]) for s, d in ((7, 0), (0, 5), (3, 2))]
        self.decoder.check(self.cache, pieces)

    def check_unharmed(self) -> None:
        """Check that nothing was written, and that a retry works (S-212)."""
        self.decoder.untouched(self.cache)
        self.pull()
        self.check_pulled()


@pytest.fixture
def scene(linked: tuple[Prompt, Decoder]) -> Scene:
    prompt, decoder = linked
    prompt.allocate_blocks(SOURCE, BlocksCacheKey(1))
    return Scene(prompt, decoder, decoder.allocate(DESTINATION, blocks=True))


def row(rule: str, expected: Expected, *words: object, **changes: Any) -> Any:
    return pytest.param(expected, words, changes, id=name_of(rule, changes))


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        row("E-250", TypeError, "prompt_cache_key", "BlocksCacheKey", prompt_cache_key=CacheKey(1, 10)),
        row("E-250", TypeError, "prompt_cache_key", prompt_cache_key=CacheKeyByIdAndIndex(1, 1)),
        row("E-250", TypeError, "prompt_cache_key", prompt_cache_key=None),
        row("E-203", TypeError, "decoder_kv_cache", decoder_kv_cache=None),
        row("E-204", PARAM_INVALID, "decoder_kv_cache", "HOST", "DEVICE", decoder_kv_cache=host_cache()),
        row("E-251", TypeError, "prompt_blocks", prompt_blocks=None),
        row("E-251", TypeError, "prompt_blocks", prompt_blocks=7),
        row("E-251", TypeError, "prompt_blocks", prompt_blocks="703"),
        row("E-251", TypeError, "prompt_blocks", prompt_blocks={7, 0, 3}),
        row("E-251", TypeError, "decoder_blocks", decoder_blocks={0: 1, 5: 2, 2: 3}),
        row("E-251", TypeError, "decoder_blocks", decoder_blocks=iter([0, 5, 2])),
        row("E-251", TypeError, "prompt_blocks", prompt_blocks=(i for i in (7, 0, 3))),
        row("E-251", TypeError, "prompt_blocks", "1", "bool", prompt_blocks=[7, False, 3]),
        row("E-251", TypeError, "prompt_blocks", "float", prompt_blocks=[7.0, 0, 3]),
        row("E-251", TypeError, "decoder_blocks", "str", decoder_blocks=[0, 5, "2"]),
        row("E-251", TypeError, "decoder_blocks", "None", decoder_blocks=[0, 5, None]),
        row("E-251", TypeError, "decoder_blocks", decoder_blocks=[0, 5, np.float32(2)]),
        row("E-251", TypeError, "decoder_blocks", "bool", decoder_blocks=[0, 5, np.bool_(True)]),
        row("E-251", TypeError, "prompt_blocks", prompt_blocks=np.array([7.0, 0.0, 3.0])),
        row("E-251", TypeError, "prompt_blocks", prompt_blocks=np.array([True, False, True])),
        row("E-251", TypeError, "prompt_blocks", prompt_blocks=np.array([[7, 0, 3]])),
        row("E-252", PARAM_INVALID, "decoder_blocks", "3", "0", decoder_blocks=[]),
        row("E-253", PARAM_INVALID, "prompt_blocks", "0", "3", prompt_blocks=()),
        row("E-253", PARAM_INVALID, "prompt_blocks", "0", prompt_blocks=range(0), decoder_blocks=[]),
        row("E-255", PARAM_INVALID, "prompt_blocks has 2", "decoder_blocks 3", prompt_blocks=[7, 0]),
        row("E-255", PARAM_INVALID, "prompt_blocks has 3", "decoder_blocks 4", decoder_blocks=[0, 5, 2, 1]),
        row("E-256", ValueError, "prompt_blocks", "-1", prompt_blocks=[7, -1, 3]),
        row("E-256", ValueError, "decoder_blocks", "-1", decoder_blocks=np.array([0, -1, 2])),
        row("E-256", ValueError, "decoder_blocks", "-1", decoder_blocks=range(1, -2, -1)),
        row("E-256", ValueError, "prompt_blocks", 2**64, prompt_blocks=[7, 0, 2**64]),
        row("E-256", ValueError, "prompt_blocks", prompt_blocks=[7, 0, 2**200]),
        row("E-257", PARAM_INVALID, "source block 8", "8", prompt_blocks=[7, 8, 3]),
        row("E-257", PARAM_INVALID, "destination block 6", "6", decoder_blocks=[0, 6, 2]),
        row("E-257", PARAM_INVALID, "source block", prompt_blocks=[7, 0, 2**64 - 1]),
        row("E-257", PARAM_INVALID, "destination block", decoder_blocks=[0, 5, 2**63]),
        row("E-215", TypeError, "tensor_num_per_layer", "int", tensor_num_per_layer=2.0),
        row("E-217", ValueError, "tensor_num_per_layer", "-1", tensor_num_per_layer=-1),
        row("E-218", PARAM_INVALID, "tensor_num_per_layer is 0", tensor_num_per_layer=0),
        row("E-219", PARAM_INVALID, "tensor_num_per_layer is 5", "1 to 4", tensor_num_per_layer=5),
        row("E-220", PARAM_INVALID, "tensor_num_per_layer is 3", "4", tensor_num_per_layer=3, dst_layer_range=range(1)),
        row("E-222", TypeError, "src_layer_range", "range", src_layer_range=(0, 1)),
        row("E-223", PARAM_INVALID, "dst_layer_range", "step 1", dst_layer_range=range(0, 2, 2)),
        row("E-224", PARAM_INVALID, "dst_layer_range", dst_layer_range=range(1, 1)),
        row("E-225", PARAM_INVALID, "2 source", "4 destination", src_layer_range=range(1)),
        row("E-226", PARAM_INVALID, "src_layer_range", "6", "4", src_layer_range=range(1, 3)),
        row("E-226", PARAM_INVALID, "dst_layer_range", "6", "4", dst_layer_range=range(1, 3)),
        row("E-229", NOT_YET_LINK, "cluster 9", prompt_cache_key=BlocksCacheKey(9)),
        row("E-230", NOT_YET_LINK, "cluster 2", prompt_cache_key=BlocksCacheKey(2)),
        row("E-260", NOT_EXIST, "model_id=3", prompt_cache_key=BlocksCacheKey(1, 3)),
    ],
)
def test_refused(scene: Scene, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-212: the call is refused with the right words, nothing is written, and a retry works."""
    with refuses(expected, *words):
        scene.pull(**changes)
    scene.check_unharmed()


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        np.array,
        lambda v: np.array(v, dtype=np.uint8),
        lambda v: np.array(v, dtype=np.int32),
        lambda v: np.array([x for i in v for x in (i, 99)])[::2],
        lambda v: np.array(v[::-1])[::-1],
        lambda v: array("q", v),
        lambda v: [np.int64(i) for i in v],
        lambda v: [Index(i) for i in v],
    ],
    ids=["list", "tuple", "array", "uint8", "int32", "strided", "reversed", "array.array", "numpy-ints", "__index__"],
)
def test_e251_what_counts_as_a_list_of_indices(scene: Scene, kind: Any) -> None:
    """E-251, S-50: sequences and one-dimensional integer buffers of any stride and width mean the same."""
    scene.pull(prompt_blocks=kind([7, 0, 3]), decoder_blocks=kind([0, 5, 2]))
    scene.check_pulled()


def test_e251_ranges_are_lists_of_indices(scene: Scene) -> None:
    """E-251: a range works on both sides, also one that goes down."""
    scene.pull(prompt_blocks=range(2, 5), decoder_blocks=range(4, -1, -2))
    pieces = {}
    for t in range(4):
        source = scene.prompt.expected(SOURCE, t)
        pieces[t] = [(d * 64, source[s * 64 : s * 64 + 64]) for s, d in ((2, 4), (3, 2), (4, 0))]
    scene.decoder.check(scene.cache, pieces)


@pytest.mark.parametrize("role", [LLMRole.PROMPT, LLMRole.MIX])
def test_e200_only_a_decoder_pulls(scene: Scene, role: LLMRole) -> None:
    """E-200: the role is looked at before anything else."""
    scene.decoder.manager._role = role
    with refuses(PARAM_INVALID, "pull_blocks", "DECODER", role):
        scene.pull(prompt_cache_key=None)
    scene.decoder.manager._role = LLMRole.DECODER
    scene.check_unharmed()


def test_s40_earlier_checks_win(scene: Scene) -> None:
    """S-40: of two mistakes the one that stands first in the order of checks is reported."""
    gone = scene.decoder.allocate(DESTINATION, blocks=True)
    scene.decoder.manager.deallocate_cache(gone)
    order: list[tuple[dict[str, Any], Expected, str]] = [
        ({"prompt_cache_key": None}, TypeError, "prompt_cache_key"),
        ({"decoder_kv_cache": None}, TypeError, "decoder_kv_cache"),
        ({"decoder_kv_cache": host_cache()}, PARAM_INVALID, "decoder_kv_cache"),
        ({"prompt_blocks": ["7", 0, 3]}, TypeError, "prompt_blocks"),
        ({"decoder_blocks": [0, 5, -2]}, ValueError, "decoder_blocks"),
        ({"prompt_blocks": [7]}, PARAM_INVALID, "prompt_blocks"),
        ({"tensor_num_per_layer": 0}, PARAM_INVALID, "tensor_num_per_layer"),
        ({"src_layer_range": 1}, TypeError, "src_layer_range"),
        ({"decoder_kv_cache": gone}, NOT_EXIST, str(gone.cache_id)),
        ({"decoder_blocks": [0, 5, 6]}, PARAM_INVALID, "destination block 6"),
        ({"prompt_cache_key": BlocksCacheKey(9)}, NOT_YET_LINK, "cluster 9"),
        ({"prompt_cache_key": BlocksCacheKey(1, 3)}, NOT_EXIST, "model_id=3"),
        ({"prompt_blocks": [7, 0, 8]}, PARAM_INVALID, "source block 8"),
    ]
    for (first, expected, word), (second, *_) in itertools.combinations(order, 2):
        with refuses(expected, word):
            scene.pull(**{**second, **first})
    scene.check_unharmed()


def test_e258_destination_may_be_a_plain_cache(scene: Scene) -> None:
    """E-258, S-55: in this mode the slots of a contiguous cache are blocks."""
    plain = scene.decoder.allocate(DESTINATION)
    scene.pull(decoder_kv_cache=plain)
    scene.cache = plain
    scene.check_pulled()


@pytest.mark.parametrize("stride", [32, 63, 128])
def test_e259_block_sizes_differ(scene: Scene, stride: int) -> None:
    """E-259, S-51: blocks of unequal size are refused, both sizes named, whatever their ratio."""
    other = scene.decoder.allocate(bytes_desc(4, 6, stride), blocks=True)
    with refuses(PARAM_INVALID, "64 bytes", str(stride), "equal"):
        scene.pull(decoder_kv_cache=other)
    scene.decoder.untouched(other)
    scene.check_unharmed()


def test_e259_equal_bytes_in_another_shape_fit(scene: Scene) -> None:
    """E-259, S-36: only bytes count, not shape, data type or number of blocks."""
    other = scene.decoder.allocate(CacheDesc(4, [9, 2, 8], DataType.DT_FLOAT), blocks=True)
    scene.pull(decoder_kv_cache=other, decoder_blocks=[8, 0, 1])
    pieces = {}
    for t in range(4):
        source = scene.prompt.expected(SOURCE, t)
        pieces[t] = [(d * 64, source[s * 64 : s * 64 + 64]) for s, d in ((7, 8), (0, 0), (3, 1))]
    scene.decoder.check(other, pieces)


def test_e260_key_ends_with_its_cache(scene: Scene) -> None:
    """E-260, S-23: deallocation releases a blocks key at once, also for a decoder that has pulled by it before."""
    scene.pull()
    scene.decoder.prefill(scene.cache)
    source = scene.prompt.allocate_blocks(SOURCE, BlocksCacheKey(1, 4))
    scene.pull(prompt_cache_key=BlocksCacheKey(1, 4))
    scene.decoder.prefill(scene.cache)
    scene.prompt.manager.deallocate_cache(source)
    with refuses(NOT_EXIST, "model_id=4"):
        scene.pull(prompt_cache_key=BlocksCacheKey(1, 4))
    scene.check_unharmed()


def test_e228_local_cache_is_gone(scene: Scene) -> None:
    """E-228, S-21: a deallocated destination does not exist any more, and its memory is not written."""
    gone = scene.decoder.allocate(DESTINATION, blocks=True)
    scene.decoder.manager.deallocate_cache(gone)
    reuser = scene.decoder.allocate(DESTINATION, blocks=True)
    with refuses(NOT_EXIST, f"cache {gone.cache_id}"):
        scene.pull(decoder_kv_cache=gone)
    scene.decoder.untouched(reuser)
    scene.check_unharmed()


def test_e241_offsets_do_not_exist_here(scene: Scene) -> None:
    """E-241, S-53, S-203: offsets are unknown to pull_blocks: ignored, and told of once each."""
    with pytest.warns(RuntimeWarning, match="pull_blocks.*'src_cache_offset'"):
        scene.pull(src_cache_offset=64)
    scene.pull(src_cache_offset=128)
    scene.check_pulled()
