"""Copy a plan inside host memory, and say whether what was copied can be trusted."""

import os

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport INT64_MAX, int64_t, uint64_t

from llm_datadist._kernels.runs cimport Plan, dd_plan, shown, unsigned


cdef extern from "<poll.h>" nogil:
    enum:
        POLLIN
        POLLHUP
        POLLERR
        POLLRDHUP
        POLLNVAL
    int c_poll "poll"(pollfd *, unsigned long, int)


cdef extern from "atomics.h" nogil:
    uint64_t dd_load_relaxed(const uint64_t *)
    uint64_t dd_load_acquire(const uint64_t *)
    void dd_acquire_fence()


cdef extern from "copy.h" nogil:
    enum:
        DD_MOST_THREADS
        DD_KERNELS
        DD_PLAIN

    cdef struct dd_kernel:
        const char *name
        dd_move *move

    const dd_kernel dd_kernels[]
    bint dd_kernel_runs(int)
    void dd_start(dd_copy *, const dd_plan *, uint64_t, uint64_t, int64_t, int)
    bint dd_slice(dd_copy *, dd_worker *, int64_t)
    void *dd_work(void *)
    uint64_t dd_move_slice(const dd_plan *, uint64_t, uint64_t, int64_t)


DONE = 0
TIMED_OUT = 1
STALE = 2
TORN = 3
PEER_GONE = 4

# Giving the GIL away costs more than it gives up to here: another busy thread keeps it for 5 ms.
cdef enum: KEEP_GIL = 64 << 10
# Up to here what was copied fits in the cache of its reader, and one thread with ordinary stores is best.
cdef enum: CACHED = 1 << 20
# A key press must not wait longer than this.
cdef enum: SLICE_NS = 50_000_000

cdef int kernel = DD_PLAIN


@cython.final
cdef class Guard:
    """At most eight (offset, value) pairs of 8-byte words that must hold their value before and after a copy.

    Offsets count from `base`. With `tells_death` one of them changes when the peer dies, so that the peer need not be
    looked at besides.

    Raises
    ------
    ValueError
        More than eight pairs; an address that is 0 or not a multiple of 8; a number outside 0 to 2**64 - 1.
    """

    def __cinit__(self, words, base=0, bint tells_death=False):
        cdef uint64_t start = unsigned(base, "base")
        cdef uint64_t address
        self.tells_death = tells_death
        for offset, value in words:
            if self.count == 8:
                raise ValueError("words has more than 8 pairs")
            address = start + unsigned(offset, "address")
            if address == 0 or address % 8 != 0 or address < start:
                raise ValueError(f"address is {address}; allowed are multiples of 8 above 0")
            self.words[self.count].word = <const uint64_t *> address
            self.words[self.count].value = unsigned(value, "value")
            self.count += 1

    cdef bint holds(self) noexcept:
        cdef int i
        for i in range(self.count):
            if dd_load_acquire(self.words[i].word) != self.words[i].value:
                return False
        return True


@cython.final
cdef class Liveness:
    """Descriptors that tell a peer's death: its control socket (hang-up) and its pidfd (readable). -1 = none."""

    def __cinit__(self, int socket_fd, int pidfd):
        # poll() leaves out negative descriptors.
        self.socket.fd = socket_fd
        self.socket.events = POLLRDHUP
        self.process.fd = pidfd
        self.process.events = POLLIN

    def alive(self):
        return self.poll()

    cdef bint poll(self) noexcept:
        cdef pollfd[2] fds
        fds[0] = self.socket
        fds[1] = self.process
        # A call that fails (a signal, no memory) says nothing about the peer, and silence is no proof of death.
        if c_poll(fds, 2, 0) <= 0:
            return True
        return fds[0].revents & (POLLHUP | POLLERR | POLLRDHUP | POLLNVAL) == 0 and fds[1].revents == 0


cdef uint64_t position(object value, str name, int64_t least, int64_t most) except? 0:
    if not least <= value <= most:
        raise ValueError(f"{name} is {shown(value)}; allowed are {least} to {most}")
    return value


cdef int start(dd_copy *state, Plan plan, deadline_ns, threads, begin, end) except -1:
    """Check what a transfer was given, and get ready."""
    cdef uint64_t last = plan.nbytes if end == -1 else position(end, "end", 0, plan.nbytes)
    cdef uint64_t first = position(begin, "begin", 0, last)
    cdef int workers = min(position(threads, "threads", 1, INT64_MAX), <uint64_t> DD_MOST_THREADS)
    # Any moment in the past will do for one below 0, where the clock never was.
    cdef int64_t deadline = max(1, min(deadline_ns, INT64_MAX)) if deadline_ns else 0
    cdef dd_plan view = plan.view()
    dd_start(state, &view, first, last, deadline, workers)
    return 0


cdef int torn(Liveness liveness) noexcept:
    """Say why a guard has changed during a copy."""
    return TORN if liveness is None or liveness.poll() else PEER_GONE


cdef int run(dd_copy *state, dd_worker *work, Guard guard, Liveness liveness) except -1:
    """Do the work between two looks at guard and peer, and say how it went."""
    cdef bint ended = False
    cdef bint look = liveness is not None and not (guard is not None and guard.tells_death)

    if guard is not None and not guard.holds():
        return STALE
    if look and not liveness.poll():
        return PEER_GONE

    while not ended:
        if state.bytes > KEEP_GIL:
            with nogil:
                ended = dd_slice(state, work, SLICE_NS)
        else:
            ended = dd_slice(state, work, SLICE_NS)
        if not ended:
            PyErr_CheckSignals()
            # A long copy of what is no longer there would only keep its caller waiting.
            if look and not liveness.poll():
                return PEER_GONE
            if guard is not None and not guard.holds():
                return torn(liveness)

    # The reader's half of a sequence lock. The owner changes the guard words before it reuses the memory, so
    # bytes of the new use can be in the copy only if a guard word read *after* the copy has changed. That needs the
    # loads of the copy to come before the loads of the guard. x86 keeps loads in order (and our stores, temporal
    # or not, play no part in it); elsewhere the fence keeps all earlier loads of this thread before all later
    # ones, and those of the other threads were done before they were joined.
    dd_acquire_fence()
    if guard is not None and not guard.holds():
        return torn(liveness)
    if look and not liveness.poll():
        return PEER_GONE
    return TIMED_OUT if state.timed_out else DONE


def copy(
    Plan plan not None, Guard guard, Liveness liveness, deadline_ns, threads, begin=0, end=-1
):
    """Copy the bytes [begin, end) of a plan (counted tensor by tensor, run by run) and say how it went.

    The GIL is kept up to 64 KiB in all. Above it is released; deadline and signals are checked at least each 100 ms.
    Returns only when no thread of it writes any more. `deadline_ns` is on CLOCK_MONOTONIC; 0 means none.

    Raises
    ------
    ValueError
        `begin`, `end` or `threads` is out of range.
    KeyboardInterrupt
        Or what else a signal handler raises, after all threads have stopped; the destination is undefined then.
    """
    cdef dd_copy state
    start(&state, plan, deadline_ns, threads, begin, end)
    if state.bytes > CACHED:
        state.move = dd_kernels[kernel].move
    return run(&state, dd_work, guard, liveness)


def move(Plan plan not None):
    """Copy a plan in order: tensor after tensor, run after run, each run as if through a buffer.

    For blocks of one cache where one run reads what an earlier one wrote. The GIL is kept up to 64 KiB in all. Above
    it is released, and signals are checked at least each 100 ms.

    Raises
    ------
    KeyboardInterrupt
        Or what else a signal handler raises; the destination is undefined then.
    """
    cdef uint64_t at = 0, end = plan.nbytes
    cdef dd_plan view = plan.view()
    while at < end:
        if end > KEEP_GIL:
            with nogil:
                at = dd_move_slice(&view, at, end, SLICE_NS)
        else:
            at = dd_move_slice(&view, at, end, SLICE_NS)
        if at < end:
            PyErr_CheckSignals()


def kernels():
    """Names of the copy kernels that this processor can run, best first. "plain" is always there."""
    return [dd_kernels[i].name.decode() for i in range(DD_KERNELS) if dd_kernel_runs(i)]


def select_kernel(str name not None):
    """Use this kernel from now on (tests, diagnosis); returns the former one.

    Raises
    ------
    ValueError
        This processor does not run a kernel of that name.
    """
    global kernel
    cdef int i
    former = dd_kernels[kernel].name.decode()
    for i in range(DD_KERNELS):
        if dd_kernels[i].name == name.encode() and dd_kernel_runs(i):
            kernel = i
            return former
    raise ValueError(f"kernel is {name!r}; allowed are {', '.join(kernels())}")


select_kernel(os.environ.get("LLM_DATADIST_KERNEL") or kernels()[0])
