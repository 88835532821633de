"""Devices: claimed once, and current on whatever thread calls the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.acl.codes import REPEAT_INITIALIZE, Step, failure
from llm_datadist.backends.acl.library import Library, NativeError

__all__ = ["Device", "claim"]


class Device:
    """A claimed device of this process.

    Parameters
    ----------
    library : Library
        The driver.
    id : int
        As this process counts devices, which ``ASCEND_RT_VISIBLE_DEVICES`` may shift.
    context : int
        The device's default context, the same for all threads and all users of it in the process.
    """

    def __init__(self, library: Library, id: int, context: int) -> None:
        self.library = library
        self.id = id
        self._context = context

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device current on this thread, and afterwards what was current before.

        A thread that had none keeps this one: the driver has no way to take it away again.

        Raises
        ------
        BackendError
            When someone else in the process has reset the device.
        """
        before = current_context(self.library)
        if before == self._context:
            yield
            return
        try:
            self.library.call("aclrtSetCurrentContext", self._context)
        except NativeError as error:
            raise failure(error, f"device {self.id} can't be used any more", step=Step.CONTEXT) from error
        try:
            yield
        finally:
            restore(self.library, before)


def current_context(library: Library) -> int | None:
    """Give the context of this thread; None if it has none."""
    found = ctypes.c_void_p()
    return None if library.code("aclrtGetCurrentContext", ctypes.byref(found)) else found.value


def restore(library: Library, context: int | None) -> None:
    """Make a context current on this thread that was so before."""
    if context is not None:
        # Its owner may have destroyed it meanwhile: then there is nothing to restore.
        library.code("aclrtSetCurrentContext", context)


def claim(library: Library, ids: Sequence[int], undo: ExitStack) -> list[Device]:
    """Initialise ACL and claim devices; ``undo`` is given what gives them back, which may raise `NativeError`.

    Raises
    ------
    BackendError
        When the driver refuses.
    """
    _initialise(library, undo)
    before = current_context(library)
    try:
        return [_claim(library, id, undo) for id in ids]
    finally:
        restore(library, before)


def _initialise(library: Library, undo: ExitStack) -> None:
    try:
        library.call("aclInit", None)
    except NativeError as error:
        if error.code != REPEAT_INITIALIZE:
            raise failure(error, "ACL could not be initialised", step=Step.DEVICE) from error
    # It counts down what our aclInit counted up. The older aclFinalize would end ACL for all its users in the process,
    # so where this is missing ACL is left alive.
    if library.has("aclFinalizeReference"):
        undo.callback(library.call, "aclFinalizeReference", None)


def _claim(library: Library, id: int, undo: ExitStack) -> Device:
    count = ctypes.c_uint32()
    try:
        library.call("aclrtGetDeviceCount", ctypes.byref(count))
        if id >= count.value:
            raise BackendError(Failure.INVALID, f"device {id} is not there: this process sees {count.value} devices")
        library.call("aclrtSetDevice", id)
    except NativeError as error:
        raise failure(error, f"device {id} could not be claimed", step=Step.DEVICE) from error
    undo.callback(library.call, "aclrtResetDevice", id)
    context = current_context(library)
    if context is None:
        raise BackendError(Failure.FAILED, f"device {id} was claimed, but the driver gave no context for it")
    return Device(library, id, context)
