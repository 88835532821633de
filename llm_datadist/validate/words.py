"""Whether single words can be exchanged one-sided: two facts that the library does not rely on.

H1: a copy from host to device that has finished is seen by any later read of a peer.
H2: a write of a peer that it has waited for is seen by a later copy from device to host.
"""

from __future__ import annotations

import base64
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from typing import Final

from llm_datadist._kernels.runs import Bases, Plan, span_runs
from llm_datadist._options import LOCAL_COMM_RES
from llm_datadist.backend import Backend, Endpoint, Export, MemoryKind, Pair, Region, make_backend
from llm_datadist.validate.environment import table
from llm_datadist.validate.partner import Partner, control_of, count
from llm_datadist.validate.results import Check, Outcome

__all__ = ["Target", "observe"]

POOL_BYTES: Final = 2 << 20
#: Used in turn, side by side, so that what is old in some cache of the hardware would show.
WORDS: Final = 64
WORD_BYTES: Final = 8
ROUNDS: Final = 10_000
QUICK_ROUNDS: Final = 20
LINK_S: Final = 60.0
TRANSFER_S: Final = 30.0


class Memory:
    """A backend with some device memory, linked to another one."""

    def __init__(self, control: socket.socket, *, first: bool) -> None:
        self._control = control
        self._first = first
        self._stack = ExitStack()
        self._backend: Backend = make_backend(os.environ["LLM_DATADIST_BACKEND"])
        self._endpoint: Endpoint | None = None
        self._backend.open([0], {LOCAL_COMM_RES: table(0)})
        self._stack.callback(self._backend.close)
        self._region: Region = self._backend.reserve(0, POOL_BYTES, MemoryKind.DEVICE)
        self._backend.store(self._region.address, bytes(WORDS * WORD_BYTES))
        self._backend.make_windows(4096, 4096)

    def close(self) -> None:
        """End the link, and give everything back."""
        self._stack.close()

    def describe(self) -> tuple[str, int]:
        """Give what the other side needs: its export, and the id of the region."""
        return base64.b64encode(self._backend.export().data).decode(), self._region.id

    def connect(self, export: str, name: str) -> None:
        """Link; the other side does the same at the same time."""
        pair = Pair(self._control, -1, -1, name, self._first)
        deadline_ns = time.monotonic_ns() + int(LINK_S * 1e9)
        self._endpoint = self._backend.connect(Export(base64.b64decode(export)), pair, deadline_ns)
        self._stack.callback(self._endpoint.close)

    def store(self, word: int, value: int) -> None:
        """Put a value into a word of this side, by a copy that has finished."""
        self._backend.store(self._address(word), value.to_bytes(WORD_BYTES, "little"))

    def load(self, word: int) -> int:
        """Give the value of a word of this side."""
        return int.from_bytes(self._backend.load(self._address(word), WORD_BYTES), "little")

    def get(self, region: int, word: int) -> int:
        """Give the value of a word of the other side."""
        self._transfer(region, word, write=False)
        return self.load(word)

    def put(self, region: int, word: int, value: int) -> None:
        """Put a value into a word of the other side, and wait until it is there."""
        self.store(word, value)
        self._transfer(region, word, write=True)

    def _transfer(self, region: int, word: int, *, write: bool) -> None:
        assert self._endpoint is not None
        place = self._endpoint.locate(region, word * WORD_BYTES, WORD_BYTES)
        bases = [self._address(word)], [place.base]
        plan = Plan(Bases(*bases) if write else Bases(*bases[::-1]), span_runs(0, 0, WORD_BYTES))
        move = self._endpoint.write if write else self._endpoint.read
        move(plan, None, time.monotonic_ns() + int(TRANSFER_S * 1e9), place.route)

    def _address(self, word: int) -> int:
        return self._region.address + word * WORD_BYTES


class Target:
    """The partner's side."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._memory: Memory | None = None
        self.calls: dict[str, Callable[..., object]] = {
            "open": self._open,
            "connect": lambda export, name: self._opened().connect(export, name),
            "store": lambda word, value: self._opened().store(_word(word), count("value", value, 1 << 62)),
            "load": lambda word: self._opened().load(_word(word)),
        }

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._memory is not None:
            self._memory.close()

    def _open(self) -> tuple[str, int]:
        self._memory = Memory(self._control, first=False)
        return self._memory.describe()

    def _opened(self) -> Memory:
        if self._memory is None:
            raise ValueError("no memory is open yet")
        return self._memory


def _word(word: object) -> int:
    if type(word) is not int or not 0 <= word < WORDS:
        raise ValueError(f"word is {word!r:.100}, allowed are 0 to {WORDS - 1}")
    return word


def observe(connection: Connection, quick: bool) -> Iterator[Check]:
    """Link to the partner, and look at both facts in many rounds.

    Parameters
    ----------
    connection : Connection
        Leads to the partner.
    quick : bool
        A few rounds only.
    """
    if make_backend(os.environ["LLM_DATADIST_BACKEND"]).capabilities.mapped_words:
        yield Check("words", Outcome.SKIPPED, "this backend maps the words of its peers")
        return
    partner = Partner(connection)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with control_of(connection) as control, closing(Memory(control, first=True)) as memory:
        export, region = partner.ask("open")
        name = f"validate-{os.getpid()}-{time.monotonic_ns()}"
        partner.start("connect", export=memory.describe()[0], name=name)
        memory.connect(export, name)
        partner.answer()

        def stored_there(word: int, value: int) -> int:
            partner.ask("store", word=word, value=value)
            return memory.get(region, word)

        def put_there(word: int, value: int) -> int:
            memory.put(region, word, value)
            seen: int = partner.ask("load", word=word)
            return seen

        # No value is used twice: it could have been left by what was looked at before.
        h1, h2 = range(1, rounds + 1), range(rounds + 1, 2 * rounds + 1)
        yield _fact("H1", "a finished copy from host to device is seen by a later remote read", stored_there, h1)
        yield _fact("H2", "a remote write that has ended is seen by a later copy to the host", put_there, h2)


def _fact(name: str, what: str, exchange: Callable[[int, int], int], values: Sequence[int]) -> Check:
    misses = 0
    first = ""
    rounds = len(values)
    for value in values:
        seen = exchange(value % WORDS, value)
        if seen != value:
            misses += 1
            first = first or f", first {seen} instead of {value}"
    figures = {"rounds": rounds, "misses": misses}
    if misses:
        text = f"{what}: did not hold in {misses} of {rounds} rounds{first}"
        return Check(name, Outcome.WARNING, text, "nothing: the library does not rely on it", figures)
    return Check(name, Outcome.OK, f"{what}: held in {rounds} rounds", figures=figures)
