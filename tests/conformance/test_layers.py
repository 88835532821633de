"""Which tensors meet which."""

from __future__ import annotations

from typing import Any

import pytest
from bindings import is_bound
from pairs import Decoder, Prompt, bytes_desc
from refusals import refuses

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode

INVALID = LLMStatusCode.LLM_PARAM_INVALID
KEY, BLOCKS = CacheKey(1, 1), BlocksCacheKey(1, 0)


def layers(source: range | None = None, destination: range | None = None, count: Any = ...) -> dict[str, Any]:
    """Make the keyword arguments; what is not given is left out."""
    chosen = {"src_layer_range": source, "dst_layer_range": destination}
    kwargs: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if count is not ...:
        kwargs["tensor_num_per_layer"] = count
    return kwargs


#: totals of source and destination, arguments, and where which source tensor goes; None: PARAM_INVALID
CASES = [
    pytest.param(8, 8, layers(range(0, 2), range(2, 4)), {4: 0, 5: 1, 6: 2, 7: 3}, id="S-46 line 1"),
    pytest.param(8, 8, layers(range(0, 2), range(2, 4), 2), {4: 0, 5: 1, 6: 2, 7: 3}, id="S-46 line 1 with 2"),
    pytest.param(8, 8, layers(range(1, 2), range(0, 1), 4), {0: 4, 1: 5, 2: 6, 3: 7}, id="S-46 line 2"),
    pytest.param(8, 8, layers(range(0, 3), range(0, 3), 1), {0: 0, 1: 1, 2: 2}, id="S-46 line 3"),
    pytest.param(8, 8, layers(range(0, 1), range(0, 1), 3), None, id="S-46 line 4, E-220"),
    pytest.param(8, 8, layers(range(0, 2), range(0, 1)), None, id="S-46 line 5, E-225"),
    pytest.param(8, 8, layers(range(3, 5), range(0, 2)), None, id="S-46 line 6, E-226"),
    pytest.param(8, 4, layers(range(2, 4)), {0: 4, 1: 5, 2: 6, 3: 7}, id="S-46 source range only"),
    pytest.param(8, 4, layers(None, range(0, 2)), None, id="S-46 destination range only"),
    pytest.param(4, 8, layers(None, range(2, 4)), {4: 0, 5: 1, 6: 2, 7: 3}, id="S-42 destination range only"),
    pytest.param(4, 4, layers(), {i: i for i in range(4)}, id="S-41 all"),
    pytest.param(8, 4, layers(), None, id="S-42 totals differ, E-227"),
    pytest.param(4, 8, layers(), None, id="S-42 totals differ, E-227 other way"),
    pytest.param(8, 8, layers(range(0, 2)), None, id="S-42 part against all"),
    pytest.param(8, 8, layers(range(0, 4), range(0, 4)), {i: i for i in range(8)}, id="S-42 all by ranges"),
    pytest.param(8, 8, layers(range(0, 4)), {i: i for i in range(8)}, id="S-42 all by one range"),
    pytest.param(8, 8, layers(range(0, 2), range(3, 5)), None, id="S-43 destination beyond"),
    pytest.param(8, 8, layers(range(0, 2**32 - 1), range(0, 2**32 - 1)), None, id="S-43 far beyond"),
    pytest.param(4, 4, layers(count=None), {i: i for i in range(4)}, id="S-45.1 None is 2, E-216"),
    pytest.param(4, 4, layers(range(1, 2), range(0, 1), None), {0: 2, 1: 3}, id="S-45.1 None is 2 with ranges"),
    pytest.param(4, 4, layers(count=0), None, id="S-45.2 0, E-218"),
    pytest.param(4, 4, layers(count=5), None, id="S-45.3 above the total, E-219"),
    pytest.param(4, 4, layers(range(0, 1), range(0, 1), 5), None, id="S-45.3 above the total with ranges"),
    pytest.param(4, 4, layers(count=3), {i: i for i in range(4)}, id="S-45.4 not dividing is fine without ranges"),
    pytest.param(4, 4, layers(range(0, 1), None, 3), None, id="S-45.4 not dividing with a source range"),
    pytest.param(4, 4, layers(None, range(0, 1), 3), None, id="S-45.4 not dividing with a destination range"),
    pytest.param(9, 6, layers(range(2, 3), range(1, 2), 3), {3: 6, 4: 7, 5: 8}, id="S-45.4 dividing"),
    pytest.param(7, 6, layers(range(1, 2), range(1, 2), 3), {3: 3, 4: 4, 5: 5}, id="S-45.4 destination's total alone"),
    pytest.param(1, 1, layers(), {0: 0}, id="S-45.5 one tensor"),
    pytest.param(1, 1, layers(count=2), {0: 0}, id="S-45.5 one tensor with 2"),
    pytest.param(1, 1, layers(range(1), range(1)), None, id="S-45.5 one tensor with ranges"),
    pytest.param(1, 1, layers(range(1), range(1), 1), {0: 0}, id="S-45.4 one tensor a layer"),
    pytest.param(5, 5, layers(range(1, 2), range(0, 1)), {0: 2, 1: 3}, id="S-45.5 odd totals, E-221"),
    pytest.param(5, 5, layers(range(2, 3), range(0, 1)), None, id="S-45.5 odd source, half a layer"),
    pytest.param(4, 4, layers(range(0), range(0)), None, id="S-44 range(0), E-224"),
    pytest.param(4, 4, layers(range(3, 3)), None, id="S-44 empty"),
    pytest.param(4, 4, layers(None, range(2, 1)), None, id="S-44 reversed"),
    pytest.param(4, 4, layers(range(0, 2, 2), range(0, 1)), None, id="S-44 step 2, E-223"),
    pytest.param(4, 4, layers(range(1, -1, -1), range(0, 2)), None, id="S-44 step -1"),
    pytest.param(4, 4, layers(range(-1, 1), range(0, 2)), None, id="S-44 negative start"),
]


@pytest.mark.parametrize("blocks", [False, True], ids=["cache", "blocks"])
@pytest.mark.parametrize(("source", "destination", "kwargs", "expected"), CASES)
def test_selection(
    linked: tuple[Prompt, Decoder],
    source: int,
    destination: int,
    kwargs: dict[str, Any],
    expected: dict[int, int] | None,
    blocks: bool,
) -> None:
    """S-41 to S-46, S-53: for both kinds of pull, every byte compared; a refusal writes and releases nothing."""
    prompt, decoder = linked
    desc = bytes_desc(source, 2, 16)
    (prompt.allocate_blocks if blocks else prompt.allocate)(desc, BLOCKS if blocks else [CacheKey(1, 0), KEY])
    cache = decoder.allocate(bytes_desc(destination, 3, 16))

    def pull() -> None:
        if blocks:
            decoder.manager.pull_blocks(BLOCKS, cache, [1], [2], **kwargs)
        else:
            decoder.manager.pull_cache(KEY, cache, 2, **kwargs)

    if expected is None:
        with refuses(INVALID):
            pull()
        decoder.untouched(cache)
        assert is_bound(prompt, BLOCKS if blocks else KEY)
    else:
        pull()
        decoder.check(cache, {to: [(32, prompt.expected(desc, of)[16:])] for to, of in expected.items()})


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        pytest.param({"tensor_num_per_layer": 1.0}, TypeError, id="S-45.2 float, E-215"),
        pytest.param({"tensor_num_per_layer": "x"}, TypeError, id="S-45.2 str"),
        pytest.param({"tensor_num_per_layer": True}, TypeError, id="A-12 bool"),
        pytest.param({"tensor_num_per_layer": -1}, ValueError, id="S-45.2 negative, E-217"),
        pytest.param({"tensor_num_per_layer": 2**32}, ValueError, id="S-45.2 too wide"),
        pytest.param({"src_layer_range": [0, 1]}, TypeError, id="S-44 list, E-222"),
        pytest.param({"dst_layer_range": 1}, TypeError, id="S-44 int"),
        pytest.param({"src_layer_range": range(0, 2**32)}, ValueError, id="S-44 beyond uint32"),
        pytest.param({"dst_layer_range": range(2**64, 2**64 + 1)}, ValueError, id="S-44 beyond uint64"),
    ],
)
def test_wrong_types_and_widths(linked: tuple[Prompt, Decoder], kwargs: dict[str, Any], error: type[Exception]) -> None:
    """S-44, S-45: TypeError and plain ValueError, before anything is asked of the peer."""
    _, decoder = linked
    cache = decoder.allocate(bytes_desc(4, 2, 16))
    for pull in (
        lambda: decoder.manager.pull_cache(CacheKey(9, 1), cache, **kwargs),
        lambda: decoder.manager.pull_blocks(BlocksCacheKey(9, 0), cache, [0], [0], **kwargs),
    ):
        with pytest.raises(error) as caught:
            pull()
        assert type(caught.value) is error


def test_layers_with_size_slot_and_offsets(linked: tuple[Prompt, Decoder]) -> None:
    """S-47: they apply to each selected tensor."""
    prompt, decoder = linked
    desc = bytes_desc(6, 2, 32)
    prompt.allocate(desc, [CacheKey(1, 0), KEY])
    cache = decoder.allocate(bytes_desc(6, 3, 24))
    decoder.manager.pull_cache(
        KEY,
        cache,
        2,
        5,
        src_layer_range=range(1, 2),
        dst_layer_range=range(0, 1),
        tensor_num_per_layer=3,
        src_cache_offset=27,
        dst_cache_offset=19,
    )
    decoder.check(cache, {t: [(48 + 19, prompt.expected(desc, t + 3)[59:64])] for t in range(3)})


def test_explicit_none_is_not_given(linked: tuple[Prompt, Decoder]) -> None:
    """S-41, S-42: None for a range is as if left out."""
    prompt, decoder = linked
    desc = bytes_desc(3, 1, 8)
    prompt.allocate(desc, [KEY])
    cache = decoder.allocate(desc)
    decoder.manager.pull_cache(KEY, cache, src_layer_range=None, dst_layer_range=None, tensor_num_per_layer=None)
    decoder.check(cache, {t: [(0, prompt.expected(desc, t))] for t in range(3)})
