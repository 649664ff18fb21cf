/* A file to which rows are appended by copying them into its memory, for router/recording/journal_file.py.
 *
 * The kernel has a row as soon as it is copied, so it survives the process as a written row does, and
 * no system call is made for it. Zeros are written first, STEP bytes at a time: a page for which the
 * disk has no space could not be stored, and the process would get SIGBUS. (posix_fallocate reserves
 * space too, but then each page costs ext4 three microseconds at its first use.) The process may get
 * SIGBUS nevertheless, from a disk that fails or a file that was cut. Then ordinary memory takes the
 * place of the file's, and this row and all later ones are written with pwrite, which says what is
 * wrong.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { STEP = 64 * 1024 };
static char zeros[STEP];

typedef struct {
    PyObject_HEAD
    int descriptor; /* -1 once closed */
    char *memory;   /* the whole of a file of `size_max` bytes; NULL if it is not mapped any more */
    size_t size_max, reserved, used;
} MappedFile;

/* The memory that is being copied to, under Python's lock. */
static char *volatile copied_to;
static volatile size_t copied_size;
static volatile sig_atomic_t is_lost;
static struct sigaction previous;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    char *at = info->si_addr, *memory = copied_to;
    if (memory && at >= memory && at < memory + copied_size &&
        mmap(memory, copied_size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1,
             0) != MAP_FAILED) {
        is_lost = 1;
        return;
    }
    /* Not of a copy: the instruction is run again, and gets what it would have got without us. */
    sigaction(SIGBUS, &previous, NULL);
}

static void catch_bus_errors(void) {
    static int is_caught;
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (!is_caught) is_caught = !sigaction(SIGBUS, &action, &previous);
}

static void unmap(MappedFile *file) {
    if (file->memory) munmap(file->memory, file->size_max);
    file->memory = NULL;
}

static void close_file(MappedFile *file) {
    unmap(file);
    if (file->descriptor < 0) return;
    close(file->descriptor);
    file->descriptor = -1;
}

static PyObject *mapped_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    int descriptor;
    Py_ssize_t size_max;
    static char *expected[] = {"descriptor", "bytes_max", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "in", expected, &descriptor, &size_max))
        return NULL;
    MappedFile *file = (MappedFile *)type->tp_alloc(type, 0);
    if (!file) return NULL;
    file->descriptor = descriptor;
    file->size_max = (size_t)size_max;
    catch_bus_errors();
    void *memory = mmap(NULL, file->size_max, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    file->memory = memory == MAP_FAILED ? NULL : memory;
    return (PyObject *)file;
}

/* Makes sure that the disk has space for `size` more bytes; returns whether they may be copied. */
static int reserve(MappedFile *file, size_t size) {
    while (file->memory && file->used + size > file->reserved) {
        size_t begin = file->used > file->reserved ? file->used : file->reserved;
        size_t missing = file->size_max - begin < STEP ? file->size_max - begin : STEP;
        ssize_t written;
        Py_BEGIN_ALLOW_THREADS
        written = pwrite(file->descriptor, zeros, missing, (off_t)begin);
        Py_END_ALLOW_THREADS
        if (written != (ssize_t)missing) return 0;
        file->reserved = begin + missing;
    }
    return file->memory != NULL;
}

/* Copies to the end of the file; returns whether it has got there. */
static int copy(MappedFile *file, const char *data, size_t size) {
    is_lost = 0;
    copied_size = file->size_max;
    copied_to = file->memory;
    memcpy(file->memory + file->used, data, size);
    atomic_signal_fence(memory_order_seq_cst);
    copied_to = NULL;
    if (is_lost) unmap(file);
    return !is_lost;
}

static PyObject *mapped_append(PyObject *self, PyObject *row) {
    MappedFile *file = (MappedFile *)self;
    if (!PyBytes_Check(row)) return PyErr_SetString(PyExc_TypeError, "expected bytes"), NULL;
    const char *data = PyBytes_AS_STRING(row);
    size_t size = (size_t)PyBytes_GET_SIZE(row);
    if (file->used + size > file->size_max) {
        errno = EFBIG;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (!(reserve(file, size) && copy(file, data, size))) {
        ssize_t written;
        Py_BEGIN_ALLOW_THREADS
        written = pwrite(file->descriptor, data, size, (off_t)file->used);
        Py_END_ALLOW_THREADS
        if (written != (ssize_t)size) {
            /* The next row overwrites what a full disk took of this one. */
            if (written >= 0) errno = ENOSPC;
            return PyErr_SetFromErrno(PyExc_OSError);
        }
    }
    file->used += size;
    Py_RETURN_NONE;
}

static PyObject *mapped_close(PyObject *self, PyObject *unused) {
    (void)unused;
    close_file((MappedFile *)self);
    Py_RETURN_NONE;
}

static void mapped_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    close_file((MappedFile *)self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"append", mapped_append, METH_O, NULL},
    {"close", mapped_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, mapped_new},
    {Py_tp_dealloc, mapped_dealloc},
    {Py_tp_methods, METHODS},
    {0, NULL},
};

static PyType_Spec SPEC = {
    "router.recording.mapped_file.MappedFile", sizeof(MappedFile), 0, Py_TPFLAGS_DEFAULT, SLOTS,
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.recording.mapped_file", NULL, 0, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_mapped_file(void) {
    PyObject *module = PyModule_Create(&MODULE);
    PyObject *type = module ? PyType_FromSpec(&SPEC) : NULL;
    if (!type || PyModule_AddObjectRef(module, "MappedFile", type) < 0) Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
