/* Relays the tokens of running streams from node sockets to client sockets, for
 * router/dataplane/token_pump.py, which says when a stream is here. The request path in Python can do
 * the same and decides everything else.
 *
 * Rule 1: only bytes of one shape are relayed: whole HTTP chunks of whole frames that equal the
 * stream's frame in all but the text of one JSON string. Everything else, the end of a stream and
 * errors included, is given back unread with the stream.
 * Rule 2: a frame is relayed as it came, in the chunk in which it came.
 * Rule 3: nothing waits here. What a client's socket does not take is given back with the stream.
 *
 * The event loop watches one descriptor, `outer_fd`. While few tokens come, it is readable when a
 * node's socket is. While many come, the sockets are looked at once for each `gather_ns`, because
 * waking the process costs more than relaying a token.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    READ_BYTES = 1 << 16,
    EVENTS = 256,
    ROUNDS_MAX = 8, /* of EVENTS streams, before the event loop has its turn */
    SIZE_DIGITS_MAX = 6,
    TEXT_ROOM_MIN = 256,
    TEXT_BYTES_MAX = 1 << 20, /* then the stream is given back, and its text with it */
    STREAMS_MIN = 16,
    NONE = -1,
};
static const int64_t WINDOW_NS = 100000000; /* the rate of tokens is counted over this time */

struct stream {
    int node_fd, client_fd; /* NONE: the slot is free, and `next` the next free one */
    int next, is_watched, keeps_text;
    char *frame; /* what stands before the text, then what stands behind it */
    size_t before, behind;
    char *text; /* of all tokens, as it is written in JSON */
    size_t text_size, text_room;
    unsigned long long tokens;
    double heard_s;
};

typedef struct {
    PyObject_HEAD
    int outer_fd, sockets_fd, timer_fd, is_gathering;
    int64_t gather_ns, window_began_ns, window_reads;
    struct stream *streams;
    int room, unused;
    Py_ssize_t count;
    char buffer[READ_BYTES];
} StreamPump;

static int is_utf8_tail(unsigned char byte) { return (byte & 0xc0) == 0x80; }

/* The size of the character that begins at `at`, outside ASCII; 0 if it is not UTF-8. */
static size_t utf8_size(const unsigned char *at, const unsigned char *end) {
    size_t left = (size_t)(end - at);
    unsigned char first = at[0];
    if (first >= 0xc2 && first <= 0xdf) return left > 1 && is_utf8_tail(at[1]) ? 2 : 0;
    if (first >= 0xe0 && first <= 0xef) {
        if (left < 3 || !is_utf8_tail(at[1]) || !is_utf8_tail(at[2])) return 0;
        /* Neither longer than needed nor half of a pair. */
        return (first == 0xe0 && at[1] < 0xa0) || (first == 0xed && at[1] > 0x9f) ? 0 : 3;
    }
    if (first < 0xf0 || first > 0xf4 || left < 4) return 0;
    if (!is_utf8_tail(at[1]) || !is_utf8_tail(at[2]) || !is_utf8_tail(at[3])) return 0;
    return (first == 0xf0 && at[1] < 0x90) || (first == 0xf4 && at[1] > 0x8f) ? 0 : 4;
}

/* The unit that `\uXXXX` at `at` stands for, NONE if it is not that. */
static int unit_of(const unsigned char *at, const unsigned char *end) {
    if (end - at < 6 || at[0] != '\\' || at[1] != 'u') return NONE;
    int unit = 0;
    for (int n = 2; n < 6; n++) {
        int digit = at[n], letter = digit | 0x20;
        if (digit >= '0' && digit <= '9') unit = unit * 16 + digit - '0';
        else if (letter >= 'a' && letter <= 'f') unit = unit * 16 + letter - 'a' + 10;
        else return NONE;
    }
    return unit;
}

/* The size of the escape that begins at `at`; 0 if it is none that can be decoded. */
static size_t escape_size(const unsigned char *at, const unsigned char *end) {
    if (end - at < 2) return 0;
    if (at[1] != 'u') return at[1] && strchr("\"\\/bfnrt", at[1]) ? 2 : 0;
    int unit = unit_of(at, end);
    if (unit < 0 || (unit >= 0xdc00 && unit <= 0xdfff)) return 0;
    if (unit < 0xd800 || unit > 0xdbff) return 6;
    int second = unit_of(at + 6, end);
    return second >= 0xdc00 && second <= 0xdfff ? 12 : 0;
}

/* The end of the JSON text that begins at `at`: its closing quote. NULL if it has none, or if a JSON
 * decoder would refuse the text. */
static const unsigned char *text_end(const unsigned char *at, const unsigned char *end) {
    while (at < end && *at != '"') {
        size_t size = 1;
        if (*at == '\\') size = escape_size(at, end);
        else if (*at >= 0x80) size = utf8_size(at, end);
        else if (*at < 0x20) size = 0;
        if (!size) return NULL;
        at += size;
    }
    return at < end ? at : NULL;
}

static int keep_text(struct stream *stream, const unsigned char *text, size_t size) {
    size_t wanted = stream->text_size + size;
    if (wanted > TEXT_BYTES_MAX) return -1;
    if (wanted > stream->text_room) {
        size_t room = 2 * wanted < TEXT_ROOM_MIN ? TEXT_ROOM_MIN : 2 * wanted;
        char *grown = realloc(stream->text, room);
        if (!grown) return -1;
        stream->text = grown;
        stream->text_room = room;
    }
    memcpy(stream->text + stream->text_size, text, size);
    stream->text_size = wanted;
    return 0;
}

/* Counts one frame and keeps its text; returns its end, NULL if it is not of the stream's shape. */
static const unsigned char *take_frame(
    struct stream *stream, const unsigned char *at, const unsigned char *end) {
    if ((size_t)(end - at) < stream->before || memcmp(at, stream->frame, stream->before)) return NULL;
    const unsigned char *text = at + stream->before, *behind = text_end(text, end);
    if (!behind || (size_t)(end - behind) < stream->behind) return NULL;
    if (memcmp(behind, stream->frame + stream->before, stream->behind)) return NULL;
    size_t size = (size_t)(behind - text);
    if (size && stream->keeps_text && keep_text(stream, text, size)) return NULL;
    stream->tokens += size > 0;
    return behind + stream->behind;
}

/* Takes one whole chunk of whole frames; returns its end, NULL if there is none such at `at`. */
static const unsigned char *take_chunk(
    struct stream *stream, const unsigned char *at, const unsigned char *end) {
    size_t size = 0;
    int digits = 0;
    for (; at < end && digits <= SIZE_DIGITS_MAX; at++, digits++) {
        int letter = *at | 0x20;
        if (*at >= '0' && *at <= '9') size = size * 16 + (size_t)(*at - '0');
        else if (letter >= 'a' && letter <= 'f') size = size * 16 + (size_t)(letter - 'a' + 10);
        else break;
    }
    if (!size || digits > SIZE_DIGITS_MAX || (size_t)(end - at) < size + 4) return NULL;
    const unsigned char *frame = at + 2, *close = frame + size;
    if (memcmp(at, "\r\n", 2) || memcmp(close, "\r\n", 2)) return NULL;
    unsigned long long tokens = stream->tokens;
    size_t text_size = stream->text_size;
    while (frame && frame < close) frame = take_frame(stream, frame, close);
    if (frame) return close + 2;
    stream->tokens = tokens;
    stream->text_size = text_size;
    return NULL;
}

static void unwatch(StreamPump *pump, struct stream *stream) {
    struct epoll_event event = {0};
    if (stream->is_watched) epoll_ctl(pump->sockets_fd, EPOLL_CTL_DEL, stream->node_fd, &event);
    stream->is_watched = 0;
}

/* Stops watching a stream and appends (slot, unread bytes, unsent bytes) to the list. */
static int give_back(
    StreamPump *pump, int slot, PyObject *returned, const char *unread, size_t unread_size,
    const char *unsent, size_t unsent_size) {
    unwatch(pump, &pump->streams[slot]);
    PyObject *entry = Py_BuildValue(
        "(iy#y#)", slot, unread, (Py_ssize_t)unread_size, unsent, (Py_ssize_t)unsent_size);
    int failed = !entry || PyList_Append(returned, entry);
    Py_XDECREF(entry);
    return failed ? -1 : 0;
}

/* Relays what one node has sent. */
static int relay(StreamPump *pump, int slot, double now_s, PyObject *returned) {
    struct stream *stream = &pump->streams[slot];
    ssize_t size = recv(stream->node_fd, pump->buffer, READ_BYTES, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (size <= 0) return give_back(pump, slot, returned, "", 0, "", 0);
    stream->heard_s = now_s;
    const unsigned char *begin = (const unsigned char *)pump->buffer, *end = begin + size;
    const unsigned char *taken = begin, *next;
    while (taken < end && (next = take_chunk(stream, taken, end))) taken = next;
    size_t whole = (size_t)(taken - begin), sent = 0;
    if (whole) {
        ssize_t done = send(stream->client_fd, begin, whole, MSG_DONTWAIT | MSG_NOSIGNAL);
        sent = done > 0 ? (size_t)done : 0;
    }
    if (sent == (size_t)size) return 0;
    return give_back(
        pump, slot, returned, (const char *)taken, (size_t)(end - taken), pump->buffer + sent,
        whole - sent);
}

/* Lets `outer_fd` be readable when a socket is, or when the timer has run out. */
static void watch_sockets(StreamPump *pump, int is_on) {
    struct epoll_event event = {.events = is_on ? EPOLLIN : 0, .data.fd = pump->sockets_fd};
    epoll_ctl(pump->outer_fd, EPOLL_CTL_MOD, pump->sockets_fd, &event);
}

/* Decides when the sockets are looked at again, after `reads` of them were ready: at once if more are. */
static void plan_next_look(StreamPump *pump, int64_t reads, int is_behind) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    int64_t now_ns = time.tv_sec * 1000000000LL + time.tv_nsec;
    int64_t elapsed_ns = now_ns - pump->window_began_ns;
    int was_gathering = pump->is_gathering;
    pump->window_reads += reads;
    if (elapsed_ns >= WINDOW_NS) {
        pump->is_gathering = pump->window_reads * pump->gather_ns >= elapsed_ns;
        pump->window_began_ns = now_ns;
        pump->window_reads = 0;
    }
    if (pump->is_gathering != was_gathering) watch_sockets(pump, !pump->is_gathering);
    if (pump->is_gathering || was_gathering) {
        /* Setting it also clears that it has run out; 0 stops it. */
        struct itimerspec next = {0};
        if (pump->is_gathering) next.it_value.tv_nsec = is_behind ? 1 : (long)pump->gather_ns;
        timerfd_settime(pump->timer_fd, 0, &next, NULL);
    }
}

static PyObject *run(PyObject *self, PyObject *now) {
    StreamPump *pump = (StreamPump *)self;
    struct epoll_event events[EVENTS];
    double now_s = PyFloat_AsDouble(now);
    if (now_s == -1.0 && PyErr_Occurred()) return NULL;
    PyObject *returned = PyList_New(0);
    if (!returned) return NULL;
    int64_t reads = 0;
    int found = EVENTS, failed = 0;
    for (int round = 0; round < ROUNDS_MAX && found == EVENTS && !failed; round++) {
        found = epoll_wait(pump->sockets_fd, events, EVENTS, 0);
        for (int n = 0; n < found && !failed; n++)
            failed = relay(pump, (int)events[n].data.u32, now_s, returned);
        reads += found > 0 ? found : 0;
    }
    plan_next_look(pump, reads, found == EVENTS);
    if (failed) Py_CLEAR(returned);
    return returned;
}

static int grow(StreamPump *pump) {
    int room = pump->room ? 2 * pump->room : STREAMS_MIN;
    struct stream *grown = realloc(pump->streams, (size_t)room * sizeof *grown);
    if (!grown) return PyErr_NoMemory(), -1;
    pump->streams = grown;
    for (int slot = pump->room; slot < room; slot++) {
        grown[slot] = (struct stream){.node_fd = NONE, .next = slot + 1 < room ? slot + 1 : NONE};
    }
    pump->unused = pump->room;
    pump->room = room;
    return 0;
}

/* attach(node_fd, client_fd, before, behind, keeps_text, now_s) -> slot. Raises OSError. */
static PyObject *attach(PyObject *self, PyObject *arguments) {
    StreamPump *pump = (StreamPump *)self;
    struct stream new = {.is_watched = 1};
    const char *before, *behind;
    Py_ssize_t before_size, behind_size;
    if (!PyArg_ParseTuple(
            arguments, "iiy#y#pd", &new.node_fd, &new.client_fd, &before, &before_size, &behind,
            &behind_size, &new.keeps_text, &new.heard_s))
        return NULL;
    if (!before_size || !behind_size || behind[0] != '"')
        return PyErr_SetString(PyExc_ValueError, "a frame has a text between quotes"), NULL;
    if (pump->unused == NONE && grow(pump)) return NULL;
    new.before = (size_t)before_size;
    new.behind = (size_t)behind_size;
    new.frame = malloc(new.before + new.behind);
    if (!new.frame) return PyErr_NoMemory();
    memcpy(new.frame, before, new.before);
    memcpy(new.frame + new.before, behind, new.behind);
    int slot = pump->unused;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)slot};
    if (epoll_ctl(pump->sockets_fd, EPOLL_CTL_ADD, new.node_fd, &event)) {
        free(new.frame);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    pump->unused = pump->streams[slot].next;
    pump->streams[slot] = new;
    pump->count++;
    return PyLong_FromLong(slot);
}

/* The stream in a slot, NULL with IndexError if there is none. */
static struct stream *stream_in(StreamPump *pump, PyObject *slot) {
    long number = PyLong_AsLong(slot);
    if (number == -1 && PyErr_Occurred()) return NULL;
    if (number < 0 || number >= pump->room || pump->streams[number].node_fd == NONE)
        return PyErr_SetString(PyExc_IndexError, "no stream has this slot"), NULL;
    return &pump->streams[number];
}

static void clear(StreamPump *pump, struct stream *stream) {
    unwatch(pump, stream);
    free(stream->frame);
    free(stream->text);
    *stream = (struct stream){.node_fd = NONE};
}

/* take(slot) -> (tokens, text, heard_s): ends the stream's time here. */
static PyObject *take(PyObject *self, PyObject *slot) {
    StreamPump *pump = (StreamPump *)self;
    struct stream *stream = stream_in(pump, slot);
    if (!stream) return NULL;
    PyObject *taken = Py_BuildValue(
        "(Ky#d)", stream->tokens, stream->text ? stream->text : "", (Py_ssize_t)stream->text_size,
        stream->heard_s);
    clear(pump, stream);
    stream->next = pump->unused;
    pump->unused = (int)(stream - pump->streams);
    pump->count--;
    return taken;
}

static PyObject *heard_s(PyObject *self, PyObject *slot) {
    struct stream *stream = stream_in((StreamPump *)self, slot);
    return stream ? PyFloat_FromDouble(stream->heard_s) : NULL;
}

static PyObject *get_fileno(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(((StreamPump *)self)->outer_fd);
}

static Py_ssize_t length(PyObject *self) { return ((StreamPump *)self)->count; }

static PyObject *new_pump(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    double gather_s;
    if (names && PyDict_GET_SIZE(names))
        return PyErr_SetString(PyExc_TypeError, "StreamPump takes no names"), NULL;
    if (!PyArg_ParseTuple(arguments, "d", &gather_s)) return NULL;
    if (!(gather_s >= 0.0 && gather_s < 1.0))
        return PyErr_SetString(PyExc_ValueError, "tokens gather for less than a second"), NULL;
    StreamPump *pump = (StreamPump *)type->tp_alloc(type, 0);
    if (!pump) return NULL;
    pump->gather_ns = (int64_t)(gather_s * 1e9);
    pump->unused = NONE;
    pump->outer_fd = epoll_create1(EPOLL_CLOEXEC);
    pump->sockets_fd = epoll_create1(EPOLL_CLOEXEC);
    pump->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event sockets = {.events = EPOLLIN, .data.fd = pump->sockets_fd};
    struct epoll_event timer = {.events = EPOLLIN, .data.fd = pump->timer_fd};
    if (epoll_ctl(pump->outer_fd, EPOLL_CTL_ADD, pump->sockets_fd, &sockets) ||
        epoll_ctl(pump->outer_fd, EPOLL_CTL_ADD, pump->timer_fd, &timer)) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_CLEAR(pump);
    }
    return (PyObject *)pump;
}

static void dealloc(PyObject *self) {
    StreamPump *pump = (StreamPump *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (int slot = 0; slot < pump->room; slot++)
        if (pump->streams[slot].node_fd != NONE) clear(pump, &pump->streams[slot]);
    free(pump->streams);
    int opened[] = {pump->outer_fd, pump->sockets_fd, pump->timer_fd};
    for (int n = 0; n < 3; n++)
        if (opened[n] >= 0) close(opened[n]);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"attach", attach, METH_VARARGS, NULL},
    {"take", take, METH_O, NULL},
    {"heard_s", heard_s, METH_O, NULL},
    {"run", run, METH_O, NULL},
    {"fileno", get_fileno, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, new_pump},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, METHODS},
    {Py_sq_length, length},
    {0, NULL},
};

static PyType_Spec SPEC = {
    "router.dataplane.stream_pump.StreamPump", sizeof(StreamPump), 0, Py_TPFLAGS_DEFAULT, SLOTS,
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.dataplane.stream_pump", NULL, 0, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_stream_pump(void) {
    PyObject *module = PyModule_Create(&MODULE);
    PyObject *type = module ? PyType_FromSpec(&SPEC) : NULL;
    if (!type || PyModule_AddObject(module, "StreamPump", type) < 0) {
        Py_XDECREF(type);
        Py_CLEAR(module);
    }
    return module;
}
