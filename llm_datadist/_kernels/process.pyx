"""Copy a plan between this process and another (or this one again) by the kernel, for memory that may not be there."""

import os

from libc.stdint cimport uint64_t
from posix.types cimport pid_t
from posix.unistd cimport getpid

from llm_datadist._kernels.hostcopy cimport Guard, Liveness, run, start
from llm_datadist._kernels.runs cimport Plan, dd_base, unsigned

from llm_datadist._kernels.hostcopy import DONE, TIMED_OUT


cdef object failure(dd_transfer *state):
    """Make the error of the first byte that was not copied."""
    cdef uint64_t to, from_
    cdef dd_cursor cursor = dd_walk(&state.copy.plan, state.failed, state.failed + 1)
    dd_step(&cursor, &to, &from_)
    cdef pid_t reader = getpid() if state.write else state.pid
    cdef pid_t writer = state.pid if state.write else getpid()
    # The kernel does not say which end is to blame; if the source can be read, it is the destination.
    if dd_probe(reader, from_, 1):
        what, address, pid = "reading", from_, reader
    else:
        what, address, pid = "writing", to, writer
    whose = "this process" if pid == getpid() else f"process {pid}"
    return OSError(state.error, f"{what} {address:#x} of {whose} failed: {os.strerror(state.error)}")


def transfer(
    Plan plan not None, int pid, bint write, Guard guard, Liveness liveness, deadline_ns, threads, begin=0, end=-1
):
    """Copy the bytes [begin, end) of a plan from the process `pid` (or, with `write`, to it) and say how it went.

    Outcomes, order of work, threads and GIL are those of `hostcopy.copy`. No address causes a signal. A call of the
    kernel copies at most 1 MiB and 1024 runs.

    Raises
    ------
    OSError
        The kernel refused. Unless the peer is gone or a guard word has changed, which are outcomes: the text names the
        first byte that was not copied, whose it is, and whether it was to be read or written.
    ValueError
        `begin`, `end` or `threads` is out of range.
    KeyboardInterrupt
        Or what else a signal handler raises, after all threads have stopped; the destination is undefined then.
    """
    cdef dd_transfer state
    start(&state.copy, plan, deadline_ns, threads, begin, end)
    state.pid = pid
    state.write = write
    state.error = 0
    outcome = run(&state.copy, dd_transfer_work, guard, liveness)
    if state.error and outcome in (DONE, TIMED_OUT):
        raise failure(&state)
    return outcome


def probe(int pid, address):
    """Give the errno of reading 8 bytes of a process; 0 when they can be read."""
    return dd_probe(pid, unsigned(address, "address"), 8)


def covered(Plan plan not None, bytes ranges not None):
    """Say whether all that a plan touches lies inside ranges.

    Parameters
    ----------
    plan : Plan
        A base and all up to the furthest end of a run counts as touched.
    ranges : bytes
        Native 8-byte words begin, end, begin, end, ...; sorted, and with a gap between each two.
    """
    cdef const uint64_t *words = <const uint64_t *> <const char *> ranges
    cdef size_t count = len(ranges) // 16
    cdef Py_ssize_t i
    cdef const dd_base *base
    for i in range(plan.bases.count):
        base = &plan.bases.items[i]
        if not inside(words, count, base.source, base.source + plan.runs.source_end):
            return False
        if not inside(words, count, base.destination, base.destination + plan.runs.destination_end):
            return False
    return True


cdef bint inside(const uint64_t *words, size_t count, uint64_t begin, uint64_t end) noexcept:
    cdef size_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if words[2 * middle + 1] < end:
            low = middle + 1
        else:
            high = middle
    return low < count and words[2 * low] <= begin
