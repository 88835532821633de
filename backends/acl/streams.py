"""Streams: work is put on them, waited for within a time limit, and dropped when something went wrong."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Final

from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.acl.devices import Device
from llm_datadist.backends.acl.library import NativeError
from llm_datadist.backends.acl.structures import StreamFlag

__all__ = ["Stream"]

#: So that signals, and the peer's death, are seen meanwhile.
SLICE_MS: Final = 100
_NOT_DONE_YET: Final = 507046


class Stream:
    """A stream of one device. All methods but the constructor raise `NativeError` when the driver refuses."""

    def __init__(self, device: Device) -> None:
        self._device = device
        #: Nothing that was put on it runs any more.
        self.aborted = False
        made = ctypes.c_void_p()
        with device.current():
            device.library.call(
                "aclrtCreateStreamWithConfig", ctypes.byref(made), 0, StreamFlag.FAST_LAUNCH | StreamFlag.FAST_SYNC
            )
        self.handle = made.value

    def wait(self, deadline_ns: int, alive: Callable[[], bool]) -> None:
        """Wait until all that was put on the stream is done.

        Raises
        ------
        BackendError
            ``TIMED_OUT``, or ``PEER_GONE`` once ``alive`` says no. The work goes on until `abort`.
        """
        while True:
            left_ms = -(-(deadline_ns - time.monotonic_ns()) // 1_000_000)
            try:
                with self._device.current():
                    # The driver would take 0 for an error, and -1 for ever.
                    self._device.library.call(
                        "aclrtSynchronizeStreamWithTimeout", self.handle, max(1, min(left_ms, SLICE_MS))
                    )
                return
            except NativeError as error:
                if error.code != _NOT_DONE_YET:
                    raise
            if not alive():
                raise BackendError(Failure.PEER_GONE, "the peer's process has ended, or its connection is closed")
            if time.monotonic_ns() >= deadline_ns:
                raise BackendError(Failure.TIMED_OUT, "the work did not end within its time limit", _NOT_DONE_YET)

    def abort(self) -> None:
        """Stop what runs and drop what is queued; from then on the stream can only be destroyed."""
        if not self.aborted:
            with self._device.current():
                self._device.library.call("aclrtStreamAbort", self.handle)
            self.aborted = True

    def destroy(self) -> None:
        """Abort and end the stream. One that can't be aborted is left alone: the driver would wait for its work."""
        self.abort()
        with self._device.current():
            self._device.library.call("aclrtDestroyStream", self.handle)
