"""Directory and board where a peer's words are not mapped: its service thread is asked for them, frame by frame.

The same words as elsewhere, carried by PEEK and POKE frames. Each request is answered in one step of the owner's
service thread, in the order of the connection, so what a peer writes before it looks is there when it looks.
"""

from __future__ import annotations

import base64
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from llm_datadist._engine.board import MappedBoard, PeerBoard
from llm_datadist._engine.directory import ENTRY_BYTES, Entry, Key, Layout, MappedDirectory, PeerDirectory, Unreadable
from llm_datadist._engine.wire import Frame, Kind, Malformed
from llm_datadist._kernels import words
from llm_datadist._kernels.runs import Plan
from llm_datadist.backend import BackendError, Endpoint, Failure, Window

__all__ = ["Answerer", "Ask", "AskedBoard", "AskedDirectory", "GuardedMoves"]

#: So that an answer fits into a frame: a record comes in parts of so many words, a list of entries in parts of so many.
WORDS = 4096
ENTRIES = 256
#: The tail of a push must reach the owner even when the push itself ran out of time.
UNPIN_NS = 10**9

#: Sends a request of this kind by a deadline (None: that of the operation that has the link), and gives the answer.
Ask: TypeAlias = Callable[[Kind, dict[str, object], int | None], Frame]
#: (offset in the directory, value) of words that must hold their value.
Expected: TypeAlias = tuple[tuple[int, int], ...]


class AskedDirectory(PeerDirectory):
    """A peer's directory, whose words are asked for."""

    pins_reads = True

    def __init__(self, nbytes: int, ask: Ask) -> None:
        super().__init__(Layout.of(nbytes))
        self._ask = ask

    def guard(self, expected: Sequence[tuple[int, int]]) -> Expected:
        return tuple(expected)

    def holds(self, expected: Expected) -> bool:
        """Say whether all the words of a guard hold their values at this moment."""
        found = self._words([number for offset, _ in expected for number in (offset, 1)])
        return [int.from_bytes(found[i * 8 : i * 8 + 8], "little") for i in range(len(expected))] == [
            value for _, value in expected
        ]

    def alive(self) -> bool:
        # Whoever is gone does not answer.
        return True

    def word(self, offset: int) -> int:
        return int.from_bytes(self._words([offset, 1]), "little")

    def _words(self, spans: list[int]) -> bytes:
        """Read (offset, number of words) spans, one after the other."""
        answer = self._ask(Kind.PEEK, {"words": spans}, None)
        try:
            data = base64.b64decode(answer.text("words"), validate=True)
        except (ValueError, Malformed) as e:
            raise Unreadable(f"the peer's answer is wrong: {e}") from e
        if len(data) != 8 * sum(spans[1::2]):
            raise Unreadable(f"the peer's answer has {len(data)} bytes, {8 * sum(spans[1::2])} were asked for")
        return data

    def find_once(self, key: Key) -> tuple[int, ...] | Literal[False] | None:
        answer = self._ask(Kind.PEEK, {"find": list(key)}, None)
        found = self._rows(answer, "entry", 6)
        if "again" in answer.body:
            return False
        return found[0] if found else None

    def list_once(self) -> Sequence[tuple[int, ...]] | Literal[False]:
        entries: list[tuple[int, ...]] = []
        while True:
            first = entries[-1][0] + 1 if entries else 0
            answer = self._ask(Kind.PEEK, {"list": first}, None)
            if "again" in answer.body:
                return False
            found = self._rows(answer, "entries", 6)
            if not found:
                return entries
            if [row[0] for row in found] != sorted({row[0] for row in found}) or found[0][0] < first:
                raise Unreadable("the peer's list of caches is out of order")
            entries += found

    def _rows(self, answer: Frame, name: str, columns: int) -> list[tuple[int, ...]]:
        try:
            numbers = answer.numbers(name)
        except Malformed as e:
            raise Unreadable(f"the peer's answer is wrong: {e}") from e
        rows = [tuple(numbers[i : i + columns]) for i in range(0, len(numbers), columns)]
        if any(len(row) != columns or row[0] >= self.layout.entry_count for row in rows):
            raise Unreadable(f"the peer's answer has a wrong {name!r}")
        return rows

    def _read_entry(self, offset: int) -> tuple[int, ...] | None:
        copy = ctypes.create_string_buffer(self._words([offset, ENTRY_BYTES // 8]), ENTRY_BYTES)
        return words.read_entry(ctypes.addressof(copy))

    def _read_record(self, offset: int, limit: int) -> tuple[int, bytes] | None:
        size = int.from_bytes(self._words([offset + 8, 1]), "little")
        if size % 8 or size > limit:
            return None
        # Parts of different writings don't pass for one record: its two generations and its checksum would not agree.
        parts = []
        while size:
            part = min(size, WORDS * 8)
            parts.append(self._words([offset, part // 8]))
            offset, size = offset + part, size - part
        data = b"".join(parts)
        copy = ctypes.create_string_buffer(data, len(data) + 8)
        return words.read_record(ctypes.addressof(copy), len(data))


class AskedBoard(PeerBoard):
    """A peer's board, which its owner writes to on request. The owner knows which link's pin is meant."""

    def __init__(self, ask: Ask, give_up: Callable[[str], None]) -> None:
        self._ask = ask
        self._give_up = give_up
        self._pinned = False

    def pin(self, slot: int, generation: int) -> None:
        self._pinned = True
        self._ask(Kind.POKE, {"pin": generation}, None)

    def unpin(self, slot: int) -> None:
        if not self._pinned:
            return
        try:
            self._ask(Kind.POKE, {"pin": 0}, time.monotonic_ns() + UNPIN_NS)
        except (BackendError, Unreadable) as e:
            # The end of the connection says it too: the owner then waits for the endpoint to be taken down.
            self._give_up(f"the end of a push could not be told (timed out): {e}")
        self._pinned = False

    def is_spent(self, entry: Entry) -> bool:
        answer = self._ask(Kind.PEEK, {"spent": entry.number, "generation": entry.generation}, None)
        return bool(answer.body.get("is_spent"))

    def spend(self, entry: Entry) -> None:
        self._ask(Kind.POKE, {"spend": entry.number, "generation": entry.generation}, None)

    def spend_tensors(self, entry: Entry, tensors: range, num_tensors: int) -> None:
        body: dict[str, object] = {
            "spend": entry.number,
            "generation": entry.generation,
            "tags": entry.tags,
            "first": tensors.start,
            "count": len(tensors),
            "total": num_tensors,
        }
        self._ask(Kind.POKE, body, None)


class GuardedMoves:
    """Reads and writes of an endpoint that can't look at guard words itself: they are asked for before and after."""

    def __init__(self, endpoint: Endpoint, directory: AskedDirectory) -> None:
        self._endpoint = endpoint
        self._directory = directory

    def read(self, plan: Plan, guard: Expected, deadline_ns: int, route: int) -> None:
        """Copy a plan from the peer; like `Endpoint.read`."""
        self._check(guard, Failure.STALE)
        self._endpoint.read(plan, None, deadline_ns, route)
        self._check(guard, Failure.TORN)

    def write(self, plan: Plan, guard: Expected, deadline_ns: int, route: int) -> None:
        """Copy a plan to the peer; like `Endpoint.write`."""
        self._check(guard, Failure.STALE)
        self._endpoint.write(plan, None, deadline_ns, route)
        self._check(guard, Failure.TORN)

    def _check(self, guard: Expected, otherwise: Failure) -> None:
        if not self._directory.holds(guard):
            raise BackendError(otherwise, f"{otherwise.value}.".capitalize())


class Answerer:
    """The owner's side: reads and writes its own windows for peers, and bounds what they ask."""

    def __init__(self, directory: Window, board: Window, incarnation: int) -> None:
        self._window = directory
        self._directory = MappedDirectory(directory, incarnation)
        self._board = MappedBoard(board, self._directory.layout)

    def peek(self, frame: Frame) -> dict[str, object]:
        """Answer a PEEK frame; raises `Malformed`."""
        if "words" in frame.body:
            return {"words": base64.b64encode(self._read(frame.numbers("words"))).decode()}
        if "find" in frame.body:
            key = frame.numbers("find")
            if len(key) != 3:
                raise Malformed(f"a PEEK frame looks for {key!r}, expected three numbers")
            found = self._directory.find_once(Key(*key))
            return {"entry": found or [], **({"again": 1} if found is False else {})}
        if "list" in frame.body:
            first = frame.number("list")
            listed = self._directory.list_once()
            rows = sorted(row for row in listed or () if row[0] >= first)[:ENTRIES]
            return {"entries": [n for row in rows for n in row], **({"again": 1} if listed is False else {})}
        return {"is_spent": int(self._board.is_spent(self._entry(frame, "spent")))}

    def poke(self, frame: Frame, slot: int) -> dict[str, object]:
        """Carry a POKE frame of the peer of a link slot out; raises `Malformed`."""
        if slot < 0:
            raise Malformed("a POKE frame came after the end of its link")
        if "pin" in frame.body:
            self._board.pin(slot, frame.number("pin"))
        elif "tags" in frame.body:
            total = frame.number("total", self._window.nbytes)
            first, count = frame.number("first", total), frame.number("count", total)
            if first + count > total:
                raise Malformed(f"a POKE frame has tensors {first} to {first + count - 1} of {total}")
            entry = self._entry(frame, "spend", tags=frame.number("tags"))
            self._board.spend_tensors(entry, range(first, first + count), total)
        else:
            self._board.spend(self._entry(frame, "spend"))
        return {}

    def _entry(self, frame: Frame, name: str, tags: int = 0) -> Entry:
        number = frame.number(name, self._directory.layout.entry_count - 1)
        return Entry(number, frame.number("generation"), 0, 0, tags, 0)

    def _read(self, spans: list[int]) -> bytes:
        pairs = list(zip(spans[::2], spans[1::2], strict=False))
        if len(spans) % 2 or sum(count for _, count in pairs) > WORDS:
            raise Malformed(
                f"a PEEK frame asks for {spans!r:.100}, allowed are {WORDS} words as (offset, number) pairs"
            )
        for offset, count in pairs:
            if offset % 8 or offset + 8 * count > self._window.nbytes:
                raise Malformed(f"a PEEK frame asks for {count} words at byte {offset} of {self._window.nbytes}")
        # One call each, under the GIL, as are all writers of the directory: no span is half old and half new.
        return b"".join(ctypes.string_at(self._window.address + offset, 8 * count) for offset, count in pairs)
