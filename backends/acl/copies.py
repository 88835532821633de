"""Copies inside this process, in all four directions between host and devices."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from llm_datadist._kernels.runs import Bases, Plan, span_runs
from llm_datadist.backend import BackendError, Failure, MemoryKind, Region
from llm_datadist.backends.acl.codes import Step, failure
from llm_datadist.backends.acl.devices import Device
from llm_datadist.backends.acl.library import NativeError
from llm_datadist.backends.acl.memory import Memory
from llm_datadist.backends.acl.pointers import location_of
from llm_datadist.backends.acl.streams import Stream
from llm_datadist.backends.acl.structures import AclrtMemcpyBatchAttr, CopyKind, LocationType
from llm_datadist.backends.host.memory import HostMemory

__all__ = ["Copies", "Piece"]

#: Source, destination, bytes.
Piece = tuple[int, int, int]

#: Copies that are queued before the stream is waited for; the driver takes 4096 in one batch.
QUEUED: Final = 1024
#: Local copies need nobody else, so what takes this long has failed.
LIMIT_NS: Final = 60 * 10**9
SCRATCH_BYTES: Final = 1 << 20
_NOT_SUPPORTED: Final = frozenset((200001, 207000))


@dataclass(frozen=True, slots=True)
class Side:
    """Where one end of a copy is."""

    #: None for memory of the host.
    device: Device | None
    #: Memory of the host that asynchronous copies may use.
    pinned: bool


_PAGEABLE: Final = Side(None, False)
_PINNED: Final = Side(None, True)


class Copies:
    """Local copies of one backend. Thread-safe; those of one device follow each other."""

    def __init__(self, devices: Mapping[int, Device], memory: Memory, host: HostMemory, threads: int) -> None:
        self._memory = memory
        self._host = host
        self._threads = threads
        self._any_device = next(iter(devices.values()))
        self._queues = {id: Queue(device, memory) for id, device in devices.items()}

    def run(self, plan: Plan, *, ordered: bool) -> None:
        """Copy a plan.

        Raises
        ------
        BackendError
            ``INVALID`` for an address without memory; never a signal.
        """
        runs = plan.runs
        bases = plan.bases.tolist()
        sides = [(self._side(s, runs.source_end), self._side(d, runs.destination_end)) for s, d in bases]
        for (source, destination), group in itertools.groupby(zip(bases, sides, strict=True), lambda pair: pair[1]):
            pairs = [base for base, _ in group]
            if source.device is None and destination.device is None:
                part = Plan(Bases([s for s, _ in pairs], [d for _, d in pairs]), runs)
                self._host.copy(part, self._threads, ordered=ordered)
                continue
            if source.device is None:
                self._host.check((s, s + runs.source_end) for s, _ in pairs)
            elif destination.device is None:
                self._host.check((d, d + runs.destination_end) for _, d in pairs)
            offsets = runs.tolist()
            self._run(((s + so, d + do, n) for s, d in pairs for so, do, n in offsets), source, destination, ordered)

    def pieces(self, pieces: Sequence[Piece]) -> None:
        """Copy single ranges, in order."""
        for nbytes, group in itertools.groupby(pieces, lambda piece: piece[2]):
            same = list(group)
            self.run(
                Plan(Bases([s for s, _, _ in same], [d for _, d, _ in same]), span_runs(0, 0, nbytes)), ordered=False
            )

    def load(self, address: int, nbytes: int) -> bytes:
        """Give some bytes of this engine's memory."""
        buffer = ctypes.create_string_buffer(nbytes)
        self.pieces([(address, ctypes.addressof(buffer), nbytes)])
        return buffer.raw

    def store(self, address: int, data: bytes) -> None:
        """Put some bytes into this engine's memory."""
        buffer = ctypes.create_string_buffer(data, len(data))
        self.pieces([(ctypes.addressof(buffer), address, len(data))])

    def close(self) -> list[str]:
        """End the streams; say what could not be ended. No copy runs any more."""
        return [text for queue in self._queues.values() for text in queue.close()]

    def _side(self, address: int, nbytes: int) -> Side:
        region = self._memory.find(address, nbytes)
        if region is None:
            # The processor's own view of its addresses may show memory of a device as if it could be read.
            for at in (address, address + max(nbytes, 1) - 1):
                location = location_of(self._any_device, at) if 0 < at < 1 << 64 else None
                if location is not None and location.type == LocationType.DEVICE:
                    raise BackendError(
                        Failure.INVALID, f"{nbytes} bytes at {address:#x} are memory of a device that is not registered"
                    )
            return _PAGEABLE
        if region.kind is MemoryKind.DEVICE:
            return self._queues[region.device].side
        return _PINNED if self._memory.pinned(region) else _PAGEABLE

    def _run(self, pieces: Iterator[Piece], source: Side, destination: Side, ordered: bool) -> None:
        if source.device is not None and destination.device is not None and source is not destination:
            raise BackendError(
                Failure.UNSUPPORTED,
                f"copies between devices ({source.device.id} and {destination.device.id}) are not possible",
            )
        device = source.device or destination.device
        assert device is not None  # copies inside the host went another way
        queue = self._queues[device.id]
        if source.device is not None and destination.device is not None:
            queue.inside(pieces, ordered=ordered)
        else:
            kind = CopyKind.HOST_TO_DEVICE if source.device is None else CopyKind.DEVICE_TO_HOST
            if not (source.pinned or destination.pinned):
                queue.pageable(pieces, kind)
            else:
                queue.pinned(pieces, kind, ordered=ordered)


class Queue:
    """The copies of one device: a stream, and room for ranges that overlap themselves."""

    def __init__(self, device: Device, memory: Memory) -> None:
        self.side = Side(device, False)
        self._device = device
        self._memory = memory
        self._batches = device.library.has("aclrtMemcpyBatch")
        self._stream: Stream | None = None
        #: A copy failed, and what was queued could not be stopped.
        self._running = False
        self._scratch: Region | None = None
        self._lock = threading.Lock()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=LIMIT_NS / 1e9):
            raise BackendError(
                Failure.TIMED_OUT, f"other copies on device {self._device.id} took {LIMIT_NS / 1e9:.0f} s"
            )
        try:
            yield
        finally:
            self._lock.release()

    def pageable(self, pieces: Iterable[Piece], kind: CopyKind) -> None:
        """Copy between the device and memory that the driver must copy at once."""
        try:
            with self._device.current():
                for source, destination, nbytes in pieces:
                    self._device.library.call("aclrtMemcpy", destination, nbytes, source, nbytes, kind)
        except NativeError as error:
            raise self._failed(error) from error

    def pinned(self, pieces: Iterator[Piece], kind: CopyKind, *, ordered: bool) -> None:
        """Copy between the device and pinned memory, in batches where the driver knows them."""
        with self._turn():
            while chunk := list(itertools.islice(pieces, QUEUED)):
                # A batch is done in any order.
                if ordered or not self._batch(chunk, kind):
                    self._queue(chunk, kind)

    def inside(self, pieces: Iterator[Piece], *, ordered: bool) -> None:
        """Copy inside the device; what is done in order may overlap."""
        if ordered:
            pieces = (part for piece in pieces for part in self._apart(*piece))
        with self._turn():  # all the time: what is in the scratch must not be another copy's
            while chunk := list(itertools.islice(pieces, QUEUED)):
                self._queue(chunk, CopyKind.DEVICE_TO_DEVICE)

    def _apart(self, source: int, destination: int, nbytes: int) -> Iterator[Piece]:
        """Cut a copy that overlaps itself into ones that do not: by way of scratch, in the order that loses nothing."""
        if source == destination:
            return
        if abs(source - destination) >= nbytes:
            yield source, destination, nbytes
            return
        scratch = self._room()
        offsets = range(0, nbytes, SCRATCH_BYTES)
        for offset in offsets if destination < source else reversed(offsets):
            part = min(SCRATCH_BYTES, nbytes - offset)
            yield source + offset, scratch, part
            yield scratch, destination + offset, part

    def _room(self) -> int:
        if self._scratch is None:
            self._scratch = self._memory.reserve(self._device.id, SCRATCH_BYTES, MemoryKind.DEVICE, exported=False)
        return self._scratch.address

    def _batch(self, pieces: Sequence[Piece], kind: CopyKind) -> bool:
        """Copy a batch; say whether the driver can."""
        if not self._batches:
            return False
        sources, destinations, sizes = zip(*pieces, strict=True)
        addresses, counts = ctypes.c_void_p * len(pieces), ctypes.c_size_t * len(pieces)
        attributes, first, failed = AclrtMemcpyBatchAttr(), ctypes.c_size_t(0), ctypes.c_size_t()
        upward = kind is CopyKind.HOST_TO_DEVICE
        there, here = (attributes.dstLoc, attributes.srcLoc) if upward else (attributes.srcLoc, attributes.dstLoc)
        there.id, there.type, here.type = self._device.id, LocationType.DEVICE, LocationType.HOST
        try:
            with self._device.current():
                self._device.library.call(
                    "aclrtMemcpyBatch",
                    addresses(*destinations),
                    counts(*sizes),
                    addresses(*sources),
                    counts(*sizes),
                    len(pieces),
                    ctypes.byref(attributes),
                    ctypes.byref(first),
                    1,
                    ctypes.byref(failed),
                )
        except NativeError as error:
            if error.code not in _NOT_SUPPORTED:
                raise self._failed(error) from error
            self._batches = False
        return self._batches

    def _queue(self, pieces: Sequence[Piece], kind: CopyKind) -> None:
        """Copy one after the other on the stream, and wait for the last."""
        if self._running:
            self._stop("an earlier copy failed")
        try:
            self._stream = stream = self._stream or Stream(self._device)
            with self._device.current():
                for source, destination, nbytes in pieces:
                    self._device.library.call(
                        "aclrtMemcpyAsync", destination, nbytes, source, nbytes, kind, stream.handle
                    )
            stream.wait(time.monotonic_ns() + LIMIT_NS, lambda: True)
        except BaseException as error:
            told = self._failed(error) if isinstance(error, NativeError) else error
            self._stop(str(told) or type(told).__name__)
            if told is error:
                raise
            raise told from error

    def _stop(self, why: str) -> None:
        """Stop what is queued, so that its memory is the caller's again."""
        try:
            self._drop_stream()
        except (BackendError, NativeError) as error:
            self._running = self._stream is not None
            still = ", so bytes may still move" * self._running
            raise BackendError(Failure.FAILED, f"{why}; and its stream could not be ended{still}: {error}") from error
        self._running = False

    def _drop_stream(self) -> None:
        if self._stream is not None:
            stream = self._stream
            stream.abort()
            self._stream = None
            stream.destroy()

    def _failed(self, error: NativeError) -> BackendError:
        return failure(error, f"a copy on device {self._device.id} failed", step=Step.COPY)

    def close(self) -> list[str]:
        try:
            self._drop_stream()
        except (BackendError, NativeError) as error:
            return [f"the copy stream of device {self._device.id}: {error}"]
        return []
