"""What a backend is: it holds memory and moves bytes one-sided, and knows nothing else.

The engine owns every meaning (caches, keys, roles, status codes). A backend sees devices, regions,
addresses and sizes. It reports trouble with `BackendError` only, whose `Failure` kind the engine
turns into a status code.
"""

from __future__ import annotations

import enum
import importlib
import os
import socket
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llm_datadist._kernels.hostcopy import Guard
    from llm_datadist._kernels.runs import Plan

__all__ = [
    "Backend",
    "BackendError",
    "Capabilities",
    "Endpoint",
    "Export",
    "Failure",
    "MemoryKind",
    "Pair",
    "Place",
    "Region",
    "Window",
    "make_backend",
]

ENTRY_POINTS = "llm_datadist.backends"


class Failure(enum.Enum):
    """Why a backend could not do what it was asked."""

    OUT_OF_MEMORY = "out of memory"
    #: Host memory of a device's driver, where `OUT_OF_MEMORY` is about a pool.
    HOST_OUT_OF_MEMORY = "out of host memory"
    INVALID = "invalid argument"
    TIMED_OUT = "timed out"
    PEER_GONE = "peer gone"
    #: A guard word differed before the first byte was written: look again and retry.
    STALE = "the peer's data changed before the copy"
    #: A guard word differed after the copy: the bytes written are undefined.
    TORN = "the peer's data changed during the copy"
    LINK_FAILED = "link failed"
    UNLINK_FAILED = "unlink failed"
    #: The device reports a fault of its own memory: bytes are lost.
    DEVICE_MEMORY = "device memory fault"
    SUSPECT_REMOTE = "memory fault suspected at the peer"
    CLOSING = "closing"
    UNSUPPORTED = "not supported"
    UNAVAILABLE = "not available"
    FAILED = "failed"


class BackendError(Exception):
    """The only exception a backend raises on purpose.

    Parameters
    ----------
    kind : Failure
        What sort of trouble it is; the engine maps it to a status code.
    text : str
        A full sentence for the user: what failed, with the numbers.
    native_code : int, optional
        The number that the operating system or driver gave (errno on the simulator).
    breaks_link : bool, optional
        The endpoint that raised it can't be used any more, though its peer may live.
    """

    def __init__(self, kind: Failure, text: str, native_code: int = 0, *, breaks_link: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.native_code = native_code
        self.breaks_link = breaks_link


class MemoryKind(enum.IntEnum):
    """Where a region's bytes live."""

    HOST = 0
    DEVICE = 1


@dataclass(frozen=True, slots=True)
class Region:
    """One range of memory that the backend knows. ``id`` is small, and unique in its backend."""

    id: int
    device: int
    kind: MemoryKind
    address: int
    nbytes: int


class Place(NamedTuple):
    """A base address for a `Plan`, and the way to it: a number that only its endpoint understands."""

    base: int
    route: int


@dataclass(frozen=True, slots=True)
class Window:
    """Memory for directory or board words, in this process: 8-byte aligned and zero at first."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Export:
    """What a peer needs in order to reach my regions: bounded bytes, and descriptors to pass along."""

    data: bytes
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """The two ends of one link, as the control connection knows them.

    ``control`` is the connected socket and ``pidfd`` a descriptor of the peer's process, or -1 where there
    is none. An endpoint polls both for liveness and never reads, writes or closes them. ``pid`` is -1 where it is not
    known, as on another host.
    """

    control: socket.socket
    pid: int
    pidfd: int
    #: Names the link on both sides alike; never used before.
    name: str
    #: Tells the two sides apart: true on exactly one of them.
    first: bool


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the engine may expect of a backend."""

    #: Directory and board of a peer are mapped memory. Else the peer is asked for their words over control.
    mapped_words: bool
    #: Bytes to which tensors in a pool must be aligned.
    alignment: int
    #: Pools and windows take memory only where they are used, so they may be larger than what there is.
    sparse: bool
    #: The processor can read and write DEVICE memory at its address. Else only `Backend.load` and `Backend.store` can.
    host_access: bool
    #: Memory can be registered when links stand, and is reached over them. Else it is staged on them.
    late_regions: bool
    #: Whatever the process can address is registered as either kind, and what is no memory fails when it is used. Else
    #: only memory of the driver is, where the driver wants it to start, and all other is refused at once.
    any_memory: bool
    #: Peers may be on other hosts: control runs over TCP, and neither a `Pair` nor an `Export` has descriptors.
    network: bool
    #: An engine can link to itself.
    self_link: bool
    #: A forked child of a process that has an engine can open one of its own.
    forks: bool


class Endpoint(ABC):
    """The data path to one peer."""

    #: Where the peer's directory and board are mapped here, or None without `Capabilities.mapped_words`.
    windows: tuple[Window, Window] | None

    @abstractmethod
    def locate(self, region: int, offset: int, nbytes: int) -> Place:
        """Say where a range in a peer's region is for a `Plan`, and which way leads there.

        Byte x of the range is at ``base + x``, for all of it. It may span several tensors and what lies between them;
        what is refused is asked for tensor by tensor.

        Raises
        ------
        BackendError
            ``INVALID`` when the range is not inside the region: what a peer says is not trusted. ``UNSUPPORTED`` when
            no way leads there, so that the bytes must be staged.
        """

    @abstractmethod
    def address_of(self, region: int, offset: int) -> int:
        """Give the address that a byte of a peer's region has in the peer's own process."""

    @abstractmethod
    def read(self, plan: Plan, guard: Guard | None, deadline_ns: int, route: int) -> None:
        """Copy a plan from the peer; return when all bytes are in place.

        Parameters
        ----------
        plan : Plan
            Source bases come from `locate`; destination bases are addresses of this process.
        guard : Guard or None
            Words of the peer's directory that must hold given values before and after; always None without
            `Capabilities.mapped_words`.
        deadline_ns : int
            On ``time.monotonic_ns()``.
        route : int
            From `locate`, the same for all bases of the plan.

        Raises
        ------
        BackendError
            ``TIMED_OUT``, ``PEER_GONE``, ``STALE`` or ``TORN``.
        """

    @abstractmethod
    def write(self, plan: Plan, guard: Guard | None, deadline_ns: int, route: int) -> None:
        """Copy a plan to the peer; like `read` the other way round."""

    @abstractmethod
    def alive(self) -> bool:
        """Say whether the peer's process and control connection still stand."""

    @abstractmethod
    def close(self) -> None:
        """Forget the peer's memory. Idempotent, and does not wait: what takes time goes on elsewhere.

        Never called while a transfer of this side runs.
        """

    @abstractmethod
    def revoked(self) -> bool:
        """Say whether the peer is proved to be unable to write into memory of this side, once closed."""


class Backend(ABC):
    """Memory of one engine, and the way to its peers. Methods may be called from any thread."""

    capabilities: Capabilities

    @abstractmethod
    def open(self, devices: Sequence[int], options: Mapping[str, str]) -> None:
        """Claim the devices and read the options. On failure nothing is left behind."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent. Memory that a live `Tensor` shows stays until it dies."""

    @abstractmethod
    def abandon(self) -> None:
        """Close the descriptors in a forked child. Memory stays mapped; the parent's is not touched."""

    @abstractmethod
    def make_windows(self, directory_bytes: int, board_bytes: int) -> tuple[Window, Window]:
        """Make the directory (peers only read it) and the board (peers write it) of this engine. Once."""

    @abstractmethod
    def reserve(self, device: int, nbytes: int | None, kind: MemoryKind) -> Region:
        """Reserve a pool that peers can read and write; ``None`` means as large as is sensible.

        Raises
        ------
        BackendError
            ``OUT_OF_MEMORY``, with the numbers.
        """

    @abstractmethod
    def commit(self, region: Region, offset: int, nbytes: int) -> None:
        """Back a range of a pool with memory; ranges that are committed already cost nothing.

        Raises
        ------
        BackendError
            ``OUT_OF_MEMORY``, with the numbers, before the kernel would have to kill someone.
        """

    @abstractmethod
    def discard(self, region: Region, offset: int, nbytes: int) -> None:
        """Say that a committed range is free now; the backend may keep it committed for the next `commit`."""

    @abstractmethod
    def register(self, device: int, addresses: Sequence[int], nbytes: int, kind: MemoryKind) -> list[Region]:
        """Take in memory that the user owns, ``nbytes`` at each address. It is not touched.

        A region may be larger than what is registered: a range in it is named by ``address - region.address``.

        Raises
        ------
        BackendError
            ``INVALID`` when the driver refuses a range, with its position; none is registered then.
        """

    @abstractmethod
    def unregister(self, registered: Sequence[tuple[Region, int]], nbytes: int) -> None:
        """Forget ranges that `register` took in, given by region and address."""

    @abstractmethod
    def copy(self, plan: Plan, *, ordered: bool) -> None:
        """Copy a plan inside this process.

        Parameters
        ----------
        plan : Plan
            Both bases are addresses of this process, of a pool, registered, or neither.
        ordered : bool
            Runs are copied one after the other, each as if through a buffer, so that they may overlap.

        Raises
        ------
        BackendError
            ``INVALID`` for an address without memory; never a signal.
        """

    @abstractmethod
    def load(self, address: int, nbytes: int) -> bytes:
        """Give some bytes of this engine's memory, of either kind.

        Raises
        ------
        BackendError
            ``INVALID`` for an address without memory; never a signal.
        """

    @abstractmethod
    def store(self, address: int, data: bytes) -> None:
        """Put some bytes into this engine's memory; like `load` the other way round."""

    @abstractmethod
    def remap(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Tell the driver that (address, bytes) of registered memory have new pages, after a memory fault was repaired.

        Raises
        ------
        BackendError
            ``INVALID`` when a range is not registered.
        """

    @abstractmethod
    def hold(self, region: Region) -> object:
        """Give an object that keeps the region readable, past `close`, as long as the object lives.

        Without `Capabilities.host_access` nothing is readable past `close`, and None does.
        """

    @abstractmethod
    def export(self) -> Export:
        """Describe my windows and regions for a peer."""

    @abstractmethod
    def connect(self, peer: Export, pair: Pair, deadline_ns: int) -> Endpoint:
        """Open the data path to a peer. Takes over ``peer.fds``: closes them, also on failure.

        Both sides call it at the same time, on threads of their own, and it may wait for the other side's call, as long
        as the deadline allows. ``pair.control`` is the engine's while it runs.
        """


def make_backend(name: str) -> Backend:
    """Make, but not open, the backend of a name.

    Parameters
    ----------
    name : str
        ``auto``, the name of a built-in backend, or one that another package offers under the entry-point group
        ``llm_datadist.backends``.

    Raises
    ------
    BackendError
        ``INVALID`` for an unknown name, ``UNAVAILABLE`` when the backend's module can't be imported.
    """
    from importlib.metadata import entry_points

    from llm_datadist.backends import BUILT_IN
    from llm_datadist.backends.acl.probe import is_installed

    if name == "auto":
        # A broken runtime is chosen too, and is an error then: never the simulator in its place.
        name = "acl" if is_installed(os.environ) else "simulator"
        if name == "simulator":
            warnings.warn(
                "llm.Backend is auto and no Ascend runtime was found: using the simulator (host memory, one host)",
                RuntimeWarning,
                stacklevel=4,
            )
    known = {**{point.name: point.value for point in entry_points(group=ENTRY_POINTS)}, **BUILT_IN}
    if name not in known:
        raise BackendError(Failure.INVALID, f"llm.Backend is {name!r}, allowed are auto, {', '.join(sorted(known))}")
    module, _, attribute = known[name].partition(":")
    try:
        made: Backend = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as e:
        raise BackendError(Failure.UNAVAILABLE, f"backend {name!r} ({known[name]}) can't be loaded: {e}") from e
    return made
