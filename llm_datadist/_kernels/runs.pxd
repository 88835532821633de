from libc.stdint cimport int64_t, uint64_t


cdef extern from "plan.h" nogil:
    cdef struct dd_run:
        int64_t source
        int64_t destination
        int64_t end

    cdef struct dd_base:
        uint64_t source
        uint64_t destination

    cdef struct dd_plan:
        const dd_base *bases
        const dd_run *runs
        size_t run_count
        uint64_t tensor_bytes


cdef class Indices:
    cdef Py_ssize_t count
    cdef int64_t top
    # NULL for a range, which is never expanded: its elements are first + i * step modulo 2**64.
    cdef int64_t *items
    cdef uint64_t first
    cdef uint64_t step
    cdef int64_t few[8]


cdef class Runs:
    cdef Py_ssize_t count
    cdef Py_ssize_t room
    cdef dd_run *items
    # Ends of the furthest runs: a plan checks them against its bases.
    cdef readonly int64_t source_end
    cdef readonly int64_t destination_end
    cdef dd_run few[2]

    cdef int64_t total(self) noexcept
    cdef dd_run *append(self) except NULL
    cdef int trim(self) except -1
    cdef int resize(self, Py_ssize_t room) except -1


cdef class Bases:
    cdef Py_ssize_t count
    cdef dd_base *items
    cdef uint64_t source_top
    cdef uint64_t destination_top

    cdef int allot(self, Py_ssize_t count) except -1


cdef class Plan:
    cdef readonly Bases bases
    cdef readonly Runs runs
    cdef readonly int64_t nbytes

    cdef dd_plan view(self) noexcept


cdef int64_t whole(object value, str name, int64_t least) except? -1
cdef uint64_t unsigned(object value, str name) except? 0
cdef str shown(object value)
