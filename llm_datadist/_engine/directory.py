"""The directory: what an engine publishes about its caches, and how a peer reads it.

The owner alone writes; peers read the same bytes at any moment and trust none of them. All positions follow from
the size of the window, so a reader takes no offset from the peer except those of entries, which it bounds.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from llm_datadist._engine.space import Space
from llm_datadist._kernels import words
from llm_datadist._kernels.hostcopy import Guard
from llm_datadist._kernels.records import Record
from llm_datadist.backend import Window

__all__ = [
    "BLOCKS",
    "CACHE",
    "MAX_LINKS",
    "PREFIX",
    "REQUEST",
    "Directory",
    "Entry",
    "Key",
    "Layout",
    "MappedDirectory",
    "PeerDirectory",
    "Unreadable",
    "record_of",
]

MAGIC = 0x4C4C4D4444495231  # "LLMDDIR1"
VERSION = 1
LIVE, CLOSING = 1, 2

#: Kinds of entries: a cache by its id, or one of the three key spaces.
CACHE, REQUEST, PREFIX, BLOCKS = 1, 2, 3, 4

MAX_LINKS = 1024
PAGE = 4096
ENTRY_BYTES = 64
SMALLEST_INDEX = 512
#: What a reader believes of a peer at most: a million tensors in one cache, and directories not far above ours.
LARGEST_RECORD = 16 << 20
LARGEST_WINDOW = 1 << 30
#: Bytes of a record besides its body: generation and length before it, checksum and generation behind.
FRAME_BYTES = 32

# header words
W_MAGIC, W_VERSION, W_INCARNATION, W_STATE, W_TABLE, W_EPOCH, W_CAPACITY, W_ALIVE = (8 * i for i in range(8))
#: A word that holds the value in W_ALIVE as long as the owner's process lives; none if that is 0.
LIFE_AT = 512
LINKS_AT = PAGE

#: Flags of a record; POOLED: its engine has a device pool.
F_BLOCKS, F_HOST, F_REGISTERED, F_ACCESSIBLE, F_POOLED = 1, 2, 4, 8, 16


class Key(NamedTuple):
    """What an entry stands for: a kind, and the two numbers that name it."""

    kind: int
    ident: int
    model: int


class Entry(NamedTuple):
    """One key (or cache id) as published.

    ``tags`` is where the board has the tags of a request key. Of a cache id it is 1 when the owner has let go of the
    handle, so that the cache lives by its keys alone.
    """

    number: int
    generation: int
    record: int
    slot: int
    tags: int
    memory_generation: int


class Unreadable(Exception):
    """The peer's directory could not be read within the time limit, or says impossible things."""


def record_of(
    generation: int,
    cache_id: int,
    flags: int,
    devices: int,
    num_tensors: int,
    slots: int,
    tensor_bytes: int,
    tensors: Iterable[tuple[int, int]],
    keys: Collection[tuple[int, int]],
) -> Record:
    """Describe a cache: ``tensors`` are (region, offset), device after device.

    ``keys`` are (entry number + 1, binding generation) of each slot up to the last that was given a key, (0, 0) for one
    without.
    """
    head = cache_id, flags, devices, num_tensors, slots, tensor_bytes, len(keys)
    body = array("Q", head)
    body.extend(itertools.chain.from_iterable(tensors))
    body.extend(itertools.chain.from_iterable(keys))
    return Record(generation, body.tobytes())


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in a directory window of a given size."""

    index: int
    largest_index: int
    entries: int
    entry_count: int
    arena: int
    nbytes: int

    @classmethod
    def of(cls, nbytes: int) -> Layout:
        """Work the layout out."""
        entry_count = 1 << max(nbytes // 1024, 64).bit_length() - 1
        largest_index = entry_count * 4
        index = LINKS_AT + MAX_LINKS * 8
        entries = index + largest_index * 8
        arena = entries + entry_count * ENTRY_BYTES
        if arena + PAGE > nbytes:
            raise ValueError(f"a directory of {nbytes} bytes is too small")
        return cls(index, largest_index, entries, entry_count, arena, nbytes)


class Directory:
    """The owner's side. Not thread-safe, except `open_link` and `close_link`, which write one word each."""

    def __init__(self, window: Window, incarnation: int) -> None:
        self._base = window.address
        self.layout = Layout.of(window.nbytes)
        self._arena = Space(window.nbytes - self.layout.arena, 8)
        self._free = deque(range(min(SMALLEST_INDEX, self.layout.entry_count)))
        self._used_up_to = len(self._free)
        self._capacity = SMALLEST_INDEX
        self._filled = 0  # words of the index that are not empty
        self._live = 0
        words.store(self._base + W_CAPACITY, self._capacity)
        words.store(self._base + W_INCARNATION, incarnation)
        words.store(self._base + W_VERSION, VERSION)
        words.store(self._base + W_STATE, LIVE)
        words.store(self._base + W_MAGIC, MAGIC)

    def come_alive(self) -> None:
        """Bind the directory to the calling thread's life, which ends with `let_go` or with the process."""
        words.store(self._base + W_ALIVE, words.hold_life(self._base + LIFE_AT))

    def let_go(self) -> None:
        """End what `come_alive` has begun, in the same thread."""
        words.release_life(self._base + LIFE_AT)

    @staticmethod
    def holds(tensors: int, keys: int) -> bool:
        """Say whether a cache of so many tensors, on all devices, can be recorded at all."""
        return (7 + 2 * tensors + 2 * keys) * 8 + FRAME_BYTES <= LARGEST_RECORD

    def take_entries(self, count: int) -> list[int]:
        """Reserve entry numbers, those longest free first, so that late writes of peers meet no new owner soon."""
        while len(self._free) < count and self._used_up_to < self.layout.entry_count:
            self._free.append(self._used_up_to)
            self._used_up_to += 1
        if len(self._free) < count:
            raise MemoryError(f"the directory holds {self.layout.entry_count} caches and keys, and all are in use")
        return [self._free.popleft() for _ in range(count)]

    def return_entries(self, numbers: Sequence[int]) -> None:
        """Give back entries that were reserved, or withdrawn."""
        self._free.extend(numbers)

    def write_record(self, record: Record) -> int:
        """Publish a cache; return the record's offset. It is found only once an entry names it."""
        nbytes = len(record.body) + FRAME_BYTES
        if nbytes > LARGEST_RECORD:
            raise MemoryError(f"a cache's record of {nbytes} bytes is above {LARGEST_RECORD}")
        offset = self._arena.take(nbytes)
        if offset is None:
            raise MemoryError("the directory has no room for another cache")
        offset += self.layout.arena
        words.write_record(self._base + offset, record.generation, memoryview(record.body).cast("Q"))
        return offset

    def retire_record(self, offset: int, generation: int) -> None:
        """Withdraw a record: from here on no reader that finds bytes of a later owner calls them good."""
        words.retire(self._base + offset, generation)

    def free_record(self, offset: int, record: Record) -> None:
        """Let a retired record's room be used again."""
        self._arena.give(offset - self.layout.arena, len(record.body) + FRAME_BYTES)

    def publish(self, number: int, key: Key, entry: Entry) -> None:
        """Publish an entry and make it findable."""
        self.replace(number, key, entry)
        if (self._filled + 1) * 2 > self._capacity:
            self._rebuild()
        if words.index_insert(self._base + self.layout.index, self._capacity, *key, number):
            self._filled += 1
        self._live += 1
        if key.kind == CACHE:
            self._touch()

    def replace(self, number: int, key: Key, entry: Entry) -> None:
        """Write a published entry anew, under another generation."""
        words.write_entry(
            self._base + self.layout.entries + number * ENTRY_BYTES,
            entry.generation,
            *key,
            *entry[2:],
        )

    def withdraw(self, number: int, key: Key, generation: int) -> None:
        """Make an entry absent, and its number free for later."""
        # First out of the index: a reader that finds the word of an entry that is odd believes it is being rewritten.
        if words.index_remove(self._base + self.layout.index, self._capacity, *key, number):
            self._live -= 1
        words.retire(self._base + self.layout.entries + number * ENTRY_BYTES, generation)
        self._free.append(number)
        if key.kind == CACHE:
            self._touch()

    def open_link(self, slot: int, epoch: int) -> None:
        """Let a peer's transfers pass that expect this epoch in its link word."""
        words.store(self._base + LINKS_AT + slot * 8, epoch)

    def close_link(self, slot: int) -> None:
        """Stop a peer's transfers: those that run fail at their second look."""
        words.store(self._base + LINKS_AT + slot * 8, 0)

    def close(self) -> None:
        """Say that nothing here may be used any more."""
        words.store(self._base + W_STATE, CLOSING)
        for slot in range(MAX_LINKS):
            if words.load(self._base + LINKS_AT + slot * 8):
                self.close_link(slot)

    def _touch(self) -> None:
        # Last: who reads the new version reads the new table.
        words.store(self._base + W_TABLE, words.load(self._base + W_TABLE) + 1)

    def _rebuild(self) -> None:
        capacity = SMALLEST_INDEX
        while capacity < self._live * 4 + 4:
            capacity *= 2
        words.index_rebuild(
            self._base + W_EPOCH,
            self._base + W_CAPACITY,
            self._base + self.layout.index,
            self._capacity,
            capacity,
            self._base + self.layout.entries,
        )
        self._capacity, self._filled = capacity, self._live


class PeerDirectory(ABC):
    """A peer's directory. Nothing in it is trusted: offsets are bounded, numbers are checked.

    How its words are read is a matter of the subclass.
    """

    #: Memory that its owner registers may be taken from the card while it is read, unless it is pinned.
    pins_reads = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    # ------------------------------------------------------------------ reading words

    @abstractmethod
    def guard(self, expected: Sequence[tuple[int, int]]) -> Any:
        """Make a guard of (offset, value) words, for reads and writes over the link that this directory belongs to."""

    @abstractmethod
    def alive(self) -> bool:
        """Say whether the directory's owner lives, as far as its words tell."""

    @abstractmethod
    def word(self, offset: int) -> int:
        """Read one word."""

    @abstractmethod
    def find_once(self, key: Key) -> tuple[int, ...] | Literal[False] | None:
        """Look a key up; False says that it must be done again."""

    @abstractmethod
    def list_once(self) -> Sequence[tuple[int, ...]] | Literal[False]:
        """List the entries of all caches; False says that it must be done again."""

    @abstractmethod
    def _read_entry(self, offset: int) -> tuple[int, ...] | None:
        """Read an entry's words, generation first."""

    @abstractmethod
    def _read_record(self, offset: int, limit: int) -> tuple[int, bytes] | None:
        """Read a record of at most ``limit`` bytes."""

    # ------------------------------------------------------------------ what they mean

    def link_word(self, slot: int) -> int:
        """Give the offset of the link word of a slot."""
        return LINKS_AT + slot * 8

    def entry_word(self, entry: Entry) -> int:
        """Give the offset of an entry's generation."""
        return self.layout.entries + entry.number * ENTRY_BYTES

    def table_version(self) -> int:
        """Give a number that moves with every cache that comes or goes."""
        return self.word(W_TABLE)

    def find(self, key: Key, deadline_ns: int) -> Entry | None:
        """Look a key up; None says for certain that it was not there at one moment of the call."""
        while (found := self.find_once(key)) is False:
            self._pause(deadline_ns)
        return None if found is None else self._bounded(Entry._make(found))

    def caches(self, deadline_ns: int) -> list[Entry]:
        """List all caches."""
        while (found := self.list_once()) is False:
            self._pause(deadline_ns)
        return [self._bounded(Entry(*numbers)) for numbers in found]

    @staticmethod
    def _pause(deadline_ns: int) -> None:
        if time.monotonic_ns() > deadline_ns:
            raise Unreadable("the peer's index stayed unreadable until the time limit")
        time.sleep(0.0001)

    def entry_of_slot(self, record: Record, slot: int) -> tuple[int, Entry] | None:
        """Give kind and entry of the key that is still bound to a slot, or None."""
        number, generation = record.key_of_slot(slot)
        if not 0 < number <= self.layout.entry_count:
            return None
        found = self._read_entry(self.layout.entries + (number - 1) * ENTRY_BYTES)
        if found is None or found[0] != generation:
            return None
        return found[1], self._bounded(Entry(number - 1, generation, *found[4:]))

    def _bounded(self, entry: Entry) -> Entry:
        if entry.record % 8 or not self.layout.arena <= entry.record < self.layout.nbytes:
            raise Unreadable(f"an entry points to byte {entry.record} of the peer's directory")
        return entry

    def record(self, entry: Entry) -> Record | None:
        """Read the record that an entry names; None if it has gone since."""
        found = self._read_record(entry.record, min(self.layout.nbytes - entry.record, LARGEST_RECORD))
        if found is None or found[0] != entry.memory_generation:
            return None
        try:
            return Record(*found)
        except ValueError as e:
            raise Unreadable(f"a record of the peer's directory {e}") from e


class MappedDirectory(PeerDirectory):
    """A peer's directory, mapped here."""

    def __init__(self, window: Window, incarnation: int) -> None:
        try:
            if window.nbytes > LARGEST_WINDOW:
                raise ValueError(f"a directory of {window.nbytes} bytes is too large")
            super().__init__(Layout.of(window.nbytes))
        except ValueError as e:
            raise Unreadable(f"the peer's directory can't be one: {e}") from e
        base = self._base = window.address
        self._index = (
            base + W_EPOCH,
            base + W_CAPACITY,
            base + self.layout.index,
            self.layout.largest_index,
            base + self.layout.entries,
            self.layout.entry_count,
        )
        found = self.word(W_MAGIC), self.word(W_VERSION)
        if found != (MAGIC, VERSION):
            raise Unreadable(f"the peer's directory has magic and version {found}, expected {(MAGIC, VERSION)}")
        if self.word(W_INCARNATION) != incarnation:
            raise Unreadable("the peer's directory belongs to another incarnation than its greeting said")
        if self.word(W_STATE) != LIVE:
            raise Unreadable("the peer is being finalized")
        alive = self.word(W_ALIVE)
        self._life = [(LIFE_AT, alive)] if alive else []

    def guard(self, expected: Sequence[tuple[int, int]]) -> Guard:
        return Guard([*self._life, *expected], self._base, bool(self._life))

    def alive(self) -> bool:
        return all(self.word(offset) == value for offset, value in self._life)

    def word(self, offset: int) -> int:
        return words.load(self._base + offset)

    def find_once(self, key: Key) -> tuple[int, ...] | Literal[False] | None:
        return words.find(*self._index, *key)

    def list_once(self) -> Sequence[tuple[int, ...]] | Literal[False]:
        return words.list_entries(*self._index, CACHE)

    def _read_entry(self, offset: int) -> tuple[int, ...] | None:
        return words.read_entry(self._base + offset)

    def _read_record(self, offset: int, limit: int) -> tuple[int, bytes] | None:
        return words.read_record(self._base + offset, limit)
