/* Copies by the kernel, between two processes or inside one: an address without memory gives an error and no signal. */
#ifndef LLM_DATADIST_PROCESS_H
#define LLM_DATADIST_PROCESS_H

#include <errno.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "copy.h"

/* The kernel takes no more in one call. */
enum { DD_IOVECS = 1024 };

struct dd_transfer {
    struct dd_copy copy; /* first: a dd_worker gets its address */
    pid_t pid;
    bool write;
    atomic_int error; /* errno; 0 while all goes well */
    uint64_t failed;  /* byte of the plan that could not be copied */
};

/* Copies from `begin` on in one call, up to `end` or as far as iovecs go; gives what the kernel gave. */
static inline ssize_t dd_call(const struct dd_transfer *transfer, uint64_t begin, uint64_t end)
{
    struct iovec local[DD_IOVECS], remote[DD_IOVECS];
    struct dd_cursor cursor = dd_walk(&transfer->copy.plan, begin, end);
    unsigned long count = 0;
    for (; cursor.left && count < DD_IOVECS; count++) {
        uint64_t to, from;
        size_t bytes = dd_step(&cursor, &to, &from);
        local[count] = (struct iovec){(void *)(uintptr_t)(transfer->write ? from : to), bytes};
        remote[count] = (struct iovec){(void *)(uintptr_t)(transfer->write ? to : from), bytes};
    }
    return transfer->write ? process_vm_writev(transfer->pid, local, count, remote, count, 0)
                           : process_vm_readv(transfer->pid, local, count, remote, count, 0);
}

static inline void *dd_transfer_work(void *argument)
{
    struct dd_transfer *transfer = argument;
    uint64_t begin, end;
    while (dd_take(&transfer->copy, &begin, &end))
        while (begin < end) {
            /* The kernel stops at the first byte that it can't copy; the next call, which begins there, tells why. */
            ssize_t copied = dd_call(transfer, begin, end);
            if (copied <= 0) {
                int none = 0;
                if (atomic_compare_exchange_strong(&transfer->error, &none, copied < 0 ? errno : EFAULT))
                    transfer->failed = begin;
                atomic_store(&transfer->copy.next, transfer->copy.end);
                return NULL;
            }
            begin += (uint64_t)copied;
            if (begin < end && dd_late(&transfer->copy, dd_now()))
                return NULL;
        }
    return NULL;
}

/* The errno of reading up to 8 bytes of a process; 0 when they were read. */
static inline int dd_probe(pid_t pid, uint64_t address, size_t bytes)
{
    char held[8];
    struct iovec local = {held, bytes}, remote = {(void *)(uintptr_t)address, bytes};
    ssize_t copied = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (copied == (ssize_t)bytes)
        return 0;
    return copied < 0 ? errno : EFAULT;
}

#endif
