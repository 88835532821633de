"""Rank-table links: named sets of two to four engines that meet without knowing each other's addresses.

All members pass the same names, ranks and table. Each listens at a place made of these; the higher rank of every pair
connects to the lower. `link` returns at once, and a worker goes on until all pairs are linked or the time is over.
"""

from __future__ import annotations

import enum
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llm_datadist._addresses import Address
from llm_datadist._engine import control
from llm_datadist._engine.control import Carrier, Gone, NotThere, Service, TimedOut
from llm_datadist._engine.directory import Unreadable
from llm_datadist._engine.links import Link, LinkRequest, Links, Refused
from llm_datadist._engine.ranktable import devices_of
from llm_datadist._engine.wire import Malformed
from llm_datadist._log import get_logger
from llm_datadist.backend import BackendError
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

__all__ = ["CommState", "Communicators"]

LIMIT = 512
PREPARING = 16
DEFAULT_S = 120
#: How soon to try again to reach a member that does not listen yet.
RETRY_S = 0.01
#: How long to try at a time: a host that is down does not answer at all, and `unlink` must not wait for it.
TRY_NS = 2 * 10**9


class CommState(enum.Enum):
    """How far a communicator is."""

    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(eq=False)
class Communicator:
    """One named set of engines."""

    name: str
    #: Name and content of the set: what all members must agree on.
    meeting: str
    ranks: Mapping[int, int]
    #: Where each member listens.
    places: Mapping[int, Address]
    deadline_ns: int
    state: CommState = CommState.PREPARING
    #: Its links, which carry no transfer before all of them stand.
    links: list[Link] = field(default_factory=list)
    #: Prepares it.
    worker: threading.Thread = field(init=False)

    def missing(self, cluster_id: int) -> list[int]:
        """Give the members that a member is not linked to yet."""
        return sorted(self.ranks.keys() - {cluster_id, *(link.cluster_id for link in self.links)})


class Communicators:
    """All rank-table links of one engine. Thread-safe."""

    def __init__(
        self,
        links: Links,
        service: Service,
        carrier: Carrier,
        cluster_id: int,
        total_s: int,
        attempts: int,
        loopback: bool,
    ) -> None:
        self._links = links
        self._service = service
        self._carrier = carrier
        self._cluster_id = cluster_id
        self._total_ns = (total_s or DEFAULT_S) * 10**9
        self._attempts = attempts
        self._loopback = loopback
        #: Guards all below, and tells of each change of a communicator.
        self._changed = threading.Condition()
        self._comms: dict[int, Communicator] = {}
        self._next_id = 1
        self._preparing = 0
        self._listeners: set[socket.socket] = set()
        links.entered = self._entered

    def link(self, name: str, ranks: Mapping[int, int], table: str) -> int:
        """Start to link a set of engines; give the id of the communicator."""
        try:
            decoded = json.loads(table)
            meeting = digest(name, ranks, decoded)
        except (ValueError, RecursionError) as e:
            raise LLMException(f"rank_table is not JSON: {e}", status_code=LLMStatusCode.LLM_LINK_FAILED) from e
        places = {cluster: self._carrier.meeting_place(meeting, rank, decoded) for cluster, rank in ranks.items()}
        comm = Communicator(name, meeting, dict(ranks), places, time.monotonic_ns() + self._total_ns)
        comm.worker = threading.Thread(target=self._prepare, args=(comm,), name="llm_datadist comm", daemon=True)
        with self._changed:
            if len(self._comms) >= LIMIT:
                raise ParamInvalid(f"{LIMIT} communicators exist, which is the limit: unlink one first")
            number, self._next_id = self._next_id, self._next_id + 1
            self._comms[number] = comm
            comm.worker.start()
        return number

    def state(self, number: int) -> CommState:
        """Say how far a communicator is."""
        return self._get(number).state

    def unlink(self, number: int, deadline_ns: int) -> None:
        """Remove a communicator's links, after its preparation and running transfers."""
        comm = self._get(number)
        self._cancel(comm)
        comm.worker.join(control.remaining(deadline_ns))
        if comm.worker.is_alive() or not self._links.end_all(comm.links, deadline_ns):
            raise LLMException(
                f"communicator {number} ({comm.name}) is still in use", status_code=LLMStatusCode.LLM_UNLINK_FAILED
            )
        with self._changed:
            self._comms.pop(number, None)

    def cancel(self) -> None:
        """Stop all preparation; `wait` for its end."""
        for comm in list(self._comms.values()):
            self._cancel(comm)

    def wait(self, deadline_ns: int) -> None:
        """Wait until no preparation goes on."""
        for comm in list(self._comms.values()):
            comm.worker.join(control.remaining(deadline_ns))

    def abandon(self) -> None:
        """Close the descriptors in a forked child, where no preparation goes on."""
        for listener in self._listeners:
            listener.close()

    def _cancel(self, comm: Communicator) -> None:
        with self._changed:
            if comm.state is CommState.PREPARING:
                comm.state = CommState.ENDED
                self._changed.notify_all()

    def _get(self, number: int) -> Communicator:
        comm = self._comms.get(number)
        if comm is None:
            raise LLMException(f"communicator {number} does not exist", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        return comm

    def _entered(self, link: Link) -> None:
        with self._changed:
            for comm in self._comms.values():
                if comm.meeting == link.comm and comm.state is CommState.PREPARING:
                    comm.links.append(link)
                    self._changed.notify_all()
                    return
        raise Gone("the communicator has ended meanwhile")

    def _prepare(self, comm: Communicator) -> None:
        try:
            with self._turn(comm):
                self._meet(comm)
            with self._changed:
                if comm.state is CommState.PREPARING:
                    self._links.open(comm.links)
                    comm.state = CommState.READY
        except (TimedOut, Gone, NotThere, Refused, Malformed, Unreadable, BackendError, OSError, LLMException) as e:
            get_logger().error("communicator %s did not come about: %s", comm.name, e)
            with self._changed:
                if comm.state is CommState.PREPARING:
                    comm.state = CommState.FAILED
        finally:
            if comm.state is not CommState.READY:
                # No transfer has used them, so nothing is waited for.
                self._links.end_all(comm.links, time.monotonic_ns())

    @contextmanager
    def _turn(self, comm: Communicator) -> Iterator[None]:
        """Wait until few enough others are being prepared."""
        with self._changed:
            self._wait(comm, lambda: self._preparing < PREPARING, lambda: f"{PREPARING} others were always before it")
            self._preparing += 1
        try:
            yield
        finally:
            with self._changed:
                self._preparing -= 1
                self._changed.notify_all()

    def _wait(self, comm: Communicator, done: Callable[[], bool], why_not: Callable[[], str]) -> None:
        def ended() -> bool:
            return comm.state is not CommState.PREPARING

        if not self._changed.wait_for(lambda: ended() or done(), control.remaining(comm.deadline_ns)):
            raise TimedOut(why_not())
        if ended():
            raise Gone("unlinked meanwhile")

    def _meet(self, comm: Communicator) -> None:
        mine = comm.ranks[self._cluster_id]
        listener = self._carrier.listen(comm.places[self._cluster_id])
        self._listeners.add(listener)
        self._service.listen(listener, self._links.accept)
        try:
            for cluster in comm.missing(self._cluster_id):
                if self._loopback and not self._is_there(comm, cluster):
                    self._connect(comm, self._cluster_id, alias=cluster)
                elif comm.ranks[cluster] < mine:
                    self._connect(comm, cluster)
            with self._changed:
                self._wait(
                    comm,
                    lambda: not comm.missing(self._cluster_id),
                    lambda: f"clusters {comm.missing(self._cluster_id)} did not come in time",
                )
        finally:
            self._listeners.discard(listener)
            self._service.release(listener)

    def _is_there(self, comm: Communicator, cluster: int) -> bool:
        try:
            self._carrier.connect(comm.places[cluster], time.monotonic_ns() + 10**7).close()
        except (NotThere, TimedOut):
            return False
        return True

    def _connect(self, comm: Communicator, cluster: int, alias: int | None = None) -> None:
        # A loop-back link is told from others of the same engine by the member that it stands for.
        local = () if alias is None else (comm.places[alias],)
        request = LinkRequest(cluster, local, comm=comm.meeting, alias=alias)
        attempts = 0
        while True:
            try:
                channel = self._carrier.connect(
                    comm.places[cluster], min(comm.deadline_ns, time.monotonic_ns() + TRY_NS)
                )
            except (NotThere, TimedOut) as e:
                with self._changed:
                    if time.monotonic_ns() > comm.deadline_ns:
                        raise TimedOut(f"cluster {cluster} did not come in time: {e}") from None
                    if comm.state is not CommState.PREPARING:
                        raise Gone("unlinked meanwhile") from None
                    self._changed.wait(RETRY_S)
                continue
            attempts += 1
            try:
                self._links.greet(channel, request, comm.deadline_ns)
            except (Gone, Malformed, Unreadable, BackendError) as e:
                if attempts >= self._attempts or comm.state is not CommState.PREPARING:
                    raise
                get_logger().warning("attempt %d to link cluster %d for %s failed: %s", attempts, cluster, comm.name, e)
            else:
                return


def digest(name: str, ranks: Mapping[int, int], table: Any) -> str:
    """Make the name under which the members of a set meet.

    Members may write one table in different ways, so it counts which address has which rank, if the table says that.
    """
    devices = [device for _, device in devices_of(table)]
    if devices and all("rank_id" in device and "device_ip" in device for device in devices):
        content: Any = sorted((str(device["rank_id"]), str(device["device_ip"])) for device in devices)
    else:
        content = table
    text = json.dumps([name, sorted(ranks.items()), content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
