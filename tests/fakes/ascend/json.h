// As much JSON as a rank table needs.
#pragma once

#include <stddef.h>

enum json_type { JSON_LITERAL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

struct json {
    enum json_type type;
    char *key;              // in an object
    char *text;             // of a string, number or literal
    struct json *first;
    struct json *next;
};

struct json *json_parse(const char *text);      // NULL: it isn't JSON
void json_free(struct json *value);
const struct json *json_get(const struct json *object, const char *key);
