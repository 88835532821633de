from libc.stdint cimport uint64_t

from llm_datadist._kernels.runs cimport Plan, dd_plan


cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents


cdef extern from "copy.h" nogil:
    ctypedef void dd_move()
    ctypedef void *dd_worker(void *)

    cdef struct dd_copy:
        dd_plan plan
        dd_move *move
        uint64_t bytes
        bint timed_out


cdef struct GuardWord:
    const uint64_t *word
    uint64_t value


cdef class Guard:
    cdef int count
    cdef bint tells_death
    cdef GuardWord words[8]

    cdef bint holds(self) noexcept


cdef class Liveness:
    cdef pollfd socket
    cdef pollfd process

    cdef bint poll(self) noexcept


cdef int start(dd_copy *state, Plan plan, deadline_ns, threads, begin, end) except -1
cdef int run(dd_copy *state, dd_worker *work, Guard guard, Liveness liveness) except -1
