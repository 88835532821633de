// The exported functions of memory and copies.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

#define BATCH_LIMIT 4096
#define SUMMED_END (256u << 10)

API aclError aclrtMalloc(void **out, size_t size, int policy) {
    ENTER_CONTEXT;
    (void)policy;
    if (!out || !size)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "out %p, size %zu", (void *)out, size);
    LOCKED;
    return fake_allocate(&call, context->physical, size, out);
}

API aclError aclrtMallocHost(void **out, size_t size) {
    ENTER_CONTEXT;
    (void)context;
    if (!out || !size)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "out %p, size %zu", (void *)out, size);
    LOCKED;
    return fake_allocate(&call, -1, size, out);
}

API aclError aclrtFree(void *address) {
    ENTER_READY;
    if (!address)
        return fake_fail(&call, ACL_INVALID_PARAM, "A18", "null pointer");
    LOCKED;
    return fake_release(&call, address, true);
}

API aclError aclrtFreeHost(void *address) {
    ENTER_READY;
    if (!address)
        return fake_fail(&call, ACL_INVALID_PARAM, "A18", "null pointer");
    LOCKED;
    return fake_release(&call, address, false);
}

API aclError aclrtGetMemInfo(int attr, size_t *free_bytes, size_t *total) {
    ENTER_CONTEXT;
    if (!free_bytes || !total || attr < 0 || attr > 17)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "attribute %d, or a null pointer", attr);
    LOCKED;
    size_t used = fake_used(context->physical);
    *total = fake_settings.memory;
    *free_bytes = fake_settings.memory > used ? fake_settings.memory - used : 0;
    return ACL_OK;
}

API aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes) {
    ENTER_READY;
    if (!address || !attributes)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    LOCKED;
    struct allocation *found = fake_allocation(address);
    *attributes = (aclrtPtrAttributes){.location.type = LOCATION_UNREGISTERED};
    if (!found)
        return ACL_OK;
    attributes->location.type = found->physical < 0 ? LOCATION_HOST : LOCATION_DEVICE;
    for (int i = 0; i < fake_settings.visible_count; i++)
        if (fake_settings.visible[i] == found->physical)
            attributes->location.id = i;
    attributes->pageSize = found->physical < 0 || found->charge < (2u << 20) ? 4096 : 2u << 20;
    return ACL_OK;
}

API aclError aclrtMemGetAddressRange(void *address, void **base, size_t *size) {
    ENTER_READY;
    if (!address || !base || !size)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    LOCKED;
    struct allocation *found = fake_allocation(address);
    if (!found || found->physical < 0)
        return fake_fail(&call, RT_PARAM_INVALID, "A22", "%p is in no device allocation", address);
    *base = found->start;
    *size = found->size;
    return ACL_OK;
}

static uint64_t sum_up(uint64_t sum, const char *bytes, size_t size) {
    for (; size >= 8; size -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        sum = (sum ^ word) * 0x9e3779b97f4a7c15ull;
    }
    while (size--)
        sum = (sum ^ (unsigned char)*bytes++) * 0x9e3779b97f4a7c15ull;
    return sum;
}

// Of a long buffer only both ends.
static uint64_t checksum(const char *bytes, size_t size) {
    size_t end = size < SUMMED_END ? size : SUMMED_END;
    return sum_up(sum_up(size, bytes, end), bytes + size - end, end);
}

static bool pinned(const void *address, size_t size) {
    return fake_inside(address, size, false);
}

// What the plain and the asynchronous copy check alike. 1: there is nothing to copy. Needs the lock.
static int check_copy(struct call *call, void *dst, size_t dst_max, const void *src, size_t count, int kind) {
    if (!count)
        return 1;
    if (!dst_max || count > dst_max)
        return fake_fail(call, RT_PARAM_INVALID, "A21", "%zu bytes into %zu", count, dst_max);
    if (!dst || !src)
        return fake_fail(call, ACL_INVALID_PARAM, "A21", "null pointer");
    if (dst == src)
        return 1;
    if (kind < HOST_TO_HOST || kind > COPY_DEFAULT)
        return fake_fail(call, ACL_INVALID_PARAM, "A23", "kind %d", kind);
    bool from = fake_on_device(src), to = fake_on_device(dst);
    if ((from && !fake_inside(src, count, true)) || (to && !fake_inside(dst, count, true)))
        return fake_fail(call, RT_PARAM_INVALID, "A22", "%zu bytes from %p to %p leave an allocation", count, src, dst);
    int is = from ? (to ? DEVICE_TO_DEVICE : DEVICE_TO_HOST) : to ? HOST_TO_DEVICE : HOST_TO_HOST;
    if (kind != COPY_DEFAULT && kind != is)
        fake_fail(call, ACL_OK, "A23", "kind %d, by its pointers it is %d", kind, is);
    return ACL_OK;
}

API aclError aclrtMemcpy(void *dst, size_t dst_max, const void *src, size_t count, int kind) {
    ENTER_CONTEXT;
    (void)context;
    char *to, *from;
    {
        LOCKED;
        int code = check_copy(&call, dst, dst_max, src, count, kind);
        if (code)
            return code == 1 ? ACL_OK : code;
        to = fake_bytes(dst);
        from = fake_bytes(src);
    }
    memmove(to, from, count);
    return ACL_OK;
}

static int run_copy(struct task *task, struct stream *stream) {
    (void)stream;
    char *to, *from;
    {
        LOCKED;
        if (task->checked && !pinned(task->src, task->size)) {
            fake_record(task->function, "A26", "the source was freed before the copy ran");
            return ACL_OK;
        }
        if (!fake_on_device(task->dst) && !pinned(task->dst, task->size)) {
            fake_record(task->function, "A26", "the target was freed before the copy ran");
            return ACL_OK;
        }
        to = fake_bytes(task->dst);
        from = fake_bytes(task->src);
    }
    if (task->checked && checksum(from, task->size) != task->checksum)
        fake_record(task->function, "A26", "the source was changed before the copy ran");
    if (task->outcome == DIES_HALFWAY) {
        memmove(to, from, task->size / 2);
        fake_die();
    }
    memmove(to, from, task->size);
    return ACL_OK;
}

static void enqueue_copy(struct call *call, struct stream *stream, void *dst, void *src, size_t size) {
    struct task *task = fake_task(call, 2);
    task->run = run_copy;
    task->dst = dst;
    task->src = src;
    task->size = size;
    task->spans[0] = (struct span){dst, size, true};
    task->spans[1] = (struct span){src, size, false};
    // What an earlier task will write there can't be summed up yet.
    task->checked = !fake_on_device(src) && !fake_used_by_task(src, size, true);
    if (task->checked)
        task->checksum = checksum(src, size);
    fake_enqueue(stream, task);
}

API aclError aclrtMemcpyAsync(void *dst, size_t dst_max, const void *src, size_t count, int kind, aclrtStream handle) {
    ENTER_CONTEXT;
    LOCKED;
    int code;
    struct stream *stream = fake_stream(&call, handle, context, false, &code);
    if (!stream)
        return code;
    code = check_copy(&call, dst, dst_max, src, count, kind);
    if (code)
        return code == 1 ? ACL_OK : code;
    bool from = fake_on_device(src), to = fake_on_device(dst);
    if (!from && !to)
        return fake_fail(&call, RT_FEATURE_NOT_SUPPORT, "A24", "host to host");
    if ((from || pinned(src, count)) && (to || pinned(dst, count))) {
        enqueue_copy(&call, stream, dst, (void *)src, count);
        return ACL_OK;
    }
    fake_fail(&call, ACL_OK, "A25", "host memory that isn't from aclrtMallocHost");
    code = fake_sync(&call, stream, -1);
    if (!code)
        memmove(fake_bytes(dst), fake_bytes(src), count);
    return code;
}

static int check_memset(struct call *call, void *address, size_t max, size_t count) {
    if (!count)
        return 1;
    if (!address)
        return fake_fail(call, ACL_INVALID_PARAM, "A21", "null pointer");
    if (count > max)
        return fake_fail(call, RT_PARAM_INVALID, "A21", "%zu bytes into %zu", count, max);
    if (fake_on_device(address) && !fake_inside(address, count, true))
        return fake_fail(call, RT_PARAM_INVALID, "A22", "%zu bytes at %p leave an allocation", count, address);
    return ACL_OK;
}

API aclError aclrtMemset(void *address, size_t max, int32_t value, size_t count) {
    ENTER_CONTEXT;
    (void)context;
    {
        LOCKED;
        int code = check_memset(&call, address, max, count);
        if (code)
            return code == 1 ? ACL_OK : code;
    }
    memset(fake_bytes(address), value, count);
    return ACL_OK;
}

static int run_memset(struct task *task, struct stream *stream) {
    (void)stream;
    memset(fake_bytes(task->dst), task->value, task->size);
    return ACL_OK;
}

API aclError aclrtMemsetAsync(void *address, size_t max, int32_t value, size_t count, aclrtStream handle) {
    ENTER_CONTEXT;
    LOCKED;
    int code;
    struct stream *stream = fake_stream(&call, handle, context, false, &code);
    if (!stream)
        return code;
    code = check_memset(&call, address, max, count);
    if (code)
        return code == 1 ? ACL_OK : code;
    struct task *task = fake_task(&call, 1);
    task->run = run_memset;
    task->dst = address;
    task->size = count;
    task->value = value;
    task->spans[0] = (struct span){address, count, true};
    fake_enqueue(stream, task);
    return ACL_OK;
}

// Batches.

static bool location_fits(const aclrtMemLocation *location, const void *address) {
    if (!fake_on_device(address))
        return location->type == LOCATION_HOST;
    struct allocation *found = fake_allocation(address);
    return location->type == LOCATION_DEVICE && location->id < (uint32_t)fake_settings.visible_count && found &&
           found->physical == fake_settings.visible[location->id];
}

// 1: there is nothing to copy. Needs the lock.
static int check_batch(struct call *call, void **dsts, size_t *dst_maxs, void **srcs, size_t *sizes, size_t count,
                       aclrtMemcpyBatchAttr *attrs, size_t *attr_first, size_t attr_count, size_t *fail_index,
                       bool pinned_only) {
    if (!dsts || !dst_maxs || !srcs || !sizes || !attrs || !attr_first || !fail_index || !count)
        return fake_fail(call, ACL_INVALID_PARAM, "A27", "null pointer, or a count of 0");
    *fail_index = SIZE_MAX;
    if (count > BATCH_LIMIT)
        return fake_fail(call, ACL_INVALID_PARAM, "A27", "%zu copies in a call, at most %d", count, BATCH_LIMIT);
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        if (dst_maxs[i] < sizes[i])
            return fake_fail(call, ACL_INVALID_PARAM, "A27", "entry %zu: %zu bytes into %zu", i, sizes[i], dst_maxs[i]);
        total += sizes[i];
    }
    static const uint8_t zeros[16];
    for (size_t k = 0; k < attr_count; k++)
        if (memcmp(attrs[k].rsv, zeros, sizeof zeros))
            return fake_fail(call, ACL_INVALID_PARAM, "A27", "attribute %zu: reserved bytes aren't 0", k);
    bool bad = !attr_count || attr_count > count || attr_first[0];
    for (size_t k = 1; !bad && k < attr_count; k++)
        bad = attr_first[k] <= attr_first[k - 1] || attr_first[k] >= count;
    if (bad)
        return fake_fail(call, RT_PARAM_INVALID, "A27", "the indices of the attributes don't rise from 0 to below %zu",
                         count);
    if (!total)
        return 1;
    for (size_t i = 0, k = 0; i < count; i++) {
        while (k + 1 < attr_count && attr_first[k + 1] <= i)
            k++;
        if (!sizes[i])
            continue;
        bool to = fake_on_device(dsts[i]), from = fake_on_device(srcs[i]);
        const char *wrong = !dsts[i] || !srcs[i] ? "null pointer"
                            : to == from         ? "both ends on the same side"
                            : !location_fits(&attrs[k].dstLoc, dsts[i]) || !location_fits(&attrs[k].srcLoc, srcs[i])
                                ? "the location contradicts the pointer"
                            : !fake_inside(to ? dsts[i] : srcs[i], sizes[i], true) ? "it leaves its allocation"
                                                                                   : NULL;
        if (wrong) {
            *fail_index = i;
            return fake_fail(call, RT_PARAM_INVALID, "A27", "entry %zu: %s", i, wrong);
        }
        if (pinned_only && !pinned(to ? srcs[i] : dsts[i], sizes[i])) {
            *fail_index = i;
            return fake_fail(call, RT_PARAM_INVALID, "A25", "entry %zu: host memory that isn't from aclrtMallocHost",
                             i);
        }
    }
    return ACL_OK;
}

// Entries may run in any order, so they do.
static size_t *any_order(size_t count) {
    size_t *order = calloc(count, sizeof *order);
    for (size_t i = 0; i < count; i++) {
        size_t other = fake_random((int)i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    return order;
}

API aclError aclrtMemcpyBatch(void **dsts, size_t *dst_maxs, void **srcs, size_t *sizes, size_t count,
                              aclrtMemcpyBatchAttr *attrs, size_t *attr_first_index, size_t attr_count,
                              size_t *fail_index) {
    ENTER_CONTEXT;
    (void)context;
    {
        LOCKED;
        int code = check_batch(&call, dsts, dst_maxs, srcs, sizes, count, attrs, attr_first_index, attr_count,
                               fail_index, false);
        if (code)
            return code == 1 ? ACL_OK : code;
    }
    size_t *order = any_order(count);
    for (size_t i = 0; i < count; i++)
        if (sizes[order[i]])
            memmove(fake_bytes(dsts[order[i]]), fake_bytes(srcs[order[i]]), sizes[order[i]]);
    free(order);
    return ACL_OK;
}

API aclError aclrtMemcpyBatchAsync(void **dsts, size_t *dst_maxs, void **srcs, size_t *sizes, size_t count,
                                   aclrtMemcpyBatchAttr *attrs, size_t *attr_first_index, size_t attr_count,
                                   size_t *fail_index, aclrtStream handle) {
    ENTER_CONTEXT;
    LOCKED;
    int code;
    struct stream *stream = fake_stream(&call, handle, context, false, &code);
    if (!stream)
        return code;
    code =
        check_batch(&call, dsts, dst_maxs, srcs, sizes, count, attrs, attr_first_index, attr_count, fail_index, true);
    if (code)
        return code == 1 ? ACL_OK : code;
    size_t *order = any_order(count);
    for (size_t i = 0; i < count; i++)
        if (sizes[order[i]])
            enqueue_copy(&call, stream, dsts[order[i]], srcs[order[i]], sizes[order[i]]);
    free(order);
    return ACL_OK;
}

// Registered host memory and memory faults: what the backend under test may look up; the fake has none of it.

API aclError aclrtHostRegister(void *address, uint64_t size, int type, void **device_pointer) {
    ENTER_CONTEXT;
    (void)context;
    if (!address || !size || !device_pointer || type)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer, size 0 or type %d", type);
    return fake_answer(&call, RT_FEATURE_NOT_SUPPORT, "the fake maps no host memory into a device");
}

API aclError aclrtHostUnregister(void *address) {
    ENTER_CONTEXT;
    (void)context;
    return fake_fail(&call, RT_PARAM_INVALID, "A18", "%p is not registered", address);
}

API aclError aclrtGetMemUceInfo(int32_t device, aclrtMemUceInfo *array, size_t array_len, size_t *returned) {
    ENTER_CONTEXT;
    (void)context, (void)device;
    if (!array || !array_len || !returned || array_len > 128)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer, or %zu entries", array_len);
    *returned = 0;
    return ACL_OK;
}

API aclError aclrtMemUceRepair(int32_t device, aclrtMemUceInfo *array, size_t array_len) {
    ENTER_CONTEXT;
    (void)context, (void)device;
    if (!array || !array_len || array_len > 128)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer, or %zu entries", array_len);
    return ACL_OK;
}
