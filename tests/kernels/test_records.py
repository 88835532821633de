"""Records of caches: what readers make of words that a peer wrote."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._engine.directory import record_of
from llm_datadist._kernels.records import Record

TOP = 2**64 - 1
small = st.integers(0, 5)
words = st.integers(0, TOP)


def body(*numbers: int) -> bytes:
    return array("Q", numbers).tobytes()


@st.composite
def records(draw: st.DrawFn) -> tuple[Record, list[tuple[int, int]], list[tuple[int, int]]]:
    devices, tensors, slots = draw(small), draw(small), draw(st.integers(1, 5))
    pair = st.tuples(st.integers(0, 2), words)
    placed = draw(st.lists(pair, min_size=devices * tensors, max_size=devices * tensors))
    keys = draw(st.lists(st.tuples(words, words), max_size=slots))
    nbytes = slots * draw(st.integers(1, 2**40))
    return record_of(draw(words), draw(words), draw(words), devices, tensors, slots, nbytes, placed, keys), placed, keys


@given(records())
def test_what_was_written_is_read(made: tuple[Record, list[tuple[int, int]], list[tuple[int, int]]]) -> None:
    record, placed, keys = made
    assert list(record.tensors) == placed
    assert [record.tensor(i) for i in range(len(placed))] == placed
    with pytest.raises(IndexError):
        record.tensor(len(placed))
    assert list(record.keys) == keys
    assert record.key_count == len(keys)
    assert record.stride * record.slots == record.tensor_bytes
    assert [record.key_of_slot(i) for i in range(7)] == keys + [(0, 0)] * (7 - len(keys))
    assert record == Record(record.generation, record.body)
    assert record != Record(record.generation ^ 1, record.body)


@given(records())
def test_span_is_the_hull_of_one_region(made: tuple[Record, list[tuple[int, int]], list[tuple[int, int]]]) -> None:
    record, placed, _ = made
    if len({region for region, _ in placed}) != 1:
        assert record.span() is None
        return
    offsets = [offset for _, offset in placed]
    assert record.span() == (placed[0][0], min(offsets), max(offsets) + record.tensor_bytes - min(offsets))


@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_bases_pair_tensors(data: st.DataObject, devices: int, tensors: int, stride: int) -> None:
    """A slow model of the same: tensor ``first + i`` of each device meets address ``to + i`` of that device."""
    offsets = data.draw(st.lists(st.integers(0, 2**40), min_size=devices * tensors, max_size=devices * tensors))
    addresses = data.draw(st.lists(words, min_size=devices * stride, max_size=devices * stride))
    record = record_of(2, 1, 0, devices, tensors, 1, 64, [(3, offset) for offset in offsets], [])
    count = data.draw(st.integers(0, min(tensors, stride)))
    first, to = data.draw(st.integers(0, tensors - count)), data.draw(st.integers(0, stride - count))
    base = data.draw(st.integers(0, 2**47))
    span = record.span()
    assert span is not None
    made = record.bases(first, span[1], base, array("Q", addresses), to, stride, count)
    assert made.tolist() == [
        (base + offsets[device * tensors + first + i] - span[1], addresses[device * stride + to + i])
        for device in range(devices)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"1234567",
        body(1, 2, 3, 4, 5, 6),
        body(1, 0, 1, 1, 1, 64, 0) + b"x",
        body(1, 0, 1, 2, 1, 64, 0, 0, 0),
        body(1, 0, 1, 0, 1, 64, 0, 0, 0),
        body(1, 0, 1, 1, 1, 64, 1, 0, 0),
        body(1, 0, 1, 1, 0, 64, 0, 0, 0),
        body(1, 0, 1, 1, 1, 0, 0, 0, 0),
        body(1, 0, 1, 1, 3, 64, 0, 0, 0),
        body(1, 0, 1, 0, 1, 64, 2, 0, 0, 0, 0),
        # Products and sums that would come out right modulo 2**64.
        body(1, 0, 2**63, 2, 1, 64, 0),
        body(1, 0, 2**32, 2**31, 1, 64, 0),
        body(1, 0, 1, 1, TOP, TOP, 2**63, 0, 0),
        body(1, 0, TOP, TOP, 1, 64, 0, 0, 0),
    ],
)
def test_contradictions_are_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="has"):
        Record(2, wrong)


@pytest.mark.parametrize(
    ("first", "to", "stride", "count", "addresses"),
    [
        (0, 0, 2, 3, 2),
        (2, 0, 2, 1, 2),
        (0, 2, 2, 1, 2),
        (-1, 0, 2, 1, 2),
        (0, -1, 2, 1, 2),
        (0, 0, 2, -1, 2),
        (0, 0, 3, 1, 2),
    ],
)
def test_bases_outside_are_refused(first: int, to: int, stride: int, count: int, addresses: int) -> None:
    record = record_of(2, 1, 0, 1, 2, 1, 64, [(0, 0), (0, 64)], [])
    with pytest.raises(ValueError, match="tensors"):
        record.bases(first, 0, 4096, array("Q", range(addresses)), to, stride, count)
    with pytest.raises(ValueError, match="dtype|format"):
        record.bases(0, 0, 4096, array("I", [1, 2]), 0, 2, 1)
