// How the two ends of a pair find each other, and how bytes go between them.
//
// The lower rank listens at a name made of the comm and both devices, the other one connects and brings along one end
// of a socket pair: so each side has a socket for its own requests and one for those of its peer.
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "hccl.h"

#define MAGIC 0xfa4e4e110ull
#define RETRY_US 2000
#define TEXT_LIMIT (40u << 20)

struct hello {
    uint64_t magic;
    int64_t rank;
    uint64_t text_size;
};

int64_t hccl_deadline(int timeout_s) {
    if (timeout_s < 0)
        return -1;
    if (!timeout_s) {
        const char *value = getenv("HCCL_CONNECT_TIMEOUT");
        timeout_s = value ? atoi(value) : 120;
    }
    return fake_now_us() + (int64_t)timeout_s * fake_settings.second_ms * 1000;
}

// False when the time is over.
static bool ready(int fd, short events, int64_t deadline_us) {
    for (;;) {
        int64_t left_us = deadline_us < 0 ? -1000 : deadline_us - fake_now_us();
        if (deadline_us >= 0 && left_us <= 0)
            return false;
        struct pollfd poller = {.fd = fd, .events = events};
        int found = poll(&poller, 1, deadline_us < 0 ? -1 : (int)((left_us + 999) / 1000));
        if (found > 0)
            return true;
        if (found < 0 && errno != EINTR)
            return false;
    }
}

bool hccl_move(int fd, void *bytes, size_t size, bool sending, int64_t deadline_us) {
    char *at = bytes;
    while (size) {
        ssize_t moved = sending ? send(fd, at, size, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(fd, at, size, MSG_DONTWAIT);
        if (moved > 0) {
            at += moved;
            size -= moved;
        } else if (moved < 0 && (errno == EAGAIN || errno == EINTR)) {
            if (!ready(fd, sending ? POLLOUT : POLLIN, deadline_us))
                return false;
        } else {
            return false;
        }
    }
    return true;
}

// The name must differ wherever two pairs could meet by mistake; it is a hash, as names are short.
static socklen_t place(const struct peer *peer, struct sockaddr_un *address) {
    const struct comm *comm = peer->comm;
    int low = comm->rank < peer->rank ? comm->rank : peer->rank;
    int high = comm->rank < peer->rank ? peer->rank : comm->rank;
    const struct member *first = &comm->table.members[low], *second = &comm->table.members[high];
    char *key;
    int size = asprintf(&key, "%s|%s|%s|%d|%s|%d", fake_settings.domain, comm->name, first->server, first->device,
                        second->server, second->device);
    uint64_t hash[2] = {0xcbf29ce484222325ull, 0x84222325cbf29ce4ull};
    for (int i = 0; i < size; i++) {
        hash[0] = (hash[0] ^ (unsigned char)key[i]) * 0x100000001b3ull;
        hash[1] = (hash[1] ^ (unsigned char)key[size - 1 - i]) * 0x100000001b3ull;
    }
    free(key);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "fake-ascend/%u/%016llx%016llx",
                          (unsigned)getuid(), (unsigned long long)hash[0], (unsigned long long)hash[1]);
    return offsetof(struct sockaddr_un, sun_path) + 1 + length;
}

static int unix_socket(void) {
    return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

// Sends or receives the hello, with a descriptor.
static bool hello_with(int fd, struct hello *hello, int *passed, bool sending, int64_t deadline_us) {
    char control[CMSG_SPACE(sizeof *passed)] __attribute__((aligned(8))) = {0};
    struct iovec part = {hello, sizeof *hello};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!ready(fd, sending ? POLLOUT : POLLIN, deadline_us))
        return false;
    if (sending) {
        *header =
            (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof *passed), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(header), passed, sizeof *passed);
        return sendmsg(fd, &message, MSG_NOSIGNAL) == sizeof *hello;
    }
    if (recvmsg(fd, &message, MSG_CMSG_CLOEXEC) != sizeof *hello)
        return false;
    header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_type != SCM_RIGHTS)
        return false;
    memcpy(passed, CMSG_DATA(header), sizeof *passed);
    return true;
}

static struct hello hello_of(const struct comm *comm) {
    return (struct hello){MAGIC, comm->rank, strlen(comm->text)};
}

// The peer's rank table; NULL: it went away.
static char *receive_text(int fd, const struct hello *hello, int64_t deadline_us) {
    if (hello->magic != MAGIC || hello->text_size > TEXT_LIMIT)
        return NULL;
    char *text = calloc(1, hello->text_size + 1);
    if (hccl_move(fd, text, hello->text_size, false, deadline_us))
        return text;
    free(text);
    return NULL;
}

static bool send_text(int fd, const struct comm *comm, int64_t deadline_us) {
    return hccl_move(fd, comm->text, strlen(comm->text), true, deadline_us);
}

// One conversation; the peer's text, or NULL if it broke off.
static char *greet_as_listener(const struct peer *peer, int fd, int *passed, int64_t deadline_us) {
    struct hello theirs, mine = hello_of(peer->comm);
    char *text = NULL;
    *passed = -1;
    if (hello_with(fd, &theirs, passed, false, deadline_us))
        text = receive_text(fd, &theirs, deadline_us);
    if (text && hccl_move(fd, &mine, sizeof mine, true, deadline_us) && send_text(fd, peer->comm, deadline_us))
        return text;
    free(text);
    if (*passed >= 0)
        close(*passed);
    return NULL;
}

static char *greet_as_connector(const struct peer *peer, int fd, int *kept, int64_t deadline_us) {
    struct hello theirs, mine = hello_of(peer->comm);
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
        return NULL;
    char *text = NULL;
    if (hello_with(fd, &mine, &pair[1], true, deadline_us) && send_text(fd, peer->comm, deadline_us) &&
        hccl_move(fd, &theirs, sizeof theirs, false, deadline_us))
        text = receive_text(fd, &theirs, deadline_us);
    close(pair[1]);
    *kept = pair[0];
    if (!text)
        close(pair[0]);
    return text;
}

// A second socket pair for the other direction, given over the first.
static bool second_pair(struct peer *peer, int first, int64_t deadline_us) {
    struct hello hello = hello_of(peer->comm);
    if (peer->comm->rank < peer->rank) {
        peer->served = first;
        return hello_with(peer->meeting, &hello, &peer->requests, false, deadline_us);
    }
    int pair[2];
    peer->requests = first;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
        return false;
    peer->served = pair[0];
    bool sent = hello_with(peer->meeting, &hello, &pair[1], true, deadline_us);
    close(pair[1]);
    return sent;
}

// Returns the code; keeps on trying until the deadline, as either side may come late or have to come again.
static int converse(struct call *call, struct peer *peer, int listener, int64_t deadline_us) {
    struct sockaddr_un address;
    socklen_t size = place(peer, &address);
    do {
        int fd, first = -1;
        char *text = NULL;
        if (listener >= 0) {
            if (!ready(listener, POLLIN, deadline_us))
                break;
            fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        } else {
            fd = unix_socket();
            if (fd >= 0 && connect(fd, (struct sockaddr *)&address, size)) {
                close(fd);
                fake_sleep_us(RETRY_US);
                continue;
            }
        }
        if (fd < 0)
            return fake_answer(call, HCCL_NETWORK, "no socket: %s", strerror(errno));
        text = listener >= 0 ? greet_as_listener(peer, fd, &first, deadline_us)
                             : greet_as_connector(peer, fd, &first, deadline_us);
        if (!text) {
            close(fd);
            continue;
        }
        bool same = !strcmp(text, peer->comm->text);
        free(text);
        if (!same) {
            close(fd);
            close(first);
            fake_fail(call, HCCL_TIMEOUT, "H17", "the peer has another rank table for comm '%s'", peer->comm->name);
            while (deadline_us < 0 || fake_now_us() < deadline_us)
                fake_sleep_us(RETRY_US);
            return HCCL_TIMEOUT;
        }
        peer->meeting = fd;
        if (second_pair(peer, first, deadline_us))
            return HCCL_OK;
        LOCKED;
        hccl_part(peer);
    } while (deadline_us < 0 || fake_now_us() < deadline_us);
    return fake_answer(call, HCCL_TIMEOUT, "rank %d of comm '%s' has not come in time", peer->rank, peer->comm->name);
}

int hccl_meet(struct call *call, struct peer *peer, int64_t deadline_us) {
    if (peer->meeting >= 0)
        return HCCL_OK;
    if (peer->comm->rank > peer->rank)
        return converse(call, peer, -1, deadline_us);
    struct sockaddr_un address;
    socklen_t size = place(peer, &address);
    int listener = unix_socket();
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, size) || listen(listener, 8)) {
        int error = errno;
        if (listener >= 0)
            close(listener);
        return fake_answer(call, HCCL_NETWORK, "can't listen for rank %d of comm '%s': %s", peer->rank,
                           peer->comm->name, strerror(error));
    }
    int code = converse(call, peer, listener, deadline_us);
    close(listener);
    return code;
}

static void end_socket(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void hccl_part(struct peer *peer) {
    int *sockets[] = {&peer->meeting, &peer->requests, &peer->served};
    for (int i = 0; i < 3; i++)
        if (*sockets[i] >= 0)
            shutdown(*sockets[i], SHUT_RDWR);
    // Nobody may use the number of a socket that is closed.
    while (peer->requesting)
        fake_wait_until(&peer->idle, -1);
    if (peer->serving) {
        peer->serving = false;
        pthread_mutex_unlock(&fake_mutex);
        pthread_join(peer->server, NULL);
        pthread_mutex_lock(&fake_mutex);
    }
    for (int i = 0; i < 3; i++)
        end_socket(sockets[i]);
    free(peer->offers);
    peer->offers = NULL;
    peer->offer_count = 0;
}
