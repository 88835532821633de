#define _GNU_SOURCE
#include "rank_table.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"
#include "json.h"

#define TEXT_LIMIT (40u << 20)

struct reader {
    struct rank_table *table;
    char *why;
    int why_size;
    int family;
};

#define REFUSE(code, ...)                                                                                              \
    do {                                                                                                               \
        snprintf(reader->why, reader->why_size, __VA_ARGS__);                                                          \
        return code;                                                                                                   \
    } while (0)
#define TRY(step)                                                                                                      \
    do {                                                                                                               \
        int result = step;                                                                                             \
        if (result)                                                                                                    \
            return result;                                                                                             \
    } while (0)

// A scalar, which must be a string; *text is NULL for an optional one that isn't there.
static int scalar(struct reader *reader, const struct json *object, const char *key, bool required, const char **text) {
    const struct json *found = json_get(object, key);
    *text = NULL;
    if (!found && required)
        REFUSE(HCCL_NOT_FOUND, "%s is missing", key);
    if (!found)
        return HCCL_OK;
    if (found->type != JSON_STRING)
        REFUSE(HCCL_PARA, "%s is no string", key);
    *text = found->text;
    return HCCL_OK;
}

static int list(struct reader *reader, const struct json *object, const char *key, const struct json **found) {
    *found = json_get(object, key);
    if (!*found)
        REFUSE(HCCL_NOT_FOUND, "%s is missing", key);
    if ((*found)->type != JSON_ARRAY)
        REFUSE(HCCL_PARA, "%s is no list", key);
    for (const struct json *each = (*found)->first; each; each = each->next)
        if (each->type != JSON_OBJECT)
            REFUSE(HCCL_PARA, "%s has an entry that is no object", key);
    return HCCL_OK;
}

static int number(struct reader *reader, const char *key, const char *text, long least, long most, int *value) {
    char *end;
    long read = strtol(text, &end, 10);
    if (!isdigit((unsigned char)*text) || *end || read < least || read > most)
        REFUSE(HCCL_PARA, "%s is '%s', expected %ld to %ld", key, text, least, most);
    *value = (int)read;
    return HCCL_OK;
}

static int read_ip(struct reader *reader, const char *ip, struct member *member) {
    unsigned char bytes[16];
    int family = strchr(ip, ':') ? AF_INET6 : AF_INET;
    if (inet_pton(family, ip, bytes) != 1)
        REFUSE(HCCL_PARA, "device_ip '%s' is no address", ip);
    if (reader->family && reader->family != family)
        REFUSE(HCCL_PARA, "device_ip of both address families");
    reader->family = family;
    for (int i = 0; i < reader->table->count; i++)
        if (!strcmp(reader->table->members[i].ip, ip))
            REFUSE(HCCL_PARA, "device_ip '%s' occurs twice", ip);
    snprintf(member->ip, sizeof member->ip, "%s", ip);
    return HCCL_OK;
}

static int read_device(struct reader *reader, const struct json *device, const char *server) {
    struct rank_table *table = reader->table;
    struct member member = {.rank = -1};
    const char *text;
    snprintf(member.server, sizeof member.server, "%s", server);
    TRY(scalar(reader, device, "device_id", true, &text));
    TRY(number(reader, "device_id", text, 0, fake_settings.devices - 1, &member.device));
    for (int i = 0; i < table->count; i++)
        if (table->members[i].device == member.device && !strcmp(table->members[i].server, server))
            REFUSE(HCCL_PARA, "device %d of server '%s' occurs twice", member.device, server);
    TRY(scalar(reader, device, "rank_id", true, &text));
    TRY(number(reader, "rank_id", text, 0, 1 << 30, &member.rank));
    TRY(scalar(reader, device, "device_ip", false, &text));
    if (text)
        TRY(read_ip(reader, text, &member));
    TRY(scalar(reader, device, "device_port", false, &text));
    int port;
    if (text)
        TRY(number(reader, "device_port", text, 1, 65535, &port));
    TRY(scalar(reader, device, "super_device_id", false, &text));
    if (text)
        snprintf(member.super_device, sizeof member.super_device, "%s", text);
    table->members = realloc(table->members, (table->count + 1) * sizeof member);
    table->members[table->count++] = member;
    return HCCL_OK;
}

static int read_server(struct reader *reader, const struct json *server) {
    const char *id;
    TRY(scalar(reader, server, "server_id", true, &id));
    if (!*id || strlen(id) > 64)
        REFUSE(HCCL_PARA, "server_id has %zu bytes, expected 1 to 64", strlen(id));
    for (int i = 0; i < reader->table->count; i++)
        if (!strcmp(reader->table->members[i].server, id))
            REFUSE(HCCL_PARA, "server_id '%s' occurs twice", id);
    const struct json *devices;
    TRY(list(reader, server, "device", &devices));
    if (!devices->first)
        REFUSE(HCCL_PARA, "server '%s' has no device", id);
    for (const struct json *each = devices->first; each; each = each->next)
        TRY(read_device(reader, each, id));
    reader->table->servers++;
    return HCCL_OK;
}

static int read_pods(struct reader *reader, const struct json *whole) {
    const struct json *pods, *servers;
    if (!json_get(whole, "super_pod_list"))
        REFUSE(HCCL_PARA, "super_pod_list is missing");
    TRY(list(reader, whole, "super_pod_list", &pods));
    for (const struct json *pod = pods->first; pod; pod = pod->next) {
        const char *pod_id, *server_id;
        TRY(scalar(reader, pod, "super_pod_id", true, &pod_id));
        TRY(list(reader, pod, "server_list", &servers));
        for (const struct json *server = servers->first; server; server = server->next) {
            TRY(scalar(reader, server, "server_id", true, &server_id));
            bool known = false;
            for (int i = 0; i < reader->table->count; i++) {
                struct member *member = &reader->table->members[i];
                if (strcmp(member->server, server_id))
                    continue;
                snprintf(member->pod, sizeof member->pod, "%s", pod_id);
                known = true;
            }
            if (!known)
                REFUSE(HCCL_PARA, "server '%s' of super pod '%s' is not in server_list", server_id, pod_id);
        }
    }
    for (int i = 0; i < reader->table->count; i++)
        if (!reader->table->members[i].pod[0] || !reader->table->members[i].super_device[0])
            REFUSE(HCCL_PARA, "rank %d has no super_pod_id or no super_device_id", reader->table->members[i].rank);
    return HCCL_OK;
}

static int by_rank(const void *left, const void *right) {
    return ((const struct member *)left)->rank - ((const struct member *)right)->rank;
}

static int check_ranks(struct reader *reader, int own_rank, int own_device) {
    struct rank_table *table = reader->table;
    if (own_rank >= table->count)
        REFUSE(HCCL_PARA, "rank %d of %d", own_rank, table->count);
    qsort(table->members, table->count, sizeof *table->members, by_rank);
    if (table->members[own_rank].rank != own_rank)
        REFUSE(HCCL_UNAVAIL, "rank_id %d, our own, is missing or displaced", own_rank);
    for (int i = 0; i < table->count; i++)
        if (table->members[i].rank != i)
            REFUSE(HCCL_PARA, "rank_id %d is missing or displaced", i);
    if (table->members[own_rank].device != own_device)
        REFUSE(HCCL_UNAVAIL, "rank %d has device_id %d, the current device has physical id %d", own_rank,
               table->members[own_rank].device, own_device);
    // What needs RDMA by the table alone is refused here, the rest when the ranks meet.
    if ((fake_settings.product == A2 && table->servers > 1) || fake_settings.intra_roce)
        for (int i = 0; i < table->count; i++)
            if (!table->members[i].ip[0])
                REFUSE(HCCL_PARA, "rank %d needs a device_ip", i);
    return HCCL_OK;
}

static int read_table(struct reader *reader, const struct json *whole, int own_rank, int own_device) {
    const char *text;
    const struct json *servers;
    TRY(scalar(reader, whole, "status", true, &text));
    TRY(scalar(reader, whole, "version", false, &text));
    if (!text || (strcmp(text, "1.0") && strcmp(text, "1.2")))
        REFUSE(HCCL_NOT_SUPPORT, "version is '%s'", text ? text : "missing");
    reader->table->version = strcmp(text, "1.0") ? 12 : 10;
    TRY(list(reader, whole, "server_list", &servers));
    for (const struct json *each = servers->first; each; each = each->next)
        TRY(read_server(reader, each));
    TRY(scalar(reader, whole, "server_count", false, &text));
    int count;
    if (text) {
        TRY(number(reader, "server_count", text, 0, 1 << 20, &count));
        if (count != reader->table->servers)
            REFUSE(HCCL_PARA, "server_count is %d, there are %d", count, reader->table->servers);
    }
    if (reader->table->version == 12)
        TRY(read_pods(reader, whole));
    return check_ranks(reader, own_rank, own_device);
}

int rank_table_read(const char *text, int own_rank, int own_device, struct rank_table *table, char *why, int why_size) {
    struct reader it = {.table = table, .why = why, .why_size = why_size}, *reader = &it;
    *table = (struct rank_table){0};
    struct json *whole = strnlen(text, TEXT_LIMIT + 1) > TEXT_LIMIT ? NULL : json_parse(text);
    if (!whole)
        REFUSE(HCCL_PARA, "the rank table is not JSON");
    int code;
    if (whole->type != JSON_OBJECT) {
        snprintf(why, why_size, "the rank table is no JSON object");
        code = HCCL_PARA;
    } else {
        code = read_table(reader, whole, own_rank, own_device);
    }
    json_free(whole);
    if (code) {
        free(table->members);
        table->members = NULL;
    }
    return code;
}
