// Settings, faults, violations and messages.
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

struct settings fake_settings;
pthread_mutex_t fake_mutex = PTHREAD_MUTEX_INITIALIZER;
bool fake_forked;

// Of its own, so that it can be taken with or without the other.
static pthread_mutex_t record_mutex = PTHREAD_MUTEX_INITIALIZER;
static char *records;
static size_t records_size;
static char report[4096];

struct fault {
    char function[64];
    long nth;               // 0: every call
    long percent;           // above 0: so many of a hundred calls
    long seen;
    char what[32];
    long delay_ms;          // a delay, not a fault
    struct fault *next;
};
static struct fault *faults;
static unsigned int seed;

// What a thread was told last. The buffer that was handed out is overwritten at the thread's next call.
struct thread {
    char message[1024];
    char given[1024];
};
static pthread_key_t thread_key;
static atomic_int unread;
static atomic_int calls_inside;

// Life of the library: how often it is initialised, and whether somebody else did it first.
static uint64_t init_count;
static bool was_finalized;
static bool preinitialized;

int fake_lock(void) {
    pthread_mutex_lock(&fake_mutex);
    return 0;
}

void fake_unlock(int *unused) {
    (void)unused;
    pthread_mutex_unlock(&fake_mutex);
}

int64_t fake_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000ll + now.tv_nsec / 1000;
}

void fake_sleep_us(long us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&time, &time) && errno == EINTR)
        ;
}

void fake_wait_init(pthread_cond_t *cond) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

bool fake_wait_until(pthread_cond_t *cond, int64_t deadline_us) {
    if (deadline_us < 0)
        return pthread_cond_wait(cond, &fake_mutex) == 0;
    struct timespec until = {deadline_us / 1000000, deadline_us % 1000000 * 1000};
    return pthread_cond_timedwait(cond, &fake_mutex, &until) == 0;
}

static struct thread *thread(void) {
    struct thread *self = pthread_getspecific(thread_key);
    if (!self) {
        self = calloc(1, sizeof *self);
        pthread_setspecific(thread_key, self);
    }
    return self;
}

static void thread_ends(void *value) {
    struct thread *self = value;
    if (self->message[0])
        atomic_fetch_sub(&unread, 1);
    free(self);
}

static void set_message(const char *function, int code, const char *text) {
    struct thread *self = thread();
    if (!self->message[0])
        atomic_fetch_add(&unread, 1);
    snprintf(self->message, sizeof self->message, "[fake] %s: %s (%d)", function, text, code);
}

static void add_record(const char *function, const char *id, const char *text) {
    pthread_mutex_lock(&record_mutex);
    char *line;
    int size = asprintf(&line, "%s %s [thread %ld] %s\n", id, function, (long)syscall(SYS_gettid), text);
    records = realloc(records, records_size + size + 1);
    memcpy(records + records_size, line, size + 1);
    records_size += size;
    pthread_mutex_unlock(&record_mutex);
    if (fake_settings.strict) {
        fprintf(stderr, "fake Ascend driver: %s", line);
        abort();
    }
    free(line);
}

#define TEXT(text, format)                                                                                             \
    char text[900];                                                                                                    \
    do {                                                                                                               \
        va_list arguments;                                                                                             \
        va_start(arguments, format);                                                                                   \
        vsnprintf(text, sizeof text, format, arguments);                                                               \
        va_end(arguments);                                                                                             \
    } while (0)

void fake_record(const char *function, const char *id, const char *format, ...) {
    TEXT(text, format);
    add_record(function, id, text);
}

int fake_fail(struct call *call, int code, const char *id, const char *format, ...) {
    TEXT(text, format);
    add_record(call->function, id, text);
    set_message(call->function, code, text);
    return code;
}

int fake_answer(struct call *call, int code, const char *format, ...) {
    TEXT(text, format);
    set_message(call->function, code, text);
    return code;
}

API const char *aclGetRecentErrMsg(void) {
    struct thread *self = thread();
    if (!self->message[0]) {
        if (atomic_load(&unread))
            fake_record(__func__, "A29", "this thread has no message, but another thread has one that it didn't read");
        return NULL;
    }
    memcpy(self->given, self->message, sizeof self->given);
    self->message[0] = 0;
    atomic_fetch_sub(&unread, 1);
    return self->given;
}

int fake_random(int below) {
    pthread_mutex_lock(&record_mutex);
    int value = rand_r(&seed) % below;
    pthread_mutex_unlock(&record_mutex);
    return value;
}

void fake_die(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

// Faults and delays.

static void add_faults(const char *list, bool delays) {
    char *copy = strdup(list), *rest = copy, *entry;
    while ((entry = strsep(&rest, ";"))) {
        if (!*entry)
            continue;
        char *function = strsep(&entry, ":"), *nth = delays ? "*" : strsep(&entry, ":"), *what = entry;
        if (!what || !nth) {
            fprintf(stderr, "fake Ascend driver: can't read '%s'\n", list);
            abort();
        }
        struct fault *fault = calloc(1, sizeof *fault), **last = &faults;
        snprintf(fault->function, sizeof fault->function, "%s", function);
        snprintf(fault->what, sizeof fault->what, "%s", what);
        fault->nth = strtol(nth, NULL, 10);
        if (strchr(nth, '%'))
            fault->percent = fault->nth, fault->nth = 0;
        fault->delay_ms = delays ? strtol(what, NULL, 10) : 0;
        while (*last)
            last = &(*last)->next;
        *last = fault;
    }
    free(copy);
}

static void forget_faults(void) {
    while (faults) {
        struct fault *next = faults->next;
        free(faults);
        faults = next;
    }
}

API void fake_inject(const char *list) {
    LOCKED;
    add_faults(list, false);
}

API void fake_delay(const char *list) {
    LOCKED;
    add_faults(list, true);
}

// The first fault that is due decides; all count the call.
static const char *due(const char *function, long *delay_ms) {
    LOCKED;
    static __thread char what[32];
    what[0] = 0;
    for (struct fault *fault = faults; fault; fault = fault->next) {
        if (strcmp(fault->function, function))
            continue;
        fault->seen++;
        if (fault->delay_ms)
            *delay_ms += fault->delay_ms;
        else if (!what[0] &&
                 (fault->percent ? fake_random(100) < fault->percent : !fault->nth || fault->nth == fault->seen))
            memcpy(what, fault->what, sizeof what);
    }
    return what;
}

int fake_enter(struct call *call, const char *function) {
    *call = (struct call){.function = function};
    if (fake_forked)
        return fake_fail(call, ACL_UNINITIALIZE, "fork",
                         "called in a process that was forked after the library was loaded");
    memset(thread()->given, '#', sizeof thread()->given - 1);
    atomic_fetch_add(&calls_inside, 1);
    call->entered = true;
    long delay_ms = 0;
    const char *what = due(function, &delay_ms);
    if (delay_ms)
        fake_sleep_us(delay_ms * 1000);
    if (!what[0])
        return 0;
    if (!strcmp(what, "die"))
        fake_die();
    if (!strcmp(what, "hang"))
        call->outcome = HANGS;
    else if (!strcmp(what, "die-half"))
        call->outcome = DIES_HALFWAY;
    else if (!strncmp(what, "task-", 5))
        call->outcome = FAILS, call->task_code = atoi(what + 5);
    else
        return fake_answer(call, atoi(what), "injected fault");
    return 0;
}

void fake_leave(struct call *call) {
    if (call->entered)
        atomic_fetch_sub(&calls_inside, 1);
}

// Initialise and finalise.

bool fake_ready(struct call *call) {
    pthread_mutex_lock(&fake_mutex);
    bool ready = init_count, before = !was_finalized;
    pthread_mutex_unlock(&fake_mutex);
    if (!ready)
        fake_fail(call, ACL_UNINITIALIZE, before ? "A1" : "A4",
                  before ? "called before aclInit" : "called after the library was finalised");
    return ready;
}

API aclError aclInit(const char *config_path) {
    ENTER;
    (void)config_path;
    LOCKED;
    if (init_count++)
        return fake_answer(&call, ACL_REPEAT_INITIALIZE, "initialised already");
    was_finalized = false;
    return ACL_OK;
}

void fake_tell_leaks(const char *function, const char *when);

static aclError finalize(struct call *call) {
    init_count = 0;
    was_finalized = true;
    if (preinitialized)
        fake_record(call->function, "A5", "somebody else had initialised the library, and still uses it");
    preinitialized = false;
    if (atomic_load(&calls_inside) > 1)
        fake_record(call->function, "A4", "finalised while another thread was inside a call");
    fake_tell_leaks(call->function, "at finalise");
    return ACL_OK;
}

API aclError aclFinalize(void) {
    ENTER;
    LOCKED;
    if (!init_count)
        return fake_answer(&call, ACL_REPEAT_FINALIZE, "not initialised, or finalised already");
    return finalize(&call);
}

API aclError aclFinalizeReference(uint64_t *ref_count) {
    ENTER;
    LOCKED;
    if (!init_count)
        return fake_answer(&call, ACL_REPEAT_FINALIZE, "not initialised, or finalised already");
    aclError code = init_count == 1 ? finalize(&call) : (init_count--, ACL_OK);
    if (ref_count)
        *ref_count = init_count;
    return code;
}

// Control, for tests.

// As if another part of the process had called aclInit before.
API void fake_preinit(void) {
    LOCKED;
    init_count = 1;
    preinitialized = true;
    was_finalized = false;
}

API size_t fake_violations(char *buffer, size_t size) {
    pthread_mutex_lock(&record_mutex);
    size_t length = records_size;
    if (size) {
        size_t given = length < size ? length : size - 1;
        if (given)
            memcpy(buffer, records, given);
        buffer[given] = 0;
    }
    pthread_mutex_unlock(&record_mutex);
    return length;
}

API void fake_reset(void) {
    pthread_mutex_lock(&record_mutex);
    free(records);
    records = NULL;
    records_size = 0;
    pthread_mutex_unlock(&record_mutex);
    LOCKED;
    forget_faults();
}

API long fake_layout(const char *name) {
#define LAYOUT_SIZE(type, size, align)                                                                                 \
    if (!strcmp(name, #type))                                                                                          \
        return sizeof(type);
#define LAYOUT_FIELD(type, field, offset, size)                                                                        \
    if (!strcmp(name, #type "." #field))                                                                               \
        return offsetof(type, field);
    SIZES(LAYOUT_SIZE)
    FIELDS(LAYOUT_FIELD)
    return -1;
}

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static int product_of(const char *soc) {
    if (!strncmp(soc, "Ascend910_93", 12))
        return A3;
    if (!strncmp(soc, "Ascend910B", 10))
        return A2;
    return strncmp(soc, "Ascend950", 9) ? OTHER_PRODUCT : A5;
}

// Reads the environment again, as when the library is loaded.
API void fake_reload(void) {
    LOCKED;
    struct settings *to = &fake_settings;
    to->devices = atoi(setting("FAKE_ASCEND_DEVICES", "16"));
    if (to->devices > 64)
        to->devices = 64;
    to->visible_count = 0;
    const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (visible) {
        char *copy = strdup(visible), *rest = copy, *item;
        // What follows an id that the machine doesn't have is not looked at.
        while ((item = strsep(&rest, ",")) && *item && atoi(item) < to->devices && to->visible_count < 64)
            to->visible[to->visible_count++] = atoi(item);
        free(copy);
    } else {
        for (; to->visible_count < to->devices; to->visible_count++)
            to->visible[to->visible_count] = to->visible_count;
    }
    snprintf(to->soc, sizeof to->soc, "%s", setting("FAKE_ASCEND_SOC", "Ascend910B2"));
    to->product = product_of(to->soc);
    to->memory = strtoull(setting("FAKE_ASCEND_MEMORY", "2147483648"), NULL, 10);
    to->lazy = *setting("FAKE_ASCEND_LAZY", "0") == '1';
    to->strict = *setting("FAKE_ASCEND_STRICT", "0") == '1';
    to->second_ms = atoi(setting("FAKE_ASCEND_SECOND", "1000"));
    snprintf(to->domain, sizeof to->domain, "%s", setting("FAKE_ASCEND_DOMAIN", ""));
    to->super_pod = atoll(setting("FAKE_ASCEND_SUPER_POD", "7"));
    const char *dead = setting("FAKE_ASCEND_DEAD_PEER", "507057");
    to->dead_peer = strcmp(dead, "hang") ? atoi(dead) : 0;
    to->unaligned_fails = *setting("FAKE_ASCEND_UNALIGNED", "fail") == 'f';
    to->pageable_fails = *setting("FAKE_ASCEND_PAGEABLE", "record") == 'f';
    to->intra_roce = *setting("HCCL_INTRA_ROCE_ENABLE", "0") == '1';
    to->region_limit = strtoull(setting("FAKE_ASCEND_REGION_LIMIT", "0"), NULL, 10);
    snprintf(report, sizeof report, "%s", setting("FAKE_ASCEND_REPORT", ""));
    seed = (unsigned)strtoul(setting("FAKE_ASCEND_SEED", "1"), NULL, 10);
    forget_faults();
    add_faults(setting("FAKE_ASCEND_FAULTS", ""), false);
    add_faults(setting("FAKE_ASCEND_DELAYS", ""), true);
}

// The child of a fork has the state but not the threads: it may not go on, and must be able to end.
static void in_child(void) {
    fake_forked = true;
    pthread_mutex_init(&fake_mutex, NULL);
    pthread_mutex_init(&record_mutex, NULL);
}

__attribute__((constructor)) static void loaded(void) {
    pthread_key_create(&thread_key, thread_ends);
    pthread_atfork(NULL, NULL, in_child);
    fake_reload();
}

// After the destructor of the HCCL library, which depends on this one.
__attribute__((destructor)) static void process_ends(void) {
    if (fake_forked)
        return;
    {
        LOCKED;
        fake_tell_leaks("exit", "at process exit");
    }
    // Threads that outlive this have no values any more that need their destructor.
    pthread_key_delete(thread_key);
    if (!report[0] || !records_size)
        return;
    char path[4200];
    snprintf(path, sizeof path, "%s/%d.txt", report, getpid());
    FILE *file = fopen(path, "w");
    if (!file) {
        fprintf(stderr, "fake Ascend driver: can't write %s: %s\n%s", path, strerror(errno), records);
        return;
    }
    fwrite(records, 1, records_size, file);
    fclose(file);
}
