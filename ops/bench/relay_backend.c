/* The backend of ops/bench/relay.py: prepared responses, from a program that costs little beside the
 * routers. A large body is discarded in the kernel.
 *
 *     relay_backend PORT FOLDER
 *
 * FOLDER has the responses as files: `plain`, `stream`, `models` and `empty`. A POST with
 * "stream":true near the beginning or the end of its body gets `stream`, any other `plain`; a GET of the
 * models gets `models`, any other `empty`. One request of a connection at a time.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { EVENTS = 256, HELD_BYTES = 16384, TAIL_BYTES = 4096, RESPONSE_BYTES_MAX = 1 << 20 };

struct response {
    char *bytes;
    size_t size;
};

struct connection {
    int fd, has_head;
    const struct response *response;
    size_t held, missing; /* bytes in `bytes`, and of the body that have not come */
    char bytes[HELD_BYTES + 1];
};

static struct response plain, stream, models, empty;

static void fail(const char *what) {
    fprintf(stderr, "cannot serve: %s: %s\n", what, strerror(errno));
    exit(1);
}

static struct response load(const char *folder, const char *name) {
    char path[4096];
    struct response response = {.bytes = malloc(RESPONSE_BYTES_MAX)};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file || !response.bytes) fail(path);
    response.size = fread(response.bytes, 1, RESPONSE_BYTES_MAX, file);
    fclose(file);
    return response;
}

/* Looks for `stream: true` in the held part of a body. Some clients write a space after the colon. */
static void find_stream(struct connection *connection, const char *body, size_t size) {
    if (connection->response == &plain &&
        (memmem(body, size, "\"stream\":true", 13) || memmem(body, size, "\"stream\": true", 14)))
        connection->response = &stream;
}

/* Reads a head once it is whole. */
static void read_head(struct connection *connection) {
    char *bytes = connection->bytes;
    bytes[connection->held] = 0;
    char *end = strstr(bytes, "\r\n\r\n");
    if (!end) {
        if (connection->held == HELD_BYTES) fail("the head of a request is too long");
        return;
    }
    *end = 0;
    char *length = strcasestr(bytes, "\r\ncontent-length:");
    size_t size = length ? strtoul(length + 17, NULL, 10) : 0;
    size_t come = connection->held - (size_t)(end + 4 - bytes);
    int is_models = !!strstr(bytes, "/v1/models");
    connection->response = bytes[0] != 'G' ? &plain : is_models ? &models : &empty;
    find_stream(connection, end + 4, come);
    connection->has_head = 1;
    connection->missing = size > come ? size - come : 0;
    connection->held = 0;
}

/* Takes what has come; returns 0 at the connection's end. */
static int take(struct connection *connection) {
    int is_middle = connection->missing > TAIL_BYTES;
    size_t most = is_middle ? connection->missing - TAIL_BYTES : HELD_BYTES - connection->held;
    char *to = connection->bytes + connection->held;
    ssize_t size = recv(connection->fd, to, most, MSG_DONTWAIT | (is_middle ? MSG_TRUNC : 0));
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return 1;
    if (size <= 0) return 0;
    if (!connection->has_head) {
        connection->held += (size_t)size;
        read_head(connection);
    } else {
        connection->missing -= (size_t)size;
        if (!is_middle) {
            connection->held += (size_t)size;
            find_stream(connection, connection->bytes, connection->held);
        }
    }
    if (!connection->has_head || connection->missing) return 1;
    connection->has_head = 0;
    connection->held = 0;
    const struct response *response = connection->response;
    return send(connection->fd, response->bytes, response->size, MSG_NOSIGNAL) ==
           (ssize_t)response->size;
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: see the source\n"), 2;
    plain = load(argv[2], "plain"), stream = load(argv[2], "stream");
    models = load(argv[2], "models"), empty = load(argv[2], "empty");
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[1]))};
    int listener = socket(AF_INET, SOCK_STREAM, 0), poll_fd = epoll_create1(0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8192))
        fail(argv[1]);
    struct epoll_event event = {.events = EPOLLIN}, events[EVENTS];
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int found = epoll_wait(poll_fd, events, EVENTS, -1);
        for (int n = 0; n < found; n++) {
            struct connection *connection = events[n].data.ptr;
            if (!connection) {
                int fd = accept(listener, NULL, NULL);
                if (fd < 0 || !(connection = calloc(1, sizeof *connection))) continue;
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                connection->fd = fd;
                event.data.ptr = connection;
                epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event);
            } else if (!take(connection)) {
                close(connection->fd);
                free(connection);
            }
        }
    }
}
