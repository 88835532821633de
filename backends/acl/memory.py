"""Memory of devices, and pinned memory of the host: allocated here or brought by the user, and known to the cards."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

from llm_datadist.backend import BackendError, Failure, MemoryKind, Region
from llm_datadist.backends.acl.codes import Step, failure
from llm_datadist.backends.acl.devices import Device
from llm_datadist.backends.acl.library import NativeError
from llm_datadist.backends.acl.pointers import allocation_of, location_of, tells_locations
from llm_datadist.backends.acl.regions import RegionTable
from llm_datadist.backends.acl.structures import (
    CommMem,
    LocationType,
    MallocPolicy,
    MemInfo,
    MemType,
)
from llm_datadist.backends.host.memory import HostMemory

__all__ = ["MAX_REGIONS", "Binder", "Memory"]

#: Where memory of our own starts: what HCCS wants of device memory, and the largest pages of the host.
ALIGNMENTS: Final = {MemoryKind.DEVICE: 2 << 20, MemoryKind.HOST: 64 << 10}
_TYPES: Final = {MemoryKind.DEVICE: MemType.DEVICE, MemoryKind.HOST: MemType.HOST}
#: Share of the free device memory that a pool without a size takes.
POOL_SHARE: Final = 0.7
#: Documented for all registered memory of one device, A2 and A3. What the host may have depends on the driver.
MAX_DEVICE_BYTES: Final = 50 << 30
#: So that the description of all of them fits into a greeting.
MAX_REGIONS: Final = 1024


class Binder(Protocol):
    """A communicator, as far as memory is bound to it."""

    device: Device
    #: From the driver; None before it is made and once it has ended.
    handle: int | None

    def wants(self, region: Region) -> bool:
        """Say whether the peer can reach a region, or this side use it, over this communicator."""

    def bind(self, region: Region, handle: int) -> None:
        """Bind a region. The device is current."""

    def unbind(self, region: Region, handle: int) -> None:
        """Unbind a region if it is bound. The device is current."""


@dataclass(slots=True)
class Entry:
    """What is kept of a region."""

    region: Region
    device: Device
    #: From the driver; None for memory that a card can't be given.
    handle: int | None
    #: Where the driver allocated it; None when it is the user's.
    pointer: int | None
    #: Whether asynchronous copies may use it.
    pinned: bool
    #: Whether peers are told of it.
    exported: bool
    #: Registrations inside it, and one for memory of our own.
    uses: int = 1


class Memory:
    """All memory of one backend. Thread-safe.

    Its lock is held while the driver registers, binds and unbinds, so the service thread must never want it.

    Parameters
    ----------
    devices : mapping of int to Device
        By the id that the process has for each.
    host : HostMemory
        Is told of pinned and registered memory of the host.
    hccs : bool
        Whether peers may be reached over HCCS, which wants device memory aligned.
    """

    def __init__(self, devices: Mapping[int, Device], host: HostMemory, *, hccs: bool) -> None:
        self._devices = devices
        self._host = host
        self._hccs = hccs
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._entries: dict[int, Entry] = {}
        self._binders: set[Binder] = set()
        #: Copied on change.
        self._table = RegionTable()

    # ------------------------------------------------------------------ memory of our own

    def reserve(self, device_id: int, nbytes: int | None, kind: MemoryKind, *, exported: bool = True) -> Region:
        """Allocate memory and register it.

        Raises
        ------
        BackendError
            ``OUT_OF_MEMORY``, with the numbers, among others.
        """
        device = self._device(device_id)
        alignment = ALIGNMENTS[kind]
        if nbytes is None:
            if kind is not MemoryKind.DEVICE:
                raise BackendError(Failure.INVALID, "a pool of host memory needs a size")
            share = min(int(_free(device)[0] * POOL_SHARE), MAX_DEVICE_BYTES - self._registered(device))
            nbytes = share // alignment * alignment
        if nbytes <= 0:
            raise BackendError(Failure.OUT_OF_MEMORY, f"device {device.id} has no memory left for a pool")
        with ExitStack() as undo:
            pointer = _allocate(device, nbytes + alignment, kind)
            undo.callback(_give_back, device, pointer, kind)
            address = -(-pointer // alignment) * alignment
            with self._lock:
                self._check_room(device, nbytes, kind, exported)
                doing = f"a pool of {nbytes} bytes at {address:#x} on device {device.id} could not be registered"
                handle = _register(device, address, nbytes, kind, doing)
                region = Region(next(self._ids), device.id, kind, address, nbytes)
                self._put(Entry(region, device, handle, pointer, True, exported))
            undo.pop_all()
        return region

    def release(self, region: Region) -> None:
        """Free memory of our own that is bound to no communicator."""
        with self._lock:
            entry = self._entries[region.id]
            _deregister(entry)
            self._drop(entry)
        if entry.pointer is not None:
            _give_back(entry.device, entry.pointer, region.kind)

    # ------------------------------------------------------------------ memory of the user

    def register(self, device_id: int, addresses: Sequence[int], nbytes: int, kind: MemoryKind) -> list[Region]:
        """Take in ranges of one size, all or none. A range inside a region that is known already joins it.

        Raises
        ------
        BackendError
            ``INVALID``, with the position of the range, when it is not what it is said to be or the driver refuses it.
        """
        device = self._device(device_id)
        regions: list[Region] = []
        with self._lock, ExitStack() as undo:
            undo.callback(self._end, regions)
            for position, address in enumerate(addresses):
                what = f"tensor {position} of {len(addresses)} ({nbytes} bytes of {kind.name} memory at {address:#x})"
                known = self._table.find(address, nbytes)
                if known is not None and (known.device, known.kind) == (device.id, kind):
                    self._entries[known.id].uses += 1
                    region = known
                else:
                    region = self._take_in(device, address, nbytes, kind, what)
                regions.append(region)
            undo.pop_all()
        return regions

    def _take_in(self, device: Device, address: int, nbytes: int, kind: MemoryKind, what: str) -> Region:
        self._check_room(device, nbytes, kind, True)
        alignment = ALIGNMENTS[MemoryKind.DEVICE]
        if kind is MemoryKind.DEVICE and self._hccs and address % alignment:
            raise BackendError(
                Failure.INVALID,
                f"{what} can't be registered: HCCS wants device memory to start at a multiple of {alignment} bytes; "
                "align it, or set HCCL_INTRA_ROCE_ENABLE=1 on all sides",
            )
        pinned = True
        location = location_of(device, address)
        if kind is MemoryKind.HOST:
            self._host.check([(address, address + nbytes)])
            # A driver without the function leaves it to the user; one that has no answer did not make the memory.
            pinned = location.type == LocationType.HOST if location else not tells_locations(device)
        if location is not None and (location.type == LocationType.DEVICE) is not (kind is MemoryKind.DEVICE):
            raise BackendError(Failure.INVALID, f"{what} can't be registered: the driver says it is not {kind.name}")
        if kind is MemoryKind.DEVICE:
            _check_allocation(device, address, nbytes, what)
        # The card can't reach pageable memory: if it were bound, no link could be made any more.
        handle = _register(device, address, nbytes, kind, f"{what} could not be registered") if pinned else None
        region = Region(next(self._ids), device.id, kind, address, nbytes)
        self._put(Entry(region, device, handle, None, pinned and location is not None, handle is not None))
        return region

    def unregister(self, regions: Iterable[Region]) -> None:
        """End one registration in each of the regions.

        Raises
        ------
        BackendError
            When the driver keeps some of them, which stay registered. The call can be repeated.
        """
        with self._lock:
            self._end(regions)

    def _end(self, regions: Iterable[Region]) -> None:
        ending = Counter(region.id for region in regions)
        known = {id: self._entries[id] for id in ending if id in self._entries}  # not what a first try has ended
        with ExitStack() as all_of_them:
            for id, entry in known.items():
                if entry.uses <= ending[id]:
                    all_of_them.callback(self._take_out, entry)
        for id, entry in known.items():
            entry.uses -= ending[id]

    def _take_out(self, entry: Entry) -> None:
        with ExitStack() as all_of_them:
            for binder in self._binders:
                all_of_them.callback(self._with, binder, binder.unbind, entry)
        if entry.handle is not None:
            _deregister(entry)
        # Only now: what the driver still has registered must stay known.
        self._drop(entry)

    # ------------------------------------------------------------------ communicators

    def bind(self, binder: Binder, private: Region) -> None:
        """Bind to a communicator its own buffer and all that it wants; what is registered later is not."""
        with self._lock:
            self._binders.add(binder)
            for entry in self._entries.values():
                if entry.region is private or (entry.exported and binder.wants(entry.region)):
                    self._with(binder, binder.bind, entry)

    def unbind(self, binder: Binder) -> None:
        """Unbind all from a communicator, which is to end."""
        with self._lock, ExitStack() as all_of_them:
            self._binders.discard(binder)
            for entry in self._entries.values():
                all_of_them.callback(self._with, binder, binder.unbind, entry)

    def remap(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Tell the cards that (address, bytes) of registered device memory have new pages.

        Raises
        ------
        BackendError
            ``INVALID`` when a range is not registered; ``PEER_GONE`` when there is no link that knows it.
        """
        if not ranges:
            raise BackendError(Failure.INVALID, "no memory to remap is given")
        found: dict[Device, dict[int, Region]] = {}
        for address, nbytes in ranges:
            region = self.find(address, nbytes)
            if region is None or region.kind is not MemoryKind.DEVICE:
                raise BackendError(
                    Failure.INVALID, f"{nbytes} bytes at {address:#x} are not registered memory of a device"
                )
            found.setdefault(self._device(region.device), {})[region.id] = region
        # No communicator can end meanwhile: it is unbound first.
        with self._lock:
            for device, regions in found.items():
                self._remap(device, list(regions.values()))

    def _remap(self, device: Device, regions: Sequence[Region]) -> None:
        comms = [binder.handle for binder in self._binders if binder.device is device]
        if not comms:
            raise BackendError(Failure.PEER_GONE, f"no link of device {device.id} stands, so nothing can be remapped")
        memory = [CommMem(MemType.DEVICE, region.address, region.nbytes) for region in regions]
        try:
            with device.current():
                device.library.call(
                    "HcclRemapRegistedMemory",
                    (ctypes.c_void_p * len(comms))(*comms),
                    (CommMem * len(memory))(*memory),
                    len(comms),
                    len(memory),
                )
        except NativeError as error:
            raise failure(error, f"memory of device {device.id} could not be remapped", step=Step.REMAP) from error

    @staticmethod
    def _with(binder: Binder, act: Callable[[Region, int], None], entry: Entry) -> None:
        if entry.handle is not None and entry.device is binder.device:
            with entry.device.current():
                act(entry.region, entry.handle)

    # ------------------------------------------------------------------ what is known

    def find(self, address: int, nbytes: int) -> Region | None:
        """Give the region that a range of this process is in."""
        return self._table.find(address, nbytes)

    def pinned(self, region: Region) -> bool:
        """Say whether asynchronous copies may use a region."""
        entry = self._entries.get(region.id)
        return entry is not None and entry.pinned

    def exported(self) -> list[Region]:
        """List what peers are told of."""
        with self._lock:
            return [entry.region for entry in self._entries.values() if entry.exported]

    def close(self) -> list[str]:
        """Give everything back; say what could not be."""
        kept = []
        for entry in list(self._entries.values()):
            try:
                if entry.handle is not None:
                    _deregister(entry)
                if entry.pointer is not None:
                    _give_back(entry.device, entry.pointer, entry.region.kind)
            except BackendError as error:
                # A card may still write there, so it stays registered and allocated.
                kept.append(error.text)
        self._entries.clear()
        self._table = RegionTable()
        return kept

    # ------------------------------------------------------------------ inside

    def _device(self, id: int) -> Device:
        if id not in self._devices:
            raise BackendError(Failure.INVALID, f"device {id} is not claimed, claimed are {sorted(self._devices)}")
        return self._devices[id]

    def _registered(self, device: Device) -> int:
        """Give the bytes of a device that are registered."""
        entries = list(self._entries.values())
        return sum(e.region.nbytes for e in entries if e.device is device and e.region.kind is MemoryKind.DEVICE)

    def _check_room(self, device: Device, nbytes: int, kind: MemoryKind, exported: bool) -> None:
        if not exported:
            return
        taken = self._registered(device)
        if kind is MemoryKind.DEVICE and taken + nbytes > MAX_DEVICE_BYTES:
            raise BackendError(
                Failure.INVALID,
                f"{nbytes} bytes of device {device.id} can't be registered beside {taken} that are: its card takes "
                f"{MAX_DEVICE_BYTES} in all",
            )
        if sum(entry.exported for entry in self._entries.values()) >= MAX_REGIONS:
            raise BackendError(Failure.INVALID, f"{MAX_REGIONS} regions of memory are registered, more can't be")

    def _put(self, entry: Entry) -> None:
        self._entries[entry.region.id] = entry
        if entry.region.kind is MemoryKind.HOST:
            self._host.add(entry.region.address, entry.region.nbytes)
        self._publish()

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.region.id]
        if entry.region.kind is MemoryKind.HOST:
            self._host.remove(entry.region.address, entry.region.nbytes)
        self._publish()

    def _publish(self) -> None:
        self._table = RegionTable(entry.region for entry in self._entries.values())


def _free(device: Device) -> tuple[int, int]:
    """Give the free and all memory of a device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        with device.current():
            device.library.call("aclrtGetMemInfo", MemInfo.HBM, ctypes.byref(free), ctypes.byref(total))
    except NativeError as error:
        raise failure(error, f"device {device.id} does not tell its free memory", step=Step.MEMORY) from error
    return free.value, total.value


def _allocate(device: Device, nbytes: int, kind: MemoryKind) -> int:
    pointer = ctypes.c_void_p()
    on_device = kind is MemoryKind.DEVICE
    try:
        with device.current():
            if on_device:
                device.library.call("aclrtMalloc", ctypes.byref(pointer), nbytes, MallocPolicy.HUGE_FIRST)
            else:
                device.library.call("aclrtMallocHost", ctypes.byref(pointer), nbytes)
    except NativeError as error:
        doing = f"{nbytes} bytes of pinned host memory could not be allocated"
        if on_device:
            free, total = _free(device)
            doing = f"{nbytes} bytes could not be allocated on device {device.id}, where {free} of {total} are free"
        raise failure(error, doing, step=Step.MEMORY if on_device else Step.HOST_MEMORY) from error
    if pointer.value is None:
        raise BackendError(Failure.FAILED, f"the driver gave no address for {nbytes} bytes of {kind.name} memory")
    return pointer.value


def _give_back(device: Device, pointer: int, kind: MemoryKind) -> None:
    try:
        with device.current():
            device.library.call("aclrtFree" if kind is MemoryKind.DEVICE else "aclrtFreeHost", pointer)
    except NativeError as error:
        raise failure(
            error, f"memory at {pointer:#x} on device {device.id} could not be freed", step=Step.MEMORY
        ) from (error)


def _register(device: Device, address: int, nbytes: int, kind: MemoryKind, doing: str) -> int:
    memory = CommMem(_TYPES[kind], address, nbytes)
    handle = ctypes.c_void_p()
    try:
        with device.current():
            device.library.call("HcclRegisterGlobalMem", ctypes.byref(memory), ctypes.byref(handle))
    except NativeError as error:
        raise failure(error, f"{doing} (wanted alignment {ALIGNMENTS[kind]})", step=Step.REGISTER) from error
    return handle.value or 0


def _deregister(entry: Entry) -> None:
    region = entry.region
    try:
        with entry.device.current():
            entry.device.library.call("HcclDeregisterGlobalMem", entry.handle)
    except NativeError as error:
        doing = f"{region.nbytes} bytes at {region.address:#x} on device {region.device} could not be deregistered"
        raise failure(error, doing, step=Step.REGISTER) from error


def _check_allocation(device: Device, address: int, nbytes: int, what: str) -> None:
    """Refuse device memory that the driver would register and no link could use."""
    # Not its device: nobody says whether the driver's number for that is the logical or the physical one.
    allocation = allocation_of(device, address)
    if allocation is not None and address + nbytes > allocation[1]:
        raise BackendError(
            Failure.INVALID,
            f"{what} can't be registered: the memory that was allocated there ends after "
            f"{allocation[1] - address} bytes",
        )
