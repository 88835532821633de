// Registered memory and communicators.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hccl.h"

#define HUGE_PAGE (2ull << 20)
#define MOST_OFFERS (1u << 20)

struct context *hccl_context(struct call *call) {
    if (!fake_ready(call))
        return NULL;
    struct context *context = fake_context_quietly();
    if (!context)
        fake_fail(call, HCCL_RUNTIME, "H1", "this thread has no current device");
    return context;
}

struct comm *hccl_comm(struct call *call, HcclComm handle) {
    bool ended;
    struct comm *comm = fake_find(COMM, handle, &ended);
    if (!comm)
        fake_fail(call, HCCL_PARA, "H35", "%p %s", handle, ended ? "was destroyed" : "is no comm");
    return comm;
}

// Registered memory.

static bool placed(const struct region *region) {
    return fake_inside(region->address, region->size, region->type == MEMORY_DEVICE);
}

bool hccl_region_live(const struct region *region) {
    if (!fake_find(REGION, region->handle, NULL))
        return false;
    // Nothing is known about memory that isn't the driver's.
    return placed(region) || (region->type == MEMORY_HOST && !fake_on_device(region->address));
}

static bool overlaps(const struct region *region, const char *address, uint64_t size) {
    return region->address < address + size && address < region->address + region->size;
}

API HcclResult HcclRegisterGlobalMem(const CommMem *mem, void **handle) {
    ENTER;
    if (!fake_ready(&call))
        return HCCL_RUNTIME;
    struct context *context = fake_context_quietly();
    if (!mem || !handle)
        return fake_fail(&call, HCCL_PTR, "H8", "null pointer");
    if (!mem->addr || !mem->size || (mem->type != MEMORY_DEVICE && mem->type != MEMORY_HOST))
        return fake_fail(&call, HCCL_PARA, "H8", "type %d, address %p, size %llu", mem->type, mem->addr,
                         (unsigned long long)mem->size);
    if (fake_settings.product == A5)
        return fake_fail(&call, HCCL_NOT_SUPPORT, "H38", "no global registration on %s", fake_settings.soc);
    if (fake_settings.region_limit && mem->size > fake_settings.region_limit)
        return fake_answer(&call, HCCL_PARA, "%llu bytes, %zu are the most", (unsigned long long)mem->size,
                           fake_settings.region_limit);
    LOCKED;
    int physical = context ? context->physical : -1;
    if (!context)
        fake_fail(&call, HCCL_OK, "H14b", "no current device: the handle will be good for nothing");
    struct region *each;
    for (size_t at = 0; (each = fake_each(REGION, &at));) {
        if (each->physical != physical || each->type != mem->type || !overlaps(each, mem->addr, mem->size))
            continue;
        if (each->address != mem->addr || each->size != mem->size)
            return fake_fail(&call, HCCL_PARA, "H8", "%p + %llu overlaps %p + %llu", mem->addr,
                             (unsigned long long)mem->size, (void *)each->address, (unsigned long long)each->size);
        *handle = each->handle;
        return fake_fail(&call, HCCL_OK, "H8", "%p is registered already, and this isn't counted", mem->addr);
    }
    struct region *made = calloc(1, sizeof *made);
    *made = (struct region){.physical = physical, .type = mem->type, .address = mem->addr, .size = mem->size};
    *handle = made->handle = fake_handle(REGION, made);
    // Host memory of another kind is a matter of the wire, see Prepare.
    if (!placed(made) &&
        (made->type == MEMORY_DEVICE || fake_on_device(made->address) || fake_allocation(made->address)))
        fake_fail(&call, HCCL_OK, "H9", "%p + %llu is not inside one %s allocation", mem->addr,
                  (unsigned long long)mem->size, mem->type == MEMORY_DEVICE ? "device" : "host");
    return HCCL_OK;
}

// A handle counts only under the device it was made under. Needs the lock.
static struct region *find_region(struct call *call, void *handle, struct context *context, const char *unknown_id) {
    struct region *region = fake_find(REGION, handle, NULL);
    if (!region)
        fake_fail(call, HCCL_PARA, unknown_id, "%p is no registered memory", handle);
    else if (!context || region->physical != context->physical) {
        fake_fail(call, HCCL_PARA, "H14", "the memory was registered under another device, or under none");
        return NULL;
    }
    return region;
}

API HcclResult HcclDeregisterGlobalMem(void *handle) {
    ENTER;
    if (!fake_ready(&call))
        return HCCL_RUNTIME;
    struct context *context = fake_context_quietly();
    LOCKED;
    struct region *region = find_region(&call, handle, context, "H13");
    if (!region)
        return HCCL_PARA;
    if (region->bound)
        return fake_fail(&call, HCCL_PARA, "H13", "the memory is bound to %d comms", region->bound);
    fake_end(handle);
    return HCCL_OK;
}

static size_t bound_at(const struct comm *comm, const struct region *region) {
    size_t at = 0;
    while (at < comm->bound_count && comm->bound[at] != region)
        at++;
    return at;
}

API HcclResult HcclCommBindMem(HcclComm handle, void *memory) {
    ENTER_HCCL;
    if (!handle)
        return fake_fail(&call, HCCL_PTR, "H12", "null comm");
    LOCKED;
    struct comm *comm = hccl_comm(&call, handle);
    struct region *region = comm ? find_region(&call, memory, context, "H12") : NULL;
    if (!region)
        return HCCL_PARA;
    if (region->physical != comm->physical)
        return fake_fail(&call, HCCL_PARA, "H14", "comm '%s' is of another device", comm->name);
    if (bound_at(comm, region) < comm->bound_count)
        return fake_fail(&call, HCCL_PARA, "H12", "bound to comm '%s' already", comm->name);
    comm->bound = realloc(comm->bound, (comm->bound_count + 1) * sizeof *comm->bound);
    comm->bound[comm->bound_count++] = region;
    region->bound++;
    if (comm->prepared)
        fake_fail(&call, HCCL_OK, "H15", "comm '%s' is prepared: what is bound now stays out of reach", comm->name);
    return HCCL_OK;
}

API HcclResult HcclCommUnbindMem(HcclComm handle, void *memory) {
    ENTER_HCCL;
    if (!handle)
        return fake_fail(&call, HCCL_PTR, "H12", "null comm");
    LOCKED;
    struct comm *comm = hccl_comm(&call, handle);
    struct region *region = comm ? find_region(&call, memory, context, "H12") : NULL;
    if (!region)
        return HCCL_PARA;
    size_t at = bound_at(comm, region);
    if (at == comm->bound_count)
        return fake_fail(&call, HCCL_PARA, "H12", "not bound to comm '%s'", comm->name);
    comm->bound[at] = comm->bound[--comm->bound_count];
    region->bound--;
    return HCCL_OK;
}

API HcclResult HcclRemapRegistedMemory(HcclComm *comms, CommMem *mems, uint64_t n_comms, uint64_t n_mems) {
    ENTER_HCCL;
    if (!comms || !mems)
        return fake_fail(&call, HCCL_PTR, "H36", "null pointer");
    if (!n_comms || !n_mems)
        return fake_fail(&call, HCCL_PARA, "H36", "%llu comms, %llu ranges", (unsigned long long)n_comms,
                         (unsigned long long)n_mems);
    LOCKED;
    for (uint64_t i = 0; i < n_comms; i++) {
        struct comm *comm = hccl_comm(&call, comms[i]);
        if (!comm)
            return HCCL_PARA;
        bool rdma = false;
        for (int rank = 0; rank < comm->table.count; rank++)
            rdma |= comm->peers[rank].rdma;
        for (uint64_t k = 0; rdma && k < n_mems; k++) {
            if (!mems[k].addr || !mems[k].size || mems[k].type != MEMORY_DEVICE)
                continue;
            struct region *each;
            size_t at = 0;
            while ((each = fake_each(REGION, &at)))
                if (each->physical == context->physical && each->type == mems[k].type &&
                    each->address == mems[k].addr && each->size == mems[k].size)
                    break;
            if (!each)
                return fake_fail(&call, HCCL_PARA, "H36", "%p + %llu is not registered", mems[k].addr,
                                 (unsigned long long)mems[k].size);
        }
    }
    return HCCL_OK;
}

// Making a communicator.

// End of the last field that each version of the configuration brought.
static const size_t config_end[] = {24, 32, 160, 288, 292, 300, 312, 313, 2098, 2226, 2240, 2244};

static int read_config(struct call *call, const HcclCommConfig *given, HcclCommConfig *config) {
    uint32_t newest = sizeof config_end / sizeof *config_end - 1;
    *config = (HcclCommConfig){0};
    // No byte more than the caller says that there are.
    memcpy(config, given, config_end[0]);
    uint32_t version = config->version < newest ? config->version : newest;
    if (config->magic != HCCL_CONFIG_MAGIC)
        return fake_fail(call, HCCL_PARA, "H2", "magic %#x", config->magic);
    if (version < 2 || config->size < config_end[version] || config->size > 1 << 20)
        return fake_fail(call, HCCL_PARA, "H2b", "version %u with a size of %zu", config->version, config->size);
    memcpy(config, given, config->size < sizeof *config ? config->size : sizeof *config);
    memset((char *)config + config_end[version], 0, sizeof *config - config_end[version]);
    if (!memchr(config->hcclCommName, 0, sizeof config->hcclCommName))
        return fake_fail(call, HCCL_PARA, "H2b", "the name has no end");
    uint32_t unset = 0xffffffff, most = fake_settings.product == A2 ? 2 : 1;
    if (!config->hcclCommName[0])
        return fake_fail(call, HCCL_PARA, "H2", "empty name");
    if (!config->hcclBufferSize)
        return fake_fail(call, HCCL_PARA, "H2", "buffer size 0");
    if (config->hcclDeterministic != unset && config->hcclDeterministic > most)
        return fake_fail(call, HCCL_PARA, "H2", "deterministic %u", config->hcclDeterministic);
    if (version < 5)
        return HCCL_OK;
    if (config->hcclRdmaTrafficClass != unset &&
        (config->hcclRdmaTrafficClass > 255 || config->hcclRdmaTrafficClass % 4))
        return fake_fail(call, HCCL_PARA, "H2", "traffic class %u", config->hcclRdmaTrafficClass);
    if (config->hcclRdmaServiceLevel != unset && config->hcclRdmaServiceLevel > 7)
        return fake_fail(call, HCCL_PARA, "H2", "service level %u", config->hcclRdmaServiceLevel);
    return HCCL_OK;
}

static bool rdma_between(const struct rank_table *table, int mine, int theirs) {
    const struct member *left = &table->members[mine], *right = &table->members[theirs];
    if (fake_settings.intra_roce || (fake_settings.product != A2 && fake_settings.product != A3))
        return true;
    if (fake_settings.product == A3 && table->version == 12)
        return strcmp(left->pod, right->pod);
    return strcmp(left->server, right->server);
}

static bool on_device_processors(const HcclCommConfig *config) {
    return config->hcclOpExpansionMode ? config->hcclOpExpansionMode == 2 : fake_settings.product == A3;
}

static int initialize(struct call *call, struct context *context, const char *text, uint32_t rank,
                      const HcclCommConfig *given, HcclComm *out) {
    HcclCommConfig config;
    int code = read_config(call, given, &config);
    if (code)
        return code;
    LOCKED;
    struct comm *each;
    for (size_t at = 0; (each = fake_each(COMM, &at));)
        if (each->physical == context->physical && !strcmp(each->name, config.hcclCommName))
            return fake_fail(call, HCCL_PARA, "H6", "comm '%s' is live on this device", each->name);
    struct rank_table table;
    char why[256];
    int own = rank > 1u << 30 ? 1 << 30 : (int)rank;
    code = rank_table_read(text, own, context->physical, &table, why, sizeof why);
    if (code)
        return fake_fail(call, code, strstr(why, "JSON") ? "H5" : "H4", "%s", why);
    struct comm *comm = calloc(1, sizeof *comm);
    *comm = (struct comm){.physical = context->physical, .rank = own, .table = table, .text = strdup(text)};
    memcpy(comm->name, config.hcclCommName, sizeof comm->name);
    comm->device_cpu = on_device_processors(&config);
    comm->peers = calloc(table.count, sizeof *comm->peers);
    for (int i = 0; i < table.count; i++) {
        comm->peers[i] = (struct peer){.comm = comm, .rank = i, .meeting = -1, .requests = -1, .served = -1};
        comm->peers[i].rdma = i != own && rdma_between(&table, own, i);
        fake_wait_init(&comm->peers[i].idle);
    }
    *out = comm->handle = fake_handle(COMM, comm);
    return HCCL_OK;
}

API HcclResult HcclCommInitClusterInfoMemConfig(const char *rank_table, uint32_t rank, HcclCommConfig *config,
                                                HcclComm *out) {
    static atomic_int inside;
    ENTER_HCCL;
    if (!rank_table || !config || !out)
        return fake_fail(&call, HCCL_PTR, "H2", "null pointer");
    if (atomic_fetch_add(&inside, 1))
        fake_fail(&call, HCCL_OK, "H7", "two threads make a comm at the same time");
    // Long enough for another thread to be caught at it.
    fake_sleep_us(200);
    int code = initialize(&call, context, rank_table, rank, config, out);
    atomic_fetch_sub(&inside, 1);
    return code;
}

// Preparing it.

// Registers what is bound with the wire to one peer. Needs the lock.
static int open_regions(struct call *call, struct peer *peer, struct offer *offers) {
    struct comm *comm = peer->comm;
    if (peer->rdma && (!comm->table.members[comm->rank].ip[0] || !comm->table.members[peer->rank].ip[0]))
        return fake_fail(call, HCCL_NOT_FOUND, "H4", "RDMA needs the device_ip of both ranks");
    for (size_t i = 0; i < comm->opened_count; i++) {
        struct region *region = comm->opened[i];
        bool device = region->type == MEMORY_DEVICE, other = !device && !fake_allocation(region->address);
        if (!placed(region) && !other)
            return fake_fail(call, HCCL_INTERNAL, "H9", "%p + %llu is not inside one allocation",
                             (void *)region->address, (unsigned long long)region->size);
        if (peer->rdma && other) {
            fake_fail(call, HCCL_OK, "H10", "%p is host memory that isn't from aclrtMallocHost",
                      (void *)region->address);
            if (fake_settings.pageable_fails)
                return HCCL_INTERNAL;
        }
        if (!peer->rdma && device && (uint64_t)region->address % HUGE_PAGE) {
            fake_fail(call, HCCL_OK, "H11", "%p doesn't start on a 2 MiB boundary", (void *)region->address);
            if (fake_settings.unaligned_fails)
                return HCCL_INTERNAL;
        }
        offers[i] = (struct offer){peer->rdma || device, region->type, (uint64_t)region->address, region->size};
    }
    return HCCL_OK;
}

// Both sides' lists, and a word that each has opened the other's. The lower rank speaks first.
static bool exchange(struct peer *peer, struct offer *offers, uint32_t count, int timeout_s) {
    int64_t until = hccl_deadline(timeout_s);
    uint32_t theirs = 0;
    for (int turn = 0; turn < 2; turn++) {
        bool sending = (peer->comm->rank < peer->rank) == !turn;
        uint32_t *number = sending ? &count : &theirs;
        if (!hccl_move(peer->meeting, number, sizeof *number, sending, until) || *number > MOST_OFFERS)
            return false;
        if (!sending) {
            peer->offers = calloc(theirs + 1, sizeof *peer->offers);
            peer->offer_count = theirs;
        }
        if (!hccl_move(peer->meeting, sending ? offers : peer->offers, *number * sizeof *offers, sending, until))
            return false;
    }
    until = hccl_deadline(timeout_s);
    char word = 'y';
    return hccl_move(peer->meeting, &word, 1, true, until) && hccl_move(peer->meeting, &word, 1, false, until);
}

static int prepare_peer(struct call *call, struct peer *peer, int timeout_s) {
    struct comm *comm = peer->comm;
    int code = hccl_meet(call, peer, hccl_deadline(timeout_s));
    if (code)
        return code;
    if (call->outcome == DIES_HALFWAY)
        fake_die();
    struct offer *offers = calloc(comm->opened_count + 1, sizeof *offers);
    {
        LOCKED;
        code = open_regions(call, peer, offers);
    }
    if (!code && !exchange(peer, offers, comm->opened_count, timeout_s))
        code = fake_answer(call, HCCL_INTERNAL, "rank %d of comm '%s' went away", peer->rank, comm->name);
    free(offers);
    return code;
}

API HcclResult HcclCommPrepare(HcclComm handle, const HcclPrepareConfig *config, const int timeout) {
    ENTER_HCCL;
    if (!handle || !config)
        return fake_fail(&call, HCCL_PTR, "H16", "null pointer");
    if (timeout <= -2)
        return fake_fail(&call, HCCL_PARA, "H16", "timeout %d", timeout);
    struct comm *comm;
    {
        LOCKED;
        comm = hccl_comm(&call, handle);
        if (!comm)
            return HCCL_PARA;
        if (fake_settings.product == A5)
            return fake_fail(&call, HCCL_NOT_SUPPORT, "H38", "no Prepare on %s", fake_settings.soc);
        if (config->topoType || config->reserved[0] || config->reserved[1] || config->reserved[2])
            return fake_fail(&call, HCCL_PARA, "H16", "topology %d, or reserved words that aren't 0", config->topoType);
        if (comm->physical != context->physical || comm->stopped)
            return fake_fail(&call, HCCL_PARA, comm->stopped ? "H33" : "H14",
                             comm->stopped ? "a destroy has failed" : "the comm is of another device");
        if (comm->prepared)
            return HCCL_OK;
        if (comm->preparing)
            return fake_fail(&call, HCCL_INTERNAL, "H30", "another thread prepares the same comm");
        comm->preparing = true;
        free(comm->opened);
        comm->opened_count = comm->bound_count;
        comm->opened = calloc(comm->bound_count + 1, sizeof *comm->opened);
        if (comm->bound_count)
            memcpy(comm->opened, comm->bound, comm->bound_count * sizeof *comm->opened);
    }
    int code = HCCL_OK;
    for (int i = 0; !code && i < comm->table.count; i++)
        if (i != comm->rank)
            code = prepare_peer(&call, &comm->peers[i], timeout);
    LOCKED;
    comm->preparing = false;
    comm->prepared = !code;
    for (int i = 0; i < comm->table.count; i++) {
        struct peer *peer = &comm->peers[i];
        if (code) {
            hccl_part(peer);
        } else if (i != comm->rank) {
            hccl_serve(peer);
            for (size_t k = 0; k < comm->opened_count; k++)
                comm->opened[k]->on_card |= peer->rdma;
        }
    }
    return code;
}

API HcclResult HcclExchangeMemDesc(HcclComm handle, uint32_t remote_rank, HcclMemDescs *local, int timeout,
                                   HcclMemDescs *remote, uint32_t *actual) {
    ENTER_HCCL;
    (void)context;
    if (!handle || !local || !remote || !actual || (local->arrayLength && !local->array))
        return fake_fail(&call, HCCL_PTR, "H21", "null pointer");
    if (timeout <= -2)
        return fake_fail(&call, HCCL_PARA, "H21", "timeout %d", timeout);
    struct comm *comm;
    {
        LOCKED;
        comm = hccl_comm(&call, handle);
    }
    if (!comm)
        return HCCL_PARA;
    if (remote_rank >= (uint32_t)comm->table.count)
        return fake_fail(&call, HCCL_PARA, "H21", "rank %u of %d", remote_rank, comm->table.count);
    if (remote_rank == (uint32_t)comm->rank)
        return HCCL_OK;
    struct peer *peer = &comm->peers[remote_rank];
    int64_t until = hccl_deadline(timeout);
    int code = hccl_meet(&call, peer, until);
    if (code)
        return code;
    uint32_t mine = local->arrayLength, theirs = 0, room = remote->arrayLength;
    HcclMemDesc *received = NULL;
    bool moved = true;
    for (int turn = 0; moved && turn < 2; turn++) {
        bool sending = (comm->rank < peer->rank) == !turn;
        uint32_t *number = sending ? &mine : &theirs;
        moved = hccl_move(peer->meeting, number, sizeof *number, sending, until) && *number <= MOST_OFFERS;
        if (moved && !sending)
            received = calloc(theirs + 1, sizeof *received);
        moved = moved &&
                hccl_move(peer->meeting, sending ? local->array : received, *number * sizeof *received, sending, until);
    }
    *actual = remote->arrayLength = theirs;
    if (!moved)
        code = fake_answer(&call, HCCL_INTERNAL, "rank %d went away", peer->rank);
    else if (theirs > room)
        code = fake_fail(&call, HCCL_INTERNAL, "H21", "%u descriptors for %u places", theirs, room);
    for (uint32_t i = 0; !code && i < theirs; i++) {
        uint32_t reader;
        memcpy(&reader, received[i].desc + 4, sizeof reader);
        if (reader != (uint32_t)comm->rank && reader != 0xffffffff)
            code = fake_fail(&call, HCCL_INTERNAL, "H21", "descriptor %u is for rank %u", i, reader);
        else
            remote->array[i] = received[i];
    }
    free(received);
    return code;
}

API HcclResult HcclCommDestroy(HcclComm handle) {
    ENTER_HCCL;
    if (!handle)
        return HCCL_OK;
    LOCKED;
    struct comm *comm = hccl_comm(&call, handle);
    if (!comm)
        return HCCL_PARA;
    if (comm->physical != context->physical)
        return fake_fail(&call, HCCL_PARA, "H14", "comm '%s' is of another device", comm->name);
    if (comm->preparing)
        return fake_fail(&call, HCCL_AGAIN, "H34", "comm '%s' is being prepared", comm->name);
    if (comm->pending && comm->busy_answers < 2) {
        comm->busy_answers++;
        return fake_fail(&call, HCCL_AGAIN, "H34", "%zu transfers of comm '%s' haven't ended", comm->pending,
                         comm->name);
    }
    comm->prepared = false;
    comm->stopped = true;
    if (!comm->bound_count)
        fake_end(handle);
    for (int i = 0; i < comm->table.count; i++)
        hccl_part(&comm->peers[i]);
    if (comm->bound_count)
        return fake_fail(&call, HCCL_PARA, "H33", "%zu ranges are bound to comm '%s'", comm->bound_count, comm->name);
    return HCCL_OK;
}

API const char *HcclGetErrorString(HcclResult code) {
    static const char *const names[] = {
        "no error",     "parameter error", "null pointer",  "memory error",  "internal error", "not supported",
        "not found",    "unavailable",     "system call",   "timeout",       "open file",      "tcp connect",
        "roce connect", "tcp transfer",    "roce transfer", "runtime error", "driver error",   "profiling error",
        "cce error",    "network error",   "try again",     "remote error",  "suspending",
    };
    return code >= 0 && code < (int)(sizeof names / sizeof *names) ? names[code] : "unknown error";
}

// What the ACL library asks of this one.

static bool registered(const void *address, size_t size) {
    struct region *each;
    for (size_t at = 0; (each = fake_each(REGION, &at));)
        if (overlaps(each, address, size))
            return true;
    return false;
}

static int live_comms(int physical) {
    int count = 0;
    struct comm *each;
    for (size_t at = 0; (each = fake_each(COMM, &at));)
        count += each->physical == physical;
    return count;
}

// A child that keeps the sockets would hide the death of its parent.
static void in_child(void) {
    struct comm *comm;
    for (size_t at = 0; (comm = fake_each(COMM, &at));)
        for (int i = 0; i < comm->table.count; i++) {
            close(comm->peers[i].meeting);
            close(comm->peers[i].requests);
            close(comm->peers[i].served);
        }
}

__attribute__((constructor)) static void loaded(void) {
    fake_registered = registered;
    fake_live_comms = live_comms;
    pthread_atfork(NULL, NULL, in_child);
}

__attribute__((destructor)) static void process_ends(void) {
    if (fake_forked)
        return;
    LOCKED;
    struct comm *comm;
    for (size_t at = 0; (comm = fake_each(COMM, &at));)
        fake_record("exit", "H37", "comm '%s' is live at process exit", comm->name);
    struct region *region;
    for (size_t at = 0; (region = fake_each(REGION, &at));)
        fake_record("exit", "H37", "%p is registered%s at process exit", (void *)region->address,
                    region->bound ? " and bound" : "");
}
