#include "json.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 32

static struct json *value(const char **at, int depth);

static void skip(const char **at) {
    while (**at == ' ' || **at == '\t' || **at == '\n' || **at == '\r')
        ++*at;
}

static bool take(const char **at, char expected) {
    skip(at);
    if (**at != expected)
        return false;
    ++*at;
    return true;
}

// Escapes of more than one byte stand as they are: no rank table has them.
static char *string(const char **at) {
    if (!take(at, '"'))
        return NULL;
    const char *start = *at;
    for (; **at != '"'; ++*at)
        if ((unsigned char)**at < ' ' || (**at == '\\' && !*++*at))
            return NULL;
    char *text = malloc(*at - start + 1), *to = text;
    for (const char *from = start; from < *at; from++) {
        if (*from == '\\' && strchr("\"\\/", from[1]))
            from++;
        *to++ = *from;
    }
    *to = 0;
    ++*at;
    return text;
}

// The members of an array or object, after its first bracket.
static bool members(struct json *parent, const char **at, char close, int depth) {
    if (take(at, close))
        return true;
    struct json **last = &parent->first;
    do {
        char *key = NULL;
        if (close == '}' && (!(key = string(at)) || !take(at, ':'))) {
            free(key);
            return false;
        }
        if (!(*last = value(at, depth + 1))) {
            free(key);
            return false;
        }
        (*last)->key = key;
        last = &(*last)->next;
    } while (take(at, ','));
    return take(at, close);
}

static bool number(const char *text) {
    char *end;
    strtod(text, &end);
    return !*end && (isdigit((unsigned char)*text) || *text == '-');
}

static bool scalar(struct json *made, const char **at) {
    const char *start = *at;
    while (isalnum((unsigned char)**at) || (**at && strchr("+-.", **at)))
        ++*at;
    made->text = strndup(start, *at - start);
    made->type = number(made->text) ? JSON_NUMBER : JSON_LITERAL;
    return made->type == JSON_NUMBER || !strcmp(made->text, "true") || !strcmp(made->text, "false") ||
           !strcmp(made->text, "null");
}

static struct json *value(const char **at, int depth) {
    skip(at);
    struct json *made = calloc(1, sizeof *made);
    bool good = depth < DEPTH;
    if (good && take(at, '{')) {
        made->type = JSON_OBJECT;
        good = members(made, at, '}', depth);
    } else if (good && take(at, '[')) {
        made->type = JSON_ARRAY;
        good = members(made, at, ']', depth);
    } else if (good && **at == '"') {
        made->type = JSON_STRING;
        good = (made->text = string(at));
    } else if (good) {
        good = scalar(made, at);
    }
    if (good)
        return made;
    json_free(made);
    return NULL;
}

struct json *json_parse(const char *text) {
    struct json *whole = value(&text, 0);
    skip(&text);
    if (whole && *text) {
        json_free(whole);
        return NULL;
    }
    return whole;
}

void json_free(struct json *value) {
    while (value) {
        struct json *next = value->next;
        json_free(value->first);
        free(value->key);
        free(value->text);
        free(value);
        value = next;
    }
}

const struct json *json_get(const struct json *object, const char *key) {
    for (const struct json *each = object->first; each; each = each->next)
        if (each->key && !strcmp(each->key, key))
            return each;
    return NULL;
}
