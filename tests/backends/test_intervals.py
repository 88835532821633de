"""Sets of intervals, and what a signal in the middle of a change leaves of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from llm_datadist.backends.host.intervals import Intervals

BEFORE = [(0, 10), (20, 30), (40, 50)]


def made() -> Intervals:
    intervals = Intervals()
    for begin, end in BEFORE:
        intervals.add(begin, end)
    return intervals


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
