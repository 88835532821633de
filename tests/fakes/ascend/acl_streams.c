// The exported functions of streams and events.
#include <stdlib.h>

#include "fake.h"

static int64_t deadline(int32_t timeout_ms) {
    return timeout_ms < 0 ? -1 : fake_now_us() + timeout_ms * 1000ll;
}

API aclError aclrtCreateStreamWithConfig(aclrtStream *out, uint32_t priority, uint32_t flags) {
    ENTER_CONTEXT;
    (void)priority;
    if (!out || flags & ~0x3fu)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "out %p, flags %#x", (void *)out, flags);
    LOCKED;
    struct stream *stream = fake_make_stream(context);
    if (!stream)
        return fake_fail(&call, RT_NO_STREAM, "A15", "too many streams on this device");
    *out = stream->handle;
    return ACL_OK;
}

API aclError aclrtCreateStream(aclrtStream *out) {
    return aclrtCreateStreamWithConfig(out, 0, 0);
}

static aclError destroy(struct call *call, aclrtStream handle, struct context *context, bool force) {
    if (!handle)
        return fake_fail(call, ACL_INVALID_PARAM, "A11", "null stream");
    LOCKED;
    int code;
    struct stream *stream = fake_stream(call, handle, context, false, &code);
    if (!stream)
        return code;
    if (force)
        fake_abort(stream);
    fake_finish(stream);
    return ACL_OK;
}

API aclError aclrtDestroyStream(aclrtStream handle) {
    ENTER_CONTEXT;
    return destroy(&call, handle, context, false);
}

API aclError aclrtDestroyStreamForce(aclrtStream handle) {
    ENTER_CONTEXT;
    return destroy(&call, handle, context, true);
}

static aclError synchronize(struct call *call, aclrtStream handle, struct context *context, int64_t deadline_us) {
    LOCKED;
    int code;
    struct stream *stream = fake_stream(call, handle, context, true, &code);
    if (!stream)
        return code;
    if (stream->aborted && !stream->aborting)
        fake_fail(call, ACL_OK, "A14", "a stream is synchronised after an abort");
    return fake_sync(call, stream, deadline_us);
}

API aclError aclrtSynchronizeStream(aclrtStream handle) {
    ENTER_CONTEXT;
    return synchronize(&call, handle, context, -1);
}

API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
    ENTER_CONTEXT;
    if (!timeout_ms || timeout_ms < -1)
        return fake_fail(&call, RT_PARAM_INVALID, "A12", "timeout %d", timeout_ms);
    return synchronize(&call, handle, context, deadline(timeout_ms));
}

API aclError aclrtSynchronizeDevice(void) {
    ENTER_CONTEXT;
    LOCKED;
    struct stream *stream;
    for (size_t at = 0; (stream = fake_each(STREAM, &at));) {
        int code = stream->context->physical == context->physical ? fake_sync(&call, stream, -1) : ACL_OK;
        if (code)
            return code;
    }
    return ACL_OK;
}

API aclError aclrtStreamAbort(aclrtStream handle) {
    ENTER_CONTEXT;
    LOCKED;
    int code;
    struct stream *stream = fake_stream(&call, handle, context, false, &code);
    if (stream)
        fake_abort(stream);
    return code;
}

API aclError aclrtDeviceTaskAbort(int32_t device, uint32_t timeout_ms) {
    ENTER_CONTEXT;
    (void)context, (void)timeout_ms;
    if (device < 0 || device >= fake_settings.visible_count)
        return fake_fail(&call, RT_INVALID_DEVICEID, "A7", "device %d", device);
    LOCKED;
    struct stream *stream;
    for (size_t at = 0; (stream = fake_each(STREAM, &at));)
        if (stream->context->physical == fake_settings.visible[device])
            fake_abort(stream);
    return ACL_OK;
}

API aclError aclrtStreamQuery(aclrtStream handle, int *status) {
    ENTER_CONTEXT;
    if (!status)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    LOCKED;
    int code;
    struct stream *stream = fake_stream(&call, handle, context, true, &code);
    if (!stream)
        return code;
    *status = stream->finished < stream->queued ? STREAM_NOT_READY : STREAM_COMPLETE;
    // Who asks again and again must see an end, also in lazy mode.
    stream->released = stream->queued;
    pthread_cond_broadcast(&stream->work);
    return ACL_OK;
}

API aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) {
    ENTER_CONTEXT;
    if (mode > 1)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "mode %llu", (unsigned long long)mode);
    LOCKED;
    int code;
    struct stream *stream = fake_stream(&call, handle, context, false, &code);
    if (stream)
        stream->stops = mode;
    return code;
}

// For tests: let what a lazy stream holds run, without a sync.
API int fake_release_stream(aclrtStream handle) {
    LOCKED;
    struct stream *stream = fake_find(STREAM, handle, NULL);
    if (!stream)
        return -1;
    stream->released = stream->queued;
    pthread_cond_broadcast(&stream->work);
    return 0;
}

// For tests: how many threads are inside a sync of this stream.
API int fake_waiting(aclrtStream handle) {
    LOCKED;
    struct stream *stream = fake_find(STREAM, handle, NULL);
    return stream ? stream->waiting : 0;
}

// Events: what is waited for is the last record at the time of the call.

struct event {
    struct stream *stream;      // of the last record; NULL before the first
    uint64_t number;            // its task
};

static struct event *find_event(struct call *call, aclrtEvent handle, int *code) {
    struct event *event = fake_find(EVENT, handle, NULL);
    *code = event
                ? ACL_OK
                : fake_fail(call, handle ? RT_INVALID_HANDLE : ACL_INVALID_PARAM, "A11", "%p is no live event", handle);
    return event;
}

API aclError aclrtCreateEvent(aclrtEvent *out) {
    ENTER_CONTEXT;
    (void)context;
    if (!out)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    LOCKED;
    *out = fake_handle(EVENT, calloc(1, sizeof(struct event)));
    return ACL_OK;
}

API aclError aclrtDestroyEvent(aclrtEvent handle) {
    ENTER_CONTEXT;
    (void)context;
    LOCKED;
    int code;
    if (find_event(&call, handle, &code))
        fake_end(handle);
    return code;
}

static int run_nothing(struct task *task, struct stream *stream) {
    (void)task, (void)stream;
    return ACL_OK;
}

API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    ENTER_CONTEXT;
    LOCKED;
    int code;
    struct event *event = find_event(&call, handle, &code);
    struct stream *stream = event ? fake_stream(&call, stream_handle, context, false, &code) : NULL;
    if (!stream)
        return code;
    struct task *task = fake_task(&call, 0);
    task->run = run_nothing;
    fake_enqueue(stream, task);
    *event = (struct event){stream, stream->queued};
    return ACL_OK;
}

API aclError aclrtQueryEventStatus(aclrtEvent handle, int *status) {
    ENTER_CONTEXT;
    (void)context;
    if (!status)
        return fake_fail(&call, ACL_INVALID_PARAM, "A16", "null pointer");
    LOCKED;
    int code;
    struct event *event = find_event(&call, handle, &code);
    if (!event)
        return code;
    struct stream *stream = event->stream;
    *status = !stream || stream->finished >= event->number ? EVENT_COMPLETE : EVENT_NOT_READY;
    if (stream && stream->released < event->number)
        stream->released = event->number, pthread_cond_broadcast(&stream->work);
    return ACL_OK;
}

static bool wait_for(struct stream *of, uint64_t number, int64_t deadline_us) {
    if (of->released < number)
        of->released = number;
    pthread_cond_broadcast(&of->work);
    while (of->finished < number)
        if (!fake_wait_until(&of->done, deadline_us) && of->finished < number)
            return false;
    return true;
}

static aclError synchronize_event(struct call *call, aclrtEvent handle, int64_t deadline_us) {
    LOCKED;
    int code;
    struct event *event = find_event(call, handle, &code);
    if (!event || !event->stream || wait_for(event->stream, event->number, deadline_us))
        return code;
    return fake_answer(call, RT_EVENT_SYNC_TIMEOUT, "the event was not reached in time");
}

API aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    ENTER_CONTEXT;
    (void)context;
    return synchronize_event(&call, handle, -1);
}

API aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t timeout_ms) {
    ENTER_CONTEXT;
    (void)context;
    if (!timeout_ms || timeout_ms < -1)
        return fake_fail(&call, RT_PARAM_INVALID, "A12", "timeout %d", timeout_ms);
    return synchronize_event(&call, handle, deadline(timeout_ms));
}

// A stream that waits for an aborted one stays stuck until it is aborted too: the record never comes.
static int run_wait(struct task *task, struct stream *stream) {
    LOCKED;
    struct event *event = task->data;
    while (!stream->aborting && !wait_for(event->stream, event->number, fake_now_us() + 10000))
        ;
    return ACL_OK;
}

static void release_wait(struct task *task) {
    free(task->data);
}

API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    ENTER_CONTEXT;
    LOCKED;
    int code;
    struct event *event = find_event(&call, handle, &code);
    struct stream *stream = event ? fake_stream(&call, stream_handle, context, false, &code) : NULL;
    if (!stream || !event->stream)
        return code;
    struct task *task = fake_task(&call, 0);
    struct event *as_recorded = malloc(sizeof *as_recorded);
    *as_recorded = *event;
    task->run = run_wait;
    task->release = release_wait;
    task->data = as_recorded;
    fake_enqueue(stream, task);
    return ACL_OK;
}
