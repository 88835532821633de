"""Ranges of a space, against a model that knows every granule."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_datadist._engine.space import Space

GRANULES = 24
GRANULE = 8


class SpaceModel(RuleBasedStateMachine):
    """A list of granules, each free or taken."""

    def __init__(self) -> None:
        super().__init__()
        self.space = Space(GRANULES * GRANULE + GRANULE - 1, GRANULE)
        self.taken = [False] * GRANULES
        self.ranges: list[tuple[int, int]] = []

    def lowest(self, count: int) -> int | None:
        for start in range(GRANULES - count + 1):
            if not any(self.taken[start : start + count]):
                return start * GRANULE
        return None

    @rule(nbytes=st.integers(1, 10 * GRANULE))
    def take(self, nbytes: int) -> None:
        count = -(-nbytes // GRANULE)
        offset = self.space.take(nbytes)
        assert offset == self.lowest(count), "the lowest range that fits"
        if offset is not None:
            first = offset // GRANULE
            self.taken[first : first + count] = [True] * count
            self.ranges.append((offset, nbytes))

    @precondition(lambda self: self.ranges)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset, nbytes = self.ranges.pop(data.draw(st.integers(0, len(self.ranges) - 1)))
        self.space.give(offset, nbytes)
        first, count = offset // GRANULE, -(-nbytes // GRANULE)
        self.taken[first : first + count] = [False] * count

    @invariant()
    def used_is_what_is_taken(self) -> None:
        assert self.space.used == sum(self.taken) * GRANULE

    def teardown(self) -> None:
        for offset, nbytes in self.ranges:
            self.space.give(offset, nbytes)
        assert self.space.used == 0
        assert self.space.take(GRANULES * GRANULE) == 0, "all ranges merge again"


TestSpaceModel = SpaceModel.TestCase
TestSpaceModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("nbytes", [0, 7])
def test_no_room_at_all(nbytes: int) -> None:
    space = Space(nbytes, 8)
    assert space.nbytes == 0
    assert space.take(1) is None


def test_round() -> None:
    assert [Space(64, 8).round(n) for n in (1, 7, 8, 9)] == [8, 8, 8, 16]
