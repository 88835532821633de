"""From what a copy reports to what a backend raises."""

from __future__ import annotations

from typing import Final

from llm_datadist._kernels import hostcopy
from llm_datadist.backend import BackendError, Failure

__all__ = ["gone", "of_outcome"]

_OUTCOMES: Final = {
    hostcopy.TIMED_OUT: (Failure.TIMED_OUT, "The transfer did not end within its time limit."),
    hostcopy.STALE: (Failure.STALE, "The peer changed or released the cache before the transfer began."),
    hostcopy.TORN: (Failure.TORN, "The peer changed or released the cache during the transfer."),
    hostcopy.PEER_GONE: (Failure.PEER_GONE, "The peer's process has ended, or its connection is closed."),
}


def of_outcome(outcome: int) -> BackendError:
    """Translate an outcome other than DONE."""
    return BackendError(*_OUTCOMES[outcome])


def gone() -> BackendError:
    """Say that the peer is gone."""
    return of_outcome(hostcopy.PEER_GONE)
