// What the parts of the fake share. Nothing of this is for the backend under test.
//
// One mutex (fake_mutex) guards all state of the process. Objects that are known to the caller by a handle are never
// freed: a handle that is used after its end is found out, and no thread is left with a dangling pointer.
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "abi.h"

// state.c: settings, faults, violations, messages.

struct settings {
    int devices;            // physical devices of the machine
    int visible[64];        // logical -> physical
    int visible_count;
    char soc[64];           // "" answers NULL
    enum { A2, A3, A5, OTHER_PRODUCT } product;
    size_t memory;          // bytes a device, and of pinned host memory
    bool lazy;              // tasks wait for a sync
    bool strict;            // abort at the first violation
    int second_ms;          // length of a second of HCCL time limits
    char domain[64];        // processes of different domains never meet
    long long super_pod;
    int dead_peer;          // code of a sync after the peer is gone; 0 = hang
    bool unaligned_fails;   // H11
    bool pageable_fails;    // H10
    bool intra_roce;
    size_t region_limit;    // a larger region is refused by HCCL; 0: none is
};
extern API struct settings fake_settings;
extern API pthread_mutex_t fake_mutex;
extern API bool fake_forked;

enum outcome { AS_USUAL, HANGS, DIES_HALFWAY, FAILS };

// One call of a function of the driver: made by ENTER, ended when it goes out of scope.
struct call {
    const char *function;
    enum outcome outcome;   // what becomes of the task that this call queues
    int task_code;
    bool entered;
};

API int fake_enter(struct call *call, const char *function);
API void fake_leave(struct call *call);
API bool fake_ready(struct call *call);     // initialised, else recorded

// fail: a violation, recorded; answer: an outcome that any caller must expect. Both set the thread's message.
API int fake_fail(struct call *call, int code, const char *id, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
API int fake_answer(struct call *call, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
API void fake_record(const char *function, const char *id, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
API int fake_random(int below);
API void fake_die(void);
API void fake_sleep_us(long us);
API int64_t fake_now_us(void);
API void fake_wait_init(pthread_cond_t *cond);
API bool fake_wait_until(pthread_cond_t *cond, int64_t deadline_us);   // false: too late; -1 waits for ever

#define ENTER                                                                                                          \
    struct call call __attribute__((cleanup(fake_leave)));                                                             \
    do {                                                                                                               \
        int given = fake_enter(&call, __func__);                                                                       \
        if (given)                                                                                                     \
            return given;                                                                                              \
    } while (0)
#define ENTER_READY                                                                                                    \
    ENTER;                                                                                                             \
    if (!fake_ready(&call))                                                                                            \
    return ACL_UNINITIALIZE
#define ENTER_CONTEXT                                                                                                  \
    ENTER_READY;                                                                                                       \
    struct context *context = fake_context(&call);                                                                     \
    if (!context)                                                                                                      \
    return RT_CONTEXT_NULL

#define LOCKED __attribute__((cleanup(fake_unlock), unused)) int locked = fake_lock()
API int fake_lock(void);
API void fake_unlock(int *unused);

// handles.c

enum kind { CONTEXT = 1, STREAM, EVENT, COMM, REGION };
API void *fake_handle(enum kind kind, void *object);
API void *fake_find(enum kind kind, const void *handle, bool *ended);   // NULL if it isn't one, or has ended
API void fake_end(void *handle);
API void *fake_each(enum kind kind, size_t *at);                        // live objects, one a call

// devices.c

struct stream;

struct context {
    void *handle;
    int logical;
    int physical;
    bool is_default;
    struct stream *default_stream;
};
API struct context *fake_context(struct call *call);    // of this thread, else recorded
API struct context *fake_context_quietly(void);
extern API int (*fake_live_comms)(int physical);        // set by the HCCL library

// memory.c

struct allocation {
    char *start;
    size_t size;            // as asked for
    char *span;             // what is taken from the space, or mapped, for it
    size_t span_size;
    size_t charge;
    int physical;           // -1: pinned host memory
    struct allocation *next;
};
API bool fake_on_device(const void *address);
API struct allocation *fake_allocation(const void *address);    // that holds this address; needs the lock
API bool fake_inside(const void *address, size_t size, bool device);
API char *fake_bytes(const void *address);              // where the fake keeps them; NULL: no such device space
API size_t fake_tell_memory(int physical, const char *id, const char *when);
extern API bool (*fake_registered)(const void *address, size_t size);   // set by the HCCL library
int fake_allocate(struct call *call, int physical, size_t size, void **out);
int fake_release(struct call *call, void *address, bool device);
void fake_drop_memory(int physical);
size_t fake_used(int physical);

// streams.c

struct span {
    const void *address;
    size_t size;
    bool written;
};

struct task {
    const char *function;
    uint64_t number;
    enum outcome outcome;
    int code;
    int (*run)(struct task *task, struct stream *stream);
    void (*interrupt)(struct task *task);   // under the lock, from an abort
    void (*release)(struct task *task);     // under the lock
    struct span *spans;
    size_t span_count;
    void *data;
    void *dst;
    void *src;
    size_t size;
    int value;
    uint64_t checksum;
    bool checked;
    struct task *next;
};

struct stream {
    void *handle;
    struct context *context;
    pthread_cond_t work;        // for the worker
    pthread_cond_t done;        // for who waits
    pthread_t worker;
    bool started;
    bool ending;
    bool destroyed;
    struct task *first;
    struct task *last;
    struct task *running;
    uint64_t queued;            // number of the last task
    uint64_t finished;
    uint64_t released;          // lazy: tasks up to this number may run
    int waiting;                // threads inside a sync
    int aborting;
    uint64_t aborts;
    bool aborted;
    bool stops;                 // failure mode
    bool failed;
    int error;
};

API struct task *fake_task(struct call *call, size_t spans);
API void fake_discard(struct task *task);                                // needs the lock
API void fake_enqueue(struct stream *stream, struct task *task);        // needs the lock
API bool fake_used_by_task(const void *address, size_t size, bool only_written);
// The stream of a handle for a call under this context; NULL: recorded, and *code is the answer. Needs the lock.
API struct stream *fake_stream(struct call *call, void *handle, struct context *context, bool any_context, int *code);
struct stream *fake_make_stream(struct context *context);
void fake_abort(struct stream *stream);         // needs the lock
void fake_finish(struct stream *stream);        // waits for its tasks and ends it; needs the lock
int fake_sync(struct call *call, struct stream *stream, int64_t deadline_us);  // needs the lock
