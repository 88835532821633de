"""Sets of intervals, and what a signal in the middle of a change leaves of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist.backends.host.intervals import Intervals

BEFORE = [(0, 10), (20, 30), (40, 50)]


def made() -> Intervals:
    intervals = Intervals()
    for begin, end in BEFORE:
        intervals.add(begin, end)
    return intervals


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=12))
def test_all_parts_at_once_are_as_one_by_one(parts: list[tuple[int, int]]) -> None:
    """Lists of mappings are no snapshots: parts may overlap, and come in any order."""
    whole = Intervals((begin, begin + size) for begin, size in parts)
    one_by_one = Intervals()
    for begin, size in parts:
        one_by_one.add(begin, begin + size)
    assert list(whole) == list(one_by_one)
    members = {i for begin, size in parts for i in range(begin, begin + size)}
    assert {i for begin, end in whole for i in range(begin, end)} == members


@pytest.mark.parametrize(
    ("change", "after"),
    [
        (lambda s: s.add(5, 45), [(0, 50)]),
        (lambda s: s.remove(5, 25), [(0, 5), (25, 30), (40, 50)]),
        (lambda s: s.remove(20, 30), [(0, 10), (40, 50)]),
    ],
)
def test_an_interrupted_change_is_done_or_not(
    change: Callable[[Intervals], None], after: list[tuple[int, int]]
) -> None:
    seen = set()
    for line in range(1, 100):
        intervals, left = made(), line

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if "intervals" not in frame.f_code.co_filename:
                return None
            left -= event == "line"
            if not left:
                raise KeyboardInterrupt
            return trace

        former = sys.gettrace()
        sys.settrace(trace)
        try:
            change(intervals)
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
        finally:
            sys.settrace(former)
        assert list(intervals) in (BEFORE, after), line
        assert intervals.total == sum(end - begin for begin, end in intervals)
        seen.add(tuple(intervals))
        if not interrupted:
            break
    assert seen == {tuple(BEFORE), tuple(after)}
