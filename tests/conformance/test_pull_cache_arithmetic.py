"""Which bytes of a batch slot go where."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from bindings import is_bound
from pairs import Decoder, Prompt, bytes_desc
from refusals import refuses

from llm_datadist import CacheDesc, CacheKey, DataType, LLMStatusCode

INVALID = LLMStatusCode.LLM_PARAM_INVALID
FLOAT16 = DataType.DT_FLOAT16
SOURCE = CacheDesc(4, [2, 16], FLOAT16)
KEY_10, KEY_11 = CacheKey(1, 10), CacheKey(1, 11)


class Moved(NamedTuple):
    """Source bytes [first, last] of each tensor are found from `at` on."""

    first: int
    last: int
    at: int


@pytest.mark.parametrize(
    ("shape", "args", "kwargs", "moved"),
    [
        pytest.param([4, 16], (3,), {}, Moved(32, 63, 96), id="whole slot"),
        pytest.param([4, 16], (3, 8), {}, Moved(32, 39, 96), id="size"),
        pytest.param([4, 16], (3,), {"dst_cache_offset": 24}, Moved(32, 39, 120), id="size -1 ends with the slot"),
        pytest.param([4, 16], (3,), {"src_cache_offset": 24}, None, id="source too short"),
        pytest.param(
            [4, 16], (3, 8), {"src_cache_offset": 24, "dst_cache_offset": 16}, Moved(56, 63, 112), id="both offsets"
        ),
        pytest.param([4, 16], (4,), {}, None, id="slot 4 of 4"),
        pytest.param([4, 16], (0, 33), {}, None, id="size above the slot"),
        pytest.param([4, 32], (0,), {}, None, id="destination slot longer"),
        pytest.param([4, 32], (1, 32), {}, Moved(32, 63, 64), id="destination slot longer, with size"),
        pytest.param([4, 8], (1,), {}, Moved(32, 47, 16), id="destination slot shorter"),
    ],
)
def test_worked_examples(
    linked: tuple[Prompt, Decoder], shape: list[int], args: Any, kwargs: Any, moved: Moved | None
) -> None:
    """S-30, S-31, S-32, S-34, section 3.3 line by line: every byte compared; a refusal writes and releases nothing."""
    prompt, decoder = linked
    prompt.allocate(SOURCE, [KEY_10, KEY_11])
    cache = decoder.allocate(CacheDesc(4, shape, FLOAT16))
    if moved is None:
        with refuses(INVALID):
            decoder.manager.pull_cache(KEY_11, cache, *args, **kwargs)
        decoder.untouched(cache)
        assert is_bound(prompt, KEY_11)
    else:
        decoder.manager.pull_cache(KEY_11, cache, *args, **kwargs)
        decoder.check(
            cache, {t: [(moved.at, prompt.expected(SOURCE, t)[moved.first : moved.last + 1])] for t in range(4)}
        )
        assert is_bound(prompt, KEY_10)


@pytest.mark.parametrize(("size", "fits"), [(513, False), (-1, False), (257, False), (256, True), (1, True)])
def test_source_256_destination_512(linked: tuple[Prompt, Decoder], size: int, fits: bool) -> None:
    """S-32, E-212, E-213: a source slot that is too short is an error, not a shorter pull, which can be tried again."""
    prompt, decoder = linked
    source = bytes_desc(2, 1, 256)
    prompt.allocate(source, [KEY_10])
    cache = decoder.allocate(bytes_desc(2, 1, 512))
    if not fits:
        with refuses(INVALID):
            decoder.manager.pull_cache(KEY_10, cache, size=size)
        decoder.untouched(cache)
        size = 256
    decoder.manager.pull_cache(KEY_10, cache, size=size)
    decoder.check(cache, {t: [(0, prompt.expected(source, t)[:size])] for t in range(2)})


@pytest.mark.parametrize(
    ("offset", "size", "fits"),
    [
        (31, -1, True),
        (32, -1, False),
        (33, -1, False),
        (2**63, -1, False),
        (2**64 - 1, -1, False),
        (31, 1, True),
        (31, 2, False),
        (32, 1, False),
        (0, 32, True),
        (0, 2**63 - 1, False),
        (2**64 - 1, 2**63 - 1, False),
    ],
)
@pytest.mark.parametrize("side", ["src_cache_offset", "dst_cache_offset"])
def test_offsets_at_the_end_of_the_slot(
    linked: tuple[Prompt, Decoder], side: str, offset: int, size: int, fits: bool
) -> None:
    """S-32, S-33, S-34, E-214: nothing reaches into the next slot, and no sum wraps round."""
    prompt, decoder = linked
    desc = bytes_desc(2, 3, 32)
    prompt.allocate(desc, [KEY_10, KEY_11])
    cache = decoder.allocate(desc)
    if size == -1 and side == "src_cache_offset":
        fits = False  # the length comes from the destination
    if not fits:
        with refuses(INVALID):
            decoder.manager.pull_cache(KEY_11, cache, 1, size, **{side: offset})
        decoder.untouched(cache)
        return
    decoder.manager.pull_cache(KEY_11, cache, 1, size, **{side: offset})
    nbytes = 32 - offset if size == -1 else size
    so, do = (offset, 0) if side == "src_cache_offset" else (0, offset)
    decoder.check(cache, {t: [(32 + do, prompt.expected(desc, t)[32 + so :][:nbytes])] for t in range(2)})


def test_caches_need_not_look_alike(linked: tuple[Prompt, Decoder]) -> None:
    """S-36: shape, data type, slots and stride may all differ."""
    prompt, decoder = linked
    source = CacheDesc(2, [3, 2, 5], DataType.DT_DOUBLE)
    prompt.allocate(source, [KEY_10, KEY_11])
    cache = decoder.allocate(CacheDesc(2, [7, 11], DataType.DT_INT8))
    decoder.manager.pull_cache(KEY_11, cache, 6)
    decoder.check(cache, {t: [(66, prompt.expected(source, t)[80:91])] for t in range(2)})


def test_a_large_slot(linked: tuple[Prompt, Decoder]) -> None:
    """S-31: sizes at which copies go by other ways than small ones, at odd places."""
    prompt, decoder = linked
    source = bytes_desc(2, 2, 3_000_001)
    prompt.allocate(source, [KEY_10, KEY_11])
    cache = decoder.allocate(bytes_desc(2, 2, 2_500_003))
    decoder.manager.pull_cache(KEY_11, cache, 1, 2_400_007, src_cache_offset=13, dst_cache_offset=7)
    decoder.check(cache, {t: [(2_500_010, prompt.expected(source, t)[3_000_014:][:2_400_007])] for t in range(2)})
