from libc.stdint cimport uint64_t


cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents


cdef struct GuardWord:
    const uint64_t *word
    uint64_t value


cdef class Guard:
    cdef int count
    cdef GuardWord words[8]

    cdef bint holds(self) noexcept


cdef class Liveness:
    cdef pollfd socket
    cdef pollfd process

    cdef bint poll(self) noexcept
