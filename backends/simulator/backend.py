"""The simulator backend: memory of this engine, and the way to its peers on the same host."""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from llm_datadist._kernels.runs import Bases, Plan, span_runs
from llm_datadist.backend import (
    Backend,
    BackendError,
    Capabilities,
    Export,
    Failure,
    MemoryKind,
    Pair,
    Region,
    Window,
)
from llm_datadist.backends.simulator import exports, limits
from llm_datadist.backends.simulator.endpoint import SimulatorEndpoint
from llm_datadist.backends.simulator.faults import Faults
from llm_datadist.backends.simulator.pools import Pools
from llm_datadist.backends.simulator.registered import REGISTERED, UserMemory
from llm_datadist.backends.simulator.segments import MAX_SEGMENT_BYTES, READ_BY_PEERS, SHARED, Segment

__all__ = ["SimulatorBackend"]

DEFAULT_ADDRESS_SPACE: Final = 64 << 30
DEFAULT_KEEP_FREE: Final = 1 << 30
DEFAULT_COPY_THREADS: Final = 2

PR_SET_PTRACER: Final = 0x59616D61
PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)


class SimulatorBackend(Backend):
    """Devices are labels, memory is shared memory, and peers are processes of this host.

    Parameters
    ----------
    room : callable, optional
        Says how much memory may still be taken; by default what the kernel tells.
    """

    capabilities = Capabilities(
        mapped_words=True,
        alignment=512,
        sparse=True,
        host_access=True,
        late_regions=True,
        any_memory=True,
        network=False,
        self_link=True,
        forks=True,
    )

    def __init__(self, room: Callable[[], limits.Room] = limits.room) -> None:
        #: Faults for tests; nothing is looked at or counted while it is None.
        self.faults: Faults | None = None
        #: For tests: whether endpoints that are made from now on find that peers can't be read by their process id.
        self.forbid_process = False
        self._room = room
        self._lock = threading.Lock()
        self._open = False

    def open(self, devices: Sequence[int], options: Mapping[str, str]) -> None:
        if sys.platform != "linux":
            raise BackendError(
                Failure.UNAVAILABLE, f"The simulator backend runs on Linux only; this system is {sys.platform}."
            )
        address_space = _bytes(options, "llm.Simulator.AddressSpace", DEFAULT_ADDRESS_SPACE, 1)
        keep_free = _bytes(options, "llm.Simulator.KeepFree", DEFAULT_KEEP_FREE, 0)
        self._threads = int(options.get("llm.CopyThreads", DEFAULT_COPY_THREADS))
        self._pools = Pools(address_space, keep_free, self._room)
        self._windows: tuple[Segment, ...] = ()
        self.user_memory = UserMemory()
        self._nonce = ctypes.c_uint64(secrets.randbits(64))
        if options.get("llm.Simulator.AllowPtracer") == "1":
            _allow_ptracer()
        self._open = True

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._pools.close()
                for window in self._windows:
                    _close_window(window)
                self._windows = ()

    def make_windows(self, directory_bytes: int, board_bytes: int) -> tuple[Window, Window]:
        with self._lock:
            self._check_open()
            directory = _window_segment("directory", directory_bytes, READ_BY_PEERS)
            try:
                board = _window_segment("board", board_bytes, SHARED)
            except BackendError:
                _close_window(directory)
                raise
            self._windows = (directory, board)
            return Window(directory.mapping.address, directory_bytes), Window(board.mapping.address, board_bytes)

    def reserve(self, device: int, nbytes: int | None, kind: MemoryKind) -> Region:
        region = self._pools.reserve(device, nbytes, kind)
        self.user_memory.add(region.address, region.nbytes)
        return region

    def commit(self, region: Region, offset: int, nbytes: int) -> None:
        self._pools.commit(region.id, offset, nbytes)

    def discard(self, region: Region, offset: int, nbytes: int) -> None:
        self._pools.discard(region.id, offset, nbytes)

    def register(self, device: int, addresses: Sequence[int], nbytes: int, kind: MemoryKind) -> list[Region]:
        return self.user_memory.register(addresses, nbytes)

    def unregister(self, registered: Sequence[tuple[Region, int]], nbytes: int) -> None:
        self.user_memory.unregister([address for _, address in registered], nbytes)

    def copy(self, plan: Plan, *, ordered: bool) -> None:
        self.user_memory.copy(plan, self._threads, ordered=ordered)

    def load(self, address: int, nbytes: int) -> bytes:
        data = ctypes.create_string_buffer(nbytes)
        self.copy(Plan(Bases([address], [ctypes.addressof(data)]), span_runs(0, 0, nbytes)), ordered=True)
        return data.raw

    def store(self, address: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        self.copy(Plan(Bases([ctypes.addressof(source)], [address]), span_runs(0, 0, len(data))), ordered=True)

    def remap(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: host memory that stands for a device's keeps its pages."""

    def hold(self, region: Region) -> object:
        # Whoever registers memory keeps it; there is nothing here that could.
        return None if region.id == REGISTERED else self._pools.hold(region.id)

    def export(self) -> Export:
        """Describe my windows and regions; the descriptors stay mine, and are valid until `close`."""
        with self._lock:
            self._check_open()
            directory, board = self._windows
            pools = self._pools.regions()
            described = exports.Description(
                directory.nbytes,
                board.nbytes,
                self._nonce.value,
                ctypes.addressof(self._nonce),
                tuple(region for region, _ in pools),
            )
            return Export(exports.encode(described), (directory.fd, board.fd, *(fd for _, fd in pools)))

    def connect(self, peer: Export, pair: Pair, deadline_ns: int) -> SimulatorEndpoint:
        """Map a peer's memory. Nothing in here waits, so the deadline is never reached."""
        return SimulatorEndpoint(self, peer, pair, self._threads)

    def abandon(self) -> None:
        # Takes no lock: in a forked child another thread may have held it for ever.
        fds, self._open = self.descriptors(), False
        for fd in fds:
            os.close(fd)

    def descriptors(self) -> tuple[int, ...]:
        """List the descriptors that a forked child must close. Endpoints have none."""
        if not self._open:
            return ()
        return (*(window.fd for window in self._windows), *(fd for _, fd in self._pools.regions()))

    def _check_open(self) -> None:
        if not self._open:
            raise BackendError(Failure.UNAVAILABLE, "The simulator backend is closed.")


def _bytes(options: Mapping[str, str], key: str, default: int, low: int) -> int:
    text = options.get(key, str(default))
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or not low <= int(text) <= MAX_SEGMENT_BYTES:
        raise BackendError(Failure.INVALID, f"{key} is {text!r:.200}, allowed are {low} to {MAX_SEGMENT_BYTES} bytes")
    return int(text)


def _window_segment(name: str, nbytes: int, seals: int) -> Segment:
    try:
        return Segment(name, nbytes, seals)
    except OSError as error:
        raise BackendError(
            Failure.OUT_OF_MEMORY,
            f"The {name} of {nbytes} bytes could not be mapped: {error.strerror}.",
            error.errno or 0,
        ) from error


def _close_window(window: Segment) -> None:
    window.mapping.unmap()
    window.close()


def _allow_ptracer() -> None:
    """Let all processes of this user read this one. Fails without Yama, where they may already."""
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)
