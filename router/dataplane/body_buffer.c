/* Collects the body of a request whose length is known, for router/dataplane/body_receiver.py.
 *
 * The buffer of a BodyBuffer is the part that has not come: the event loop reads into it, so a byte of
 * the socket is copied once, to where it stays. The body is a bytes object that nothing else has
 * until `take`. Memory is reserved for RESERVED_BYTES or twice what has come: a client that only
 * announces a large body takes little.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

enum { RESERVED_BYTES = 1152 * 1024 };

typedef struct {
    PyObject_HEAD
    /* `come` of `length` bytes are there; `body` has room for more. NULL once it is taken. */
    PyObject *body;
    Py_ssize_t come, length, exports;
} BodyBuffer;

static PyTypeObject *buffer_type;

/* Makes room for the next bytes; returns 0 with an error set if it fails, then the body is lost. */
static int reserve(BodyBuffer *self) {
    Py_ssize_t room = 2 * self->come > RESERVED_BYTES ? 2 * self->come : RESERVED_BYTES;
    if (room > self->length) room = self->length;
    return PyBytes_GET_SIZE(self->body) >= room || !_PyBytes_Resize(&self->body, room);
}

static PyObject *open_buffer(PyObject *module, PyObject *number) {
    (void)module;
    Py_ssize_t length = PyLong_AsSsize_t(number);
    if (length == -1 && PyErr_Occurred()) return NULL;
    if (length < 1) return PyErr_SetString(PyExc_ValueError, "expected a length above 0"), NULL;
    BodyBuffer *self = (BodyBuffer *)buffer_type->tp_alloc(buffer_type, 0);
    if (!self) return NULL;
    self->length = length;
    Py_ssize_t room = length < RESERVED_BYTES ? length : RESERVED_BYTES;
    if (!(self->body = PyBytes_FromStringAndSize(NULL, room))) Py_CLEAR(self);
    return (PyObject *)self;
}

/* Returns whether `count` more bytes may come now. */
static int may_come(BodyBuffer *self, Py_ssize_t count) {
    if (!self->body || count < 0 || count > self->length - self->come)
        return PyErr_SetString(PyExc_ValueError, "more than the rest of the body"), 0;
    return 1;
}

static PyObject *add(PyObject *object, PyObject *data) {
    BodyBuffer *self = (BodyBuffer *)object;
    if (!PyBytes_Check(data)) return PyErr_SetString(PyExc_TypeError, "expected bytes"), NULL;
    const char *at = PyBytes_AS_STRING(data);
    Py_ssize_t left = PyBytes_GET_SIZE(data);
    if (!may_come(self, left)) return NULL;
    if (self->exports) return PyErr_SetString(PyExc_BufferError, "it is being read into"), NULL;
    while (left) {
        if (!reserve(self)) return NULL;
        Py_ssize_t room = PyBytes_GET_SIZE(self->body) - self->come;
        Py_ssize_t count = left < room ? left : room;
        memcpy(PyBytes_AS_STRING(self->body) + self->come, at, (size_t)count);
        self->come += count;
        at += count;
        left -= count;
    }
    Py_RETURN_NONE;
}

static PyObject *advance(PyObject *object, PyObject *number) {
    BodyBuffer *self = (BodyBuffer *)object;
    Py_ssize_t count = PyLong_AsSsize_t(number);
    if (count == -1 && PyErr_Occurred()) return NULL;
    if (!may_come(self, count)) return NULL;
    if (count > PyBytes_GET_SIZE(self->body) - self->come)
        return PyErr_SetString(PyExc_ValueError, "more than was read into the buffer"), NULL;
    self->come += count;
    Py_RETURN_NONE;
}

static PyObject *take(PyObject *object, PyObject *none) {
    (void)none;
    BodyBuffer *self = (BodyBuffer *)object;
    if (!self->body || self->come != self->length)
        return PyErr_SetString(PyExc_ValueError, "the body is not whole"), NULL;
    PyObject *body = self->body;
    self->body = NULL;
    return body;
}

static int get_buffer(PyObject *object, Py_buffer *view, int flags) {
    BodyBuffer *self = (BodyBuffer *)object;
    if (!self->body || (!self->exports && !reserve(self))) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_BufferError, "the body was taken");
        return view->obj = NULL, -1;
    }
    char *at = PyBytes_AS_STRING(self->body) + self->come;
    Py_ssize_t room = PyBytes_GET_SIZE(self->body) - self->come;
    int failed = PyBuffer_FillInfo(view, object, at, room, 0, flags);
    self->exports += !failed;
    return failed;
}

static void release_buffer(PyObject *object, Py_buffer *view) {
    (void)view;
    ((BodyBuffer *)object)->exports--;
}

static void free_buffer(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((BodyBuffer *)object)->body);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef BUFFER_METHODS[] = {
    {"add", add, METH_O, NULL},
    {"advance", advance, METH_O, NULL},
    {"take", take, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef BUFFER_MEMBERS[] = {
    {"count", T_PYSSIZET, offsetof(BodyBuffer, come), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot BUFFER_SLOTS[] = {
    {Py_tp_dealloc, free_buffer},
    {Py_tp_methods, BUFFER_METHODS},
    {Py_tp_members, BUFFER_MEMBERS},
    {Py_bf_getbuffer, get_buffer},
    {Py_bf_releasebuffer, release_buffer},
    {0, NULL},
};

static PyType_Spec BUFFER_SPEC = {
    "router.dataplane.body_buffer.BodyBuffer", sizeof(BodyBuffer), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, BUFFER_SLOTS,
};

static PyMethodDef METHODS[] = {
    {"open_buffer", open_buffer, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.dataplane.body_buffer", NULL, -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_body_buffer(void) {
    if (!buffer_type) buffer_type = (PyTypeObject *)PyType_FromSpec(&BUFFER_SPEC);
    return buffer_type ? PyModule_Create(&MODULE) : NULL;
}
