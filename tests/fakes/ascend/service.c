// Answers the requests of a peer: the bytes are moved here, in the process that owns the memory.
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/socket.h>

#include "hccl.h"

#define MOST_RANGES 256

bool hccl_move_range(int fd, char *bytes, uint64_t size, bool sending, int64_t *life) {
    if (*life < 0 || (uint64_t)*life >= size) {
        if (*life >= 0)
            *life -= size;
        return hccl_move(fd, bytes, size, sending, -1);
    }
    hccl_move(fd, bytes, *life, sending, -1);
    fake_die();
    return false;
}

// Whether a range is in one region that was opened to the peer and is still there; needs the lock.
static bool open_range(const struct peer *peer, const struct range *range) {
    for (size_t i = 0; i < peer->comm->opened_count; i++) {
        const struct region *region = peer->comm->opened[i];
        uint64_t start = (uint64_t)region->address;
        if (range->address >= start && range->size <= region->size &&
            range->address - start <= region->size - range->size && (peer->rdma || region->type == MEMORY_DEVICE))
            return hccl_region_live(region);
    }
    return false;
}

static bool answer(struct peer *peer, const struct request *request, struct range *ranges) {
    int32_t code = ACL_OK;
    int64_t life = -1;
    uint64_t total = 0;
    char *bytes[MOST_RANGES];
    {
        // A name of its own, so that faults can be injected where the peer is served.
        struct call call __attribute__((cleanup(fake_leave)));
        code = fake_enter(&call, "serve");
        if (call.outcome == FAILS)
            code = call.task_code;
        LOCKED;
        for (uint32_t i = 0; i < request->count; i++) {
            total += ranges[i].size;
            bytes[i] = fake_bytes((void *)ranges[i].address);
            if (!code && !open_range(peer, &ranges[i]))
                code = RT_SUSPECT_REMOTE_ERROR;
        }
        if (call.outcome == DIES_HALFWAY)
            life = total / 2;
    }
    if (!hccl_move(peer->served, &code, sizeof code, true, -1))
        return false;
    if (code)
        return true;
    for (uint32_t i = 0; i < request->count; i++)
        if (!hccl_move_range(peer->served, bytes[i], ranges[i].size, request->operation == GET, &life))
            return false;
    return request->operation == GET || hccl_move(peer->served, &code, sizeof code, true, -1);
}

static void *serve(void *argument) {
    struct peer *peer = argument;
    struct request request;
    struct range ranges[MOST_RANGES];
    while (hccl_move(peer->served, &request, sizeof request, false, -1) && request.magic == REQUEST_MAGIC &&
           request.count <= MOST_RANGES && hccl_move(peer->served, ranges, request.count * sizeof *ranges, false, -1) &&
           answer(peer, &request, ranges))
        ;
    // The peer must not wait for an answer that won't come.
    shutdown(peer->served, SHUT_RDWR);
    return NULL;
}

void hccl_serve(struct peer *peer) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    if (pthread_create(&peer->server, &attributes, serve, peer))
        abort();
    pthread_attr_destroy(&attributes);
    peer->serving = true;
}
