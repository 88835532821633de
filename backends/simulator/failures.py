"""From what a copy reports to what a backend raises."""

from __future__ import annotations

import errno
from typing import Final

from llm_datadist._kernels import hostcopy
from llm_datadist.backend import BackendError, Failure

__all__ = ["gone", "of_kernel", "of_outcome"]

_OUTCOMES: Final = {
    hostcopy.TIMED_OUT: (Failure.TIMED_OUT, "The transfer did not end within its time limit."),
    hostcopy.STALE: (Failure.STALE, "The peer changed or released the cache before the transfer began."),
    hostcopy.TORN: (Failure.TORN, "The peer changed or released the cache during the transfer."),
    hostcopy.PEER_GONE: (Failure.PEER_GONE, "The peer's process has ended, or its connection is closed."),
}
_ERRORS: Final = {
    errno.EFAULT: Failure.INVALID,
    errno.ESRCH: Failure.PEER_GONE,
    errno.EPERM: Failure.UNSUPPORTED,
    errno.ENOSYS: Failure.UNSUPPORTED,
    errno.ENOMEM: Failure.OUT_OF_MEMORY,
}


def of_outcome(outcome: int) -> BackendError:
    """Translate an outcome other than DONE."""
    return BackendError(*_OUTCOMES[outcome])


def gone() -> BackendError:
    """Say that the peer is gone."""
    return of_outcome(hostcopy.PEER_GONE)


def of_kernel(error: OSError) -> BackendError:
    """Translate what `process.transfer` raises; its text names the address and whose it is."""
    number = error.errno or 0
    return BackendError(_ERRORS.get(number, Failure.FAILED), f"Copying failed: {error.strerror}.", number)
