"""A communicator: it joins one device of this side with one of the peer's, and moves bytes between their memory."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from llm_datadist.backend import BackendError, Failure, MemoryKind, Region
from llm_datadist.backends.acl.codes import Step, failure
from llm_datadist.backends.acl.devices import Device
from llm_datadist.backends.acl.library import NativeError
from llm_datadist.backends.acl.memory import Memory
from llm_datadist.backends.acl.regions import RegionTable
from llm_datadist.backends.acl.streams import Stream
from llm_datadist.backends.acl.structures import (
    DESCRIPTORS,
    NOT_SET,
    HcclDataType,
    HcclOneSideOpDesc,
    HcclPrepareConfig,
    comm_config,
)
from llm_datadist.backends.acl.topology import Side, rank_table, uses_rdma

__all__ = ["BOUNCE_BYTES", "Communicator", "Traffic"]

#: Of device memory, for ranges of this side that are not bound.
BOUNCE_BYTES: Final = 1 << 20
#: The library sets globals while it makes a communicator.
_MAKING: Final = threading.Lock()
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_UNAVAIL: Final = 7
_TIMEOUT: Final = 9
_AGAIN: Final = 20
#: For each phase of one try to meet the peer: the three together must take less than `end` is willing to wait.
_PREPARE_S: Final = 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """How packets are marked on RoCE."""

    traffic_class: int = NOT_SET
    service_level: int = NOT_SET


class Communicator:
    """Made by `open`, which waits for the peer's; ended by `end`.

    Parameters
    ----------
    device : Device
        Of this side.
    memory : Memory
        What of it is on that device, or of the host and registered with it, is bound.
    mine, theirs : Side
        The two devices.
    name : bytes
        The same at both ends.
    """

    def __init__(self, device: Device, memory: Memory, mine: Side, theirs: Side, name: bytes) -> None:
        self.device = device
        self._memory = memory
        self._name = name
        self._table, self._rank = rank_table(mine, theirs)
        self._rdma = uses_rdma(mine, theirs)
        self.handle: int | None = None
        #: Neither the peer nor this side's card can reach memory of this side any more, for good.
        self.ended = False
        #: `end` was called, so nothing may be made any more.
        self._ending = False
        self._stream: Stream | None = None
        #: Held while it is made, and while it ends.
        self._stage = threading.Lock()
        self._bound: dict[int, Region] = {}
        self._local = RegionTable()
        self._bounce: Region | None = None
        self._descriptors = (HcclOneSideOpDesc * DESCRIPTORS)()
        for descriptor in self._descriptors:
            descriptor.dataType = HcclDataType.UINT8
        #: The same bytes as words, which are filled much faster than fields.
        self._words = memoryview(self._descriptors).cast("B").cast("Q")

    # ------------------------------------------------------------------ which memory it reaches

    def wants(self, region: Region) -> bool:
        """Say whether memory like this, of either side, can be reached: over HCCS only that of devices."""
        return self._rdma or region.kind is MemoryKind.DEVICE

    def bind(self, region: Region, handle: int) -> None:
        """Bind a region. The device is current."""
        try:
            self.device.library.call("HcclCommBindMem", self.handle, handle)
        except NativeError as error:
            raise failure(error, f"{_describe(region)} could not be bound", step=Step.LINK) from error
        self._bound[region.id] = region
        self._local = RegionTable(self._bound.values())

    def unbind(self, region: Region, handle: int) -> None:
        """Unbind a region if it is bound. The device is current."""
        if region.id not in self._bound:
            return
        try:
            self.device.library.call("HcclCommUnbindMem", self.handle, handle)
        except NativeError as error:
            raise failure(error, f"{_describe(region)} could not be unbound", step=Step.UNLINK) from error
        del self._bound[region.id]
        self._local = RegionTable(self._bound.values())

    def find(self, address: int, nbytes: int) -> Region | None:
        """Give the region of this side that a range is in and that transfers can use as it is."""
        return self._local.find(address, nbytes)

    @property
    def bounce(self) -> int:
        """Address of a buffer of `BOUNCE_BYTES` that transfers can use."""
        assert self._bounce is not None
        return self._bounce.address

    # ------------------------------------------------------------------ linking

    def open(self, traffic: Traffic, deadline_ns: int, alive: Callable[[], bool]) -> None:
        """Make the communicator, bind all memory, and wait until the peer has done the same.

        Raises
        ------
        BackendError
            What failed; ``CLOSING`` after `end`. `end` must follow, if it was not called yet.
        """
        with self._stage:
            if self._ending:
                raise BackendError(Failure.CLOSING, "this side has closed the link while it was being made")
            self._bounce = self._memory.reserve(self.device.id, BOUNCE_BYTES, MemoryKind.DEVICE, exported=False)
            self._make(traffic, deadline_ns, alive)
            self._memory.bind(self, self._bounce)
            _require(alive)
            self._prepare(deadline_ns, alive)
            try:
                self._stream = Stream(self.device)
            except NativeError as error:
                raise failure(error, "no stream could be made for a link", step=Step.LINK) from error

    def _make(self, traffic: Traffic, deadline_ns: int, alive: Callable[[], bool]) -> None:
        config = comm_config(self._name, traffic.traffic_class, traffic.service_level)
        made = ctypes.c_void_p()
        pause = _FIRST_PAUSE_S
        while True:
            if not _MAKING.acquire(timeout=max(0.0, _left_s(deadline_ns))):
                raise BackendError(Failure.TIMED_OUT, "other links were being made until the time limit")
            try:
                with self.device.current():
                    self.device.library.call(
                        "HcclCommInitClusterInfoMemConfig",
                        self._table.encode(),
                        self._rank,
                        ctypes.byref(config),
                        ctypes.byref(made),
                    )
                self.handle = made.value
                return
            except NativeError as error:
                # Several processes of one host that start at once get in each other's way.
                if error.code != _UNAVAIL or _left_s(deadline_ns) < pause:
                    doing = f"a communicator could not be made of the rank table {self._table}"
                    raise failure(error, doing, step=Step.LINK) from error
            finally:
                _MAKING.release()
            _require(alive)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _prepare(self, deadline_ns: int, alive: Callable[[], bool]) -> None:
        config = HcclPrepareConfig()
        while True:
            # The limit holds for each of three phases; the first, in which the peer may be late, takes the time.
            seconds = min(_PREPARE_S, max(1, int(_left_s(deadline_ns) / 3)))
            try:
                with self.device.current():
                    self.device.library.call("HcclCommPrepare", self.handle, ctypes.byref(config), seconds)
                return
            except NativeError as error:
                _require(alive)
                if error.code != _TIMEOUT or _left_s(deadline_ns) < 1:
                    doing = f"device {self.device.id} could not be connected with the peer's (rank table {self._table})"
                    raise failure(error, doing, step=Step.PREPARE) from error

    # ------------------------------------------------------------------ transfers

    def submit(self, ranges: Sequence[tuple[int, int, int]], *, write: bool) -> None:
        """Queue up to `DESCRIPTORS` (local address, remote address, bytes); raises `NativeError`."""
        assert self._stream is not None
        words, at = self._words, 0
        for local, remote, nbytes in ranges:
            words[at], words[at + 1], words[at + 2] = local, remote, nbytes
            at += 4
        with self.device.current():
            self.device.library.call(
                "HcclBatchPut" if write else "HcclBatchGet",
                self.handle,
                1 - self._rank,
                self._descriptors,
                len(ranges),
                self._stream.handle,
            )

    def wait(self, deadline_ns: int, alive: Callable[[], bool]) -> None:
        """Wait until all that was submitted is in place; see `Stream.wait`."""
        assert self._stream is not None
        self._stream.wait(deadline_ns, alive)

    def abort(self) -> None:
        """Drop what was submitted. Nothing can be submitted any more. Raises `NativeError`."""
        if self._stream is not None:
            self._stream.abort()

    # ------------------------------------------------------------------ the end

    def end(self, deadline_ns: int) -> None:
        """End the communicator and give back what it has; all steps are tried.

        Raises
        ------
        BackendError
            ``UNLINK_FAILED``. What the peer's card might still write to stays registered.
        """
        self._ending = True
        if not self._stage.acquire(timeout=max(0.0, _left_s(deadline_ns))):
            raise BackendError(Failure.UNLINK_FAILED, "a link could not be ended, for it was still being made")
        try:
            with ExitStack() as steps:  # runs from the last to the first, also past failures
                steps.callback(self._release_bounce)
                steps.callback(self._end_stream)
                steps.callback(self._destroy, deadline_ns)
                steps.callback(self._memory.unbind, self)
                steps.callback(self.abort)
        except (BackendError, NativeError) as error:
            code = error.code if isinstance(error, NativeError) else error.native_code
            raise BackendError(Failure.UNLINK_FAILED, f"a link could not be ended: {error}", code) from error
        finally:
            self._stage.release()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.destroy()
            self._stream = None

    def _destroy(self, deadline_ns: int) -> None:
        while self.handle is not None:
            try:
                with self.device.current():
                    self.device.library.call("HcclCommDestroy", self.handle)
                self.handle = None
            except NativeError as error:
                if error.code != _AGAIN or _left_s(deadline_ns) <= 0:
                    raise
                time.sleep(_FIRST_PAUSE_S)

    def _release_bounce(self) -> None:
        # The card may go on with what could not be aborted.
        self.ended = self.handle is None and (self._stream is None or self._stream.aborted)
        if self._bounce is not None and self.ended:
            self._memory.release(self._bounce)
            self._bounce = None


def _left_s(deadline_ns: int) -> float:
    return (deadline_ns - time.monotonic_ns()) / 1e9


def _require(alive: Callable[[], bool]) -> None:
    if not alive():
        raise BackendError(Failure.PEER_GONE, "the peer has ended or given up, or this side has closed the link")


def _describe(region: Region) -> str:
    return f"{region.kind.name} memory of {region.nbytes} bytes at {region.address:#x}"
