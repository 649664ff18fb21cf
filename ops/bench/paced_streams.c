/* The load of ops/bench/paced_streams.py: a backend whose streams send a token at a fixed pace, and
 * the clients of those streams, in one thread, so that the time a token spent in between is known.
 *
 *     paced_streams BACKEND_PORT ROUTER_PORT STREAMS INTERVAL_US SECONDS REQUEST_FILE
 *
 * Listens on BACKEND_PORT, opens STREAMS connections to ROUTER_PORT, and sends the bytes of
 * REQUEST_FILE over each. The backend answers a POST with an event stream of one token a second until
 * all streams have begun, then of one every INTERVAL_US, each stream at its own phase; a token's
 * text is the time at which it was sent. After LEAD_IN_NS of this pace it prints "running", and SECONDS
 * later one line: tokens received, their latencies p50, p90, p99 and highest in us, and how late the
 * backend itself was at p99. What streams cost to begin is not in these figures.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER_BYTES = 65536, EVENTS = 512, BUCKETS = 200000, ROUNDS_AHEAD = 2 };
static const int64_t OPENING_INTERVAL_NS = 1000000000;
static const int64_t LEAD_IN_NS = 1000000000; /* all streams began within a second: not as in service */
enum kind { LISTENER, BACKEND, CLIENT };

struct connection {
    enum kind kind;
    int fd, is_streaming, has_token;
    int64_t next_ns;
    size_t held;
    char *request;
    size_t capacity;
};

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "cannot measure: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int poll_fd, running_streams, measuring, streams_wanted;
static int64_t interval_ns, pace_ns = OPENING_INTERVAL_NS, highest_ns;
static uint32_t latency_us[BUCKETS], late_us[BUCKETS];
static uint64_t tokens;
/* A ring in the order of next_ns: all streams have the same pace, so one that was served goes last. */
static struct connection **streaming;
static int streaming_count, streaming_first;

static struct connection *watch(int fd, enum kind kind) {
    struct connection *connection = calloc(1, sizeof *connection);
    connection->kind = kind;
    connection->fd = fd;
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event)) fail("epoll_ctl");
    return connection;
}

static void count(uint32_t *histogram, int64_t ns) {
    int64_t us = ns / 1000;
    histogram[us < 0 ? 0 : us >= BUCKETS ? BUCKETS - 1 : us]++;
}

static double percentile(const uint32_t *histogram, double share) {
    uint64_t all = 0, seen = 0;
    for (int us = 0; us < BUCKETS; us++) all += histogram[us];
    for (int us = 0; us < BUCKETS; us++)
        if ((seen += histogram[us]) > share * (double)all) return us;
    return BUCKETS - 1;
}

static void write_all(int fd, const char *bytes, size_t size) {
    if (write(fd, bytes, size) != (ssize_t)size && errno != EPIPE && errno != ECONNRESET)
        fail("a socket does not take a whole write");
}

static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
static const char EMPTY[] =
    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

static void send_token(struct connection *stream, int64_t ns) {
    char frame[400], chunk[512];
    int size = snprintf(frame, sizeof frame,
        "data: {\"id\":\"c-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"bench\","
        "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"t%020lld \"},\"finish_reason\":null}]}\n\n",
        (long long)ns);
    size = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", size, frame);
    write_all(stream->fd, chunk, (size_t)size);
}

/* Answers a request once it is complete. */
static void read_request(struct connection *backend, const char *bytes, size_t size) {
    if (backend->held + size + 1 > backend->capacity) {
        backend->capacity = 2 * (backend->held + size + 1);
        backend->request = realloc(backend->request, backend->capacity);
    }
    memcpy(backend->request + backend->held, bytes, size);
    backend->held += size;
    backend->request[backend->held] = 0;
    char *end = strstr(backend->request, "\r\n\r\n");
    if (!end) return;
    char *length = strcasestr(backend->request, "content-length:");
    size_t body = length && length < end ? strtoul(length + 15, NULL, 10) : 0;
    if (backend->held < (size_t)(end + 4 - backend->request) + body) return;
    backend->held = 0;
    if (backend->request[0] == 'G') {
        write_all(backend->fd, EMPTY, sizeof EMPTY - 1);
        return;
    }
    write_all(backend->fd, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    backend->is_streaming = 1;
    backend->next_ns = now_ns();
    /* Its first token is due now: it is the first of the ring. */
    struct connection **first = &streaming[streaming_first];
    memmove(first + 1, first, (size_t)(streaming_count++ - streaming_first) * sizeof *first);
    *first = backend;
}

/* Counts the tokens in received bytes by the times that are their text. */
static void read_tokens(struct connection *client, char *bytes, size_t size) {
    int64_t ns = now_ns();
    bytes[size] = 0;
    for (char *at = bytes; (at = strstr(at, "\"content\":\"t")); at += 12) {
        if (!client->has_token) {
            client->has_token = 1;
            running_streams++;
        }
        if (measuring) {
            tokens++;
            int64_t latency_ns = ns - strtoll(at + 12, NULL, 10);
            count(latency_us, latency_ns);
            if (latency_ns > highest_ns) highest_ns = latency_ns;
        }
    }
    if (!client->has_token && size > 12 && !memcmp(bytes, "HTTP/1.1 ", 9) && bytes[9] != '2') {
        fprintf(stderr, "cannot measure: answered %.200s\n", bytes);
        exit(1);
    }
}

static int connect_to(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
    return fd;
}

static int listen_on(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 8192)) fail("listen");
    return fd;
}

static void handle(struct connection *connection) {
    static char bytes[BUFFER_BYTES + 1];
    if (connection->kind == LISTENER) {
        int fd = accept(connection->fd, NULL, NULL);
        if (fd >= 0) watch(fd, BACKEND);
        return;
    }
    ssize_t size = read(connection->fd, bytes, BUFFER_BYTES);
    if (size <= 0) {
        if (connection->kind == CLIENT) fail("a router closed a stream");
        epoll_ctl(poll_fd, EPOLL_CTL_DEL, connection->fd, NULL);
        return;
    }
    bytes[size] = 0;
    if (connection->kind == BACKEND)
        read_request(connection, bytes, (size_t)size);
    else
        read_tokens(connection, bytes, (size_t)size);
}

/* Sends what is due and returns how long nothing else is, in ms. */
static int send_due(void) {
    int64_t ns = now_ns(), next = ns + 50000000;
    for (int n = 0; n < streaming_count; n++) {
        struct connection *stream = streaming[streaming_first];
        if (stream->next_ns > ns) {
            if (stream->next_ns < next) next = stream->next_ns;
            break;
        }
        int64_t sent = now_ns();
        if (measuring) count(late_us, sent - stream->next_ns);
        send_token(stream, sent);
        stream->next_ns += pace_ns;
        /* A backend that cannot keep up sends fewer tokens, not bursts. */
        if (stream->next_ns + ROUNDS_AHEAD * interval_ns < ns) stream->next_ns = ns + pace_ns;
        streaming_first = (streaming_first + 1) % streaming_count;
    }
    int64_t left = next - now_ns();
    return left <= 0 ? 0 : (int)(left / 1000000);
}

static int compare_due(const void *one, const void *other) {
    int64_t a = (*(struct connection *const *)one)->next_ns;
    int64_t b = (*(struct connection *const *)other)->next_ns;
    return (a > b) - (a < b);
}

/* Gives each stream a phase of its own at the measured pace. */
static void set_pace(int64_t ns) {
    pace_ns = interval_ns;
    streaming_first = 0;
    for (int n = 0; n < streaming_count; n++) streaming[n]->next_ns = ns + rand() % interval_ns;
    qsort(streaming, (size_t)streaming_count, sizeof *streaming, compare_due);
}

int main(int argc, char **argv) {
    if (argc != 7) return fprintf(stderr, "usage: see the source\n"), 2;
    int router_port = atoi(argv[2]);
    streams_wanted = atoi(argv[3]);
    interval_ns = atoll(argv[4]) * 1000;
    double seconds = atof(argv[5]);
    struct rlimit limit = {1 << 16, 1 << 16};
    setrlimit(RLIMIT_NOFILE, &limit);
    signal(SIGPIPE, SIG_IGN);
    poll_fd = epoll_create1(0);
    streaming = calloc((size_t)streams_wanted * 4 + 1024, sizeof *streaming);
    watch(listen_on(atoi(argv[1])), LISTENER);
    printf("listening\n");
    fflush(stdout);
    /* Answers the router's health checks until a line says that the router is there. */
    struct epoll_event early[EVENTS];
    struct pollfd input = {.fd = 0, .events = POLLIN};
    while (poll(&input, 1, 0) == 0) {
        int found = epoll_wait(poll_fd, early, EVENTS, 20);
        for (int n = 0; n < found; n++) handle(early[n].data.ptr);
    }
    static char request[BUFFER_BYTES];
    FILE *file = fopen(argv[6], "rb");
    size_t request_size = file ? fread(request, 1, sizeof request, file) : 0;
    if (!request_size) fail(argv[6]);
    int opened = 0, is_paced = 0;
    int64_t begin_ns = INT64_MAX, end_ns = INT64_MAX, limit_ns = now_ns() + 120000000000LL;
    struct epoll_event events[EVENTS];
    for (;;) {
        if (opened < streams_wanted && opened - running_streams < 64) {
            struct connection *client = watch(connect_to(router_port), CLIENT);
            write_all(client->fd, request, request_size);
            opened++;
        }
        int wait_ms = send_due();
        int found = epoll_wait(poll_fd, events, EVENTS, opened < streams_wanted ? 0 : wait_ms);
        for (int n = 0; n < found; n++) handle(events[n].data.ptr);
        int64_t ns = now_ns();
        if (!is_paced && running_streams == streams_wanted) {
            is_paced = 1;
            set_pace(ns);
            begin_ns = ns + LEAD_IN_NS;
        }
        if (!measuring && ns >= begin_ns) {
            measuring = 1;
            end_ns = ns + (int64_t)(seconds * 1e9);
            printf("running\n");
            fflush(stdout);
        }
        if (ns >= end_ns) break;
        if (ns >= limit_ns) return fprintf(stderr, "cannot measure: %d streams run after 120 s\n", running_streams), 1;
    }
    printf("%llu %.0f %.0f %.0f %.0f %.0f\n", (unsigned long long)tokens, percentile(latency_us, 0.5),
           percentile(latency_us, 0.9), percentile(latency_us, 0.99),
           (double)highest_ns / 1000, percentile(late_us, 0.99));
    return 0;
}
