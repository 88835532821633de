// Get and put: checked and queued here, run by the worker of the caller's stream, answered by the peer's service.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "hccl.h"

#define MOST_DESCRIPTORS 256

struct transfer {
    struct comm *comm;
    struct peer *peer;
    struct request request;
    struct range *ranges;       // of the peer's memory
    char **bytes;               // here
};

// The code of a sync that finds the peer gone, or no code before an abort.
static int peer_gone(struct stream *stream) {
    LOCKED;
    while (!fake_settings.dead_peer && !stream->aborting)
        fake_wait_until(&stream->work, -1);
    return fake_settings.dead_peer ? fake_settings.dead_peer : RT_STREAM_ABORT;
}

// The result, or -1 when the connection broke and is of no use any more.
static int converse(struct transfer *transfer, int fd, int64_t life) {
    struct request *request = &transfer->request;
    int32_t code;
    if (!hccl_move(fd, request, sizeof *request, true, -1) ||
        !hccl_move(fd, transfer->ranges, request->count * sizeof *transfer->ranges, true, -1) ||
        !hccl_move(fd, &code, sizeof code, false, -1))
        return -1;
    if (code)
        return code;
    for (uint32_t i = 0; i < request->count; i++)
        if (!hccl_move_range(fd, transfer->bytes[i], transfer->ranges[i].size, request->operation == PUT, &life))
            return -1;
    if (request->operation == PUT && !hccl_move(fd, &code, sizeof code, false, -1))
        return -1;
    return code;
}

static int run_transfer(struct task *task, struct stream *stream) {
    struct transfer *transfer = task->data;
    struct peer *peer = transfer->peer;
    int fd;
    {
        LOCKED;
        while (peer->requesting && !stream->aborting)
            fake_wait_until(&peer->idle, fake_now_us() + 10000);
        if (stream->aborting)
            return RT_STREAM_ABORT;
        fd = peer->requests;
        if (fd >= 0)
            peer->requesting = task;
    }
    if (fd < 0)
        return peer_gone(stream);
    int64_t life = -1;
    if (task->outcome == DIES_HALFWAY) {
        life = 0;
        for (uint32_t i = 0; i < transfer->request.count; i++)
            life += transfer->ranges[i].size;
        life /= 2;
    }
    int code = converse(transfer, fd, life);
    {
        LOCKED;
        if (code < 0)
            shutdown(fd, SHUT_RDWR);
        peer->requesting = NULL;
        pthread_cond_broadcast(&peer->idle);
    }
    return code < 0 || code == RT_SUSPECT_REMOTE_ERROR ? peer_gone(stream) : code;
}

static void interrupt(struct task *task) {
    struct peer *peer = ((struct transfer *)task->data)->peer;
    if (peer->requesting == task)
        shutdown(peer->requests, SHUT_RDWR);
}

static void release(struct task *task) {
    struct transfer *transfer = task->data;
    if (!--transfer->comm->pending)
        transfer->comm->stream = NULL;
    free(transfer->ranges);
    free(transfer->bytes);
    free(transfer);
}

// Checks of one descriptor.

static int type_size(int type) {
    static const uint8_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};
    return type >= 0 && type < (int)sizeof sizes ? sizes[type] : 0;
}

static bool inside(uint64_t start, uint64_t room, uint64_t address, uint64_t size) {
    return address >= start && size <= room && address - start <= room - size;
}

static int check_remote(struct call *call, const struct peer *peer, uint64_t address, uint64_t size) {
    bool touched = false;
    for (uint32_t i = 0; i < peer->offer_count; i++) {
        const struct offer *offer = &peer->offers[i];
        if (inside(offer->address, offer->size, address, size))
            return offer->reachable
                       ? HCCL_OK
                       : fake_fail(call, HCCL_INTERNAL, "H27", "the peer's host memory is out of reach over HCCS");
        touched |= address < offer->address + offer->size && offer->address < address + size;
    }
    return fake_fail(call, peer->comm->device_cpu ? HCCL_PARA : HCCL_INTERNAL, touched ? "H25" : "H24",
                     "%#llx + %llu is not in one region that the peer has opened", (unsigned long long)address,
                     (unsigned long long)size);
}

static bool opened_by(const struct comm *comm, const struct region *region) {
    for (size_t i = 0; i < comm->opened_count; i++)
        if (comm->opened[i] == region)
            return true;
    return false;
}

static int check_local(struct call *call, const struct peer *peer, uint64_t address, uint64_t size) {
    struct region *region;
    bool touched = false;
    for (size_t at = 0; (region = fake_each(REGION, &at));) {
        uint64_t start = (uint64_t)region->address;
        if (region->physical != peer->comm->physical)
            continue;
        touched |= address < start + region->size && start < address + size;
        if (!inside(start, region->size, address, size))
            continue;
        if (peer->rdma && !region->on_card)
            return fake_fail(call, HCCL_INTERNAL, "H26", "%p is registered, but no prepared comm has it bound",
                             (void *)region->address);
        if (peer->rdma && !opened_by(peer->comm, region))
            fake_fail(call, HCCL_OK, "H26", "%p was opened through another comm: don't rely on it",
                      (void *)region->address);
        return HCCL_OK;
    }
    return fake_fail(call, HCCL_INTERNAL, touched ? "H25" : "H24", "%#llx + %llu is not in one registered region",
                     (unsigned long long)address, (unsigned long long)size);
}

static int check_descriptor(struct call *call, const struct peer *peer, const HcclOneSideOpDesc *desc, uint64_t *size) {
    uint64_t unit = type_size(desc->dataType);
    if (!desc->localAddr || !desc->remoteAddr)
        return fake_fail(call, HCCL_PARA, "H28", "null address");
    if (!unit || !desc->count || desc->count > UINT64_MAX / 2 / unit)
        return fake_fail(call, HCCL_PARA, "H28", "%llu elements of type %d", desc->count, desc->dataType);
    *size = desc->count * unit;
    int code = check_remote(call, peer, (uint64_t)desc->remoteAddr, *size);
    return code ? code : check_local(call, peer, (uint64_t)desc->localAddr, *size);
}

static int check_call(struct call *call, struct comm *comm, uint32_t remote_rank, uint32_t count,
                      struct context *context, void *stream_handle) {
    if (count > MOST_DESCRIPTORS || !count)
        return fake_fail(call, HCCL_PARA, "H22", "%u descriptors, expected 1 to %d", count, MOST_DESCRIPTORS);
    if (remote_rank >= (uint32_t)comm->table.count || remote_rank == (uint32_t)comm->rank)
        return fake_fail(call, HCCL_PARA, "H22", "rank %u of %d, our own is %d", remote_rank, comm->table.count,
                         comm->rank);
    if (comm->stopped)
        return fake_fail(call, HCCL_PARA, "H23", "a destroy of comm '%s' has failed", comm->name);
    if (!comm->prepared)
        return fake_fail(call, HCCL_NOT_FOUND, "H23", "comm '%s' is not prepared", comm->name);
    struct stream *stream = fake_find(STREAM, stream_handle, NULL);
    if (!stream || stream->context != context || context->physical != comm->physical)
        return fake_fail(call, HCCL_RUNTIME, "H29", "the stream was destroyed, or is of another device or context");
    if (comm->inside)
        fake_fail(call, HCCL_OK, "H30", "two threads transfer by comm '%s' at the same time", comm->name);
    if (comm->pending && comm->stream != stream)
        fake_fail(call, HCCL_OK, "H30", "transfers of comm '%s' are pending on another stream", comm->name);
    return HCCL_OK;
}

static HcclResult batch(struct call *call, struct context *context, HcclComm handle, uint32_t remote_rank,
                        HcclOneSideOpDesc *descs, uint32_t count, aclrtStream stream_handle, int operation) {
    if (!handle || !descs || !stream_handle)
        return fake_fail(call, HCCL_PTR, "H22", "null pointer");
    struct comm *comm;
    {
        LOCKED;
        comm = hccl_comm(call, handle);
        int code = comm ? check_call(call, comm, remote_rank, count, context, stream_handle) : HCCL_PARA;
        if (code)
            return code;
        comm->inside++;
    }
    // Long enough for another thread to be caught on the same comm.
    fake_sleep_us(10);
    LOCKED;
    comm->inside--;
    struct stream *stream = fake_find(STREAM, stream_handle, NULL);
    struct peer *peer = &comm->peers[remote_rank];
    if (!stream || !comm->prepared)
        return fake_fail(call, HCCL_PARA, "H30", "the comm or the stream was ended by another thread");
    struct task *task = fake_task(call, count);
    struct transfer *transfer = calloc(1, sizeof *transfer);
    *transfer = (struct transfer){.comm = comm, .peer = peer, .request = {REQUEST_MAGIC, operation, 0}};
    transfer->ranges = calloc(count, sizeof *transfer->ranges);
    transfer->bytes = calloc(count, sizeof *transfer->bytes);
    task->data = transfer;
    task->run = run_transfer;
    task->interrupt = interrupt;
    task->release = release;
    comm->pending++;
    comm->stream = stream;
    // What comes before a bad descriptor stays queued.
    int code = HCCL_OK;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t size = 0;
        code = check_descriptor(call, peer, &descs[i], &size);
        if (code)
            break;
        transfer->ranges[i] = (struct range){(uint64_t)descs[i].remoteAddr, size};
        transfer->bytes[i] = fake_bytes(descs[i].localAddr);
        task->spans[i] = (struct span){descs[i].localAddr, size, operation == GET};
        transfer->request.count++;
    }
    if (transfer->request.count)
        fake_enqueue(stream, task);
    else
        fake_discard(task);
    return code;
}

API HcclResult HcclBatchGet(HcclComm comm, uint32_t remote_rank, HcclOneSideOpDesc *descs, uint32_t count,
                            aclrtStream stream) {
    ENTER_HCCL;
    return batch(&call, context, comm, remote_rank, descs, count, stream, GET);
}

API HcclResult HcclBatchPut(HcclComm comm, uint32_t remote_rank, HcclOneSideOpDesc *descs, uint32_t count,
                            aclrtStream stream) {
    ENTER_HCCL;
    return batch(&call, context, comm, remote_rank, descs, count, stream, PUT);
}
