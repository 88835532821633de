"""Memory that users own: which of it is really there, and which only the kernel may touch for us."""

from __future__ import annotations

import os
import threading
import warnings
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Final

from llm_datadist._kernels import hostcopy, process
from llm_datadist._kernels.runs import Plan
from llm_datadist.backend import MemoryKind, Region
from llm_datadist.backends.simulator import failures
from llm_datadist.backends.simulator.intervals import Intervals

__all__ = ["ADDRESSES", "REGISTERED", "UserMemory"]

#: Id of the one region that all registered memory is in. It is any peer's too, so late registration needs no message.
REGISTERED: Final = 1 << 16
#: No address of a user's memory is higher: 48 bits on aarch64, 47 on x86-64.
ADDRESSES: Final = 1 << 48


class UserMemory:
    """Registered ranges, and what is known of addresses that local copies use. Thread-safe."""

    def __init__(self) -> None:
        #: Registered ranges that can't be read and written as they are.
        self._wild: list[tuple[int, int]] = []
        #: Registered ranges that are memory, with how often.
        self._registered: Counter[tuple[int, int]] = Counter()
        self._own = Intervals()
        #: What is sure to be memory, as `process.covered` takes it.
        self._known_words = b""
        self._lock = threading.Lock()

    def register(self, addresses: Sequence[int], nbytes: int) -> list[Region]:
        """Take in ranges of one size, and say it when there is no memory."""
        mapped, usable = _maps()
        absent = [address for address in addresses if mapped.gaps(address, address + nbytes)]
        if absent:
            warnings.warn(
                f"Registered memory of {nbytes} bytes at {', '.join(map(hex, absent[:4]))}"
                f"{', ...' if len(absent) > 4 else ''} is not (all) mapped in this process; transfers of it will fail",
                RuntimeWarning,
                stacklevel=2,
            )
        with self._lock:
            for address in addresses:
                if usable.gaps(address, address + nbytes):
                    self._wild.append((address, address + nbytes))
                else:
                    self._registered[address, address + nbytes] += 1
            self._publish()
        return [Region(REGISTERED, 0, MemoryKind.HOST, 0, 2**64 - 1) for _ in addresses]

    def unregister(self, addresses: Sequence[int], nbytes: int) -> None:
        """Forget ranges."""
        with self._lock:
            for address in addresses:
                span = address, address + nbytes
                if span in self._wild:
                    self._wild.remove(span)
                else:
                    self._registered[span] -= 1
                    self._registered += Counter()  # drops what is zero
            self._publish()

    def add(self, address: int, nbytes: int) -> None:
        """Say that a range is memory as long as the backend is open."""
        with self._lock:
            self._own.add(address, address + nbytes)
            self._publish()

    @property
    def any_wild(self) -> bool:
        """Whether there is any such range at all."""
        return bool(self._wild)

    def wild(self, plan: Plan, *, written: bool) -> bool:
        """Say whether the sources (or what is ``written``) of a plan may only be touched by the kernel."""
        wild = tuple(self._wild)
        nbytes = plan.runs.destination_end if written else plan.runs.source_end
        bases = [pair[written] for pair in plan.bases.tolist()]
        return any(begin < base + nbytes and base < end for base in bases for begin, end in wild)

    def copy(self, plan: Plan, threads: int, *, ordered: bool) -> None:
        """Copy inside this process, directly where memory is known to be, else by the kernel."""
        if not process.covered(plan, self._known_words) and not _is_memory(plan):
            try:
                process.transfer(plan, os.getpid(), False, None, None, 0, 1 if ordered else threads)
            except OSError as error:
                raise failures.of_kernel(error) from error
        elif ordered:
            hostcopy.move(plan)
        else:
            hostcopy.copy(plan, None, None, 0, threads)

    def _publish(self) -> None:
        known = Intervals()
        for begin, end in (*self._own, *self._registered):
            known.add(begin, end)
        self._known_words = array("Q", [word for part in known for word in part]).tobytes()


def _is_memory(plan: Plan) -> bool:
    """Look whether a plan's addresses are memory now: nobody says when memory goes that was never registered."""
    _, usable = _maps()
    runs = plan.runs
    return not any(
        usable.gaps(source, source + runs.source_end) or usable.gaps(destination, destination + runs.destination_end)
        for source, destination in plan.bases.tolist()
    )


def _maps() -> tuple[Intervals, Intervals]:
    """Give what is mapped in this process, and what of it can be read and written."""
    mapped, usable = Intervals(), Intervals()
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, permissions, _ = line.split(" ", 2)
            begin, end = (int(text, 16) for text in span.split("-"))
            mapped.add(begin, end)
            if permissions.startswith("rw"):
                usable.add(begin, end)
    return mapped, usable
