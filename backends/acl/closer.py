"""Ends communicators on a thread of its own: it may take seconds, and who closes a link must not wait."""

from __future__ import annotations

import queue
import threading
import time
from typing import Final, Protocol

__all__ = ["Closer"]

#: For one communicator, and for all of them when the backend closes.
LIMIT_NS: Final = 10 * 10**9
ALL_LIMIT_S: Final = 30.0


class Ending(Protocol):
    """What can be ended."""

    def end(self, deadline_ns: int) -> None:
        """End it, or raise."""


class Closer:
    """Ends one thing after the other. Thread-safe."""

    def __init__(self) -> None:
        #: What could not be ended.
        self._failed: list[str] = []
        self._jobs: queue.SimpleQueue[Ending | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Have the thread run, before there is something to end: when it is needed, nothing may fail."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="llm_datadist acl closer", daemon=True)
                thread.start()
                self._thread = thread

    def end(self, ending: Ending) -> None:
        """Have something ended soon."""
        self._jobs.put(ending)

    def close(self) -> list[str]:
        """Wait for all that is to be ended; say what could not be."""
        self._jobs.put(None)
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(ALL_LIMIT_S)
            if thread.is_alive():
                return [*self._failed, f"links did not end within {ALL_LIMIT_S:.0f} s"]
        return self._failed

    def _work(self) -> None:
        while (ending := self._jobs.get()) is not None:
            try:
                ending.end(time.monotonic_ns() + LIMIT_NS)
            except Exception as error:  # whatever it is, the others are to be ended too
                self._failed.append(str(error) or type(error).__name__)
