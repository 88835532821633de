/* What a plan is in memory, for runs.pyx (which makes it) and copy.h (which copies it). */
#ifndef LLM_DATADIST_PLAN_H
#define LLM_DATADIST_PLAN_H

#include <stddef.h>
#include <stdint.h>

/* A run inside one tensor pair. Its length is kept as the running total up to its end: one number
 * gives both the length and a list that a byte position can be looked up in. */
struct dd_run {
    int64_t source, destination; /* offsets from the bases */
    int64_t end;                 /* bytes of all runs up to and with this one */
};

struct dd_base {
    uint64_t source, destination; /* addresses */
};

/* Every run is copied for every pair of bases. */
struct dd_plan {
    const struct dd_base *bases;
    const struct dd_run *runs;
    size_t run_count;
    uint64_t tensor_bytes; /* of one tensor pair */
};

#endif
