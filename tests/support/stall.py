"""Transfers that stand still at a chosen byte, so that tests can look at what happens meanwhile.

The only test code that knows how a backend is told to misbehave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import disturbed

from llm_datadist.backends.simulator.faults import Faults

LIMIT_S = 30.0
R = TypeVar("R", bound="Running")


def set_faults(dd: Any, **faults: Any) -> Faults:
    """Set faults for all transfers of an engine of this process."""
    made = Faults(**faults)
    disturbed.set_faults(dd._engine, made)
    return made


def clear_faults(dd: Any) -> None:
    """Let transfers run undisturbed again."""
    disturbed.set_faults(dd._engine, None)


class Running:
    """A call in another thread. Leaving the block waits for its end."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name="call in another thread")
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self.error = error

    def wait(self) -> BaseException | None:
        """Wait for the call's end; give what it raised."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the call did not end"
        return self.error

    def ended(self, within_s: float) -> bool:
        """Say whether the call ends within some time."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def finish(self) -> BaseException | None:
        """Wait for the call's end; give what it raised."""
        return self.wait()

    def __enter__(self: R) -> R:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


class Stalled(Running):
    """A call in another thread whose transfer has copied ``at`` bytes and stands still there.

    Only this transfer is disturbed. Leaving the block lets it go on, and waits for its end; `wait` does not let it go.
    """

    def __init__(self, dd: Any, call: Callable[[], object], at: int = 0) -> None:
        self._faults = set_faults(dd, stall_at_byte=at)
        super().__init__(call)
        assert self._faults.stall_entered.wait(LIMIT_S), "the transfer did not begin"
        clear_faults(dd)

    def finish(self) -> BaseException | None:
        """Let the transfer go on, and wait for the call's end; give what it raised."""
        self._faults.resume.set()
        return self.wait()
