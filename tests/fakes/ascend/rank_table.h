// The rank table of a communicator.
#pragma once

#include <stdbool.h>

struct member {
    char server[65];
    int device;                 // physical id
    char ip[64];                // "" if there is none
    char pod[32];               // "" but in version 1.2
    char super_device[32];
    int rank;
};

struct rank_table {
    int version;                // 10 or 12
    int servers;
    int count;
    struct member *members;     // by rank
};

// 0, or the code of HCCL with a text that says why. What it made is freed by free(table->members).
int rank_table_read(const char *text, int own_rank, int own_device, struct rank_table *table, char *why, int why_size);
