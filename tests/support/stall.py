"""Transfers that stand still at a chosen byte, so that tests can look at what happens meanwhile.

The only test code that knows how a backend is told to misbehave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from llm_datadist.backends.simulator.faults import Faults

LIMIT_S = 30.0


def set_faults(dd: Any, **faults: Any) -> Faults:
    """Set faults for all transfers of an engine of this process."""
    made = Faults(**faults)
    dd._engine.backend.faults = made
    return made


def clear_faults(dd: Any) -> None:
    """Let transfers run undisturbed again."""
    dd._engine.backend.faults = None


class Stalled:
    """A call in another thread whose transfer has copied ``at`` bytes and stands still there.

    Only this transfer is disturbed. Leaving the block lets it go on, and waits for its end.
    """

    def __init__(self, dd: Any, call: Callable[[], object], at: int = 0) -> None:
        self._faults = set_faults(dd, stall_at_byte=at)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name="stalled transfer")
        self._thread.start()
        assert self._faults.stall_entered.wait(LIMIT_S), "the transfer did not begin"
        clear_faults(dd)

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self.error = error

    def wait(self) -> BaseException | None:
        """Wait for the call's end without letting the transfer go on; give what it raised."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the stalled call did not end"
        return self.error

    def finish(self) -> BaseException | None:
        """Let the transfer go on, and wait for the call's end; give what it raised."""
        self._faults.resume.set()
        return self.wait()

    def __enter__(self) -> Stalled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
