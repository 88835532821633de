"""The acl backend: memory of Ascend devices, and the way to peers over HCCS and RoCE."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from llm_datadist._kernels.hostcopy import Liveness
from llm_datadist._kernels.runs import Plan
from llm_datadist.backend import (
    Backend,
    BackendError,
    Capabilities,
    Endpoint,
    Export,
    Failure,
    MemoryKind,
    Pair,
    Region,
    Window,
)
from llm_datadist.backends.acl import exports
from llm_datadist.backends.acl.closer import Closer
from llm_datadist.backends.acl.communicator import Communicator, Traffic
from llm_datadist.backends.acl.copies import Copies
from llm_datadist.backends.acl.devices import claim
from llm_datadist.backends.acl.endpoint import AclEndpoint
from llm_datadist.backends.acl.library import NativeError, open_library
from llm_datadist.backends.acl.local_comm_res import OPTION, parse_local_comm_res
from llm_datadist.backends.acl.memory import Memory
from llm_datadist.backends.acl.sides import find_sides
from llm_datadist.backends.acl.structures import NOT_SET
from llm_datadist.backends.acl.topology import INTRA_ROCE_VARIABLE, comm_name
from llm_datadist.backends.host.memory import HostMemory

__all__ = ["AclBackend"]

#: The runtime reads it when it starts.
UC_MEMORY_VARIABLE: Final = "AUTO_USE_UC_MEMORY"


class AclBackend(Backend):
    """Devices are those of this machine, and peers may be on others."""

    capabilities = Capabilities(
        mapped_words=False,
        alignment=512,
        sparse=False,
        host_access=False,
        late_regions=False,
        any_memory=False,
        network=True,
        self_link=False,
        forks=False,
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        self._abandoned = False
        self._endpoints: set[AclEndpoint] = set()
        self._windows: list[mmap.mmap] = []

    # ------------------------------------------------------------------ opening and closing

    def open(self, devices: Sequence[int], options: Mapping[str, str]) -> None:
        os.environ.setdefault(UC_MEMORY_VARIABLE, "0")
        self._traffic = Traffic(
            _number(options, "llm.RdmaTrafficClass", 252, 4), _number(options, "llm.RdmaServiceLevel", 7, 1)
        )
        given = parse_local_comm_res(options.get(OPTION, ""))
        library = open_library(os.environ)
        undo = ExitStack()
        try:
            self._devices = claim(library, devices, undo)
            self._positions = {device.id: position for position, device in enumerate(self._devices)}
            self._sides = find_sides(library, self._devices, given, os.environ)
            by_id = {device.id: device for device in self._devices}
            self._host = HostMemory()
            self._memory = Memory(by_id, self._host, hccs=os.environ.get(INTRA_ROCE_VARIABLE) != "1")
            self._copies = Copies(by_id, self._memory, self._host, int(options.get("llm.CopyThreads", 1)))
            self._closer = Closer()
        except BackendError as error:
            if kept := _release(undo):
                text = f"{error.text}; and the driver did not take back everything: {'; '.join(kept)}"
                raise BackendError(error.kind, text, error.native_code) from error
            raise
        except BaseException:
            _release(undo)
            raise
        self._undo = undo
        self._is_open = True

    def close(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            endpoints = list(self._endpoints)
        for endpoint in endpoints:
            endpoint.close()
        kept = self._closer.close() + self._copies.close()
        # A card may still write where a link has not ended, so its memory stays registered and allocated.
        kept = kept or self._memory.close() or _release(self._undo)
        if kept:
            warnings.warn(
                f"the Ascend driver did not take back everything: {'; '.join(kept)}", RuntimeWarning, stacklevel=2
            )
        else:
            self._windows.clear()

    def abandon(self) -> None:
        # The driver does not survive a fork: not one call may be made. Takes no lock: in a forked child another thread
        # may have held it for ever.
        self._is_open, self._abandoned = False, True

    # ------------------------------------------------------------------ memory

    def make_windows(self, directory_bytes: int, board_bytes: int) -> tuple[Window, Window]:
        made = []
        for nbytes in (directory_bytes, board_bytes):
            self._windows.append(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            made.append(Window(ctypes.addressof(ctypes.c_char.from_buffer(self._windows[-1])), nbytes))
        return made[0], made[1]

    def reserve(self, device: int, nbytes: int | None, kind: MemoryKind) -> Region:
        self._require_open()
        return self._memory.reserve(device, nbytes, kind)

    def commit(self, region: Region, offset: int, nbytes: int) -> None:
        """Pools have all their memory from the start."""

    def discard(self, region: Region, offset: int, nbytes: int) -> None:
        """Pools keep all their memory."""

    def register(self, device: int, addresses: Sequence[int], nbytes: int, kind: MemoryKind) -> list[Region]:
        self._require_open()
        return self._memory.register(device, addresses, nbytes, kind)

    def unregister(self, registered: Sequence[tuple[Region, int]], nbytes: int) -> None:
        if self._is_open:  # else it is done
            self._memory.unregister(region for region, _ in registered)

    def copy(self, plan: Plan, *, ordered: bool) -> None:
        self._require_open()
        self._copies.run(plan, ordered=ordered)

    def load(self, address: int, nbytes: int) -> bytes:
        self._require_open()
        return self._copies.load(address, nbytes)

    def store(self, address: int, data: bytes) -> None:
        self._require_open()
        self._copies.store(address, data)

    def hold(self, region: Region) -> object:
        return None

    def remap(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._require_open()
        self._memory.remap(ranges)

    # ------------------------------------------------------------------ peers

    def export(self) -> Export:
        self._require_open()
        regions = tuple(
            Region(r.id, self._positions[r.device], r.kind, r.address, r.nbytes) for r in self._memory.exported()
        )
        return Export(exports.encode(exports.Description(self._sides, regions)))

    def connect(self, peer: Export, pair: Pair, deadline_ns: int) -> Endpoint:
        for fd in peer.fds:
            os.close(fd)
        self._require_open()
        described = exports.decode(peer.data)
        if len(described.sides) != len(self._sides):
            raise BackendError(
                Failure.INVALID, f"the peer has {len(described.sides)} devices and this side {len(self._sides)}"
            )
        if pair.control.fileno() < 0:
            raise BackendError(Failure.PEER_GONE, "the connection to the peer is closed")
        liveness = Liveness(pair.control.fileno(), pair.pidfd)
        communicators = [
            Communicator(device, self._memory, mine, theirs, comm_name(f"{pair.name}:{position}"))
            for position, (device, mine, theirs) in enumerate(
                zip(self._devices, self._sides, described.sides, strict=True)
            )
        ]
        name = ", ".join(f"device {side.device_id} of server {side.server_id}" for side in described.sides)
        endpoint = AclEndpoint(communicators, described, self._copies, liveness, name, self._retire)
        try:
            self._closer.start()
        except RuntimeError as error:
            raise BackendError(Failure.LINK_FAILED, f"no thread could be started to end links: {error}") from error
        with self._lock:
            self._require_open()
            self._endpoints.add(endpoint)
        try:
            for communicator in communicators:
                communicator.open(self._traffic, deadline_ns, endpoint.alive)
        except BaseException:
            endpoint.close()
            raise
        return endpoint

    def _retire(self, endpoint: AclEndpoint) -> None:
        if self._abandoned:
            return
        for communicator in endpoint.communicators:
            self._closer.end(communicator)
        with self._lock:  # not before: `close` waits for what it still finds here
            self._endpoints.discard(endpoint)

    def _require_open(self) -> None:
        if not self._is_open:
            raise BackendError(Failure.UNAVAILABLE, "the acl backend is closed")


def _release(devices: ExitStack) -> list[str]:
    """Give devices back; say what the driver did not take."""
    try:
        devices.close()
    except NativeError as error:
        return [str(error)]
    return []


def _number(options: Mapping[str, str], key: str, highest: int, step: int) -> int:
    text = options.get(key)
    if text is None:
        return NOT_SET
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > highest or int(text) % step:
        raise BackendError(
            Failure.INVALID, f"{key} is {text!r:.200}, allowed are 0 to {highest}" + f" in steps of {step}" * (step > 1)
        )
    return int(text)
