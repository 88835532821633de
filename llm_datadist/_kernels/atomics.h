/* The only atomics of the library: C11 operations on 8-byte and 4-byte words in memory that two processes may share.
 *
 * Shared words are plain uint64_t in mapped memory, not objects that C knows as atomic, so each access casts. Aligned
 * lock-free words are the same bytes either way on every target we build for (asserted below). */
#ifndef LLM_DATADIST_ATOMICS_H
#define LLM_DATADIST_ATOMICS_H

#include <stdatomic.h>
#include <stdint.h>

_Static_assert(sizeof(_Atomic uint64_t) == 8 && ATOMIC_LLONG_LOCK_FREE == 2, "8-byte words must be lock-free");
_Static_assert(sizeof(_Atomic uint32_t) == 4 && ATOMIC_INT_LOCK_FREE == 2, "4-byte words must be lock-free");

static inline uint64_t dd_load_acquire(const uint64_t *p)
{
    return atomic_load_explicit((const _Atomic uint64_t *)p, memory_order_acquire);
}

static inline uint64_t dd_load_relaxed(const uint64_t *p)
{
    return atomic_load_explicit((const _Atomic uint64_t *)p, memory_order_relaxed);
}

static inline void dd_store_relaxed(uint64_t *p, uint64_t v)
{
    atomic_store_explicit((_Atomic uint64_t *)p, v, memory_order_relaxed);
}

static inline void dd_store_release(uint64_t *p, uint64_t v)
{
    atomic_store_explicit((_Atomic uint64_t *)p, v, memory_order_release);
}

static inline uint32_t dd_load32_relaxed(const uint32_t *p)
{
    return atomic_load_explicit((const _Atomic uint32_t *)p, memory_order_relaxed);
}

static inline void dd_store32_relaxed(uint32_t *p, uint32_t v)
{
    atomic_store_explicit((_Atomic uint32_t *)p, v, memory_order_relaxed);
}

/* Earlier loads of this thread stay before its later loads and stores. */
static inline void dd_acquire_fence(void) { atomic_thread_fence(memory_order_acquire); }

/* Earlier loads and stores of this thread stay before its later stores. */
static inline void dd_release_fence(void) { atomic_thread_fence(memory_order_release); }

/* Orders an earlier store before a later load, which acquire and release do not (x86 reorders exactly that). */
static inline void dd_full_fence(void) { atomic_thread_fence(memory_order_seq_cst); }

#endif
