/* Copies the bytes of a plan: a plain kernel for every machine, kernels with non-temporal stores for
 * x86-64 and aarch64, and threads that share the work. Nothing here allocates or needs the GIL. */
#ifndef LLM_DATADIST_COPY_H
#define LLM_DATADIST_COPY_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "plan.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum {
    DD_LINE = 64,            /* bytes of a cache line */
    DD_PAGE = 4096,          /* the hardware prefetcher stops at page ends, so no stream is longer */
    DD_GROUP = 4,            /* streams that are copied side by side */
    DD_MOST_THREADS = 64,
};

/* Bytes that a thread takes at a time: far more than the cost of taking them, far less than a slice. */
static const uint64_t DD_PIECE = 1 << 20;
/* With less than this for each thread, the start of another thread costs more than it saves. */
static const uint64_t DD_THREAD_BYTES = 4 << 20;

/* ---- kernels */

/* Whole cache lines of one run; `to` is aligned to a line. */
struct dd_stream {
    char *to;
    const char *from;
    size_t bytes;
};

/* Moves the streams of `now` side by side, and asks for those of `next`. */
typedef void dd_move(const struct dd_stream now[DD_GROUP], const struct dd_stream next[DD_GROUP]);

struct dd_kernel {
    const char *name;
    dd_move *move; /* NULL: memcpy run by run */
};

static inline size_t dd_shortest(const struct dd_stream streams[DD_GROUP])
{
    size_t bytes = streams[0].bytes;
    for (int i = 1; i < DD_GROUP; i++)
        if (streams[i].bytes < bytes)
            bytes = streams[i].bytes;
    return bytes;
}

/* All loads of a step come before its stores: that keeps more cache misses going at once. */
#define DD_MOVE_BYTES(BYTES, VECTOR, LOAD, STREAM, TO, FROM)                              \
    do {                                                                                  \
        VECTOR held[(BYTES) / sizeof(VECTOR)];                                            \
        for (size_t part = 0; part < (BYTES) / sizeof(VECTOR); part++)                    \
            held[part] = LOAD((const VECTOR *)(FROM) + part);                             \
        for (size_t part = 0; part < (BYTES) / sizeof(VECTOR); part++)                    \
            STREAM((VECTOR *)(TO) + part, held[part]);                                    \
    } while (0)

/* Two lines of each stream in turn, as far as the shortest goes; then the rest of each. The addresses
 * are copied first, or each store would make the compiler load them again. The prefetch is into the
 * second cache (prefetcht1, pldl2keep). */
#define DD_DEFINE_MOVE(NAME, VECTOR, LOAD, STREAM)                                                         \
    static void NAME(const struct dd_stream now[DD_GROUP], const struct dd_stream next[DD_GROUP])          \
    {                                                                                                      \
        char *to[DD_GROUP];                                                                                \
        const char *from[DD_GROUP], *ahead[DD_GROUP];                                                      \
        for (int i = 0; i < DD_GROUP; i++)                                                                 \
            to[i] = now[i].to, from[i] = now[i].from, ahead[i] = next[i].from;                             \
        size_t common = dd_shortest(now) / (2 * DD_LINE) * (2 * DD_LINE);                                  \
        for (size_t at = 0; at < common; at += 2 * DD_LINE)                                                \
            for (int i = 0; i < DD_GROUP; i++) {                                                           \
                __builtin_prefetch(ahead[i] + at, 0, 2);                                                   \
                __builtin_prefetch(ahead[i] + at + DD_LINE, 0, 2);                                         \
                DD_MOVE_BYTES(2 * DD_LINE, VECTOR, LOAD, STREAM, to[i] + at, from[i] + at);                \
            }                                                                                              \
        for (int i = 0; i < DD_GROUP; i++)                                                                 \
            for (size_t at = common; at < now[i].bytes; at += DD_LINE)                                     \
                DD_MOVE_BYTES(DD_LINE, VECTOR, LOAD, STREAM, now[i].to + at, now[i].from + at);            \
    }

#if defined(__x86_64__)

__attribute__((target("avx512f")))
DD_DEFINE_MOVE(dd_move_avx512, __m512i, _mm512_loadu_si512, _mm512_stream_si512)
__attribute__((target("avx2")))
DD_DEFINE_MOVE(dd_move_avx2, __m256i, _mm256_loadu_si256, _mm256_stream_si256)

#elif defined(__aarch64__)

struct __attribute__((may_alias)) dd_pair {
    uint8x16_t low, high;
};

/* An ordinary load. Its non-temporal twin, ldnp, may overtake a load that its address comes from. */
static inline struct dd_pair dd_load_pair(const struct dd_pair *from)
{
    const uint8_t *bytes = (const uint8_t *)from;
    return (struct dd_pair){vld1q_u8(bytes), vld1q_u8(bytes + sizeof(uint8x16_t))};
}

static inline void dd_store_pair(struct dd_pair *to, struct dd_pair held)
{
    __asm__("stnp %q1, %q2, %0" : "=Q"(*to) : "w"(held.low), "w"(held.high));
}

DD_DEFINE_MOVE(dd_move_stnp, struct dd_pair, dd_load_pair, dd_store_pair)

#endif

/* Best first; plain is last. */
static const struct dd_kernel dd_kernels[] = {
#if defined(__x86_64__)
    {"avx512", dd_move_avx512},
    {"avx2", dd_move_avx2},
#elif defined(__aarch64__)
    {"stnp", dd_move_stnp},
#endif
    {"plain", NULL},
};
enum { DD_KERNELS = sizeof dd_kernels / sizeof dd_kernels[0], DD_PLAIN = DD_KERNELS - 1 };

static inline bool dd_kernel_runs(int i)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (dd_kernels[i].move == dd_move_avx512)
        return __builtin_cpu_supports("avx512f");
    if (dd_kernels[i].move == dd_move_avx2)
        return __builtin_cpu_supports("avx2");
#endif
    return true; /* every aarch64 has stnp */
}

/* ---- bytes [begin, end) of a plan */

/* Streams that wait until a group and the one after it are known. */
struct dd_queue {
    dd_move *move;
    int filled;
    struct dd_stream streams[2 * DD_GROUP];
};

static inline void dd_push(struct dd_queue *queue, char *to, const char *from, size_t bytes)
{
    queue->streams[queue->filled++] = (struct dd_stream){to, from, bytes};
    if (queue->filled == 2 * DD_GROUP) {
        queue->move(queue->streams, queue->streams + DD_GROUP);
        memcpy(queue->streams, queue->streams + DD_GROUP, DD_GROUP * sizeof *queue->streams);
        queue->filled = DD_GROUP;
    }
}

static inline void dd_flush(struct dd_queue *queue)
{
    for (int i = queue->filled; i < 2 * DD_GROUP; i++)
        queue->streams[i] = (struct dd_stream){queue->streams[0].to, queue->streams[0].from, 0};
    queue->move(queue->streams, queue->streams + DD_GROUP);
    queue->move(queue->streams + DD_GROUP, queue->streams + DD_GROUP);
}

/* Cut a run into streams of about equal length, so that the streams of a group end together. What
 * does not fill a line at either end goes by memcpy, as do runs of a few lines. */
static inline void dd_cut(struct dd_queue *queue, char *to, const char *from, size_t bytes)
{
    if (bytes < 4 * DD_LINE) {
        memcpy(to, from, bytes);
        return;
    }
    size_t head = -(uintptr_t)to % DD_LINE;
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    size_t tail = bytes % DD_LINE;
    bytes -= tail;
    memcpy(to + bytes, from + bytes, tail);
    size_t streams = (bytes + DD_PAGE - 1) / DD_PAGE;
    size_t each = (bytes / streams + DD_LINE - 1) / DD_LINE * DD_LINE;
    for (; bytes > each; to += each, from += each, bytes -= each)
        dd_push(queue, to, from, each);
    dd_push(queue, to, from, bytes);
}

/* The run that holds a byte of a tensor pair. */
static inline const struct dd_run *dd_find(const struct dd_plan *plan, uint64_t offset)
{
    size_t low = 0, high = plan->run_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uint64_t)plan->runs[middle].end > offset)
            high = middle;
        else
            low = middle + 1;
    }
    return plan->runs + low;
}

/* Walks over bytes [begin, end) of a plan, one part of a run at a time. */
struct dd_cursor {
    const struct dd_plan *plan;
    const struct dd_base *base;
    const struct dd_run *run;
    uint64_t offset; /* in this tensor */
    uint64_t left;
};

/* Needs begin < end <= bytes of the plan. */
static inline struct dd_cursor dd_walk(const struct dd_plan *plan, uint64_t begin, uint64_t end)
{
    uint64_t offset = begin % plan->tensor_bytes;
    return (struct dd_cursor){
        plan, plan->bases + begin / plan->tensor_bytes, dd_find(plan, offset), offset, end - begin,
    };
}

/* Bytes of the run at hand that lie behind. */
static inline uint64_t dd_done(const struct dd_cursor *cursor)
{
    return cursor->offset - (cursor->run == cursor->plan->runs ? 0 : (uint64_t)cursor->run[-1].end);
}

/* Needs left > 0. Gives the bytes of the part. */
static inline uint64_t dd_step(struct dd_cursor *cursor, uint64_t *to, uint64_t *from)
{
    const struct dd_plan *plan = cursor->plan;
    const struct dd_run *run = cursor->run;
    uint64_t skipped = dd_done(cursor);
    uint64_t bytes = (uint64_t)run->end - cursor->offset;
    if (bytes > cursor->left)
        bytes = cursor->left;
    *to = cursor->base->destination + (uint64_t)run->destination + skipped;
    *from = cursor->base->source + (uint64_t)run->source + skipped;
    cursor->left -= bytes;
    cursor->offset += bytes;
    if (cursor->offset == (uint64_t)run->end)
        cursor->run++;
    if (cursor->offset == plan->tensor_bytes) {
        cursor->base++;
        cursor->run = plan->runs;
        cursor->offset = 0;
    }
    return bytes;
}

/* Up to two groups stay in the queue. */
static inline void dd_copy_bytes(struct dd_queue *queue, const struct dd_plan *plan, uint64_t begin, uint64_t end)
{
    struct dd_cursor cursor = dd_walk(plan, begin, end);
    while (cursor.left) {
        uint64_t to, from;
        uint64_t bytes = dd_step(&cursor, &to, &from);
        if (queue->move)
            dd_cut(queue, (char *)(uintptr_t)to, (const char *)(uintptr_t)from, bytes);
        else
            memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    }
}

/* ---- a whole copy, in slices */

struct dd_copy {
    struct dd_plan plan;
    dd_move *move;  /* of `dd_work` */
    uint64_t bytes; /* in all */
    uint64_t end;
    int64_t deadline; /* CLOCK_MONOTONIC, ns; 0 is none */
    int64_t slice_end;
    int threads;
    _Atomic uint64_t next; /* first byte that no thread has taken */
    atomic_bool timed_out;
};

/* What a thread does in a slice: takes pieces while there are any. Gets the dd_copy. */
typedef void *dd_worker(void *);

static inline int64_t dd_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static inline void dd_start(struct dd_copy *copy, const struct dd_plan *plan, uint64_t begin, uint64_t end,
                            int64_t deadline, int threads)
{
    uint64_t useful = (end - begin) / DD_THREAD_BYTES;
    copy->plan = *plan;
    copy->move = NULL;
    copy->bytes = end - begin;
    copy->end = end;
    copy->deadline = deadline;
    copy->threads = useful < (uint64_t)threads ? (int)useful : threads;
    atomic_init(&copy->next, begin);
    atomic_init(&copy->timed_out, false);
}

static inline bool dd_late(struct dd_copy *copy, int64_t now)
{
    if (copy->deadline == 0 || now < copy->deadline)
        return false;
    atomic_store_explicit(&copy->timed_out, true, memory_order_relaxed);
    return true;
}

/* Takes a piece; false when there is none, or time is up. */
static inline bool dd_take(struct dd_copy *copy, uint64_t *begin, uint64_t *end)
{
    if (atomic_load_explicit(&copy->next, memory_order_relaxed) >= copy->end)
        return false;
    int64_t now = dd_now();
    if (dd_late(copy, now) || now >= copy->slice_end)
        return false;
    *begin = atomic_fetch_add_explicit(&copy->next, DD_PIECE, memory_order_relaxed);
    if (*begin >= copy->end)
        return false;
    *end = copy->end - *begin < DD_PIECE ? copy->end : *begin + DD_PIECE;
    return true;
}

/* Copies by ordinary loads and stores. A piece that was taken is always finished. */
static inline void *dd_work(void *argument)
{
    struct dd_copy *copy = argument;
    struct dd_queue queue = {.move = copy->move, .filled = 0};
    uint64_t begin, end;
    while (dd_take(copy, &begin, &end))
        dd_copy_bytes(&queue, &copy->plan, begin, end);
    if (queue.filled)
        dd_flush(&queue);
#if defined(__x86_64__)
    /* Non-temporal stores are not ordered with later stores, nor by the end of a thread. On aarch64 the hint changes
     * nothing in the order: what orders other stores there (a release, a fence, the end of a thread) orders these. */
    _mm_sfence();
#endif
    return NULL;
}

/* Works for at most `slice` ns (and one piece) on all threads, and joins them. True when the copy has
 * ended: done, or timed out. Threads live for one slice, so that none writes while the caller
 * looks at signals. */
static inline bool dd_slice(struct dd_copy *copy, dd_worker *work, int64_t slice)
{
    pthread_t threads[DD_MOST_THREADS];
    int started = 0;
    copy->slice_end = dd_now() + slice;
    if (copy->threads > 1) {
        /* Signals are for the threads that Python knows; faults are for whoever made them. */
        sigset_t blocked, former;
        sigfillset(&blocked);
        sigdelset(&blocked, SIGSEGV);
        sigdelset(&blocked, SIGBUS);
        sigdelset(&blocked, SIGFPE);
        sigdelset(&blocked, SIGILL);
        pthread_sigmask(SIG_SETMASK, &blocked, &former);
        /* With no room for a thread, those that started and the caller do the work. */
        while (started < copy->threads - 1 && pthread_create(&threads[started], NULL, work, copy) == 0)
            started++;
        pthread_sigmask(SIG_SETMASK, &former, NULL);
    }
    work(copy);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    return atomic_load_explicit(&copy->next, memory_order_relaxed) >= copy->end ||
           atomic_load_explicit(&copy->timed_out, memory_order_relaxed);
}

/* ---- ordered copies */

/* Moves bytes from `at` on, run after run, each as if through a buffer, for at most `slice` ns (and one piece). Gives
 * the first byte that is still to be moved. */
static inline uint64_t dd_move_slice(const struct dd_plan *plan, uint64_t at, uint64_t end, int64_t slice)
{
    for (int64_t slice_end = dd_now() + slice; at < end && dd_now() < slice_end;) {
        struct dd_cursor cursor = dd_walk(plan, at, end - at < DD_PIECE ? end : at + DD_PIECE);
        for (at += cursor.left; cursor.left;) {
            uint64_t done = dd_done(&cursor), left = (uint64_t)cursor.run->end - cursor.offset;
            uint64_t to, from;
            uint64_t bytes = dd_step(&cursor, &to, &from);
            /* Upwards the end of a run goes first, or it would be overwritten before it is read. */
            uint64_t shift = to > from ? left - bytes - done : 0;
            memmove((void *)(uintptr_t)(to + shift), (const void *)(uintptr_t)(from + shift), bytes);
        }
    }
    return at;
}

#endif
