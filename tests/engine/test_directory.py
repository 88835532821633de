"""The directory: its owner against a dict, a reader against an owner that never rests, and hostile bytes."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import directory_writer
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from windows import SharedWindow

from llm_datadist._engine.directory import (
    BLOCKS,
    CACHE,
    CLOSING,
    LINKS_AT,
    MAX_LINKS,
    PREFIX,
    REQUEST,
    W_CAPACITY,
    W_EPOCH,
    W_INCARNATION,
    W_MAGIC,
    W_STATE,
    W_VERSION,
    Directory,
    Entry,
    Key,
    Layout,
    MappedDirectory,
    Unreadable,
    record_of,
)
from llm_datadist._kernels import words
from llm_datadist._kernels.records import Record

NBYTES = 1 << 20
INCARNATION = 77
SECOND = 10**9

keys = st.builds(
    Key, st.sampled_from([CACHE, REQUEST, PREFIX, BLOCKS]), st.integers(0, 3) | st.just(2**64 - 1), st.integers(0, 1)
)
fields = st.integers(0, 2**64 - 1)


def soon() -> int:
    return time.monotonic_ns() + 10 * SECOND


@pytest.fixture
def shared() -> Iterator[SharedWindow]:
    made = SharedWindow(NBYTES)
    yield made
    made.close()


class DirectoryModel(RuleBasedStateMachine):
    """Key to what was published under it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = SharedWindow(NBYTES)
        self.owner = Directory(self.shared.window, INCARNATION)
        self.reader = MappedDirectory(self.shared.window, INCARNATION)
        self.generations = itertools.count(2, 2)
        self.published: dict[Key, tuple[Entry, Record]] = {}

    def publish(self, key: Key, tensors: int, slot: int, tags: int) -> None:
        (number,) = self.owner.take_entries(1)
        generation = next(self.generations)
        record = record_of(
            generation,
            key.ident,
            tags % 16,
            1,
            tensors,
            3,
            3 * (slot % 1000 + 1),
            tuple((i, slot) for i in range(tensors)),
            ((number + 1, generation + 2),) * (slot % 4),
        )
        entry = Entry(number, next(self.generations), self.owner.write_record(record), slot, tags, generation)
        self.owner.publish(number, key, entry)
        self.published[key] = entry, record

    @rule(key=keys, tensors=st.integers(1, 9), slot=fields, tags=fields)
    def bind(self, key: Key, tensors: int, slot: int, tags: int) -> None:
        if key not in self.published:
            self.publish(key, tensors, slot, tags)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def unbind(self, data: st.DataObject) -> None:
        self.withdraw(data.draw(st.sampled_from(sorted(self.published))))

    def withdraw(self, key: Key) -> None:
        entry, record = self.published.pop(key)
        self.owner.retire_record(entry.record, record.generation)
        assert self.reader.record(entry) is None, "a retired record is absent at once"
        self.owner.withdraw(entry.number, key, entry.generation)
        self.owner.free_record(entry.record, record)

    @precondition(lambda self: self.published)
    @rule(data=st.data(), slot=fields)
    def replace(self, data: st.DataObject, slot: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.published)))
        entry, record = self.published[key]
        again = entry._replace(generation=next(self.generations), slot=slot)
        self.owner.replace(entry.number, key, again)
        self.published[key] = again, record

    @rule()
    def churn(self) -> None:
        """Fill the index with removed words, so that it is rebuilt."""
        for i in range(300):
            key = Key(REQUEST, 10**6 + i, 5)
            self.publish(key, 1, i, i)
            self.withdraw(key)

    @rule()
    def grow(self) -> None:
        """Have so many keys that the index must become larger, then smaller."""
        many = [Key(PREFIX, 10**6 + i, 6) for i in range(280)]
        for key in many:
            self.publish(key, 1, 0, 0)
        self.readable()
        for key in many:
            self.withdraw(key)

    @invariant()
    def readable(self) -> None:
        for kind, ident, model in itertools.product((CACHE, REQUEST, PREFIX, BLOCKS), (0, 1, 2, 3, 2**64 - 1), (0, 1)):
            key = Key(kind, ident, model)
            found = self.reader.find(key, soon())
            if key not in self.published:
                assert found is None
                continue
            entry, record = self.published[key]
            assert found == entry
            assert self.reader.record(found) == record
            assert self.reader.word(self.reader.entry_word(found)) == entry.generation
            assert self.reader.word(found.record) == record.generation

    def teardown(self) -> None:
        for key in list(self.published):
            self.withdraw(key)
        assert self.owner._arena.used == 0
        assert self.owner._live == 0
        self.shared.close()


TestDirectoryModel = DirectoryModel.TestCase
TestDirectoryModel.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_entries_run_out_with_an_error(shared: SharedWindow) -> None:
    owner = Directory(shared.window, INCARNATION)
    numbers = owner.take_entries(owner.layout.entry_count)
    assert sorted(numbers) == list(range(owner.layout.entry_count))
    with pytest.raises(MemoryError, match=str(owner.layout.entry_count)):
        owner.take_entries(1)
    owner.return_entries(numbers[:2])
    assert owner.take_entries(2) == numbers[:2]


def test_longest_free_entries_come_first(shared: SharedWindow) -> None:
    owner = Directory(shared.window, INCARNATION)
    first = owner.take_entries(1)
    owner.return_entries(first)
    assert not set(first) & set(owner.take_entries(400))


def test_arena_runs_out_with_an_error(shared: SharedWindow) -> None:
    owner = Directory(shared.window, INCARNATION)
    big = record_of(2, 1, 0, 1, 2000, 1, 64, ((0, 0),) * 2000, ())
    room = (NBYTES - owner.layout.arena) // ((7 + 4000 + 4) * 8)
    places = [owner.write_record(big) for _ in range(room)]
    with pytest.raises(MemoryError, match="no room"):
        owner.write_record(big)
    owner.free_record(places[3], big)
    assert owner.write_record(big) == places[3]


def test_link_words(shared: SharedWindow) -> None:
    """Each link has a word of its own; closing the directory closes them all and says so."""
    owner = Directory(shared.window, INCARNATION)
    reader = MappedDirectory(shared.window, INCARNATION)
    for slot in (0, 5, MAX_LINKS - 1):
        owner.open_link(slot, 1000 + slot)
        assert reader.word(reader.link_word(slot)) == 1000 + slot
    owner.close_link(5)
    assert [reader.word(reader.link_word(slot)) for slot in (0, 5, MAX_LINKS - 1)] == [1000, 0, 1000 + MAX_LINKS - 1]
    owner.close()
    assert not any(shared.word(LINKS_AT + slot * 8).value for slot in range(MAX_LINKS))
    assert shared.word(W_STATE).value == CLOSING


def test_key_of_a_slot(shared: SharedWindow) -> None:
    """The key of a slot is found as long as its binding lives, and never one that came after it."""
    owner = Directory(shared.window, INCARNATION)
    reader = MappedDirectory(shared.window, INCARNATION)
    (number,) = owner.take_entries(1)
    record = record_of(2, 1, 0, 1, 1, 3, 48, ((0, 0),), ((0, 0), (number + 1, 4)))
    at = owner.write_record(record)
    entry = Entry(number, 4, at, 1, 0, 2)
    owner.publish(number, Key(REQUEST, 10, 0), entry)
    assert [reader.entry_of_slot(record, slot) for slot in range(4)] == [None, (REQUEST, entry), None, None]
    owner.withdraw(number, Key(REQUEST, 10, 0), 4)
    assert reader.entry_of_slot(record, 1) is None
    owner.publish(number, Key(PREFIX, 11, 0), entry._replace(generation=6))
    assert reader.entry_of_slot(record, 1) is None


def test_entry_read_before_its_records_room_was_used_again(shared: SharedWindow) -> None:
    """A reader that still holds an entry never takes the record that came after for its own."""
    owner = Directory(shared.window, INCARNATION)
    reader = MappedDirectory(shared.window, INCARNATION)
    former = record_of(2, 1, 0, 1, 1, 1, 64, ((0, 0),), ())
    at = owner.write_record(former)
    entry = Entry(0, 4, at, 0, 0, 2)
    assert reader.record(entry) == former
    owner.retire_record(at, 2)
    owner.free_record(at, former)
    assert owner.write_record(record_of(6, 2, 0, 1, 1, 1, 64, ((0, 64),), ())) == at
    assert reader.record(entry) is None


# ------------------------------------------------------------------ a writer in another process


def test_reader_never_sees_a_mixed_record(shared: SharedWindow) -> None:
    """Against a writer that publishes, withdraws and rebuilds without pause: right or absent, never mixed."""
    writer = subprocess.Popen(
        [sys.executable, directory_writer.__file__, str(shared.fd), str(NBYTES)],
        pass_fds=[shared.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(directory_writer.__file__).parent)},
        text=True,
    )
    assert writer.stdin
    assert writer.stdout
    try:
        assert writer.stdout.readline() == "ready\n"
        reader = MappedDirectory(shared.window, directory_writer.INCARNATION)
        entries = records = absent = 0
        begin, end = time.monotonic(), time.monotonic() + 30
        while time.monotonic() < end and (
            min(entries, records, absent) < 2000 or shared.word(W_EPOCH).value < 40 or time.monotonic() - begin < 5
        ):
            for ident in range(directory_writer.CHANGING):
                entry = reader.find(Key(REQUEST, ident, 1), soon())
                if entry is None:
                    absent += 1
                    continue
                entries += 1
                assert (entry.slot, entry.tags) == directory_writer.fields_of(entry.generation)
                record = reader.record(entry)
                if record is not None:
                    records += 1
                    assert record == directory_writer.record_for(record.generation, ident)
                    assert record.generation == entry.memory_generation
            for ident in range(directory_writer.LASTING):
                entry = reader.find(Key(REQUEST, 1000 + ident, 1), soon())
                assert entry is not None, "a key that is always there was missed"
                assert reader.record(entry) is not None
        assert min(entries, records, absent) >= 2000, (entries, records, absent)
        writer.stdin.close()
        assert int(writer.stdout.readline()) >= 20, "the index was not rebuilt often enough for this test"
    finally:
        writer.kill()
        writer.wait(30)
        writer.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            writer.stdin.close()


# ------------------------------------------------------------------ bytes that nobody should trust


def test_not_a_directory(shared: SharedWindow) -> None:
    with pytest.raises(Unreadable, match="magic"):
        MappedDirectory(shared.window, INCARNATION)
    Directory(shared.window, INCARNATION)
    with pytest.raises(Unreadable, match="incarnation"):
        MappedDirectory(shared.window, INCARNATION + 1)
    shared.word(W_VERSION).value = 2
    with pytest.raises(Unreadable, match="version"):
        MappedDirectory(shared.window, INCARNATION)


def test_too_small_a_window() -> None:
    with pytest.raises(ValueError, match="too small"):
        Layout.of(4096)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(W_EPOCH, 1), (W_EPOCH, 2**64 - 1), (W_CAPACITY, 0), (W_CAPACITY, 513), (W_CAPACITY, 2**63), (W_CAPACITY, 2**40)],
)
def test_endless_rebuild_ends_at_the_time_limit(shared: SharedWindow, offset: int, value: int) -> None:
    Directory(shared.window, INCARNATION)
    reader = MappedDirectory(shared.window, INCARNATION)
    shared.word(offset).value = value
    begin = time.monotonic()
    with pytest.raises(Unreadable, match="time limit"):
        reader.find(Key(REQUEST, 1, 0), time.monotonic_ns() + SECOND // 20)
    assert 0.04 < time.monotonic() - begin < 10


def test_full_index_ends(shared: SharedWindow) -> None:
    """An index without any empty word is searched once, not for ever."""
    owner = Directory(shared.window, INCARNATION)
    reader = MappedDirectory(shared.window, INCARNATION)
    shared.word(W_CAPACITY).value = owner.layout.largest_index
    for i in range(owner.layout.largest_index):
        shared.word(owner.layout.index + i * 8).value = i << 32 | 1
    assert reader.find(Key(REQUEST, 1, 0), soon()) is None


@pytest.mark.parametrize("offset", [0, 8, "arena - 8", "arena + 4", NBYTES, NBYTES + 8, 2**63, 2**64 - 8])
def test_entry_that_points_elsewhere(shared: SharedWindow, offset: int | str) -> None:
    """A record lies in the arena, at a multiple of 8, or the directory is Unreadable; by key and by slot."""
    owner = Directory(shared.window, INCARNATION)
    reader = MappedDirectory(shared.window, INCARNATION)
    if isinstance(offset, str):
        offset = owner.layout.arena + int(offset.removeprefix("arena").replace(" ", ""))
    (number,) = owner.take_entries(1)
    owner.publish(number, Key(REQUEST, 1, 0), Entry(number, 4, offset, 0, 0, 2))
    with pytest.raises(Unreadable, match=str(offset)):
        reader.find(Key(REQUEST, 1, 0), soon())
    record = record_of(2, 1, 0, 1, 1, 1, 64, ((0, 0),), ((number + 1, 4),))
    with pytest.raises(Unreadable, match=str(offset)):
        reader.entry_of_slot(record, 0)


def test_slot_that_names_no_entry(shared: SharedWindow) -> None:
    """An entry number beyond the table is never looked at."""
    owner = Directory(shared.window, INCARNATION)
    reader = MappedDirectory(shared.window, INCARNATION)
    at = owner.layout.arena
    for number in (owner.layout.entry_count + 1, 2**40, 2**64 - 1):
        # What lies behind the table would pass for an entry.
        words.write_entry(shared.window.address + at, 4, REQUEST, 1, 0, at, 0, 0, 2)
        record = record_of(2, 1, 0, 1, 1, 1, 64, ((0, 0),), ((number, 4),))
        assert reader.entry_of_slot(record, 0) is None


odd_values = st.sampled_from([0, 1, 2, 7, 8, 512, 2**16, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_hostile_bytes(data: st.DataObject) -> None:
    """Whatever words of a good directory are changed, a look-up gives something bounded, nothing, or Unreadable."""
    shared = SharedWindow(NBYTES)
    try:
        owner = Directory(shared.window, INCARNATION)
        reader = MappedDirectory(shared.window, INCARNATION)
        layout = owner.layout
        targets = [W_EPOCH, W_CAPACITY, W_INCARNATION, W_MAGIC]
        published = []
        for i, number in enumerate(owner.take_entries(4)):
            record = record_of(2 + 8 * i, i, 0, 1, 2, 2, 64, ((0, 0), (0, 64)), ((number + 1, 4 + 8 * i), (0, 0)))
            at = owner.write_record(record)
            owner.publish(number, Key(REQUEST, i, 0), Entry(number, 4 + 8 * i, at, 0, 0, record.generation))
            published.append(record)
            targets += [layout.entries + number * 64 + 8 * word for word in range(8)]
            targets += [at + 8 * word for word in range(16)]
        targets += [layout.index + 8 * i for i in range(512) if shared.word(layout.index + 8 * i).value]
        places = st.sampled_from(targets) | st.integers(0, NBYTES // 8 - 1).map(lambda word: word * 8)
        for offset, value in data.draw(st.lists(st.tuples(places, odd_values | fields), min_size=1, max_size=8)):
            shared.word(offset).value = value
        for i, good in enumerate(published):
            with contextlib.suppress(Unreadable):
                entry = reader.find(Key(REQUEST, i, 0), time.monotonic_ns() + SECOND // 500)
                if entry is not None:
                    assert 0 <= entry.number < layout.entry_count
                    assert layout.arena <= entry.record < NBYTES
                    record = reader.record(entry)
                    if record is not None:
                        assert len(record.tensors) == record.devices * record.num_tensors
                        assert record.stride * record.slots == record.tensor_bytes
            with contextlib.suppress(Unreadable):
                bound = reader.entry_of_slot(good, 0)
                assert bound is None or layout.arena <= bound[1].record < NBYTES
    finally:
        shared.close()


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from([0, 1, 2, 3, 2**32, 2**63, 2**64 - 1]), min_size=7, max_size=11), st.integers(0, 4))
def test_hostile_records_with_a_good_checksum(numbers: list[int], more: int) -> None:
    """A record that says impossible things of itself is Unreadable, whoever has signed it."""
    from array import array

    shared = SharedWindow(NBYTES)
    try:
        owner = Directory(shared.window, INCARNATION)
        reader = MappedDirectory(shared.window, INCARNATION)
        at = owner.layout.arena
        words.write_record(shared.window.address + at, 2, array("Q", numbers + [0] * more))
        try:
            record = reader.record(Entry(0, 2, at, 0, 0, 2))
        except Unreadable:
            return
        assert record is not None
        assert record.slots >= 1
        assert record.tensor_bytes >= record.slots
        assert len(record.keys) <= record.slots
        assert len(record.tensors) == record.devices * record.num_tensors
    finally:
        shared.close()
