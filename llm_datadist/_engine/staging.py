"""Bytes that can't go one-sided: their owner copies them to and from an area that its peers can reach.

The initiator asks for each chunk over the control connection. The owner copies between its memory and the area of that
link, and answers; the initiator moves the bytes between the area and its own memory like any others. Slow, correct, and
said once a link. The owner looks at the generation of the cache under its own lock, and `unregister_cache` waits for
it, so a request that comes late finds nothing to do.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llm_datadist._engine.caches import Caches
from llm_datadist._engine.control import remaining
from llm_datadist._engine.directory import Unreadable
from llm_datadist._engine.links import Link, Links
from llm_datadist._engine.space import Space
from llm_datadist._engine.uses import Use
from llm_datadist._engine.wire import Frame, Kind, Malformed
from llm_datadist._kernels.records import Record
from llm_datadist._kernels.runs import Bases, Plan, span_runs
from llm_datadist.backend import Backend, BackendError, Failure, Place, Region

__all__ = ["DENSE_STAGING_BYTES", "SPARSE_STAGING_BYTES", "Staging"]

AREA_BYTES = 256 << 10
#: Where an area takes memory when its link is first staged, and where all of them do from the start.
SPARSE_STAGING_BYTES = 512 * AREA_BYTES
DENSE_STAGING_BYTES = 64 * AREA_BYTES
#: So that a request fits into a frame.
PIECES = 512
#: An initiator waits for each answer; after interruptions a few requests may be left.
REQUESTS = 16


@dataclass(slots=True)
class Chunk:
    """Pieces that lie in the area one after the other."""

    #: (tensor, offset in it, bytes) of the peer's cache.
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    #: Where each piece is in this process.
    addresses: list[int] = field(default_factory=list)
    nbytes: int = 0

    def plans(self, area: int, *, into_area: bool) -> Iterator[Plan]:
        """Plan the copies between an area and the addresses, pieces of one size together."""
        return plans(area, self.addresses, [nbytes for _, _, nbytes in self.pieces], into_area=into_area)


def plans(area: int, addresses: list[int], sizes: list[int], *, into_area: bool) -> Iterator[Plan]:
    """Plan copies between an area, where pieces lie one after the other, and their addresses."""
    groups: dict[int, tuple[list[int], list[int]]] = {}
    at = area
    for address, nbytes in zip(addresses, sizes, strict=True):
        staged, own = groups.setdefault(nbytes, ([], []))
        staged.append(at)
        own.append(address)
        at += nbytes
    for nbytes, (staged, own) in groups.items():
        yield Plan(Bases(own, staged) if into_area else Bases(staged, own), span_runs(0, 0, nbytes))


def chunks(plan: Plan, tensor_bytes: int, *, write: bool) -> Iterator[Chunk]:
    """Cut a plan whose remote bases count bytes from the cache's first tensor on."""
    chunk = Chunk()
    runs = plan.runs.tolist()
    for source, destination in plan.bases.tolist():
        for source_offset, destination_offset, nbytes in runs:
            here, there = source + source_offset, destination + destination_offset
            remote, own = (there, here) if write else (here, there)
            tensor, offset = divmod(remote, tensor_bytes)
            while nbytes:
                size = min(nbytes, AREA_BYTES - chunk.nbytes)
                chunk.pieces.append((tensor, offset, size))
                chunk.addresses.append(own)
                chunk.nbytes += size
                offset, own, nbytes = offset + size, own + size, nbytes - size
                if chunk.nbytes == AREA_BYTES or len(chunk.pieces) == PIECES:
                    yield chunk
                    chunk = Chunk()
    if chunk.pieces:
        yield chunk


class Staging:
    """Both sides of staging for one engine. Thread-safe.

    Parameters
    ----------
    backend : Backend
        Copies inside this process.
    region : Region or None
        Holds the areas of this engine's links; None if no memory of this engine ever needs one.
    caches : Caches
        What peers may ask for.
    links : Links
        Carries the requests.
    """

    def __init__(self, backend: Backend, region: Region | None, caches: Caches, links: Links) -> None:
        self._backend = backend
        self._region = region
        self._caches = caches
        self._links = links
        self._space = Space(region.nbytes if region is not None else 0, AREA_BYTES)
        #: The areas of links that have been staged; only the worker looks at them.
        self._areas: dict[Link, int] = {}
        #: Requests of peers, and links that have ended.
        self._jobs: queue.SimpleQueue[tuple[Link, Frame | None] | None] = queue.SimpleQueue()
        #: Requests of each link that are not answered; only the service thread looks at them.
        self._waiting: dict[Link, int] = {}
        self._worker: threading.Thread | None = None
        links.stage, links.ended = self._asked, self._ended

    # ------------------------------------------------------------------ the initiator

    def read(self, link: Link, record: Record, plan: Plan, guard: Any, deadline_ns: int) -> None:
        """Copy a plan from the peer; like `Endpoint.read`."""
        self._transfer(link, record, plan, guard, deadline_ns, write=False)

    def write(self, link: Link, record: Record, plan: Plan, guard: Any, deadline_ns: int) -> None:
        """Copy a plan to the peer; like `Endpoint.write`."""
        self._transfer(link, record, plan, guard, deadline_ns, write=True)

    def _transfer(self, link: Link, record: Record, plan: Plan, guard: Any, deadline_ns: int, *, write: bool) -> None:
        if not link.staged:
            link.staged = True
            warnings.warn(
                f"registered memory of cluster {link.cluster_id} can't be reached directly, so it is copied piece by "
                f"piece with that process's help, which is slow: {link.why_staged}",
                RuntimeWarning,
                stacklevel=2,
            )
        moved = False
        try:
            for chunk in chunks(plan, record.tensor_bytes, write=write):
                if write:
                    area = self._ask(link, record, Chunk(), deadline_ns, write=False)
                    for part in chunk.plans(area.base, into_area=True):
                        link.write(part, guard, deadline_ns, area.route)
                    moved = True  # from now on bytes may have come to their place
                    self._ask(link, record, chunk, deadline_ns, write=True)
                else:
                    area = self._ask(link, record, chunk, deadline_ns, write=False)
                    for part in chunk.plans(area.base, into_area=False):
                        link.read(part, guard, deadline_ns, area.route)
                        moved = True
        except BackendError as e:
            if e.kind is Failure.STALE and moved:
                raise BackendError(Failure.TORN, e.text, e.native_code) from e
            raise

    def _ask(self, link: Link, record: Record, chunk: Chunk, deadline_ns: int, *, write: bool) -> Place:
        """Have the owner copy a chunk, which may be empty; give the place of the area."""
        body: dict[str, object] = {
            "cache": record.cache_id,
            "generation": record.generation,
            "pieces": [number for piece in chunk.pieces for number in piece],
            "write": int(write),
            "deadline_ns": deadline_ns,
        }
        answer = self._links.ask_in_transfer(link, Kind.STAGE, deadline_ns, body)
        try:
            if "failed" in answer.body:
                kind = {"stale": Failure.STALE, "invalid": Failure.INVALID}.get(answer.text("failed"), Failure.FAILED)
                raise BackendError(kind, answer.text("text"))
            return link.endpoint.locate(answer.number("region"), answer.number("at"), AREA_BYTES)
        except Malformed as e:
            raise Unreadable(str(e)) from e

    # ------------------------------------------------------------------ the owner

    def _asked(self, link: Link, frame: Frame) -> None:
        # In the service thread, which must not copy.
        waiting = self._waiting.get(link, 0)
        if waiting >= REQUESTS:
            raise Malformed(f"more than {REQUESTS} STAGE frames wait for their answers")
        self._waiting[link] = waiting + 1
        if self._worker is None:
            worker = threading.Thread(target=self._work, name="llm_datadist staging", daemon=True)
            try:
                worker.start()
            except RuntimeError as e:
                self._links.reply(link, Frame(Kind.STAGED, frame.request, {"failed": "failed", "text": str(e)}))
                return
            self._worker = worker
        self._jobs.put((link, frame))

    def _ended(self, link: Link) -> None:
        # Behind all requests of the link, so that its area is free when it goes to another.
        if self._worker is not None:
            self._jobs.put((link, None))

    def close(self, deadline_ns: int) -> None:
        """End the worker; no request is served any more."""
        self._jobs.put(None)
        if self._worker is not None:
            self._worker.join(remaining(deadline_ns))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            link, frame = job
            if frame is None:
                self._give_back(link)
            else:
                if link.my_slot >= 0:
                    self._links.reply(link, self._serve(link, frame))
                self._links.service.call(partial(self._answered, link))

    def _answered(self, link: Link) -> None:
        waiting = self._waiting.pop(link, 0) - 1
        if waiting > 0:
            self._waiting[link] = waiting

    def _give_back(self, link: Link) -> None:
        at = self._areas.pop(link, None)
        if at is not None and self._region is not None:
            self._space.give(at, AREA_BYTES)
            self._backend.discard(self._region, at, AREA_BYTES)

    def _serve(self, link: Link, frame: Frame) -> Frame:
        try:
            region, at = self._area(link)
            self._copy(link, frame, region.address + at)
        except BackendError as e:
            failed = {Failure.STALE: "stale", Failure.INVALID: "invalid"}.get(e.kind, "failed")
            return Frame(Kind.STAGED, frame.request, {"failed": failed, "text": e.text})
        except Malformed as e:
            return Frame(Kind.STAGED, frame.request, {"failed": "failed", "text": str(e)})
        return Frame(Kind.STAGED, frame.request, {"region": region.id, "at": at})

    def _area(self, link: Link) -> tuple[Region, int]:
        if self._region is None:
            raise Malformed("this engine has no memory that is reached by staging")
        at = self._areas.get(link)
        if at is None:
            at = self._space.take(AREA_BYTES)
            if at is None:
                raise BackendError(Failure.OUT_OF_MEMORY, "the owner of the memory has staged for too many links")
            try:
                self._backend.commit(self._region, at, AREA_BYTES)
            except BackendError:
                self._space.give(at, AREA_BYTES)
                raise
            self._areas[link] = at
        return self._region, at

    def _copy(self, link: Link, frame: Frame, area: int) -> None:
        numbers = frame.numbers("pieces")
        if len(numbers) % 3 or len(numbers) > 3 * PIECES:
            raise Malformed(f"a STAGE frame has {len(numbers)} numbers, expected three a piece")
        pieces = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
        write = frame.number("write", 1)
        use = Use()
        try:
            cache = self._caches.begin_generation(frame.number("cache"), frame.number("generation"), use)
            if cache is None:
                raise BackendError(Failure.STALE, "the cache has been released")
            if time.monotonic_ns() > frame.number("deadline_ns") + link.clock_ahead_ns:
                raise BackendError(Failure.TIMED_OUT, "the request came too late")
            for tensor, offset, nbytes in pieces:
                inside = offset + nbytes <= cache.geometry.tensor_bytes
                if tensor >= cache.geometry.num_tensors or not nbytes or not inside:
                    raise Malformed(f"{nbytes} bytes at {offset} of tensor {tensor} are not inside cache {cache.id}")
            if sum(numbers[2::3]) > AREA_BYTES:
                raise Malformed(f"a STAGE frame asks for {sum(numbers[2::3])} bytes, the limit is {AREA_BYTES}")
            addresses = [cache.addresses[0][tensor] + offset for tensor, offset, _ in pieces]
            for plan in plans(area, addresses, list(numbers[2::3]), into_area=not write):
                self._backend.copy(plan, ordered=False)
        finally:
            self._caches.end(use)
