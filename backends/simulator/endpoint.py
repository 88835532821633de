"""The data path to one peer: its segments, mapped here, and its registered memory, reached by the kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from llm_datadist._kernels import hostcopy, process
from llm_datadist._kernels.runs import Bases, Plan, span_runs
from llm_datadist.backend import BackendError, Endpoint, Export, Failure, Pair, Place, Region, Window
from llm_datadist.backends.host.memory import failure_of
from llm_datadist.backends.simulator import exports, failures
from llm_datadist.backends.simulator.faults import Copy
from llm_datadist.backends.simulator.registered import ADDRESSES, REGISTERED
from llm_datadist.backends.simulator.segments import Mapping, map_peer

if TYPE_CHECKING:
    from llm_datadist.backends.simulator.backend import SimulatorBackend

__all__ = ["SimulatorEndpoint"]

#: Routes: bytes that are mapped here, and bytes that only the kernel can reach.
MAPPED: Final = 0
BY_PROCESS: Final = 1


class SimulatorEndpoint(Endpoint):
    """One peer's windows and pools. It keeps no descriptor: mappings need none."""

    windows: tuple[Window, Window]

    def __init__(self, backend: SimulatorBackend, peer: Export, pair: Pair, threads: int) -> None:
        self._backend = backend
        self._pid = pair.pid
        self._threads = threads
        self._closed = False
        self._liveness = hostcopy.Liveness(pair.control.fileno(), pair.pidfd)
        self._pools: dict[int, PeerPool] = {}
        self._mappings: list[Mapping] = []
        try:
            if pair.control.fileno() < 0:
                raise failures.gone()
            description = exports.decode(peer.data, len(peer.fds))
            self._map(description, peer.fds)
            #: Whether the kernel lets this process reach the peer's memory by its process id.
            self.by_process = not backend.forbid_process and _reads(pair.pid, description)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in peer.fds:
                os.close(fd)

    def _map(self, peer: exports.Description, fds: Sequence[int]) -> None:
        directory = self._add(fds[0], peer.directory, "directory", writable=False)
        board = self._add(fds[1], peer.board, "board", writable=True)
        self.windows = (Window(directory.address, peer.directory), Window(board.address, peer.board))
        for fd, pool in zip(fds[2:], peer.pools, strict=True):
            self._pools[pool.id] = PeerPool(pool, self._add(fd, pool.nbytes, f"pool {pool.id}", writable=True))

    def _add(self, fd: int, nbytes: int, name: str, *, writable: bool) -> Mapping:
        mapping = map_peer(fd, nbytes, writable=writable, name=name)
        self._mappings.append(mapping)
        return mapping

    def _range(self, region: int, offset: int, nbytes: int) -> PeerPool | None:
        """Check a range, and give the pool that it is in; None for registered memory."""
        if self._closed:
            raise failures.gone()
        if region != REGISTERED and region not in self._pools:
            raise BackendError(
                Failure.INVALID, f"Region {region} of the peer is not known here; known are {sorted(self._pools)}."
            )
        pool = self._pools.get(region)
        size = ADDRESSES if pool is None else pool.region.nbytes
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise BackendError(
                Failure.INVALID,
                f"The range of {nbytes} bytes at offset {offset} is not inside region {region} of the peer, "
                f"which has {size} bytes.",
            )
        return pool

    def locate(self, region: int, offset: int, nbytes: int) -> Place:
        pool = self._range(region, offset, nbytes)
        if pool is not None:
            return Place(pool.mapping.address + offset, MAPPED)
        if not self.by_process:
            raise BackendError(
                Failure.UNSUPPORTED,
                f"The kernel does not let this process reach registered memory of process {self._pid} directly. Yama "
                "(kernel.yama.ptrace_scope) or a container forbids it; llm.Simulator.AllowPtracer=1 on the peer lifts "
                "the former.",
            )
        return Place(offset, BY_PROCESS)

    def address_of(self, region: int, offset: int) -> int:
        pool = self._range(region, offset, 0)
        return offset if pool is None else pool.region.address + offset

    def read(self, plan: Plan, guard: hostcopy.Guard | None, deadline_ns: int, route: int) -> None:
        self._transfer(plan, guard, deadline_ns, route, write=False)

    def write(self, plan: Plan, guard: hostcopy.Guard | None, deadline_ns: int, route: int) -> None:
        self._transfer(plan, guard, deadline_ns, route, write=True)

    def _transfer(self, plan: Plan, guard: hostcopy.Guard | None, deadline_ns: int, route: int, *, write: bool) -> None:
        if self._closed:
            raise failures.gone()
        copy: Copy = hostcopy.copy
        if route == BY_PROCESS:
            copy = _by_process(self._pid, write)
        elif self._backend.user_memory.wild(plan, written=not write):
            copy = _by_process(os.getpid(), write)
        faults = self._backend.faults
        try:
            if faults is None:
                outcome = copy(plan, guard, self._liveness, deadline_ns, self._threads)
            else:
                outcome = faults.copy(copy, plan, guard, self._liveness, deadline_ns, self._threads)
        except OSError as error:
            raise failure_of(error) from error
        if outcome != hostcopy.DONE:
            raise failures.of_outcome(outcome)

    def alive(self) -> bool:
        faults = self._backend.faults
        return not self._closed and not (faults is not None and faults.drop) and self._liveness.alive()

    def revoked(self) -> bool:
        # The peer keeps its mapping of this side's memory as long as its process lives.
        return False

    def close(self) -> None:
        self._closed = True
        self._pools.clear()
        while self._mappings:
            self._mappings.pop().unmap()


class PeerPool:
    """A pool of the peer, mapped here."""

    def __init__(self, region: Region, mapping: Mapping) -> None:
        self.region = region
        self.mapping = mapping


def _by_process(pid: int, write: bool) -> Copy:
    return lambda plan, *how: process.transfer(plan, pid, write, *how)


def _reads(pid: int, peer: exports.Description) -> bool:
    """Find out whether a process can be read, and is the one that wrote the export."""
    found = ctypes.c_uint64()
    plan = Plan(Bases([peer.nonce_address], [ctypes.addressof(found)]), span_runs(0, 0, 8))
    try:
        process.transfer(plan, pid, False, None, None, 0, 1)
    except OSError:
        return False  # what was refused is said when registered memory is asked for
    return found.value == peer.nonce
