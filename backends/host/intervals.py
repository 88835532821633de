"""A set of integers, kept as sorted half-open intervals that never touch each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Intervals"]


class Intervals:
    """Intervals of pages or bytes. Not thread safe."""

    def __init__(self, parts: Iterable[tuple[int, int]] = ()) -> None:
        """Take non-empty ranges, at less cost than by `add`."""
        begins: list[int] = []
        ends: list[int] = []
        for begin, end in sorted(parts):
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        # One attribute, so that a signal between two steps leaves the former set or the new one.
        self._spans = begins, ends

    @property
    def _begins(self) -> list[int]:
        return self._spans[0]

    @property
    def _ends(self) -> list[int]:
        return self._spans[1]

    @property
    def total(self) -> int:
        """How many integers are in the set."""
        return sum(self._ends) - sum(self._begins)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._begins, self._ends, strict=True)))

    def overlaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Give the parts of a range that are in the set."""
        if begin >= end:
            return []
        first, last = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        return [(max(self._begins[i], begin), min(self._ends[i], end)) for i in range(first, last)]

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Give the parts of a range that are not in the set."""
        gaps = []
        for part_begin, part_end in self.overlaps(begin, end):
            if begin < part_begin:
                gaps.append((begin, part_begin))
            begin = part_end
        if begin < end:
            gaps.append((begin, end))
        return gaps

    def add(self, begin: int, end: int) -> None:
        """Put a range into the set."""
        if begin < end:
            first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
            if first < last:
                begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
            self._replace(first, last, [(begin, end)])

    def remove(self, begin: int, end: int) -> None:
        """Take a range out of the set."""
        first, last = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        if begin < end and first < last:
            rest = [(self._begins[first], begin), (end, self._ends[last - 1])]
            self._replace(first, last, [part for part in rest if part[0] < part[1]])

    def _replace(self, first: int, last: int, parts: list[tuple[int, int]]) -> None:
        begins, ends = self._begins.copy(), self._ends.copy()
        begins[first:last] = [begin for begin, _ in parts]
        ends[first:last] = [end for _, end in parts]
        self._spans = begins, ends
