"""The data path to one peer: a communicator for each pair of devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llm_datadist._kernels.hostcopy import Guard, Liveness
from llm_datadist._kernels.runs import Plan
from llm_datadist.backend import BackendError, Endpoint, Failure, Place, Region
from llm_datadist.backends.acl.codes import Step, failure
from llm_datadist.backends.acl.communicator import BOUNCE_BYTES, Communicator
from llm_datadist.backends.acl.copies import Copies
from llm_datadist.backends.acl.library import NativeError
from llm_datadist.backends.acl.ranges import Range, batches, chunks, expand
from llm_datadist.backends.acl.regions import RegionTable
from llm_datadist.backends.acl.structures import DESCRIPTORS

if TYPE_CHECKING:
    from llm_datadist.backends.acl.exports import Description

__all__ = ["AclEndpoint"]

#: Batches that are queued on a stream before it is waited for.
QUEUED: Final = 1024
#: How long the end of a peer's connection is waited for when a transfer failed.
GOING_S: Final = 0.1


class AclEndpoint(Endpoint):
    """One peer's memory.

    Parameters
    ----------
    communicators : sequence of Communicator
        In the order of the devices.
    peer : Description
        Its memory when the link was made; what is registered later is not reached.
    copies : Copies
        Copies between the bounce buffers and memory that is not bound.
    liveness : Liveness
        Tells the peer's death.
    name : str
        Names the peer in errors.
    retire : callable
        Is given the endpoint once it is closed, to end the communicators elsewhere.
    """

    windows = None

    def __init__(
        self,
        communicators: Sequence[Communicator],
        peer: Description,
        copies: Copies,
        liveness: Liveness,
        name: str,
        retire: Callable[[AclEndpoint], None],
    ) -> None:
        self.communicators = communicators
        self._regions = {region.id: region for region in peer.regions}
        self._table = RegionTable(peer.regions)
        self._copies = copies
        self._liveness = liveness
        self._name = name
        self._retire = retire
        self._turn = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        #: Why nothing can be transferred any more; empty as long as it can.
        self._broken = ""

    # ------------------------------------------------------------------ where things are

    def locate(self, region: int, offset: int, nbytes: int) -> Place:
        known = self._known(region, offset, nbytes)
        if not self.communicators[known.device].wants(known):
            raise BackendError(
                Failure.UNSUPPORTED, f"region {region} of the peer is memory of its host, which HCCS does not reach"
            )
        return Place(known.address + offset, 0)

    def address_of(self, region: int, offset: int) -> int:
        return self._known(region, offset, 0).address + offset

    def _known(self, region: int, offset: int, nbytes: int) -> Region:
        self._require_open()
        known = self._regions.get(region)
        if known is None:
            raise BackendError(
                Failure.UNSUPPORTED, f"region {region} of the peer was registered after this link, or is pageable"
            )
        if offset < 0 or nbytes < 0 or offset + nbytes > known.nbytes:
            raise BackendError(
                Failure.INVALID,
                f"{nbytes} bytes at offset {offset} are not inside region {region} of the peer, "
                f"which has {known.nbytes} bytes",
            )
        return known

    def _require_open(self) -> None:
        if self._broken:
            text = f"the link with {self._name} is broken: {self._broken}"
            raise BackendError(Failure.FAILED, text, breaks_link=True)
        if self._closed:
            raise BackendError(Failure.PEER_GONE, f"the link with {self._name} is closed")

    # ------------------------------------------------------------------ transfers

    def read(self, plan: Plan, guard: Guard | None, deadline_ns: int, route: int) -> None:
        self._transfer(plan, deadline_ns, write=False)

    def write(self, plan: Plan, guard: Guard | None, deadline_ns: int, route: int) -> None:
        self._transfer(plan, deadline_ns, write=True)

    def _transfer(self, plan: Plan, deadline_ns: int, *, write: bool) -> None:
        left_s = (deadline_ns - time.monotonic_ns()) / 1e9
        if left_s <= 0 or not self._turn.acquire(timeout=left_s):
            raise BackendError(Failure.TIMED_OUT, f"there was no time for a transfer with {self._name}")
        try:
            self._require_open()
            direct, bounced = self._sort(plan, write)
            runs = plan.runs.tolist()
            if not write:
                runs = [(local, remote, nbytes) for remote, local, nbytes in runs]
            with self._breaking(write):
                for communicator, pairs in direct.items():
                    self._submit(communicator, expand(pairs, runs), deadline_ns, write)
                for communicator in direct:
                    communicator.wait(deadline_ns, self._liveness.alive)
            for communicator, pairs in bounced.items():
                self._bounce(communicator, expand(pairs, runs, BOUNCE_BYTES), deadline_ns, write)
        finally:
            self._turn.release()

    def _sort(self, plan: Plan, write: bool) -> tuple[Pairs, Pairs]:
        """Find for each pair of bases the communicator, and whether the memory of this side is bound to it."""
        extents = plan.runs.source_end, plan.runs.destination_end
        direct: Pairs = {}
        bounced: Pairs = {}
        for bases in plan.bases.tolist():
            local, remote = bases if write else bases[::-1]
            local_bytes, remote_bytes = extents if write else extents[::-1]
            region = self._table.find(remote, remote_bytes)
            if region is None:
                raise BackendError(
                    Failure.INVALID, f"{remote_bytes} bytes at {remote:#x} are not inside one region of {self._name}"
                )
            communicator = self.communicators[region.device]
            if not communicator.wants(region):
                raise BackendError(Failure.INVALID, f"the memory at {remote:#x} of {self._name} is not reached by HCCS")
            reached = communicator.find(local, local_bytes) is not None
            (direct if reached else bounced).setdefault(communicator, []).append((local, remote))
        return direct, bounced

    def _submit(self, communicator: Communicator, ranges: Iterable[Range], deadline_ns: int, write: bool) -> None:
        for done, batch in enumerate(batches(ranges, DESCRIPTORS), 1):
            communicator.submit(batch, write=write)
            if done % QUEUED == 0:
                communicator.wait(deadline_ns, self._liveness.alive)

    def _bounce(self, communicator: Communicator, ranges: Iterable[Range], deadline_ns: int, write: bool) -> None:
        """Transfer memory of this side that is not bound by way of a buffer that is."""
        for chunk in chunks(ranges, DESCRIPTORS, BOUNCE_BYTES):
            staged, at = [], communicator.bounce
            for _, _, nbytes in chunk:
                staged.append(at)
                at += nbytes
            through = [(at, remote, nbytes) for at, (_, remote, nbytes) in zip(staged, chunk, strict=True)]
            if write:
                self._copies.pieces([(local, at, n) for at, (local, _, n) in zip(staged, chunk, strict=True)])
            with self._breaking(write):
                communicator.submit(through, write=write)
                communicator.wait(deadline_ns, self._liveness.alive)
            if not write:
                self._copies.pieces([(at, local, n) for at, (local, _, n) in zip(staged, chunk, strict=True)])

    @contextmanager
    def _breaking(self, write: bool) -> Iterator[None]:
        """End the link when what is done inside fails: what is queued must not touch memory after the call.

        Where that can't be stopped, `revoked` says no until it can.
        """
        try:
            yield
        except BaseException as error:
            told = self._explain(error, write)
            self._broken = str(told) or type(told).__name__
            running = [text for communicator in self.communicators if (text := _abort(communicator))]
            self.close()
            if running:
                text = f"{told}; and what is queued could not be stopped, so bytes may still move: {'; '.join(running)}"
                raise BackendError(Failure.FAILED, text, breaks_link=True) from error
            if told is error:
                raise
            raise told from error

    def _explain(self, error: BaseException, write: bool) -> BaseException:
        """Say what to raise for a failure."""
        doing = f"{'writing to' if write else 'reading from'} {self._name} failed"
        if isinstance(error, NativeError):
            told = failure(error, doing, step=Step.TRANSFER)
            kind = Failure.PEER_GONE if self._goes() else told.kind
            return BackendError(kind, told.text, told.native_code, breaks_link=True)
        if isinstance(error, BackendError):
            return BackendError(error.kind, f"{doing}: {error.text}", error.native_code, breaks_link=True)
        return error

    def _goes(self) -> bool:
        """Say whether the peer is gone. Its card may be silent shortly before the end of the connection arrives."""
        end = time.monotonic() + GOING_S
        while self._liveness.alive():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    # ------------------------------------------------------------------ the end

    def alive(self) -> bool:
        return not self._closed and self._liveness.alive()

    def close(self) -> None:
        with self._closing:  # also who comes second returns when the rest is on its way
            if not self._closed:
                self._closed = True
                self._retire(self)

    def revoked(self) -> bool:
        return all(communicator.ended for communicator in self.communicators)


def _abort(communicator: Communicator) -> str:
    """Drop what is queued; say why that failed."""
    try:
        communicator.abort()
    except (BackendError, NativeError) as error:
        return str(error)
    return ""


Pairs = dict[Communicator, list[tuple[int, int]]]
