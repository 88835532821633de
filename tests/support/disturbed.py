"""Faults on demand for backends that have none: the simulator's, put in front of their endpoints."""

from __future__ import annotations

import types
from typing import Any

from llm_datadist._kernels import hostcopy
from llm_datadist._kernels.runs import Plan
from llm_datadist.backend import BackendError, Failure, Place
from llm_datadist.backends.simulator.faults import Faults

#: How many arguments `Faults` gives to what copies a part only, and the last of them for "to the end".
WITH_RANGE, REST = 7, -1
FAILURES = {hostcopy.TIMED_OUT: Failure.TIMED_OUT, hostcopy.PEER_GONE: Failure.PEER_GONE}


def set_faults(engine: Any, faults: Faults | None) -> None:
    """Set the faults of all transfers of an engine."""
    backend = engine.backend
    if not hasattr(backend, "faults"):
        connect = backend.connect
        backend.connect = lambda *arguments: _disturbed(backend, connect(*arguments))
        for link in engine.links._links.values():
            _disturbed(backend, link.endpoint)
    backend.faults = faults


def forbid_registered(engine: Any) -> None:
    """Let future links reach only what the peer had from its start. Its regions are numbered as this side's."""
    connect, last = engine.backend.connect, engine.staging._region.id

    def limited(*arguments: Any) -> Any:
        endpoint = connect(*arguments)
        locate = endpoint.locate

        def locate_pools(region: int, offset: int, nbytes: int) -> Place:
            if region > last:
                raise BackendError(Failure.UNSUPPORTED, "Registered memory is out of reach, for a test.")
            place: Place = locate(region, offset, nbytes)
            return place

        endpoint.locate = locate_pools
        return endpoint

    engine.backend.connect = limited


def _disturbed(backend: Any, endpoint: Any) -> Any:
    read, write, alive = endpoint.read, endpoint.write, endpoint.alive

    def living() -> bool:
        return alive() and not (backend.faults is not None and backend.faults.drop)

    def through(move: Any, plan: Plan, guard: Any, deadline_ns: int, route: int) -> None:
        if backend.faults is None:
            move(plan, guard, deadline_ns, route)
            return

        def copy(*_: Any) -> int:
            # Of a transfer that stands still this is the part before, and then the part after, which takes all bytes.
            first_part = len(_) == WITH_RANGE and _[-1] != REST
            if not first_part:
                move(plan, guard, deadline_ns, route)
            return hostcopy.DONE

        outcome = backend.faults.copy(copy, plan, guard, types.SimpleNamespace(alive=living), deadline_ns, 1)
        if outcome != hostcopy.DONE:
            kind = FAILURES[outcome]
            raise BackendError(kind, f"The transfer failed: {kind.value}.", breaks_link=True)

    endpoint.alive = living
    endpoint.read = lambda *arguments: through(read, *arguments)
    endpoint.write = lambda *arguments: through(write, *arguments)
    return endpoint
