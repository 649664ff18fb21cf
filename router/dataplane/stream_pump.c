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
 * A thread of its own relays, without Python's lock: a token waits neither for the event loop nor for
 * what runs in it. While many tokens come, it lets them gather (stream_gathering.h). `lock` protects all
 * that both threads use; `waiting` lets the event loop have it between two streams. No object of
 * Python is made while it is held: that might collect garbage, which might come back here.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "stream_frames.h"
#include "stream_gathering.h"

enum {
    READ_BYTES = 1 << 16,
    EVENTS = 256,
    STREAMS_MIN = 16,
};
static const uint32_t STOP = UINT32_MAX;    /* in place of a slot */

typedef struct {
    PyObject_HEAD
    pthread_t thread;
    pthread_mutex_t lock;
    atomic_int waiting;
    int is_started, sockets_fd, stop_fd, returned_fd;
    int capacity, unused, returned; /* the first slots that are free, and given back */
    Py_ssize_t count;
    struct stream *streams;
    /* Of the thread alone: */
    struct gathering gathering;
    char buffer[READ_BYTES];
} StreamPump;

static int64_t monotonic_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void unwatch(StreamPump *pump, struct stream *stream) {
    struct epoll_event event = {0};
    if (stream->is_watched) epoll_ctl(pump->sockets_fd, EPOLL_CTL_DEL, stream->node_fd, &event);
    stream->is_watched = 0;
}

/* Stops relaying a stream: the event loop takes it, with what was read and is not done. */
static void give_back(
    StreamPump *pump, int slot, const char *unread, size_t unread_size, const char *unsent,
    size_t unsent_size) {
    struct stream *stream = &pump->streams[slot];
    uint64_t one = 1;
    unwatch(pump, stream);
    stream->rest = unread_size + unsent_size ? malloc(unread_size + unsent_size) : NULL;
    if (stream->rest) {
        memcpy(stream->rest, unread, unread_size);
        memcpy(stream->rest + unread_size, unsent, unsent_size);
        stream->unread = unread_size;
        stream->unsent = unsent_size;
    } else if (unread_size + unsent_size) {
        /* Bytes are lost: both ends see a broken connection. */
        shutdown(stream->node_fd, SHUT_RDWR);
        shutdown(stream->client_fd, SHUT_RDWR);
    }
    stream->next = pump->returned;
    pump->returned = slot;
    if (write(pump->returned_fd, &one, sizeof one) < 0) return; /* It is readable already. */
}

/* Relays what one node has sent. */
static void relay(StreamPump *pump, int slot, int64_t now_ns) {
    struct stream *stream = &pump->streams[slot];
    if (stream->node_fd == NONE || !stream->is_watched) return; /* taken since it was ready */
    ssize_t size = recv(stream->node_fd, pump->buffer, READ_BYTES, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) {
        give_back(pump, slot, "", 0, "", 0);
        return;
    }
    stream->heard_ns = now_ns;
    const unsigned char *begin = (const unsigned char *)pump->buffer, *end = begin + size;
    const unsigned char *taken = begin, *next;
    while (taken < end && (next = take_chunk(stream, taken, end))) taken = next;
    size_t whole = (size_t)(taken - begin), sent = 0;
    if (whole) {
        ssize_t done = send(stream->client_fd, begin, whole, MSG_DONTWAIT | MSG_NOSIGNAL);
        sent = done > 0 ? (size_t)done : 0;
    }
    if (sent < (size_t)size)
        give_back(
            pump, slot, (const char *)taken, (size_t)(end - taken), pump->buffer + sent,
            whole - sent);
}

static void *run(void *argument) {
    StreamPump *pump = argument;
    struct epoll_event events[EVENTS];
    struct gathering *gathering = &pump->gathering;
    for (;;) {
        int found = epoll_wait(pump->sockets_fd, events, EVENTS, gathering->pause_ns ? 0 : -1);
        if (found < 0 && errno != EINTR) return NULL;
        int64_t now_ns = monotonic_ns();
        for (int n = 0; n < found; n++) {
            if (events[n].data.u32 == STOP) return NULL;
            while (atomic_load_explicit(&pump->waiting, memory_order_relaxed)) sched_yield();
            pthread_mutex_lock(&pump->lock);
            relay(pump, (int)events[n].data.u32, now_ns);
            pthread_mutex_unlock(&pump->lock);
        }
        count_reads(gathering, found > 0 ? found : 0, now_ns);
        struct timespec pause = {.tv_nsec = (long)gathering->pause_ns};
        if (pause.tv_nsec && found < EVENTS) clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
    }
}

static void lock(StreamPump *pump) {
    atomic_fetch_add_explicit(&pump->waiting, 1, memory_order_relaxed);
    pthread_mutex_lock(&pump->lock);
    atomic_fetch_sub_explicit(&pump->waiting, 1, memory_order_relaxed);
}

static void unlock(StreamPump *pump) { pthread_mutex_unlock(&pump->lock); }

/* Starts the thread, which takes no signals. Returns an errno. */
static int start(StreamPump *pump) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&pump->thread, NULL, run, pump);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pump->is_started = !error;
    return error;
}

/* Returns -1 with an errno if there is no memory. */
static int grow(StreamPump *pump) {
    int capacity = pump->capacity ? 2 * pump->capacity : STREAMS_MIN;
    struct stream *grown = realloc(pump->streams, (size_t)capacity * sizeof *grown);
    if (!grown) return -1;
    pump->streams = grown;
    for (int slot = pump->capacity; slot < capacity; slot++) {
        int next = slot + 1 < capacity ? slot + 1 : NONE;
        grown[slot] = (struct stream){.node_fd = NONE, .next = next};
    }
    pump->unused = pump->capacity;
    pump->capacity = capacity;
    return 0;
}

/* Puts a stream into a free slot and watches it; returns the slot, or NONE with an errno. */
static int place(StreamPump *pump, const struct stream *new) {
    if (pump->unused == NONE && grow(pump)) return NONE;
    int slot = pump->unused;
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)slot};
    if (epoll_ctl(pump->sockets_fd, EPOLL_CTL_ADD, new->node_fd, &event)) return NONE;
    pump->unused = pump->streams[slot].next;
    pump->streams[slot] = *new;
    pump->count++;
    return slot;
}

/* attach(node_fd, client_fd, before, behind, keeps_text) -> slot. Raises OSError. */
static PyObject *attach(PyObject *self, PyObject *arguments) {
    StreamPump *pump = (StreamPump *)self;
    struct stream new = {.is_watched = 1, .heard_ns = monotonic_ns()};
    const char *before, *behind;
    Py_ssize_t before_size, behind_size;
    if (!PyArg_ParseTuple(
            arguments, "iiy#y#p", &new.node_fd, &new.client_fd, &before, &before_size, &behind,
            &behind_size, &new.keeps_text))
        return NULL;
    if (!before_size || !behind_size || behind[0] != '"')
        return PyErr_SetString(PyExc_ValueError, "a frame has a text between quotes"), NULL;
    new.before = (size_t)before_size;
    new.behind = (size_t)behind_size;
    new.frame = malloc(new.before + new.behind);
    if (!new.frame) return PyErr_NoMemory();
    memcpy(new.frame, before, new.before);
    memcpy(new.frame + new.before, behind, new.behind);
    lock(pump);
    int slot = place(pump, &new), error = errno;
    unlock(pump);
    if (slot != NONE) return PyLong_FromLong(slot);
    free(new.frame);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* The stream in a slot, NULL if there is none. */
static struct stream *stream_in(StreamPump *pump, long slot) {
    int is_there = slot >= 0 && slot < pump->capacity && pump->streams[slot].node_fd != NONE;
    return is_there ? &pump->streams[slot] : NULL;
}

static PyObject *no_stream(void) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no stream has this slot");
    return NULL;
}

static void release(struct stream *stream) {
    free(stream->frame);
    free(stream->text);
    free(stream->rest);
}

/* Takes a slot off the list of those given back, if it is there. */
static void forget_returned(StreamPump *pump, int slot) {
    int *place = &pump->returned;
    while (*place != NONE && *place != slot) place = &pump->streams[*place].next;
    if (*place == slot) *place = pump->streams[slot].next;
}

/* take(slot) -> (tokens, text, heard_s): ends the stream's time here. */
static PyObject *take(PyObject *self, PyObject *number) {
    StreamPump *pump = (StreamPump *)self;
    long slot = PyLong_AsLong(number);
    lock(pump);
    struct stream *stream = stream_in(pump, slot), taken;
    if (!stream) return unlock(pump), no_stream();
    if (!stream->is_watched) forget_returned(pump, (int)slot);
    unwatch(pump, stream);
    taken = *stream;
    *stream = (struct stream){.node_fd = NONE, .next = pump->unused};
    pump->unused = (int)slot;
    pump->count--;
    unlock(pump);
    PyObject *result = Py_BuildValue(
        "(Ky#d)", taken.tokens, taken.text ? taken.text : "", (Py_ssize_t)taken.text_size,
        (double)taken.heard_ns / 1e9);
    release(&taken);
    return result;
}

static PyObject *heard_s(PyObject *self, PyObject *slot) {
    StreamPump *pump = (StreamPump *)self;
    long number = PyLong_AsLong(slot);
    lock(pump);
    struct stream *stream = stream_in(pump, number);
    int64_t heard_ns = stream ? stream->heard_ns : 0;
    unlock(pump);
    return stream ? PyFloat_FromDouble((double)heard_ns / 1e9) : no_stream();
}

/* returned() -> [(slot, unread bytes, unsent bytes)]: the streams given back since the last call. */
static PyObject *take_returned(PyObject *self, PyObject *unused) {
    (void)unused;
    StreamPump *pump = (StreamPump *)self;
    PyObject *returned = PyList_New(0);
    uint64_t times;
    if (!returned) return NULL;
    lock(pump);
    /* It is not readable if all of them were taken meanwhile. */
    ssize_t ignored = read(pump->returned_fd, &times, sizeof times);
    (void)ignored;
    int slot = pump->returned;
    pump->returned = NONE;
    unlock(pump);
    /* The thread does not touch them any more. */
    for (; returned && slot != NONE; slot = pump->streams[slot].next) {
        struct stream *stream = &pump->streams[slot];
        const char *rest = stream->rest ? stream->rest : "";
        PyObject *entry = Py_BuildValue(
            "(iy#y#)", slot, rest, (Py_ssize_t)stream->unread, rest + stream->unread,
            (Py_ssize_t)stream->unsent);
        if (!entry || PyList_Append(returned, entry)) Py_CLEAR(returned);
        Py_XDECREF(entry);
    }
    return returned;
}

static PyObject *get_fileno(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(((StreamPump *)self)->returned_fd);
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
    pump->gathering.most_ns = (int64_t)(gather_s * 1e9);
    pump->unused = pump->returned = NONE;
    pthread_mutex_init(&pump->lock, NULL);
    pump->sockets_fd = epoll_create1(EPOLL_CLOEXEC);
    pump->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pump->returned_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event stop = {.events = EPOLLIN, .data.u32 = STOP};
    if (pump->returned_fd < 0 ||
        epoll_ctl(pump->sockets_fd, EPOLL_CTL_ADD, pump->stop_fd, &stop) || (errno = start(pump))) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_CLEAR(pump);
    }
    return (PyObject *)pump;
}

static void dealloc(PyObject *self) {
    StreamPump *pump = (StreamPump *)self;
    PyTypeObject *type = Py_TYPE(self);
    uint64_t one = 1;
    /* The thread never waits for Python's lock, so it ends while this one holds it. */
    if (pump->is_started && write(pump->stop_fd, &one, sizeof one) == sizeof one)
        pthread_join(pump->thread, NULL);
    for (int slot = 0; slot < pump->capacity; slot++)
        if (pump->streams[slot].node_fd != NONE) release(&pump->streams[slot]);
    free(pump->streams);
    pthread_mutex_destroy(&pump->lock);
    int opened[] = {pump->sockets_fd, pump->stop_fd, pump->returned_fd};
    for (int n = 0; n < 3; n++)
        if (opened[n] > 0) close(opened[n]);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"attach", attach, METH_VARARGS, NULL},
    {"take", take, METH_O, NULL},
    {"heard_s", heard_s, METH_O, NULL},
    {"returned", take_returned, METH_NOARGS, NULL},
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
