"""Faults on demand: what tests use to see time limits, dead peers and failed transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from llm_datadist._kernels import hostcopy
from llm_datadist._kernels.runs import Plan
from llm_datadist.backend import BackendError, Failure

__all__ = ["Copy", "Faults"]

#: `hostcopy.copy`, or what takes the same arguments.
Copy: TypeAlias = Callable[..., int]

#: How often a faked wait looks at the peer and at the clock.
LOOK_SECONDS: Final = 0.02


@dataclass(eq=False)
class Faults:
    """Set on `SimulatorBackend.faults`, it changes every transfer that starts from then on.

    Parameters
    ----------
    delay_s : float
        Seconds to wait before each transfer.
    fail_nth : int, optional
        The transfer with this number, counted from 1, fails before it copies anything.
    stall_at_byte : int, optional
        Copy so many bytes, set `stall_entered`, and go on when `resume` is set.
    drop : bool
        Each endpoint says that its peer is gone.
    """

    delay_s: float = 0.0
    fail_nth: int | None = None
    stall_at_byte: int | None = None
    drop: bool = False
    stall_entered: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)
    _transfers: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def copy(
        self,
        copy: Copy,
        plan: Plan,
        guard: hostcopy.Guard | None,
        liveness: hostcopy.Liveness,
        deadline_ns: int,
        threads: int,
    ) -> int:
        """Copy with `copy`, and with the faults that are set."""
        with self._lock:
            self._transfers += 1
            number = self._transfers
        if self.drop:
            return hostcopy.PEER_GONE
        if number == self.fail_nth:
            raise BackendError(Failure.FAILED, f"Transfer {number} failed, as a fault that was asked for.")
        if self.delay_s:
            end = time.monotonic() + self.delay_s
            outcome = _wait(lambda seconds: _sleep_until(end, seconds), liveness, deadline_ns)
            if outcome != hostcopy.DONE:
                return outcome
        if self.stall_at_byte is None:
            return copy(plan, guard, liveness, deadline_ns, threads)
        stall = min(self.stall_at_byte, plan.runs.nbytes * len(plan.bases))
        outcome = copy(plan, guard, liveness, deadline_ns, threads, 0, stall)
        if outcome == hostcopy.DONE:
            self.stall_entered.set()
            outcome = _wait(self.resume.wait, liveness, deadline_ns)
        if outcome == hostcopy.DONE:
            outcome = copy(plan, guard, liveness, deadline_ns, threads, stall, -1)
            # Nothing is untouched any more, whatever the second half found before its own first byte.
            outcome = hostcopy.TORN if outcome == hostcopy.STALE else outcome
        return outcome


def _sleep_until(end: float, seconds: float) -> bool:
    time.sleep(max(0.0, min(seconds, end - time.monotonic())))
    return time.monotonic() >= end


def _wait(done: Callable[[float], bool], liveness: hostcopy.Liveness, deadline_ns: int) -> int:
    while not done(LOOK_SECONDS):
        if not liveness.alive():
            return hostcopy.PEER_GONE
        if deadline_ns and time.monotonic_ns() >= deadline_ns:
            return hostcopy.TIMED_OUT
    return hostcopy.DONE
