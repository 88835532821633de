"""The board: what peers spend, and writes that come late."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from windows import SharedWindow

from llm_datadist._engine.board import SPENT_AT, Board, MappedBoard, tag_of
from llm_datadist._engine.directory import Entry, Layout

NBYTES = 1 << 20
LAYOUT = Layout.of(1 << 20)


@pytest.fixture
def shared() -> Iterator[SharedWindow]:
    made = SharedWindow(NBYTES)
    yield made
    made.close()


def entry_of(number: int, generation: int, tags: int = 0) -> Entry:
    return Entry(number, generation, LAYOUT.arena, 0, tags, 2)


def test_spent_is_one_generation_of_one_entry(shared: SharedWindow) -> None:
    owner, peer = Board(shared.window, LAYOUT.entry_count), MappedBoard(shared.window, LAYOUT)
    last = LAYOUT.entry_count - 1
    peer.spend(entry_of(3, 100))
    peer.spend(entry_of(last, 104))
    assert owner.spent(array("Q", [3, 98, 3, 100, 4, 100, last, 104])) == [1, 3]
    assert peer.is_spent(entry_of(3, 100))
    assert not peer.is_spent(entry_of(3, 102)), "a binding that came later to the same entry"
    # A late write of an old binding means nothing to the new one.
    peer.spend(entry_of(3, 98))
    assert owner.spent(array("Q", [3, 102])) == []


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 11), st.integers(1, 12)), max_size=12))
def test_parts_spend_when_all_are_there(num_tensors: int, pulls: list[tuple[int, int, int]]) -> None:
    """Two keys whose tags lie side by side: each is spent exactly when its own parts cover all tensors (S-61)."""
    shared = SharedWindow(NBYTES)
    try:
        owner, peer = Board(shared.window, LAYOUT.entry_count), MappedBoard(shared.window, LAYOUT)
        entries = [entry_of(i, 100 + 2 * i, owner.take_tags(num_tensors)) for i in range(2)]
        pulled: list[set[int]] = [set(), set()]
        for which, start, count in pulls:
            tensors = range(min(start, num_tensors - 1), min(start + count, num_tensors))
            if len(tensors):
                peer.spend_tensors(entries[which], tensors, num_tensors)
                pulled[which] |= set(tensors)
        for which in range(2):
            assert peer.is_spent(entries[which]) == (len(pulled[which]) == num_tensors)
    finally:
        shared.close()


def test_tags_of_a_key_that_is_gone_do_not_count(shared: SharedWindow) -> None:
    """The next owner of tags starts from none, and late tags of the former one don't help it."""
    owner, peer = Board(shared.window, LAYOUT.entry_count), MappedBoard(shared.window, LAYOUT)
    old = entry_of(0, 100, owner.take_tags(2))
    peer.spend_tensors(old, [0], 2)
    owner.give_tags(old.tags, 2)
    new = entry_of(0, 200, owner.take_tags(2))
    assert new.tags == old.tags
    peer.spend_tensors(new, [1], 2)
    assert not peer.is_spent(new)
    peer.spend_tensors(old, [0], 2)
    assert not peer.is_spent(new)
    peer.spend_tensors(new, [0], 2)
    assert peer.is_spent(new)


def test_tags_start_from_none_even_if_they_repeat(shared: SharedWindow) -> None:
    """Tags have 32 bits, so they repeat one day; what a former key left must not count then either."""
    owner, peer = Board(shared.window, LAYOUT.entry_count), MappedBoard(shared.window, LAYOUT)
    old = entry_of(0, 100, owner.take_tags(2))
    peer.spend_tensors(old, [0], 2)
    owner.give_tags(old.tags, 2)
    new = entry_of(0, 100 + 2 * (2**32 - 1), owner.take_tags(2))
    assert tag_of(new.generation) == tag_of(old.generation)
    peer.spend_tensors(new, [1], 2)
    assert not peer.is_spent(new)


@given(st.integers(0, 2**62).map(lambda n: 2 * n))
def test_tags_are_never_what_a_fresh_board_holds(generation: int) -> None:
    assert 0 < tag_of(generation) < 2**32
    assert tag_of(generation) != tag_of(generation + 2)


@pytest.mark.parametrize(
    "tags", [0, 8, SPENT_AT, SPENT_AT + LAYOUT.entry_count * 8 - 4, NBYTES - 4, NBYTES, 2**63, 2**64 - 4, SPENT_AT + 1]
)
def test_nonsense_places_of_tags_write_nothing(shared: SharedWindow, tags: int) -> None:
    """A peer that publishes a wrong place for its tags harms nobody but itself."""
    peer = MappedBoard(shared.window, LAYOUT)
    peer.spend_tensors(entry_of(0, 100, tags), [0, 1], 2)
    assert not any(shared.word(offset).value for offset in range(0, NBYTES, 8))


def test_tags_run_out_with_an_error(shared: SharedWindow) -> None:
    owner = Board(shared.window, LAYOUT.entry_count)
    room = (NBYTES - SPENT_AT - LAYOUT.entry_count * 8) // 4
    taken = [owner.take_tags(1000) for _ in range(room // 1000)]
    with pytest.raises(MemoryError, match="no room"):
        owner.take_tags(1000)
    owner.give_tags(taken[5], 1000)
    assert owner.take_tags(1000) == taken[5]
