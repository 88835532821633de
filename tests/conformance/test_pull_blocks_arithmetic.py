"""Which bytes of which blocks go where."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pairs import Decoder, Prompt, bytes_desc
from refusals import refuses

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMStatusCode

INVALID = LLMStatusCode.LLM_PARAM_INVALID
KEY = BlocksCacheKey(1, 0)


def pieces(prompt: Prompt, source: CacheDesc, block_of: dict[int, int]) -> dict[int, list[tuple[int, bytes]]]:
    """Say what a destination holds of which source blocks, by destination block."""
    nbytes = source.size // source.shape[0]
    return {
        t: [(to * nbytes, prompt.expected(source, t)[of * nbytes :][:nbytes]) for to, of in block_of.items()]
        for t in range(source.num_tensors)
    }


def test_s54_blocks_land_one_by_one(linked: tuple[Prompt, Decoder]) -> None:
    """S-50, S-54: the worked example, every byte compared."""
    prompt, decoder = linked
    source = CacheDesc(2, [10, 32], DataType.DT_FLOAT16)
    prompt.allocate_blocks(source, BlocksCacheKey(1, 0))
    cache = decoder.allocate(CacheDesc(2, [6, 32], DataType.DT_FLOAT16), blocks=True)
    decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0, 5], [2, 3])
    decoder.check(
        cache,
        {t: [(128, prompt.expected(source, t)[0:64]), (192, prompt.expected(source, t)[320:384])] for t in range(2)},
    )


def test_s50_last_of_a_repeated_destination_wins(linked: tuple[Prompt, Decoder]) -> None:
    """S-50: of a repeated destination the last pair counts, and a repeated source is fine."""
    prompt, decoder = linked
    desc = bytes_desc(2, 8, 512)
    prompt.allocate_blocks(desc, BlocksCacheKey(1, 0))
    cache = decoder.allocate(desc, blocks=True)
    decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1, 1, 2, 3], [0, 5, 0, 0])
    decoder.check(
        cache,
        {
            t: [(0, prompt.expected(desc, t)[1536:2048]), (5 * 512, prompt.expected(desc, t)[512:1024])]
            for t in range(2)
        },
    )


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        np.array,
        lambda x: array("q", x),
        lambda x: np.array(x, np.uint8),
        lambda x: [np.int64(i) for i in x],
    ],
    ids=["list", "tuple", "numpy", "array", "uint8", "numpy integers"],
)
def test_s50_any_sequence_of_indices(linked: tuple[Prompt, Decoder], make: Callable[[list[int]], Any]) -> None:
    """S-50: what api 9.3 allows as a list of indices."""
    prompt, decoder = linked
    desc = bytes_desc(2, 8, 24)
    prompt.allocate_blocks(desc, KEY)
    cache = decoder.allocate(desc, blocks=True)
    decoder.manager.pull_blocks(KEY, cache, make([7, 0, 3]), make([1, 2, 7]))
    decoder.check(cache, pieces(prompt, desc, {1: 7, 2: 0, 7: 3}))


def test_s50_ranges_and_many_runs(linked: tuple[Prompt, Decoder]) -> None:
    """S-50: consecutive blocks, strided ones and shuffled ones come out the same way."""
    prompt, decoder = linked
    desc = bytes_desc(2, 64, 40)
    prompt.allocate_blocks(desc, KEY)
    for source, destination in (
        (range(64), range(64)),
        (range(0, 64, 2), range(32)),
        (range(63, -1, -1), range(64)),
        ([(i * 37) % 64 for i in range(64)], [(i * 11 + 5) % 64 for i in range(64)]),
        ([5] * 20, range(20, 40)),
    ):
        cache = decoder.allocate(desc, blocks=True)
        decoder.manager.pull_blocks(KEY, cache, source, destination)
        decoder.check(cache, pieces(prompt, desc, dict(zip(destination, source, strict=True))))


@pytest.mark.parametrize("source_bytes", [4, 8, 32, 64, 48])
@pytest.mark.parametrize("destination_bytes", [16])
def test_s51_block_sizes_must_be_equal(
    linked: tuple[Prompt, Decoder], source_bytes: int, destination_bytes: int
) -> None:
    """S-51, E-259: no multiple will do."""
    prompt, decoder = linked
    prompt.allocate_blocks(bytes_desc(2, 8, source_bytes), KEY)
    cache = decoder.allocate(bytes_desc(2, 8, destination_bytes), blocks=True)
    with refuses(INVALID):
        decoder.manager.pull_blocks(KEY, cache, [0, 1], [0, 1])
    decoder.untouched(cache)


def test_s51_only_the_bytes_of_a_block_count(linked: tuple[Prompt, Decoder]) -> None:
    """S-51: shapes and data types of one block may differ."""
    prompt, decoder = linked
    source = CacheDesc(2, [5, 2, 8], DataType.DT_FLOAT)
    prompt.allocate_blocks(source, KEY)
    cache = decoder.allocate(CacheDesc(2, [9, 64], DataType.DT_INT8), blocks=True)
    decoder.manager.pull_blocks(KEY, cache, [4], [8])
    decoder.check(cache, pieces(prompt, source, {8: 4}))


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        pytest.param([8], [0], id="E-257 source"),
        pytest.param([0], [6], id="E-257 destination"),
        pytest.param([0, 7, 8], [0, 1, 2], id="E-257 last of several"),
        pytest.param([2**64 - 1], [0], id="E-257 largest source"),
        pytest.param([0], [2**64 - 1], id="E-257 largest destination"),
        pytest.param([2**63], [2**63], id="E-257 top bit"),
        pytest.param([], [], id="E-252 E-253 both empty"),
        pytest.param([0], [], id="E-252 empty destination"),
        pytest.param([], [0], id="E-253 empty source"),
        pytest.param([0, 1], [0], id="E-255 more sources"),
        pytest.param([0], [0, 1], id="E-255 more destinations"),
    ],
)
def test_s52_lists_that_are_refused(linked: tuple[Prompt, Decoder], source: list[int], destination: list[int]) -> None:
    """S-52: PARAM_INVALID, and not even the good pairs are written."""
    prompt, decoder = linked
    prompt.allocate_blocks(bytes_desc(2, 8, 16), KEY)
    cache = decoder.allocate(bytes_desc(2, 6, 16), blocks=True)
    with refuses(INVALID):
        decoder.manager.pull_blocks(KEY, cache, source, destination)
    decoder.untouched(cache)


@pytest.mark.parametrize("wrong", [-1, -(2**63), 2**64, 2**70])
def test_s52_indices_out_of_width(linked: tuple[Prompt, Decoder], wrong: int) -> None:
    """S-52, E-256: ValueError on either side."""
    prompt, decoder = linked
    prompt.allocate_blocks(bytes_desc(2, 8, 16), KEY)
    cache = decoder.allocate(bytes_desc(2, 8, 16), blocks=True)
    for lists in (([0, wrong], [0, 1]), ([0, 1], [0, wrong])):
        with pytest.raises(ValueError, match="blocks"):
            decoder.manager.pull_blocks(KEY, cache, *lists)
    decoder.untouched(cache)


def test_s53_other_arguments_do_not_exist(linked: tuple[Prompt, Decoder]) -> None:
    """S-53, E-241: offsets and the like are unknown to pull_blocks, which says so and goes on."""
    prompt, decoder = linked
    desc = bytes_desc(2, 4, 16)
    prompt.allocate_blocks(desc, KEY)
    cache = decoder.allocate(desc, blocks=True)
    with pytest.warns(RuntimeWarning, match="src_cache_offset"):
        decoder.manager.pull_blocks(KEY, cache, [3], [1], src_cache_offset=8)
    decoder.check(cache, pieces(prompt, desc, {1: 3}))


def test_s55_any_device_cache_is_a_destination(linked: tuple[Prompt, Decoder]) -> None:
    """S-55, E-258: slots of a contiguous cache take blocks."""
    prompt, decoder = linked
    desc = bytes_desc(2, 4, 16)
    prompt.allocate_blocks(desc, KEY)
    cache = decoder.allocate(desc)
    decoder.manager.pull_blocks(KEY, cache, [0, 1], [3, 2])
    decoder.check(cache, pieces(prompt, desc, {3: 0, 2: 1}))


def test_s55_unknown_key(linked: tuple[Prompt, Decoder]) -> None:
    """S-55, E-260: another model, or a request key of the same numbers, is no blocks key."""
    prompt, decoder = linked
    desc = bytes_desc(2, 4, 16)
    prompt.allocate_blocks(desc, KEY)
    prompt.allocate(desc, [CacheKey(1, 0, 5)])
    cache = decoder.allocate(desc)
    for model in (1, 5, 2**64 - 1):
        with refuses(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            decoder.manager.pull_blocks(BlocksCacheKey(1, model), cache, [0], [0])
    decoder.untouched(cache)
