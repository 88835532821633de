"""The board: what peers leave behind for an engine. They write, the owner reads and trusts nothing.

Every write is idempotent and carries a generation that is never used twice, so no remote atomic is needed, and a write
that comes late means nothing to the next owner of the same word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

from llm_datadist._engine.directory import MAX_LINKS, PAGE, Entry, Layout, Unreadable
from llm_datadist._engine.space import Space
from llm_datadist._kernels import words
from llm_datadist.backend import Window

__all__ = ["Board", "MappedBoard", "PeerBoard"]

PINS_AT = PAGE
SPENT_AT = PINS_AT + MAX_LINKS * 16


def tag_of(generation: int) -> int:
    """Shorten a binding generation to the 32 bits of a tag; never 0, which a fresh board holds."""
    return (generation >> 1) % 0xFFFFFFFF + 1


class Board:
    """The owner's side. Not thread-safe: the engine's table lock guards it."""

    def __init__(self, window: Window, entry_count: int) -> None:
        self._base = window.address
        self._tags_at = SPENT_AT + entry_count * 8
        self._tags = Space(window.nbytes - self._tags_at, 4)

    def take_tags(self, num_tensors: int) -> int:
        """Reserve and clear one tag per source tensor; return their offset in the board."""
        offset = self._tags.take(num_tensors * 4)
        if offset is None:
            raise MemoryError("the board has no room for another key")
        words.clear(self._base + self._tags_at + offset, num_tensors * 4)
        return self._tags_at + offset

    def give_tags(self, offset: int, num_tensors: int) -> None:
        """Let the tags of a key that is gone be used again."""
        self._tags.give(offset - self._tags_at, num_tensors * 4)

    def pinned(self, generation: int) -> list[int]:
        """Give the link slots whose peers are writing into the memory of this generation."""
        return words.pinned(self._base + PINS_AT, MAX_LINKS, generation)

    def pin(self, slot: int) -> int:
        """Give the generation of the memory that the peer of a link slot is writing into, or 0."""
        return words.load(self._base + PINS_AT + slot * 16)

    def unpin(self, slot: int) -> None:
        """Clear the pin of a link slot before its next peer gets it."""
        words.store(self._base + PINS_AT + slot * 16, 0)

    def spent(self, bindings: array[int]) -> list[int]:
        """Of flat (entry number, binding generation) pairs, give the positions of those that peers have spent."""
        return words.equal_words(self._base + SPENT_AT, bindings)


class PeerBoard(ABC):
    """A peer's board. How its words are reached is a matter of the subclass."""

    @abstractmethod
    def pin(self, slot: int, generation: int) -> None:
        """Say that I write into the memory of this generation, before I look whether it is still there."""

    @abstractmethod
    def unpin(self, slot: int) -> None:
        """Say that I write no more. Harmless when nothing was pinned."""

    @abstractmethod
    def is_spent(self, entry: Entry) -> bool:
        """Say whether someone has pulled what this key stood for."""

    @abstractmethod
    def spend(self, entry: Entry) -> None:
        """Tell the owner that this key has been pulled."""

    @abstractmethod
    def spend_tensors(self, entry: Entry, tensors: range, num_tensors: int) -> None:
        """Tell the owner that these tensors have been pulled; the last of all spends the key."""


class MappedBoard(PeerBoard):
    """A peer's board, mapped here."""

    def __init__(self, window: Window, directory: Layout) -> None:
        self._base = window.address
        self._tags_at = SPENT_AT + directory.entry_count * 8
        self._nbytes = window.nbytes
        if self._nbytes < self._tags_at:
            raise Unreadable(f"the peer's board has {window.nbytes} bytes, its directory needs {self._tags_at}")

    def pin(self, slot: int, generation: int) -> None:
        words.store(self._base + PINS_AT + slot * 16, generation)

    def unpin(self, slot: int) -> None:
        words.store(self._base + PINS_AT + slot * 16, 0)

    def is_spent(self, entry: Entry) -> bool:
        return words.load(self._base + SPENT_AT + entry.number * 8) == entry.generation

    def spend(self, entry: Entry) -> None:
        words.store(self._base + SPENT_AT + entry.number * 8, entry.generation)

    def spend_tensors(self, entry: Entry, tensors: range, num_tensors: int) -> None:
        if entry.tags % 4 or not self._tags_at <= entry.tags <= self._nbytes - num_tensors * 4:
            # A peer that publishes nonsense only loses the release of its own key.
            return
        tags = array("I", tensors)
        if words.mark_tags(self._base + entry.tags, tags, tag_of(entry.generation), num_tensors):
            self.spend(entry)
