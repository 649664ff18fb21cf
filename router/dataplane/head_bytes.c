/* Reads a whole plain HTTP message at once, for router/dataplane/plain_messages.py.
 *
 * Most messages come in one piece, with a short head that every parser reads in the same way. Only
 * these are read here; for all others the answer is None, and the parser reads them. So this has no
 * state and refuses nothing. Plain is a message of HTTP/1.1 whose head
 * - has at most HEAD_BYTES_MAX bytes, all of them printable ASCII, and CRLF after each line;
 * - names no header twice, nor more than FIELDS_MAX, and no value is empty or ends with a space;
 * - has a Content-Length, that of all bytes behind the head, and no header in FRAMING.
 *
 * An interim response has no body: its head has no Content-Length, and what follows it is the next
 * response.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

enum { HEAD_BYTES_MAX = 8192, FIELDS_MAX = 128, NAME_BYTES_MAX = 64, LENGTH_DIGITS_MAX = 9 };

/* With these a message may end elsewhere, or be the last of its connection. */
static const char *const FRAMING[] = {
    "connection", "proxy-connection", "keep-alive", "transfer-encoding", "trailer", "te", "upgrade",
    "expect", NULL,
};

/* The names of most headers: an object for each, whose hash Python remembers. */
static const char *const COMMON[] = {
    "host", "date", "accept", "server", "user-agent", "x-request-id", "content-type",
    "authorization", "content-length", "accept-encoding", NULL,
};
static PyObject *common_names[sizeof COMMON / sizeof *COMMON];
static PyObject *content_length;

/* For each byte: its lower case if it may be in a header's name, else 0. */
static char in_name[256];
/* Whether a byte may be in a request target. Others are left to the parser. */
static char in_target[256];

static int is_one_of(const char *const *names, const char *name, size_t size) {
    for (; *names; names++)
        if (strlen(*names) == size && !memcmp(*names, name, size)) return 1;
    return 0;
}

static PyObject *name_object(const char *name, size_t size) {
    for (size_t n = 0; COMMON[n]; n++) {
        PyObject *known = common_names[n];
        if ((size_t)PyBytes_GET_SIZE(known) == size && !memcmp(PyBytes_AS_STRING(known), name, size))
            return Py_NewRef(known);
    }
    return PyBytes_FromStringAndSize(name, (Py_ssize_t)size);
}

/* Returns the number that a Content-Length says, -1 if it is none that is plain. */
static Py_ssize_t read_length(PyObject *value) {
    const char *digits = PyBytes_AS_STRING(value);
    Py_ssize_t size = PyBytes_GET_SIZE(value), length = 0;
    if (size > LENGTH_DIGITS_MAX) return -1;
    for (Py_ssize_t n = 0; n < size; n++) {
        if (digits[n] < '0' || digits[n] > '9') return -1;
        length = 10 * length + (digits[n] - '0');
    }
    return length;
}

/* Reads one header line at `at` into `fields`; returns what follows it, NULL if it is not plain. */
static const char *read_line(const char *at, const char *end, PyObject *fields) {
    char name[NAME_BYTES_MAX];
    size_t size = 0;
    while (at < end && in_name[(unsigned char)*at]) {
        if (size == NAME_BYTES_MAX) return NULL;
        name[size++] = in_name[(unsigned char)*at++];
    }
    if (!size || at == end || *at++ != ':' || is_one_of(FRAMING, name, size)) return NULL;
    while (at < end && *at == ' ') at++;
    const char *value = at;
    while (at < end && *at >= ' ' && *at <= '~') at++;
    if (end - at < 2 || at[0] != '\r' || at[1] != '\n' || at == value || at[-1] == ' ') return NULL;
    PyObject *key = name_object(name, size);
    PyObject *text = key ? PyBytes_FromStringAndSize(value, at - value) : NULL;
    Py_ssize_t before = PyDict_GET_SIZE(fields);
    int failed = !text || PyDict_SetItem(fields, key, text);
    Py_XDECREF(key);
    Py_XDECREF(text);
    return failed || PyDict_GET_SIZE(fields) == before ? NULL : at + 2;
}

/* Reads the headers from `at` on into `fields`; returns what follows the head, NULL if it is not
 * plain. */
static const char *read_lines(
    const char *at, const char *begin, Py_ssize_t size, PyObject *fields) {
    const char *end = begin + (size > HEAD_BYTES_MAX ? HEAD_BYTES_MAX : size);
    while (at && !(end - at >= 2 && at[0] == '\r' && at[1] == '\n'))
        at = PyDict_GET_SIZE(fields) < FIELDS_MAX ? read_line(at, end, fields) : NULL;
    return at ? at + 2 : NULL;
}

/* Reads the headers from `at` on, and the body, as (`first`, headers, body); takes `first`. None if
 * the message is not plain. */
static PyObject *read_rest(PyObject *first, const char *at, const char *begin, Py_ssize_t size) {
    const char *whole_end = begin + size;
    PyObject *fields = first ? PyDict_New() : NULL, *read = NULL;
    if (fields && (at = read_lines(at, begin, size, fields))) {
        PyObject *length = PyDict_GetItemWithError(fields, content_length);
        if (length && read_length(length) == whole_end - at) {
            PyObject *body = PyBytes_FromStringAndSize(at, whole_end - at);
            read = body ? PyTuple_Pack(3, first, fields, body) : NULL;
            Py_XDECREF(body);
        }
    }
    Py_XDECREF(first);
    Py_XDECREF(fields);
    if (read || PyErr_Occurred()) return read;
    Py_RETURN_NONE;
}

static int begins_with(const char *at, const char *end, const char *expected, size_t size) {
    return (size_t)(end - at) >= size && !memcmp(at, expected, size);
}

static PyObject *plain_request(PyObject *module, PyObject *data) {
    (void)module;
    static const char METHOD[] = "POST ", VERSION[] = " HTTP/1.1\r\n";
    if (!PyBytes_CheckExact(data)) Py_RETURN_NONE;
    const char *begin = PyBytes_AS_STRING(data), *end = begin + PyBytes_GET_SIZE(data);
    if (!begins_with(begin, end, METHOD, sizeof METHOD - 1)) Py_RETURN_NONE;
    const char *target = begin + sizeof METHOD - 1, *at = target;
    /* A byte behind the data is 0, which is in no target. */
    while (in_target[(unsigned char)*at]) at++;
    if (*target != '/' || at - target > HEAD_BYTES_MAX / 2) Py_RETURN_NONE;
    if (!begins_with(at, end, VERSION, sizeof VERSION - 1)) Py_RETURN_NONE;
    PyObject *first = PyBytes_FromStringAndSize(target, at - target);
    return read_rest(first, at + sizeof VERSION - 1, begin, end - begin);
}

static PyObject *plain_response(PyObject *module, PyObject *data) {
    (void)module;
    static const char VERSION[] = "HTTP/1.1 ";
    if (!PyBytes_CheckExact(data)) Py_RETURN_NONE;
    const char *begin = PyBytes_AS_STRING(data), *end = begin + PyBytes_GET_SIZE(data);
    const char *at = begin + sizeof VERSION - 1;
    if (!begins_with(begin, end, VERSION, sizeof VERSION - 1) || end - at < 5) Py_RETURN_NONE;
    int status = 0;
    for (int n = 0; n < 3; n++, at++) {
        if (*at < '0' || *at > '9') Py_RETURN_NONE;
        status = 10 * status + (*at - '0');
    }
    /* Interim responses are not the last of their request, and some have no body. */
    if (status < 200 || status > 599 || status == 204 || status == 304 || *at != ' ') Py_RETURN_NONE;
    while (*at >= ' ' && *at <= '~') at++;
    if (!begins_with(at, end, "\r\n", 2)) Py_RETURN_NONE;
    return read_rest(PyLong_FromLong(status), at + 2, begin, end - begin);
}

/* Reads the interim response at the beginning, as (headers, what follows it). */
static PyObject *plain_interim(PyObject *module, PyObject *data) {
    (void)module;
    static const char FIRST[] = "HTTP/1.1 103 Early Hints\r\n";
    if (!PyBytes_CheckExact(data)) Py_RETURN_NONE;
    const char *begin = PyBytes_AS_STRING(data);
    Py_ssize_t size = PyBytes_GET_SIZE(data);
    if (!begins_with(begin, begin + size, FIRST, sizeof FIRST - 1)) Py_RETURN_NONE;
    PyObject *fields = PyDict_New(), *read = NULL;
    if (!fields) return NULL;
    const char *at = read_lines(begin + sizeof FIRST - 1, begin, size, fields);
    if (at && !PyDict_Contains(fields, content_length)) {
        PyObject *rest = PyBytes_FromStringAndSize(at, begin + size - at);
        read = rest ? PyTuple_Pack(2, fields, rest) : NULL;
        Py_XDECREF(rest);
    }
    Py_DECREF(fields);
    if (read || PyErr_Occurred()) return read;
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"plain_interim", plain_interim, METH_O, NULL},
    {"plain_request", plain_request, METH_O, NULL},
    {"plain_response", plain_response, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.dataplane.head_bytes", NULL, -1, METHODS, NULL, NULL, NULL, NULL,
};

static void mark(char *table, const char *bytes) {
    for (; *bytes; bytes++) table[(unsigned char)*bytes] = *bytes;
}

PyMODINIT_FUNC PyInit_head_bytes(void) {
    static const char LOWER[] = "abcdefghijklmnopqrstuvwxyz", DIGITS[] = "0123456789";
    mark(in_name, LOWER), mark(in_name, DIGITS), mark(in_name, "-_");
    mark(in_target, LOWER), mark(in_target, DIGITS), mark(in_target, "-_/.?=&%~@:+,");
    for (char upper = 'A'; upper <= 'Z'; upper++) {
        in_name[(unsigned char)upper] = (char)(upper - 'A' + 'a');
        in_target[(unsigned char)upper] = upper;
    }
    for (size_t n = 0; COMMON[n]; n++)
        if (!(common_names[n] = PyBytes_FromString(COMMON[n]))) return NULL;
    if (!(content_length = name_object("content-length", 14))) return NULL;
    return PyModule_Create(&MODULE);
}
