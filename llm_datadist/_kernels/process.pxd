from libc.stdint cimport uint64_t
from posix.types cimport pid_t

from llm_datadist._kernels.hostcopy cimport dd_copy
from llm_datadist._kernels.runs cimport dd_plan


cdef extern from "process.h" nogil:
    cdef struct dd_cursor:
        pass

    cdef struct dd_transfer:
        dd_copy copy
        pid_t pid
        bint write
        int error
        uint64_t failed

    dd_cursor dd_walk(const dd_plan *, uint64_t, uint64_t)
    uint64_t dd_step(dd_cursor *, uint64_t *, uint64_t *)
    void *dd_transfer_work(void *)
    int dd_probe(pid_t, uint64_t, size_t)
