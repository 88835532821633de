"""The data path to one peer: its segments, mapped here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from llm_datadist._kernels import hostcopy
from llm_datadist.backend import BackendError, Endpoint, Export, Failure, Pair, Window
from llm_datadist.backends.simulator import exports
from llm_datadist.backends.simulator.segments import Mapping, map_peer

if TYPE_CHECKING:
    from llm_datadist._kernels.runs import Plan
    from llm_datadist.backends.simulator.backend import SimulatorBackend

__all__ = ["SimulatorEndpoint"]

_FAILURES: Final = {
    hostcopy.TIMED_OUT: (Failure.TIMED_OUT, "The transfer did not end within its time limit."),
    hostcopy.STALE: (Failure.STALE, "The peer changed or released the cache before the transfer began."),
    hostcopy.TORN: (Failure.TORN, "The peer changed or released the cache during the transfer."),
    hostcopy.PEER_GONE: (Failure.PEER_GONE, "The peer's process has ended, or its connection is closed."),
}


class SimulatorEndpoint(Endpoint):
    """One peer's windows and pools. It keeps no descriptor: mappings need none."""

    windows: tuple[Window, Window]

    def __init__(self, backend: SimulatorBackend, peer: Export, pair: Pair, threads: int) -> None:
        self._backend = backend
        self._threads = threads
        self._closed = False
        self._liveness = hostcopy.Liveness(pair.control.fileno(), pair.pidfd)
        #: Region id to (where it is mapped here, bytes).
        self._pools: dict[int, tuple[Mapping, int]] = {}
        self._mappings: list[Mapping] = []
        try:
            if pair.control.fileno() < 0:
                raise BackendError(*_FAILURES[hostcopy.PEER_GONE])
            self._map(exports.decode(peer.data, len(peer.fds)), peer.fds)
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
            self._pools[pool.id] = (self._add(fd, pool.nbytes, f"pool {pool.id}", writable=True), pool.nbytes)

    def _add(self, fd: int, nbytes: int, name: str, *, writable: bool) -> Mapping:
        mapping = map_peer(fd, nbytes, writable=writable, name=name)
        self._mappings.append(mapping)
        return mapping

    def _range(self, region: int, offset: int, nbytes: int) -> Mapping:
        if self._closed:
            raise BackendError(*_FAILURES[hostcopy.PEER_GONE])
        if region not in self._pools:
            raise BackendError(
                Failure.INVALID, f"Region {region} of the peer is not known here; known are {sorted(self._pools)}."
            )
        mapping, size = self._pools[region]
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise BackendError(
                Failure.INVALID,
                f"The range of {nbytes} bytes at offset {offset} is not inside region {region} of the peer, "
                f"which has {size} bytes.",
            )
        return mapping

    def locate(self, region: int, offset: int, nbytes: int) -> int:
        return self._range(region, offset, nbytes).address + offset

    def read(self, plan: Plan, guard: hostcopy.Guard | None, deadline_ns: int) -> None:
        self._copy(plan, guard, deadline_ns)

    def write(self, plan: Plan, guard: hostcopy.Guard | None, deadline_ns: int) -> None:
        self._copy(plan, guard, deadline_ns)

    def _copy(self, plan: Plan, guard: hostcopy.Guard | None, deadline_ns: int) -> None:
        faults = self._backend.faults
        if self._closed:
            outcome = hostcopy.PEER_GONE
        elif faults is None:
            outcome = hostcopy.copy(plan, guard, self._liveness, deadline_ns, self._threads)
        else:
            outcome = faults.copy(plan, guard, self._liveness, deadline_ns, self._threads)
        if outcome != hostcopy.DONE:
            raise BackendError(*_FAILURES[outcome])

    def alive(self) -> bool:
        faults = self._backend.faults
        return not self._closed and not (faults is not None and faults.drop) and self._liveness.alive()

    def close(self) -> None:
        self._closed = True
        self._pools.clear()
        while self._mappings:
            self._mappings.pop().unmap()
