"""Which addresses of this process are sure to be memory, and copies that no address can turn into a signal."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import threading
from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Final

from llm_datadist._kernels import hostcopy, process
from llm_datadist._kernels.runs import Plan
from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.host.intervals import Intervals

__all__ = ["HostMemory", "failure_of", "maps"]

#: Begin, end and the first two permissions of a line of /proc/self/maps.
_MAPPING: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (..)", re.MULTILINE)
#: Asks for one mapping: size, flags, address; then begin, end and flags of the mapping, and more.
_PROCMAP: Final = struct.Struct("=9Q4I2Q")
PROCMAP_QUERY: Final = 0xC0686611
READ_WRITE: Final = 3
_FAILURES: Final = {
    errno.EFAULT: Failure.INVALID,
    errno.ESRCH: Failure.PEER_GONE,
    errno.EPERM: Failure.UNSUPPORTED,
    errno.ENOSYS: Failure.UNSUPPORTED,
    errno.ENOMEM: Failure.OUT_OF_MEMORY,
}


class HostMemory:
    """What is known of addresses that local copies use. Thread-safe."""

    def __init__(self) -> None:
        #: Ranges that are memory, with how often that was said.
        self._ranges: Counter[tuple[int, int]] = Counter()
        self._known = Intervals()
        #: The same, as `process.covered` takes it.
        self._words = b""
        self._lock = threading.Lock()

    def add(self, address: int, nbytes: int) -> None:
        """Say that a range is memory until it is removed."""
        with self._lock:
            self._ranges[address, address + nbytes] += 1
            self._publish()

    def remove(self, address: int, nbytes: int) -> None:
        """Take back what `add` was told once."""
        with self._lock:
            self._ranges[address, address + nbytes] -= 1
            self._ranges += Counter()  # drops what is zero
            self._publish()

    def _publish(self) -> None:
        known = Intervals()
        for begin, end in self._ranges:
            known.add(begin, end)
        self._known, self._words = known, array("Q", [word for part in known for word in part]).tobytes()

    def check(self, spans: Iterable[tuple[int, int]]) -> None:
        """Refuse (begin, end) ranges that are not memory now, before something touches them that would not.

        Raises
        ------
        BackendError
            ``INVALID``, with the first part that is no memory.
        """
        known = self._known
        unknown = [span for span in spans if known.gaps(*span)]
        if unknown:
            _, usable = maps()
            for begin, end in unknown:
                for absent, until in usable.gaps(begin, end):
                    raise BackendError(
                        Failure.INVALID,
                        f"{end - begin} bytes at {begin:#x} are not memory of this process that can be read and "
                        f"written: nothing is at {absent:#x} to {until:#x}",
                    )

    def copy(self, plan: Plan, threads: int, *, ordered: bool) -> None:
        """Copy inside this process, directly where memory is known to be, else by the kernel."""
        if not process.covered(plan, self._words) and not _is_memory(plan):
            try:
                process.transfer(plan, os.getpid(), False, None, None, 0, 1 if ordered else threads)
            except OSError as error:
                raise failure_of(error) from error
        elif ordered:
            hostcopy.move(plan)
        else:
            hostcopy.copy(plan, None, None, 0, threads)


def failure_of(error: OSError) -> BackendError:
    """Translate what `process.transfer` raises; its text names the address and whose it is."""
    number = error.errno or 0
    return BackendError(_FAILURES.get(number, Failure.FAILED), f"Copying failed: {error.strerror}.", number)


def _is_memory(plan: Plan) -> bool:
    """Look whether a plan's addresses are memory now: nobody says when memory goes that was never registered."""
    sources, destinations = zip(*plan.bases.tolist(), strict=True)
    sides = (sources, plan.runs.source_end), (destinations, plan.runs.destination_end)
    spans = [(base, base + nbytes) for bases, nbytes in sides for base in bases]
    try:
        return _usable(spans)
    except OSError:  # before Linux 6.11, or in a sandbox that forbids to ask
        _, usable = maps()
        return not any(usable.gaps(*span) for span in spans)


def _usable(spans: Iterable[tuple[int, int]]) -> bool:
    """Ask the kernel for the mappings of some ranges alone; OSError where it does not answer that.

    The list of all mappings takes a microsecond for each, which with some hundreds is longer than many a copy.
    """
    first = last = 0
    with open("/proc/self/maps", "rb", buffering=0) as file:
        for begin, end in spans:
            while begin < end:
                if not first <= begin < last:
                    query = _PROCMAP.pack(_PROCMAP.size, 0, begin, *[0] * 12)
                    try:
                        _, _, _, first, last, flags, *_ = _PROCMAP.unpack(fcntl.ioctl(file, PROCMAP_QUERY, query))
                    except OSError as error:
                        if error.errno != errno.ENOENT:
                            raise
                        return False
                    if flags & READ_WRITE != READ_WRITE:
                        return False
                begin = last
    return True


def maps() -> tuple[Intervals, Intervals]:
    """Give what is mapped in this process, and what of it can be read and written."""
    # The list is no snapshot: where mappings change meanwhile, lines may overlap.
    with open("/proc/self/maps", "rb", buffering=0) as file:
        found = _MAPPING.findall(file.readall())
    spans = [(int(begin, 16), int(end, 16)) for begin, end, _ in found]
    return Intervals(spans), Intervals(span for span, (_, _, how) in zip(spans, found, strict=True) if how == b"rw")
