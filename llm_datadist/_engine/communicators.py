"""Rank-table links: named sets of two to four engines that meet without knowing each other's addresses.

All members pass the same names, ranks and table. Each listens at a name made of these; the higher rank of every pair
connects to the lower. `link` returns at once, and a worker goes on until all pairs are linked or the time is over.
"""

from __future__ import annotations

import enum
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_datadist._addresses import Address
from llm_datadist._engine import control
from llm_datadist._engine.control import Gone, NotThere, Service, TimedOut
from llm_datadist._engine.directory import Unreadable
from llm_datadist._engine.links import Link, LinkRequest, Links, Refused
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
    deadline_ns: int
    state: CommState = CommState.PREPARING
    linked: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    finished: threading.Event = field(default_factory=threading.Event)


class Communicators:
    """All rank-table links of one engine. Thread-safe."""

    def __init__(
        self, links: Links, service: Service, namespace: str, cluster_id: int, total_s: int, loopback: bool
    ) -> None:
        self._links = links
        self._service = service
        self._namespace = namespace
        self._cluster_id = cluster_id
        self._total_ns = (total_s or DEFAULT_S) * 10**9
        self._loopback = loopback
        self._lock = threading.Lock()
        self._comms: dict[int, Communicator] = {}
        self._next_id = 1
        self._turn = threading.BoundedSemaphore(PREPARING)
        links.entered = self._entered

    def link(self, name: str, ranks: Mapping[int, int], table: str) -> int:
        """Start to link a set of engines; give the id of the communicator."""
        try:
            meeting = digest(name, ranks, json.loads(table))
        except (ValueError, RecursionError) as e:
            raise LLMException(f"rank_table is not JSON: {e}", status_code=LLMStatusCode.LLM_LINK_FAILED) from e
        comm = Communicator(name, meeting, dict(ranks), time.monotonic_ns() + self._total_ns)
        with self._lock:
            if len(self._comms) >= LIMIT:
                raise ParamInvalid(f"{LIMIT} communicators exist, which is the limit: unlink one first")
            number, self._next_id = self._next_id, self._next_id + 1
            self._comms[number] = comm
        threading.Thread(target=self._prepare, args=(comm,), name="llm_datadist comm", daemon=True).start()
        return number

    def state(self, number: int) -> CommState:
        """Say how far a communicator is."""
        return self._get(number).state

    def unlink(self, number: int, deadline_ns: int) -> None:
        """Remove a communicator's links, after its preparation and running transfers."""
        comm = self._get(number)
        self._cancel(comm)
        ended = comm.finished.wait(control.remaining(deadline_ns))
        result = self._links.end_comm(comm.meeting, deadline_ns)
        if not ended or result is not LLMStatusCode.LLM_SUCCESS:
            raise LLMException(
                f"communicator {number} ({comm.name}) is still in use", status_code=LLMStatusCode.LLM_UNLINK_FAILED
            )
        with self._lock:
            self._comms.pop(number, None)

    def close(self) -> None:
        """Stop all preparation."""
        for comm in list(self._comms.values()):
            self._cancel(comm)

    @staticmethod
    def _cancel(comm: Communicator) -> None:
        with comm.changed:
            if comm.state is CommState.PREPARING:
                comm.state = CommState.ENDED
            comm.changed.notify_all()

    def _get(self, number: int) -> Communicator:
        comm = self._comms.get(number)
        if comm is None:
            raise LLMException(f"communicator {number} does not exist", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        return comm

    def _entered(self, link: Link) -> None:
        if link.comm:
            for comm in list(self._comms.values()):
                if comm.meeting == link.comm:
                    with comm.changed:
                        comm.linked.add(link.cluster_id)
                        comm.changed.notify_all()

    def _prepare(self, comm: Communicator) -> None:
        try:
            if not self._turn.acquire(timeout=control.remaining(comm.deadline_ns)):
                raise TimedOut(f"{PREPARING} other communicators were being prepared all the time")
            try:
                self._meet(comm)
            finally:
                self._turn.release()
            with comm.changed:
                if comm.state is CommState.PREPARING:
                    comm.state = CommState.READY
        except (TimedOut, Gone, NotThere, Refused, Malformed, Unreadable, BackendError, OSError) as e:
            get_logger().error("communicator %s did not come about: %s", comm.name, e)
            with comm.changed:
                if comm.state is CommState.PREPARING:
                    comm.state = CommState.FAILED
        finally:
            comm.finished.set()

    def _meet(self, comm: Communicator) -> None:
        mine = comm.ranks[self._cluster_id]
        others = [cluster for cluster in comm.ranks if cluster != self._cluster_id]
        listener = control.listen(self._namespace, self._place(comm, self._cluster_id))
        self._service.listen(listener, self._links.accept)
        try:
            for cluster in others:
                if self._loopback and not self._is_there(comm, cluster):
                    self._connect(comm, self._cluster_id, alias=cluster)
                elif comm.ranks[cluster] < mine:
                    self._connect(comm, cluster)
            with comm.changed:
                while not comm.linked.issuperset(others):
                    left = control.remaining(comm.deadline_ns)
                    if comm.state is not CommState.PREPARING or (not comm.changed.wait(left) and not left):
                        missing = sorted(set(others) - comm.linked)
                        raise TimedOut(f"clusters {missing} did not come in time")
        finally:
            self._service.release(listener)

    def _place(self, comm: Communicator, cluster: int) -> Address:
        # No real address has such a host, so nothing else listens there.
        return Address(f"comm-{comm.meeting}-{cluster}", 0)

    def _is_there(self, comm: Communicator, cluster: int) -> bool:
        try:
            control.connect(self._namespace, self._place(comm, cluster), time.monotonic_ns() + 10**7).close()
        except (NotThere, TimedOut):
            return False
        return True

    def _connect(self, comm: Communicator, cluster: int, alias: int | None = None) -> None:
        request = LinkRequest(cluster, comm=comm.meeting, alias=alias)
        while True:
            try:
                channel = control.connect(self._namespace, self._place(comm, cluster), comm.deadline_ns)
            except NotThere:
                with comm.changed:
                    if comm.state is not CommState.PREPARING:
                        raise Gone("unlinked meanwhile") from None
                    if time.monotonic_ns() > comm.deadline_ns:
                        raise TimedOut(f"cluster {cluster} did not come in time") from None
                    comm.changed.wait(RETRY_S)
                continue
            self._links.greet(channel, request, comm.deadline_ns)
            return


def digest(name: str, ranks: Mapping[int, int], table: Any) -> str:
    """Make the name under which the members of a set meet.

    Members may write one table in different ways, so it counts which address has which rank, if the table says that.
    """
    devices = []
    if isinstance(table, dict) and isinstance(table.get("server_list"), list):
        for server in table["server_list"]:
            listed = server.get("device") if isinstance(server, dict) else None
            devices += [d for d in listed if isinstance(d, dict)] if isinstance(listed, list) else []
    if devices and all("rank_id" in device and "device_ip" in device for device in devices):
        content: Any = sorted((str(device["rank_id"]), str(device["device_ip"])) for device in devices)
    else:
        content = table
    text = json.dumps([name, sorted(ranks.items()), content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
