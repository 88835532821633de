/* The atomics and fences of the kernels. */
#ifndef LLM_DATADIST_ATOMICS_H
#define LLM_DATADIST_ATOMICS_H

#include <stdatomic.h>
#include <stdint.h>

static inline uint64_t dd_load_relaxed(const uint64_t *word)
{
    return atomic_load_explicit((const _Atomic uint64_t *)word, memory_order_relaxed);
}

static inline uint64_t dd_load_acquire(const uint64_t *word)
{
    return atomic_load_explicit((const _Atomic uint64_t *)word, memory_order_acquire);
}

static inline void dd_acquire_fence(void) { atomic_thread_fence(memory_order_acquire); }

#endif
