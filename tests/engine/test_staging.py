"""Cutting of plans into chunks that fit a staging area, against the plain meaning of a plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._engine import staging
from llm_datadist._kernels.runs import Bases, Plan, block_runs, chunk_runs, indices, span_runs

AREA = 16
PIECES = 3
LOCAL = 1 << 40


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Let areas be small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "AREA_BYTES", AREA)
        patch.setattr(staging, "PIECES", PIECES)
        yield


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, int, bool]:
    """Draw a plan, the bytes of a remote tensor, and the direction."""
    slots, stride = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    total = slots * stride
    write = draw(st.booleans())
    kind = draw(st.sampled_from(["blocks", "span", "chunks"]))
    if kind == "blocks":
        pairs = draw(st.lists(st.tuples(st.integers(0, slots - 1), st.integers(0, slots - 1)), min_size=1, max_size=9))
        runs = block_runs(
            indices([s for s, _ in pairs], "s"), indices([d for _, d in pairs], "d"), slots, slots, stride
        )
    elif kind == "span":
        begin = draw(st.integers(0, total - 1))
        runs = span_runs(begin, begin, draw(st.integers(1, total - begin)))
    else:
        count = draw(st.integers(1, slots))
        blocks = draw(st.permutations(range(slots)))[:count]
        size = draw(st.integers((count - 1) * stride + 1, count * stride))
        runs = chunk_runs(indices(blocks, "d"), slots, stride, 0, size)
    tensors = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    remote = [tensor * total for tensor in tensors]
    local = [LOCAL + 1000 * i for i in range(len(tensors))]
    return Plan(Bases(local, remote) if write else Bases(remote, local), runs), total, write


@given(cases())
def test_chunks_are_the_plan(case: tuple[Plan, int, bool]) -> None:
    """S-31, S-50: the same bytes come to the same places, in chunks within the limits."""
    plan, total, write = case
    wanted = {}
    for source, destination in plan.bases.tolist():
        for source_offset, destination_offset, nbytes in plan.runs.tolist():
            for i in range(nbytes):
                wanted[destination + destination_offset + i] = source + source_offset + i
    found = {}
    for chunk in staging.chunks(plan, total, write=write):
        assert 1 <= len(chunk.pieces) <= PIECES
        assert chunk.nbytes == sum(nbytes for _, _, nbytes in chunk.pieces) <= AREA
        area = {}
        at = 7
        for tensor, offset, nbytes in chunk.pieces:
            assert nbytes > 0
            assert offset + nbytes <= total
            for i in range(nbytes):
                area[at + i] = tensor * total + offset + i
            at += nbytes
        for part in chunk.plans(7, into_area=write):
            ((_, _, size),) = part.runs.tolist()
            for source, destination in part.bases.tolist():
                for i in range(size):
                    own, staged = (source + i, destination + i) if write else (destination + i, source + i)
                    remote = area.pop(staged)
                    to, from_ = (remote, own) if write else (own, remote)
                    assert to not in found
                    found[to] = from_
        assert not area
    assert found == wanted
