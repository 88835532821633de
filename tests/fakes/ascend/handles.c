// Handles: numbers that are no addresses, so that nobody reads what is behind them, and that stay known after their
// end.
#include <stdlib.h>

#include "fake.h"

struct entry {
    enum kind kind;
    void *object;
    bool ended;
};
static struct entry *entries;
static size_t count, room;

void *fake_handle(enum kind kind, void *object) {
    if (count == room)
        entries = realloc(entries, (room = room ? 2 * room : 64) * sizeof *entries);
    entries[count] = (struct entry){kind, object, false};
    return (void *)((0x5a00ull + kind) << 48 | ++count << 4);
}

static struct entry *entry(enum kind kind, const void *handle) {
    uint64_t value = (uint64_t)handle;
    uint64_t number = (value & 0xffffffffffffull) >> 4;
    if (value >> 48 != 0x5a00ull + kind || value & 15 || !number || number > count)
        return NULL;
    return &entries[number - 1];
}

void *fake_find(enum kind kind, const void *handle, bool *ended) {
    struct entry *found = entry(kind, handle);
    if (ended)
        *ended = found && found->ended;
    return found && !found->ended ? found->object : NULL;
}

void fake_end(void *handle) {
    entries[((uint64_t)handle & 0xffffffffffffull) / 16 - 1].ended = true;
}

void *fake_each(enum kind kind, size_t *at) {
    while (*at < count) {
        struct entry *next = &entries[(*at)++];
        if (next->kind == kind && !next->ended)
            return next->object;
    }
    return NULL;
}
