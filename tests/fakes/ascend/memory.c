// Device memory that the host can't touch, and pinned host memory.
//
// Each physical device has a range of addresses without access rights, at the same place in every process; the bytes
// are in a second mapping. Large allocations get their pattern at both ends and at the first 2 MiB boundary only, so
// that they stay sparse; what is between is zero.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake.h"

#define BASE 0x200000000000ull
#define STRIDE (1ull << 38)
#define DEVICES 64
#define PAGE 4096ull
#define HUGE_PAGE (2ull << 20)
#define ENDS (64ull << 10)
enum { FRESH = 0xA5, FREED = 0xDD };

struct space {
    char *start;
    char *bytes;
    size_t size;
    size_t used;            // charged against the device's memory
    char *next;             // fresh addresses first, so that old ones aren't valid again at once
};
static struct space spaces[DEVICES];
static size_t host_used;
static struct allocation *allocations;  // by address

bool (*fake_registered)(const void *address, size_t size);

static size_t up(size_t value, size_t grain) {
    return (value + grain - 1) / grain * grain;
}

static struct space *space_of(const void *address) {
    uint64_t offset = (uint64_t)address - BASE;
    return (uint64_t)address >= BASE && offset < DEVICES * STRIDE ? &spaces[offset / STRIDE] : NULL;
}

bool fake_on_device(const void *address) {
    return space_of(address);
}

char *fake_bytes(const void *address) {
    struct space *space = space_of(address);
    if (!space)
        return (char *)address;
    size_t offset = (const char *)address - space->start;
    return space->start && offset < space->size ? space->bytes + offset : NULL;
}

struct allocation *fake_allocation(const void *address) {
    const char *at = address;
    for (struct allocation *each = allocations; each && each->start <= at; each = each->next)
        if (at < each->start + each->size)
            return each;
    return NULL;
}

bool fake_inside(const void *address, size_t size, bool device) {
    struct allocation *found = fake_allocation(address);
    return found && (found->physical >= 0) == device && size <= (size_t)(found->start + found->size - (char *)address);
}

static void open_space(int physical) {
    struct space *space = &spaces[physical];
    if (space->start)
        return;
    char *start = (char *)(BASE + physical * STRIDE);
    // Roomier than the memory: the gaps between allocations are addresses only.
    space->size = up(4 * fake_settings.memory, HUGE_PAGE) + (1ull << 30);
    if (space->size > STRIDE)
        space->size = STRIDE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *reserved = mmap(start, space->size, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
    space->bytes = mmap(NULL, space->size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (reserved != start || space->bytes == MAP_FAILED) {
        fprintf(stderr, "fake Ascend driver: no room for %zu bytes of device memory at %p\n", space->size,
                (void *)start);
        abort();
    }
    space->start = space->next = start;
}

static void fill(const char *start, size_t size, int pattern) {
    char *bytes = fake_bytes(start);
    if (size <= 4 * ENDS) {
        memset(bytes, pattern, size);
        return;
    }
    memset(bytes, pattern, ENDS);
    memset(bytes + size - ENDS, pattern, ENDS);
    // Where a caller begins who needs HCCS.
    size_t aligned = up((size_t)start, HUGE_PAGE) - (size_t)start;
    if (aligned + ENDS < size)
        memset(bytes + aligned, pattern, ENDS);
}

// The first gap of this size at or after `from`; NULL if there is none.
static char *gap(struct space *space, char *from, size_t size) {
    char *at = from;
    for (struct allocation *each = allocations; each; each = each->next) {
        if (each->span + each->span_size <= at || space_of(each->start) != space)
            continue;
        if ((size_t)(each->span - at) >= size && each->span >= at)
            break;
        at = each->span + each->span_size;
    }
    return (size_t)(space->start + space->size - at) >= size ? at : NULL;
}

static void insert(struct allocation *allocation) {
    struct allocation **at = &allocations;
    while (*at && (*at)->start < allocation->start)
        at = &(*at)->next;
    allocation->next = *at;
    *at = allocation;
}

int fake_allocate(struct call *call, int physical, size_t size, void **out) {
    bool device = physical >= 0;
    size_t *used = device ? &spaces[physical].used : &host_used;
    size_t charge = size > SIZE_MAX / 8 ? SIZE_MAX : device ? up(size, 32) + 32 : up(size, PAGE);
    if (device && charge >= HUGE_PAGE && charge < SIZE_MAX)
        charge = up(charge, HUGE_PAGE);
    size_t unused = fake_settings.memory > *used ? fake_settings.memory - *used : 0;
    if (charge > unused)
        return fake_answer(call, RT_MEMORY_ALLOCATION, "%zu bytes asked for, %zu of %zu are free", size, unused,
                           fake_settings.memory);
    struct allocation *made = calloc(1, sizeof *made);
    *made = (struct allocation){.size = size, .charge = charge, .physical = physical};
    if (device) {
        open_space(physical);
        struct space *space = &spaces[physical];
        // 64 bytes into a page: as aligned as promised and no more. An unused page follows.
        made->span_size = up(size + 64, PAGE) + PAGE;
        made->span = gap(space, space->next, made->span_size);
        if (!made->span)
            made->span = gap(space, space->start, made->span_size);
        made->start = made->span + 64;
        if (!made->span) {
            free(made);
            return fake_answer(call, RT_MEMORY_ALLOCATION, "no %zu bytes in one piece", size);
        }
        space->next = made->span + made->span_size;
    } else {
        made->span_size = up(size, PAGE);
        made->span = made->start =
            mmap(NULL, made->span_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made->span == MAP_FAILED) {
            free(made);
            return fake_answer(call, RT_MEMORY_ALLOCATION, "%zu bytes can't be mapped", size);
        }
    }
    *used += charge;
    insert(made);
    fill(made->start, size, FRESH);
    *out = made->start;
    return ACL_OK;
}

static void drop(struct allocation **at, bool in_use) {
    struct allocation *gone = *at;
    if (gone->physical >= 0) {
        spaces[gone->physical].used -= gone->charge;
        madvise(fake_bytes(gone->span), gone->span_size, MADV_DONTNEED);
    } else {
        host_used -= gone->charge;
        // A task that still uses it is recorded, but must not bring the worker down.
        if (!in_use)
            munmap(gone->span, gone->span_size);
    }
    if (gone->physical >= 0 || in_use)
        fill(gone->start, gone->size, FREED);
    *at = gone->next;
    free(gone);
}

int fake_release(struct call *call, void *address, bool device) {
    struct allocation **at = &allocations;
    while (*at && (*at)->start != address)
        at = &(*at)->next;
    if (!*at) {
        struct allocation *inside = fake_allocation(address);
        return fake_fail(call, RT_PARAM_INVALID, "A18", "%p %s", address,
                         inside ? "is inside an allocation, not its start" : "is not allocated, or was freed already");
    }
    if (((*at)->physical >= 0) != device)
        return fake_fail(call, RT_PARAM_INVALID, "A19", "%p is %s memory", address, device ? "host" : "device");
    bool in_use = fake_used_by_task((*at)->start, (*at)->size, false);
    if (in_use)
        fake_fail(call, ACL_OK, "A20", "%p is freed while a queued task uses it", address);
    if (fake_registered && fake_registered((*at)->start, (*at)->size))
        fake_fail(call, ACL_OK, "A20", "%p is freed while it is registered with HCCL", address), in_use = true;
    drop(at, in_use);
    return ACL_OK;
}

void fake_drop_memory(int physical) {
    for (struct allocation **at = &allocations; *at;)
        if ((*at)->physical == physical)
            drop(at, false);
        else
            at = &(*at)->next;
}

size_t fake_tell_memory(int physical, const char *id, const char *when) {
    size_t told = 0;
    for (struct allocation *each = allocations; each; each = each->next)
        if (physical == -2 || each->physical == physical) {
            fake_record("memory", id, "%zu bytes of %s memory at %p live %s", each->size,
                        each->physical < 0 ? "host" : "device", (void *)each->start, when);
            told++;
        }
    return told;
}

size_t fake_used(int physical) {
    return physical < 0 ? host_used : spaces[physical].used;
}
