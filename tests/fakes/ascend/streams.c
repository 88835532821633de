// Streams: a queue of tasks and a thread that runs them, one after the other, some time after they were queued.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "fake.h"

#define STREAMS_PER_DEVICE 1984
#define HOLD_US 300

struct task *fake_task(struct call *call, size_t spans) {
    struct task *task = calloc(1, sizeof *task);
    task->function = call->function;
    task->outcome = call->outcome;
    task->code = call->task_code;
    task->spans = calloc(spans ? spans : 1, sizeof *task->spans);
    task->span_count = spans;
    return task;
}

void fake_discard(struct task *task) {
    if (task->release)
        task->release(task);
    free(task->spans);
    free(task);
}

static void drop_queue(struct stream *stream) {
    while (stream->first) {
        struct task *task = stream->first;
        stream->first = task->next;
        stream->finished = task->number;
        fake_discard(task);
    }
    stream->last = NULL;
}

// Holds a task back, as a busy device does; false: it was dropped meanwhile, or the stream has been aborted.
static bool held(struct stream *stream, struct task *task) {
    uint64_t number = task->number;
    if (fake_settings.lazy) {
        while (!stream->aborting && stream->released < number && stream->first == task)
            fake_wait_until(&stream->work, -1);
    } else {
        int64_t until = fake_now_us() + fake_random(HOLD_US);
        while (!stream->aborting && stream->first == task && fake_wait_until(&stream->work, until))
            ;
    }
    return !stream->aborting && stream->first == task && task->number == number;
}

static int run(struct task *task, struct stream *stream) {
    if (task->outcome == FAILS)
        return task->code;
    if (task->outcome != HANGS)
        return task->run(task, stream);
    LOCKED;
    while (!stream->aborting)
        fake_wait_until(&stream->work, -1);
    return RT_STREAM_ABORT;
}

static void *work(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&fake_mutex);
    for (;;) {
        while (!stream->ending && (!stream->first || stream->aborting))
            fake_wait_until(&stream->work, -1);
        if (stream->ending)
            break;
        struct task *task = stream->first;
        if (!held(stream, task))
            continue;
        stream->first = task->next;
        if (!stream->first)
            stream->last = NULL;
        stream->running = task;
        int code = ACL_OK;
        if (!(stream->stops && stream->failed)) {
            pthread_mutex_unlock(&fake_mutex);
            code = run(task, stream);
            pthread_mutex_lock(&fake_mutex);
        }
        if (code && !stream->aborting) {
            stream->failed = true;
            if (!stream->error)
                stream->error = code;
        }
        stream->running = NULL;
        stream->finished = task->number;
        fake_discard(task);
        pthread_cond_broadcast(&stream->done);
    }
    pthread_mutex_unlock(&fake_mutex);
    return NULL;
}

void fake_enqueue(struct stream *stream, struct task *task) {
    if (stream->aborted)
        fake_record(task->function, "A14", "a stream is used again after an abort");
    if (stream->aborting) {
        fake_discard(task);
        return;
    }
    task->number = ++stream->queued;
    if (stream->last)
        stream->last->next = task;
    else
        stream->first = task;
    stream->last = task;
    if (!stream->started) {
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 256 << 10);
        if (pthread_create(&stream->worker, &attributes, work, stream))
            abort();
        pthread_attr_destroy(&attributes);
        stream->started = true;
    }
    pthread_cond_broadcast(&stream->work);
}

static bool uses(const struct task *task, const char *address, size_t size, bool only_written) {
    for (size_t i = 0; i < task->span_count; i++) {
        const struct span *span = &task->spans[i];
        const char *start = span->address;
        if (start < address + size && address < start + span->size && (span->written || !only_written))
            return true;
    }
    return false;
}

bool fake_used_by_task(const void *address, size_t size, bool only_written) {
    struct stream *stream;
    for (size_t at = 0; (stream = fake_each(STREAM, &at));) {
        if (stream->running && uses(stream->running, address, size, only_written))
            return true;
        for (struct task *task = stream->first; task; task = task->next)
            if (uses(task, address, size, only_written))
                return true;
    }
    return false;
}

struct stream *fake_stream(struct call *call, void *handle, struct context *context, bool any_context, int *code) {
    *code = ACL_OK;
    if (!handle) {
        if (!context->default_stream)
            context->default_stream = fake_make_stream(context);
        if (!context->default_stream)
            *code = fake_answer(call, RT_NO_STREAM, "no stream is left for the default one");
        return context->default_stream;
    }
    bool ended;
    struct stream *stream = fake_find(STREAM, handle, &ended);
    if (!stream)
        *code = fake_fail(call, RT_INVALID_HANDLE, "A11", "%p %s", handle, ended ? "was destroyed" : "is no stream");
    else if (!any_context && stream->context != context)
        *code = fake_fail(call, RT_STREAM_CONTEXT, "A10", "the stream belongs to another context than the current one");
    return *code ? NULL : stream;
}

struct stream *fake_make_stream(struct context *context) {
    int on_device = 0;
    struct stream *each;
    for (size_t at = 0; (each = fake_each(STREAM, &at));)
        on_device += each->context->physical == context->physical;
    if (on_device >= STREAMS_PER_DEVICE)
        return NULL;
    struct stream *stream = calloc(1, sizeof *stream);
    stream->context = context;
    fake_wait_init(&stream->work);
    fake_wait_init(&stream->done);
    stream->handle = fake_handle(STREAM, stream);
    return stream;
}

void fake_abort(struct stream *stream) {
    stream->aborting++;
    stream->aborts++;
    stream->aborted = true;
    drop_queue(stream);
    if (stream->running && stream->running->interrupt)
        stream->running->interrupt(stream->running);
    pthread_cond_broadcast(&stream->work);
    pthread_cond_broadcast(&stream->done);
    while (stream->running)
        fake_wait_until(&stream->done, -1);
    stream->error = ACL_OK;
    stream->aborting--;
    pthread_cond_broadcast(&stream->work);
}

void fake_finish(struct stream *stream) {
    fake_end(stream->handle);
    stream->released = stream->queued;
    pthread_cond_broadcast(&stream->work);
    while (stream->first || stream->running)
        fake_wait_until(&stream->done, -1);
    stream->ending = true;
    pthread_cond_broadcast(&stream->work);
    if (!stream->started)
        return;
    pthread_mutex_unlock(&fake_mutex);
    pthread_join(stream->worker, NULL);
    pthread_mutex_lock(&fake_mutex);
}

int fake_sync(struct call *call, struct stream *stream, int64_t deadline_us) {
    uint64_t until = stream->queued, aborts = stream->aborts;
    if (stream->released < until)
        stream->released = until;
    pthread_cond_broadcast(&stream->work);
    bool in_time = true;
    stream->waiting++;
    while (in_time && stream->finished < until && stream->aborts == aborts)
        in_time = fake_wait_until(&stream->done, deadline_us);
    stream->waiting--;
    if (stream->aborts != aborts)
        return fake_answer(call, RT_STREAM_ABORT, "the stream was aborted");
    if (stream->finished < until)
        return fake_answer(call, RT_STREAM_SYNC_TIMEOUT, "the work on the stream has not ended in time");
    int code = stream->error;
    stream->error = ACL_OK;
    return code ? fake_answer(call, code, "a task on the stream has failed") : ACL_OK;
}
