// What the parts of the HCCL library share.
#pragma once

#include "fake.h"
#include "rank_table.h"

// Memory that the caller has registered.
struct region {
    void *handle;
    int physical;               // device that was current; -1 if none was
    int type;
    char *address;
    uint64_t size;
    int bound;                  // to so many comms
    bool on_card;               // a Prepare has registered it with the network card
};

// A region as the peer gets to know it.
struct offer {
    int32_t reachable;          // host memory is not, over HCCS
    int32_t type;
    uint64_t address;
    uint64_t size;
};

struct peer {
    struct comm *comm;
    int rank;
    bool rdma;
    int meeting;                // sockets: agreement, our requests, the peer's requests; -1 if there is none
    int requests;
    int served;
    pthread_t server;
    bool serving;
    struct task *requesting;    // has the request socket
    pthread_cond_t idle;
    struct offer *offers;       // what the peer has opened for us
    uint32_t offer_count;
};

struct comm {
    void *handle;
    char name[128];
    int physical;
    int rank;
    char *text;                 // of the rank table
    struct rank_table table;
    struct peer *peers;         // by rank; our own is unused
    bool device_cpu;            // transfers are launched by the device's own processors
    struct region **bound;
    size_t bound_count;
    struct region **opened;     // bound when Prepare began
    size_t opened_count;
    bool preparing;
    bool prepared;
    bool stopped;               // a failed destroy has ended its sockets
    int inside;                 // threads that queue transfers right now
    size_t pending;             // transfers queued or running
    struct stream *stream;      // of the pending ones
    int busy_answers;
};

struct range {
    uint64_t address;
    uint64_t size;
};

enum { GET = 1, PUT };

struct request {
    uint32_t magic;
    uint32_t operation;
    uint32_t count;             // ranges that follow
};
#define REQUEST_MAGIC 0xfa4e0a11u

#define ENTER_HCCL                                                                                                     \
    ENTER;                                                                                                             \
    struct context *context = hccl_context(&call);                                                                     \
    if (!context)                                                                                                      \
    return HCCL_RUNTIME

struct context *hccl_context(struct call *call);
struct comm *hccl_comm(struct call *call, HcclComm handle);     // NULL: recorded, the answer is PARA. Needs the lock.

// rendezvous.c
int64_t hccl_deadline(int timeout_s);
bool hccl_move(int fd, void *bytes, size_t size, bool sending, int64_t deadline_us);
int hccl_meet(struct call *call, struct peer *peer, int64_t deadline_us);       // without the lock
void hccl_part(struct peer *peer);              // ends all that ties us to the peer; needs the lock

// service.c
void hccl_serve(struct peer *peer);             // needs the lock
// Moves a range, and dies when `*life` (bytes; negative: for ever) is used up.
bool hccl_move_range(int fd, char *bytes, uint64_t size, bool sending, int64_t *life);

// memory of comms.c
bool hccl_region_live(const struct region *region);
