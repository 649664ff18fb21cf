/* The figures of all replicas of a deployment by slot, and the costs of one request, for
 * router/decide/replicas/slot_columns.py, which says what they mean. columns_in_numpy.py has the same in
 * numpy, to the last bit: setup.py forbids the compiler to fuse a product and a sum.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <string.h>

enum { CAPACITY_MIN = 16 };
#define NO_REPLICA (-1.0)

struct row {
    double ready_at_ms, wait_min_ms, ms_per_token, free_tokens;
};

typedef struct {
    PyObject_HEAD
    struct row *rows;
    Py_ssize_t count, capacity;
} SlotColumns;

typedef struct {
    PyObject_HEAD
    double *at;
    Py_ssize_t count, capacity;
} SlotValues;

static PyTypeObject *values_type;

static int reserve(void **items, Py_ssize_t *capacity, Py_ssize_t count, size_t size) {
    if (count <= *capacity) return 0;
    Py_ssize_t wanted = count < CAPACITY_MIN ? CAPACITY_MIN : 2 * count;
    void *grown = PyMem_Realloc(*items, (size_t)wanted * size);
    if (!grown) return PyErr_NoMemory(), -1;
    *items = grown;
    *capacity = wanted;
    return 0;
}

static int read_doubles(PyObject *const *arguments, Py_ssize_t count, double *found) {
    for (Py_ssize_t n = 0; n < count; n++) {
        found[n] = PyFloat_AsDouble(arguments[n]);
        if (found[n] == -1.0 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static int wrong_count(Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected) return 0;
    return PyErr_Format(PyExc_TypeError, "expected %zd arguments", expected), -1;
}

/* The slot that an object says, -1 with IndexError if there is none. */
static Py_ssize_t slot_of(PyObject *object, Py_ssize_t count) {
    Py_ssize_t slot = PyNumber_AsSsize_t(object, PyExc_IndexError);
    if (slot == -1 && PyErr_Occurred()) return -1;
    if (slot < 0 || slot >= count) return PyErr_SetString(PyExc_IndexError, "no such slot"), -1;
    return slot;
}

/* SlotValues */

static SlotValues *new_values(Py_ssize_t count) {
    SlotValues *values = (SlotValues *)values_type->tp_alloc(values_type, 0);
    if (values && reserve((void **)&values->at, &values->capacity, count, sizeof(double)))
        Py_CLEAR(values);
    if (values) values->count = count;
    return values;
}

static PyObject *values_append(PyObject *self, PyObject *object) {
    SlotValues *values = (SlotValues *)self;
    double value;
    if (read_doubles(&object, 1, &value)) return NULL;
    if (reserve((void **)&values->at, &values->capacity, values->count + 1, sizeof value))
        return NULL;
    values->at[values->count++] = value;
    Py_RETURN_NONE;
}

static Py_ssize_t values_length(PyObject *self) { return ((SlotValues *)self)->count; }

static PyObject *values_get(PyObject *self, PyObject *object) {
    Py_ssize_t slot = slot_of(object, ((SlotValues *)self)->count);
    return slot < 0 ? NULL : PyFloat_FromDouble(((SlotValues *)self)->at[slot]);
}

static int values_set(PyObject *self, PyObject *object, PyObject *value) {
    Py_ssize_t slot = slot_of(object, ((SlotValues *)self)->count);
    double number;
    if (slot < 0) return -1;
    if (!value) return PyErr_SetString(PyExc_TypeError, "cannot remove a slot"), -1;
    if (read_doubles(&value, 1, &number)) return -1;
    ((SlotValues *)self)->at[slot] = number;
    return 0;
}

static PyObject *values_best_two(PyObject *self, PyObject *ignored) {
    (void)ignored;
    const SlotValues *values = (SlotValues *)self;
    double best = INFINITY, second = INFINITY;
    Py_ssize_t slot = -1;
    for (Py_ssize_t n = 0; n < values->count; n++) {
        double value = values->at[n];
        if (value < second) {
            if (value < best) {
                second = best;
                best = value;
                slot = n;
            } else {
                second = value;
            }
        }
    }
    return Py_BuildValue("nd", slot, second);
}

static PyObject *values_count_up_to(PyObject *self, PyObject *object) {
    const SlotValues *values = (SlotValues *)self;
    double limit;
    Py_ssize_t found = 0;
    if (read_doubles(&object, 1, &limit)) return NULL;
    for (Py_ssize_t n = 0; n < values->count; n++) found += values->at[n] <= limit;
    return PyLong_FromSsize_t(found);
}

static PyObject *values_nth_up_to(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const SlotValues *values = (SlotValues *)self;
    double limit;
    if (wrong_count(count, 2) || read_doubles(arguments, 1, &limit)) return NULL;
    Py_ssize_t left = PyNumber_AsSsize_t(arguments[1], PyExc_IndexError);
    if (left == -1 && PyErr_Occurred()) return NULL;
    for (Py_ssize_t n = 0; left >= 0 && n < values->count; n++)
        if (values->at[n] <= limit && left-- == 0) return PyLong_FromSsize_t(n);
    return PyErr_SetString(PyExc_IndexError, "not so many slots"), NULL;
}

static PyObject *values_up_to(PyObject *self, PyObject *object) {
    const SlotValues *values = (SlotValues *)self;
    double limit;
    if (read_doubles(&object, 1, &limit)) return NULL;
    PyObject *slots = PyList_New(0);
    for (Py_ssize_t n = 0; slots && n < values->count; n++) {
        if (!(values->at[n] <= limit)) continue;
        PyObject *slot = PyLong_FromSsize_t(n);
        if (!slot || PyList_Append(slots, slot)) Py_CLEAR(slots);
        Py_XDECREF(slot);
    }
    return slots;
}

static PyObject *values_add_outside(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    SlotValues *values = (SlotValues *)self;
    Py_buffer bits;
    double added;
    if (wrong_count(count, 2) || read_doubles(arguments + 1, 1, &added)) return NULL;
    if (PyObject_GetBuffer(arguments[0], &bits, PyBUF_SIMPLE)) return NULL;
    const unsigned char *bytes = bits.buf;
    for (Py_ssize_t n = 0; n < values->count; n++)
        if (n >> 3 >= bits.len || !(bytes[n >> 3] >> (n & 7) & 1)) values->at[n] += added;
    PyBuffer_Release(&bits);
    Py_RETURN_NONE;
}

static PyObject *values_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *none[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "", none)) return NULL;
    return type->tp_alloc(type, 0);
}

static void values_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(((SlotValues *)self)->at);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef VALUES_METHODS[] = {
    {"append", values_append, METH_O, NULL},
    {"best_two", values_best_two, METH_NOARGS, NULL},
    {"count_up_to", values_count_up_to, METH_O, NULL},
    {"nth_up_to", (PyCFunction)(void (*)(void))values_nth_up_to, METH_FASTCALL, NULL},
    {"up_to", values_up_to, METH_O, NULL},
    {"add_outside", (PyCFunction)(void (*)(void))values_add_outside, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot VALUES_SLOTS[] = {
    {Py_tp_new, values_new},         {Py_tp_dealloc, values_dealloc},
    {Py_tp_methods, VALUES_METHODS}, {Py_mp_length, values_length},
    {Py_mp_subscript, values_get},   {Py_mp_ass_subscript, values_set},
    {0, NULL},
};

static PyType_Spec VALUES_SPEC = {
    "router.decide.replicas.column_scan.SlotValues", sizeof(SlotValues), 0, Py_TPFLAGS_DEFAULT, VALUES_SLOTS,
};

/* SlotColumns */

static PyObject *columns_append(PyObject *self, PyObject *ignored) {
    (void)ignored;
    SlotColumns *columns = (SlotColumns *)self;
    struct row empty = {0.0, 0.0, 0.0, NO_REPLICA};
    if (reserve((void **)&columns->rows, &columns->capacity, columns->count + 1, sizeof empty))
        return NULL;
    columns->rows[columns->count++] = empty;
    Py_RETURN_NONE;
}

static PyObject *columns_replace(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    SlotColumns *columns = (SlotColumns *)self;
    double given[4];
    if (wrong_count(count, 5)) return NULL;
    Py_ssize_t slot = slot_of(arguments[0], columns->count);
    if (slot < 0 || read_doubles(arguments + 1, 4, given)) return NULL;
    columns->rows[slot] = (struct row){given[0], given[1], given[2], given[3]};
    Py_RETURN_NONE;
}

static PyObject *columns_copy(PyObject *self, PyObject *ignored) {
    (void)ignored;
    const SlotColumns *columns = (SlotColumns *)self;
    PyTypeObject *type = Py_TYPE(self);
    SlotColumns *copy = (SlotColumns *)type->tp_alloc(type, 0);
    if (!copy || !columns->count) return (PyObject *)copy;
    size_t size = (size_t)columns->count * sizeof *columns->rows;
    copy->rows = PyMem_Malloc(size);
    if (!copy->rows) return Py_DECREF(copy), PyErr_NoMemory();
    memcpy(copy->rows, columns->rows, size);
    copy->count = copy->capacity = columns->count;
    return (PyObject *)copy;
}

static PyObject *columns_costs(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const SlotColumns *columns = (SlotColumns *)self;
    double given[3];
    if (wrong_count(count, 3) || read_doubles(arguments, 3, given)) return NULL;
    double now_ms = given[0], work = given[1], needed_tokens = given[2];
    SlotValues *costs = new_values(columns->count);
    for (Py_ssize_t n = 0; costs && n < columns->count; n++) {
        const struct row *row = &columns->rows[n];
        double wait_ms = row->ready_at_ms - now_ms;
        if (!(wait_ms > row->wait_min_ms)) wait_ms = row->wait_min_ms;
        double cost = work * row->ms_per_token + wait_ms;
        costs->at[n] = needed_tokens > row->free_tokens ? INFINITY : cost;
    }
    return (PyObject *)costs;
}

static PyObject *columns_save(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    const SlotColumns *columns = (SlotColumns *)self;
    Py_buffer bits;
    double saved;
    if (wrong_count(count, 3) || read_doubles(arguments + 2, 1, &saved)) return NULL;
    if (Py_TYPE(arguments[0]) != values_type)
        return PyErr_SetString(PyExc_TypeError, "expected the costs of slots"), NULL;
    SlotValues *costs = (SlotValues *)arguments[0];
    if (costs->count != columns->count)
        return PyErr_SetString(PyExc_ValueError, "as many costs as slots"), NULL;
    if (PyObject_GetBuffer(arguments[1], &bits, PyBUF_SIMPLE)) return NULL;
    const unsigned char *bytes = bits.buf;
    Py_ssize_t bytes_max = (columns->count + 7) >> 3;
    for (Py_ssize_t at = 0; at < bits.len && at < bytes_max; at++)
        for (unsigned byte = bytes[at]; byte; byte &= byte - 1) {
            Py_ssize_t slot = 8 * at + __builtin_ctz(byte);
            if (slot < columns->count)
                costs->at[slot] -= saved * columns->rows[slot].ms_per_token;
        }
    PyBuffer_Release(&bits);
    Py_RETURN_NONE;
}

static Py_ssize_t columns_length(PyObject *self) { return ((SlotColumns *)self)->count; }

static void columns_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(((SlotColumns *)self)->rows);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef COLUMNS_METHODS[] = {
    {"append", columns_append, METH_NOARGS, NULL},
    {"replace", (PyCFunction)(void (*)(void))columns_replace, METH_FASTCALL, NULL},
    {"copy", columns_copy, METH_NOARGS, NULL},
    {"costs", (PyCFunction)(void (*)(void))columns_costs, METH_FASTCALL, NULL},
    {"save", (PyCFunction)(void (*)(void))columns_save, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot COLUMNS_SLOTS[] = {
    {Py_tp_new, values_new},          {Py_tp_dealloc, columns_dealloc},
    {Py_tp_methods, COLUMNS_METHODS}, {Py_sq_length, columns_length},
    {0, NULL},
};

static PyType_Spec COLUMNS_SPEC = {
    "router.decide.replicas.column_scan.SlotColumns", sizeof(SlotColumns), 0, Py_TPFLAGS_DEFAULT,
    COLUMNS_SLOTS,
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.decide.replicas.column_scan", NULL, 0, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_column_scan(void) {
    PyObject *module = PyModule_Create(&MODULE);
    PyObject *values = module ? PyType_FromSpec(&VALUES_SPEC) : NULL;
    PyObject *columns = values ? PyType_FromSpec(&COLUMNS_SPEC) : NULL;
    if (!columns || PyModule_AddObjectRef(module, "SlotValues", values) < 0 ||
        PyModule_AddObjectRef(module, "SlotColumns", columns) < 0) {
        Py_XDECREF(values);
        Py_XDECREF(columns);
        Py_XDECREF(module);
        return NULL;
    }
    values_type = (PyTypeObject *)values;
    Py_DECREF(columns);
    return module;
}
