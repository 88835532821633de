"""Index lists: every form that is accepted, and every one that is refused."""

from __future__ import annotations

import array
import collections
import ctypes
import enum
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._kernels.runs import Indices, indices

HELD = 2**63 - 1


class Position(enum.IntEnum):
    THIRD = 3


class HasIndex:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class OddList(list[int]):
    """Iterates over other things than it holds."""

    def __iter__(self) -> Iterator[int]:
        return iter([])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        ((), []),
        (range(0), []),
        (array.array("i"), []),
        ([0], [0]),
        ([3, 1, 2], [3, 1, 2]),
        ((3, 1, 2), [3, 1, 2]),
        (list(range(1000)), list(range(1000))),
        (range(4), [0, 1, 2, 3]),
        (range(9, -1, -3), [9, 6, 3, 0]),
        (range(7, 8, 2**70), [7]),
        ([Position.THIRD, HasIndex(4), np.int16(5), np.uint64(6)], [3, 4, 5, 6]),
        ([np.array(8)], [8]),
        (OddList([1, 2]), [1, 2]),
        (array.array("Q", [1, 2**62]), [1, 2**62]),
        (memoryview(b"ab"), [97, 98]),
        ((ctypes.c_long * 2)(5, 6), [5, 6]),
        (np.arange(10)[::-3], [9, 6, 3, 0]),
        (np.arange(12).reshape(3, 4)[:, 1], [1, 5, 9]),
        (np.frombuffer(b"\0\1\0\0\0\2\0\0\0", np.uint8)[1:].view("<i4"), [1, 2]),
    ],
)
def test_s50_accepts_every_form(values: object, expected: list[int]) -> None:
    held = indices(values, "blocks")
    assert held.tolist() == expected
    assert len(held) == len(expected)
    assert held.maximum == max(expected, default=-1)


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_accepts_every_integer_type(code: str) -> None:
    top = int(np.iinfo(code).max)
    held = indices(np.array([0, 1, top], code), "blocks")
    assert held.tolist() == [0, 1, min(top, HELD)]


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_the_width_is_the_exporters(itemsize: int) -> None:
    """The letter "l" stands for 4 or for 8 bytes, by exporter and machine."""
    values = np.array([1, 2**15 - 1], f"i{itemsize}")
    assert indices(values.data, "blocks").tolist() == [1, 2**15 - 1]
    assert indices(values.view(f"=i{itemsize}"), "blocks").tolist() == [1, 2**15 - 1]


@pytest.mark.parametrize(
    "values", [[2**63 - 1], [2**63], [2**64 - 1], np.array([2**64 - 1], np.uint64), range(2**63, 2**63 + 1)]
)
def test_s52_huge_indices_are_held_as_the_greatest_number(values: object) -> None:
    held = indices(values, "blocks")
    assert held.maximum == HELD
    assert held.tolist() == [HELD]


def test_range_across_the_greatest_number() -> None:
    assert indices(range(HELD - 1, HELD + 3), "blocks").tolist() == [HELD - 1, HELD, HELD, HELD]


def test_long_range_takes_no_memory() -> None:
    held = indices(range(0, 2**62, 2), "blocks")
    assert len(held) == 2**61
    assert held.maximum == 2**62 - 2


@pytest.mark.parametrize(
    "values",
    [
        None,
        5,
        "01",
        b"01",
        bytearray(b"01"),
        {1, 2},
        {1: 2},
        {1: 2}.keys(),
        iter([1]),
        (i for i in [1]),
        collections.deque([1]),
        np.int64(1),
        np.array(1),
        np.zeros((2, 2), np.int64),
        np.zeros(2, bool),
        np.zeros(2, np.float32),
        np.zeros(2, np.complex64),
        np.zeros(2, ">i4"),
        np.array(["2020"], "M8[D]"),
        np.array([1], object),
        np.zeros(2, [("a", "i4")]),
        memoryview(b"ab").cast("c"),
        array.array("d", [1]),
    ],
)
def test_refuses_other_containers(values: object) -> None:
    with pytest.raises(TypeError, match=r"^blocks must"):
        indices(values, "blocks")


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (True, "bool"),
        (1.0, "float"),
        ("1", "str"),
        (None, "NoneType"),
        (np.bool_(True), "bool"),
        (np.array([1]), "ndarray"),
    ],
)
@pytest.mark.parametrize("container", [list, tuple])
def test_refuses_other_elements(container: type, value: object, type_name: str) -> None:
    with pytest.raises(TypeError, match=rf"^blocks\[1\] must be an int, got {type_name}"):
        indices(container([0, value]), "blocks")


@pytest.mark.parametrize(
    ("values", "position", "value"),
    [
        ([0, -1], 1, -1),
        ([-(2**63)], 0, -(2**63)),
        ([-(2**100)], 0, -(2**100)),
        ([2**64], 0, 2**64),
        ([0, HasIndex(-7)], 1, -7),
        (np.array([1, 2, -3], np.int8), 2, -3),
        (range(-2, 5), 0, -2),
        (range(5, -5, -2), 3, -1),
        (range(2**64, 2**64 + 1), 0, 2**64),
        (range(2**64 - 2, 2**64 + 9, 3), 1, 2**64 + 1),
    ],
)
def test_s52_refuses_numbers_out_of_range(values: object, position: int, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^blocks\[{position}\] is {value}; allowed are 0 to"):
        indices(values, "blocks")


def test_refuses_numbers_too_long_to_print() -> None:
    with pytest.raises(ValueError, match=r"^blocks\[0\] is an int of \d+ bits"):
        indices([10**5000], "blocks")


def test_refuses_a_range_longer_than_any_list() -> None:
    with pytest.raises(ValueError, match=r"^blocks has more than"):
        indices(range(2**64), "blocks")


def test_errors_of_index_methods_come_through() -> None:
    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        indices([1, Broken()], "blocks")


def test_a_list_that_changes_while_it_is_read() -> None:
    values: list[object] = []

    class Clears:
        def __index__(self) -> int:
            values.clear()
            return 7

    values.extend([1, Clears(), *(10**12 + i for i in range(1000))])
    assert indices(values, "blocks").tolist() == [1, 7, *(10**12 + i for i in range(1000))]


def test_empty_by_hand() -> None:
    assert Indices().maximum == -1
    assert Indices().tolist() == []


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_lists_and_buffers_agree(values: list[int]) -> None:
    expected = [min(value, HELD) for value in values]
    assert indices(values, "blocks").tolist() == expected
    assert indices(tuple(values), "blocks").tolist() == expected
    assert indices(np.array(values, np.uint64), "blocks").tolist() == expected


@given(st.integers(0, 100), st.integers(-3, 100), st.integers(-7, 7).filter(bool))
def test_ranges_read_as_their_elements(start: int, stop: int, step: int) -> None:
    values = range(start, stop, step)
    if values and min(values) < 0:
        with pytest.raises(ValueError, match="blocks"):
            indices(values, "blocks")
    else:
        assert indices(values, "blocks").tolist() == list(values)
