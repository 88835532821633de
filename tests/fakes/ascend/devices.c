// Devices and contexts: the exported functions, and which of them is current on a thread.
#include <stdlib.h>

#include "fake.h"

struct device {
    unsigned int set;               // aclrtSetDevice less aclrtResetDevice
    struct context *context;        // the default one
};
static struct device devices[64];   // by physical id

static __thread void *current;

int (*fake_live_comms)(int physical);

struct context *fake_context_quietly(void) {
    LOCKED;
    return fake_find(CONTEXT, current, NULL);
}

struct context *fake_context(struct call *call) {
    struct context *context = fake_context_quietly();
    if (!context)
        fake_fail(call, RT_CONTEXT_NULL, "A6", "this thread has no current context");
    return context;
}

static struct context *make_context(int logical, bool is_default) {
    struct context *context = calloc(1, sizeof *context);
    *context =
        (struct context){.logical = logical, .physical = fake_settings.visible[logical], .is_default = is_default};
    context->handle = fake_handle(CONTEXT, context);
    return context;
}

static bool bad_device(struct call *call, int device) {
    if (device >= 0 && device < fake_settings.visible_count)
        return false;
    fake_fail(call, RT_INVALID_DEVICEID, "A7", "device %d, there are %d", device, fake_settings.visible_count);
    return true;
}

API aclError aclrtSetDevice(int32_t device) {
    ENTER_READY;
    if (bad_device(&call, device))
        return RT_INVALID_DEVICEID;
    LOCKED;
    struct device *at = &devices[fake_settings.visible[device]];
    if (!at->context)
        at->context = make_context(device, true);
    at->set++;
    current = at->context->handle;
    return ACL_OK;
}

// Ends what hangs on a context or, for NULL, on a whole device.
static void end_streams(struct call *call, int physical, struct context *context, const char *when) {
    struct stream *stream;
    for (size_t at = 0; (stream = fake_each(STREAM, &at));) {
        if (context ? stream->context != context : stream->context->physical != physical)
            continue;
        if (stream != stream->context->default_stream)
            fake_record(call->function, "A31", "a stream is live %s", when);
        fake_abort(stream);
        fake_finish(stream);
    }
}

API aclError aclrtResetDevice(int32_t device) {
    ENTER_READY;
    if (bad_device(&call, device))
        return RT_INVALID_DEVICEID;
    LOCKED;
    int physical = fake_settings.visible[device];
    struct device *at = &devices[physical];
    if (!at->set)
        return fake_fail(&call, RT_PARAM_INVALID, "A32", "device %d is reset more often than it was set", device);
    if (--at->set)
        return ACL_OK;
    const char *when = "when its device is reset";
    if (fake_live_comms && fake_live_comms(physical))
        fake_record(call.function, "A31", "%d comms are live %s", fake_live_comms(physical), when);
    end_streams(&call, physical, NULL, when);
    fake_tell_memory(physical, "A31", when);
    fake_drop_memory(physical);
    struct context *context;
    for (size_t i = 0; (context = fake_each(CONTEXT, &i));) {
        if (context->physical != physical)
            continue;
        if (!context->is_default)
            fake_record(call.function, "A31", "a context is live %s", when);
        fake_end(context->handle);
    }
    at->context = NULL;
    return ACL_OK;
}

API aclError aclrtGetDevice(int32_t *device) {
    ENTER_CONTEXT;
    if (!device)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    *device = context->logical;
    return ACL_OK;
}

API aclError aclrtGetDeviceCount(uint32_t *count) {
    ENTER_READY;
    if (!count)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    *count = fake_settings.visible_count;
    return ACL_OK;
}

API aclError aclrtCreateContext(aclrtContext *out, int32_t device) {
    ENTER_READY;
    if (!out)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    if (bad_device(&call, device))
        return RT_INVALID_DEVICEID;
    LOCKED;
    current = *out = make_context(device, false)->handle;
    return ACL_OK;
}

API aclError aclrtDestroyContext(aclrtContext handle) {
    ENTER_READY;
    if (!handle)
        return fake_fail(&call, ACL_INVALID_PARAM, "A8", "null context");
    LOCKED;
    struct context *context = fake_find(CONTEXT, handle, NULL);
    if (!context || context->is_default)
        return fake_fail(&call, RT_PARAM_INVALID, "A8", "%p is no context, was destroyed, or is a device's own",
                         handle);
    end_streams(&call, context->physical, context, "when its context is destroyed");
    fake_end(handle);
    return ACL_OK;
}

API aclError aclrtSetCurrentContext(aclrtContext handle) {
    ENTER_READY;
    if (!handle)
        return fake_fail(&call, ACL_INVALID_PARAM, "A8", "null context");
    LOCKED;
    if (!fake_find(CONTEXT, handle, NULL))
        return fake_fail(&call, RT_PARAM_INVALID, "A8", "%p is no context, or was destroyed", handle);
    current = handle;
    return ACL_OK;
}

API aclError aclrtGetCurrentContext(aclrtContext *out) {
    ENTER_READY;
    if (!out)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    // That a thread has none is an answer like any other: whoever restores the context of a user's thread has to ask.
    struct context *context = fake_context_quietly();
    if (!context)
        return fake_answer(&call, RT_CONTEXT_NULL, "this thread has no current context");
    *out = context->handle;
    return ACL_OK;
}

API aclError aclrtGetPhyDevIdByLogicDevId(int32_t logic, int32_t *phy) {
    ENTER_READY;
    if (!phy)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    if (bad_device(&call, logic))
        return RT_INVALID_DEVICEID;
    *phy = fake_settings.visible[logic];
    return ACL_OK;
}

API aclError aclrtGetDeviceInfo(uint32_t device, int attr, int64_t *value) {
    ENTER_READY;
    if (!value)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    if (bad_device(&call, (int)device))
        return RT_INVALID_DEVICEID;
    if (fake_settings.product != A3 || attr < SUPER_POD_DEVICE_ID || attr > SUPER_POD_ID)
        return fake_answer(&call, ACL_API_NOT_SUPPORT, "attribute %d isn't known on %s", attr, fake_settings.soc);
    *value = attr == SUPER_POD_DEVICE_ID   ? 100 + fake_settings.visible[device]
             : attr == SUPER_POD_SERVER_ID ? 0
                                           : fake_settings.super_pod;
    return ACL_OK;
}

API const char *aclrtGetSocName(void) {
    struct call call __attribute__((cleanup(fake_leave)));
    if (fake_enter(&call, __func__) || !fake_ready(&call))
        return NULL;
    return fake_settings.soc[0] ? fake_settings.soc : NULL;
}

API aclError aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) {
    ENTER_READY;
    if (!major || !minor || !patch)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    *major = 1;
    *minor = 16;
    *patch = 0;
    return ACL_OK;
}

// For tests: what is current on this thread, without a look at anything else. 0, or -1 when there is nothing.
API int fake_current(int32_t *device, void **context_handle) {
    struct context *context = fake_context_quietly();
    *device = context ? context->logical : -1;
    *context_handle = context ? context->handle : NULL;
    return context ? 0 : -1;
}

void fake_tell_leaks(const char *function, const char *when) {
    struct stream *stream;
    for (size_t at = 0; (stream = fake_each(STREAM, &at));)
        if (stream != stream->context->default_stream)
            fake_record(function, "A32", "a stream is live %s", when);
    for (size_t at = 0; fake_each(EVENT, &at);)
        fake_record(function, "A32", "an event is live %s", when);
    fake_tell_memory(-2, "A32", when);
    struct context *context;
    for (size_t at = 0; (context = fake_each(CONTEXT, &at));)
        if (!context->is_default)
            fake_record(function, "A32", "a context is live %s", when);
    for (int i = 0; i < 64; i++)
        if (devices[i].set)
            fake_record(function, "A32", "device with physical id %d was set %u times more than reset %s", i,
                        devices[i].set, when);
}
