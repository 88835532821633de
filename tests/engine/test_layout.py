"""Which tensors meet which, against the definition of a layer (S-41, S-42, S-43)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._engine.layout import check_span, pair_tensors, select
from llm_datadist.status import ParamInvalid


@given(st.integers(0, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 40))
def test_select(start: int, count: int, per_layer: int, total: int) -> None:
    """S-41, S-43: layer i is tensors i*k up to i*k+k-1; one beyond the cache is refused, with the numbers."""
    layers = range(start, start + count)
    wanted = [layer * per_layer + i for layer in layers for i in range(per_layer)]
    if wanted[-1] < total:
        assert list(select("src_layer_range", layers, per_layer, total)) == wanted
    else:
        with pytest.raises(ParamInvalid, match=rf"src_layer_range.*needs {wanted[-1] + 1} tensors.* has {total}"):
            select("src_layer_range", layers, per_layer, total)


@given(st.integers(1, 40), st.integers(1, 5))
def test_none_selects_all(total: int, per_layer: int) -> None:
    """S-41: whatever the number of tensors a layer."""
    assert list(select("dst_layer_range", None, per_layer, total)) == list(range(total))


@given(st.integers(0, 20), st.integers(0, 20))
def test_pairs(source: int, destination: int) -> None:
    """S-42: selections pair up one to one, wherever they start."""
    if source == destination:
        pair_tensors(range(3, 3 + source), range(destination))
    else:
        with pytest.raises(ParamInvalid, match=f"{source} source .*{destination} destination"):
            pair_tensors(range(3, 3 + source), range(destination))


@given(st.integers(0, 2**64), st.integers(1, 2**64), st.integers(1, 2**64))
def test_span(offset: int, nbytes: int, stride: int) -> None:
    """S-32: a span ends inside its slot, also where sums are above 64 bits."""
    if offset + nbytes <= stride:
        check_span("source", "src_cache_offset", offset, nbytes, stride)
    else:
        with pytest.raises(ParamInvalid, match=f"{nbytes} bytes.*src_cache_offset {offset}.*source.*{stride}"):
            check_span("source", "src_cache_offset", offset, nbytes, stride)
