"""Pools: large sparse segments of which only the parts in use are backed with memory.

Freed parts stay backed up to a limit, since giving memory back and faulting it in again costs several times
what a request costs that reuses it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Final

from llm_datadist.backend import BackendError, Failure, MemoryKind, Region
from llm_datadist.backends.host.intervals import Intervals
from llm_datadist.backends.simulator.limits import Room
from llm_datadist.backends.simulator.segments import HUGE_PAGE, PAGE, SHARED, Mapping, Segment

__all__ = ["MAX_POOLS", "Pools"]

#: The kernel passes at most 253 descriptors in one message, and windows take two.
MAX_POOLS: Final = 128
#: Memory is taken piece by piece, so that signals are seen and no interrupted call has to start from nothing.
PIECE_PAGES: Final = (64 << 20) // PAGE

_SHORT_OF_MEMORY: Final = (errno.ENOMEM, errno.ENOSPC)


class Pool:
    """One region and the state of its parts."""

    def __init__(self, region: Region, segment: Segment) -> None:
        self.region = region
        self.segment = segment
        #: Bytes in use. Neighbours need not end on a page, so one page can serve two of them.
        self.live = Intervals()
        #: Pages that are backed with memory: `kept`, and those that `live` touches (or soon, within a commit).
        self.backed = Intervals()
        #: Pages that are backed though nothing is live in them.
        self.kept = Intervals()

    def allocate(self, begin: int, end: int) -> None:
        """Back pages, all or (raising OSError) none."""
        self.segment.allocate(begin * PAGE, (end - begin) * PAGE)
        self.backed.add(begin, end)

    def punch(self, begin: int, end: int) -> None:
        """Give kept pages back."""
        self.segment.punch(begin * PAGE, (end - begin) * PAGE)
        self.backed.remove(begin, end)
        self.kept.remove(begin, end)

    def free(self, begin: int, end: int) -> tuple[int, int]:
        """Forget a live byte range; give the pages around it that no other live range touches."""
        self.live.remove(begin, end)
        first, last = _pages(begin, end)
        if self.live.overlaps(first * PAGE, begin):
            first += 1
        if self.live.overlaps(end, last * PAGE):
            last = max(first, last - 1)
        for part in self.backed.overlaps(first, last):
            self.kept.add(*part)
        return first, last

    def close(self) -> None:
        """Give the memory back even while peers still map it, except for what someone here still shows."""
        held = self.segment.let_go()
        for part in self.kept if held else self.backed:
            self.punch(*part)
        self.segment.close()


def _pages(begin: int, end: int) -> tuple[int, int]:
    return begin // PAGE, -(-end // PAGE)


class Pools:
    """All pools of a backend, and the memory that they share.

    Parameters
    ----------
    address_space : int
        Bytes to reserve where the caller gives no size.
    keep_free : int
        Bytes of freed memory that may stay backed, all pools together.
    room : callable
        Says how much memory may still be taken.
    """

    def __init__(self, address_space: int, keep_free: int, room: Callable[[], Room]) -> None:
        self._address_space = address_space
        self._keep_free_pages = keep_free // PAGE
        self._room = room
        self._pools: dict[int, Pool] = {}
        self._closed = False
        self._lock = threading.Lock()

    def reserve(self, device: int, nbytes: int | None, kind: MemoryKind) -> Region:
        """Reserve a pool; without a size the largest that still leaves addresses to others."""
        with self._lock:
            if self._closed:
                raise _closed()
            if len(self._pools) == MAX_POOLS:
                raise BackendError(Failure.INVALID, f"The simulator has {MAX_POOLS} pools already, which is its limit.")
            number = len(self._pools)
            segment = self._largest(f"pool{number}") if nbytes is None else _segment(f"pool{number}", nbytes)
            nbytes = segment.nbytes if nbytes is None else nbytes
            region = Region(number, device, kind, segment.mapping.address, nbytes)
            self._pools[number] = Pool(region, segment)
            return region

    def _largest(self, name: str) -> Segment:
        nbytes = self._address_space
        while True:
            try:
                segment = _segment(name, nbytes)
            except BackendError:
                if nbytes // 2 < HUGE_PAGE:
                    raise
            else:
                if nbytes == self._address_space:
                    return segment
                # What just fits would leave nothing to the rest of the process, nor to the pools of peers.
                segment.let_go()
                segment.close()
                return _segment(name, max(nbytes // 2, HUGE_PAGE))
            nbytes //= 2

    def commit(self, region: int, offset: int, nbytes: int) -> None:
        """Back a range with memory and mark it live; on failure the range is as it was."""
        begin, end = offset, offset + nbytes
        with self._lock:
            pool = self._pool(region)
            fresh = pool.live.gaps(begin, end)
            first, last = _pages(begin, end)
            pool.live.add(begin, end)
            pool.kept.remove(first, last)
            try:
                self._back(pool, first, last)
            except BaseException:
                for part in fresh:
                    self._free(pool, *part)
                raise

    def _back(self, pool: Pool, first: int, last: int) -> None:
        gaps = pool.backed.gaps(first, last)
        missing = sum(end - begin for begin, end in gaps)
        for gap_begin, gap_end in gaps:
            begin = gap_begin
            while begin < gap_end:
                # Up to a multiple, so that no huge page is cut in two.
                end = min(begin - begin % PIECE_PAGES + PIECE_PAGES, gap_end)
                self._make_room(missing * PAGE)
                self._allocate(pool, begin, end)
                missing -= end - begin
                begin = end

    def _make_room(self, wanted: int) -> None:
        if self._room().nbytes < wanted:
            self._punch_kept()
            room = self._room()
            if room.nbytes < wanted:
                raise _out_of_memory(wanted, f"{max(room.nbytes, 0)} bytes may be taken under {room.limit}", 0)

    def _allocate(self, pool: Pool, begin: int, end: int) -> None:
        try:
            pool.allocate(begin, end)
        except OSError as error:
            if error.errno not in _SHORT_OF_MEMORY:
                raise BackendError(
                    Failure.FAILED, f"Memory of a pool could not be backed: {error.strerror}.", error.errno or 0
                ) from error
            self._punch_kept()
            try:
                pool.allocate(begin, end)
            except OSError as again:
                raise _out_of_memory(
                    (end - begin) * PAGE, f"the kernel says: {again.strerror}", again.errno or 0
                ) from again

    def _punch_kept(self) -> None:
        for pool in self._pools.values():
            for part in pool.kept:
                pool.punch(*part)

    def discard(self, region: int, offset: int, nbytes: int) -> None:
        """Mark a range free, and give back what is more than may be kept."""
        with self._lock:
            pool = self._pool(region)
            self._free(pool, offset, offset + nbytes)

    def _free(self, pool: Pool, begin: int, end: int) -> None:
        first, last = pool.free(begin, end)
        excess = sum(each.kept.total for each in self._pools.values()) - self._keep_free_pages
        # Allocators hand out low addresses first, so the end is what is missed last.
        for kept_begin, kept_end in reversed(pool.kept.overlaps(first, last)):
            if excess > 0:
                cut = max(kept_begin, kept_end - excess)
                pool.punch(cut, kept_end)
                excess -= kept_end - cut

    def hold(self, region: int) -> Mapping:
        """Give the mapping, which stays as long as someone refers to it."""
        with self._lock:
            return self._pool(region).segment.mapping

    def _pool(self, region: int) -> Pool:
        if self._closed:
            raise _closed()
        return self._pools[region]

    def regions(self) -> list[tuple[Region, int]]:
        """List regions with the descriptors of their segments."""
        # Without the lock: a forked child asks too, and there a lock may be held for ever.
        return [(pool.region, pool.segment.fd) for pool in list(self._pools.values())]

    def close(self) -> None:
        """Give all back but the mappings that someone holds. Idempotent."""
        with self._lock:
            self._closed = True
            while self._pools:
                _, pool = self._pools.popitem()
                pool.close()


def _segment(name: str, nbytes: int) -> Segment:
    try:
        return Segment(name, nbytes, SHARED)
    except OSError as error:
        raise _out_of_memory(
            nbytes,
            f"reserving addresses failed: {error.strerror}; see ulimit -v and llm.Simulator.AddressSpace",
            error.errno or 0,
        ) from error


def _closed() -> BackendError:
    return BackendError(Failure.UNAVAILABLE, "The simulator backend is closed.")


def _out_of_memory(wanted: int, why: str, native_code: int) -> BackendError:
    return BackendError(Failure.OUT_OF_MEMORY, f"{wanted} bytes of pool memory are wanted, but {why}.", native_code)
