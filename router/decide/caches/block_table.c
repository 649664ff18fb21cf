/* The blocks of one simulated prefix cache, for router/decide/caches/cached_blocks.py, which has the same
 * in Python and says what it means. What is evicted, and when, is decided in prefix_index.py.
 *
 * A hash table of key to entry, with linear probing, and a list of the entries in the order of
 * their last use. A salt of this process decides where a key goes, so nobody outside can choose
 * keys that collide in the table.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

enum { NONE = -1, ENTRIES_MIN = 32, ENTRIES_MAX = 1 << 28 };

static uint64_t salt;
static PyObject *sent_at_s; /* the name of an attribute */

struct entry {
    uint64_t key;
    long long used_at_inserted;
    PyObject *use;
    long long size;
    int32_t older, newer;
};

typedef struct {
    PyObject_HEAD
    struct entry *entries; /* `capacity` of them; those not in use are a list by `newer` */
    int32_t *places;       /* twice as many: the entry at each place of the table, or NONE */
    int32_t capacity, count, oldest, newest, unused;
    unsigned shift;
    long long inserted, size;
} BlockTable;

static uint32_t home_of(const BlockTable *table, uint64_t key) {
    return (uint32_t)(key * salt >> table->shift);
}

static uint32_t place_of(const BlockTable *table, uint64_t key) {
    uint32_t last = 2 * (uint32_t)table->capacity - 1, place = home_of(table, key);
    while (table->places[place] != NONE && table->entries[table->places[place]].key != key)
        place = (place + 1) & last;
    return place;
}

static int32_t find(const BlockTable *table, uint64_t key) {
    return table->capacity ? table->places[place_of(table, key)] : NONE;
}

static int grow(BlockTable *table) {
    if (table->capacity >= ENTRIES_MAX) return PyErr_NoMemory(), -1;
    int32_t before = table->capacity, capacity = before ? 2 * before : ENTRIES_MIN;
    struct entry *entries = PyMem_Realloc(table->entries, (size_t)capacity * sizeof *entries);
    if (!entries) return PyErr_NoMemory(), -1;
    table->entries = entries;
    int32_t *places = PyMem_Realloc(table->places, 2 * (size_t)capacity * sizeof *places);
    if (!places) return PyErr_NoMemory(), -1;
    table->places = places;
    table->capacity = capacity;
    table->shift = 64 - (unsigned)__builtin_ctz(2 * (unsigned)capacity);
    for (int32_t n = before; n < capacity; n++) entries[n].newer = n + 1 < capacity ? n + 1 : NONE;
    table->unused = before;
    memset(places, 0xff, 2 * (size_t)capacity * sizeof *places);
    for (int32_t n = table->oldest; n != NONE; n = entries[n].newer)
        places[place_of(table, entries[n].key)] = n;
    return 0;
}

static void unlink_entry(BlockTable *table, const struct entry *entry) {
    if (entry->older == NONE)
        table->oldest = entry->newer;
    else
        table->entries[entry->older].newer = entry->newer;
    if (entry->newer == NONE)
        table->newest = entry->older;
    else
        table->entries[entry->newer].older = entry->older;
}

static void link_newest(BlockTable *table, int32_t number) {
    struct entry *entry = &table->entries[number];
    entry->older = table->newest;
    entry->newer = NONE;
    if (table->newest == NONE)
        table->oldest = number;
    else
        table->entries[table->newest].newer = number;
    table->newest = number;
}

static void vacate(BlockTable *table, uint32_t place) {
    uint32_t last = 2 * (uint32_t)table->capacity - 1;
    uint32_t next = (place + 1) & last;
    for (; table->places[next] != NONE; next = (next + 1) & last) {
        uint32_t home = home_of(table, table->entries[table->places[next]].key);
        /* Only what would still be found there may move into the gap. */
        if (((next - home) & last) < ((next - place) & last)) continue;
        table->places[place] = table->places[next];
        place = next;
    }
    table->places[place] = NONE;
}

static int32_t insert(BlockTable *table, uint64_t key, long long size) {
    if (table->unused == NONE && grow(table)) return NONE;
    int32_t number = table->unused;
    struct entry *entry = &table->entries[number];
    table->unused = entry->newer;
    entry->key = key;
    entry->size = size;
    entry->use = NULL;
    table->places[place_of(table, key)] = number;
    table->count++;
    table->size += size;
    table->inserted += size;
    return number;
}

static int read_key(PyObject *object, uint64_t *key) {
    *key = PyLong_AsUnsignedLongLong(object);
    return *key == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Returns the entry of a key, or NONE with KeyError. */
static int32_t entry_of(BlockTable *table, PyObject *object) {
    uint64_t key;
    if (read_key(object, &key)) return NONE;
    int32_t number = find(table, key);
    if (number == NONE) PyErr_SetObject(PyExc_KeyError, object);
    return number;
}

static PyObject *key_at(const BlockTable *table, int32_t number) {
    if (number == NONE) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(table->entries[number].key);
}

/* The keys of a prompt: integers in a list or tuple, or a buffer with eight bytes for each. */
struct keys {
    PyObject *list;
    Py_buffer buffer;
    Py_ssize_t count;
};

static int is_sequence(PyObject *object) { return PyList_Check(object) || PyTuple_Check(object); }

static int open_keys(PyObject *object, struct keys *keys) {
    keys->list = is_sequence(object) ? object : NULL;
    if (keys->list) return keys->count = PySequence_Fast_GET_SIZE(object), 0;
    if (PyObject_GetBuffer(object, &keys->buffer, PyBUF_SIMPLE)) return -1;
    keys->count = keys->buffer.len / (Py_ssize_t)sizeof(uint64_t);
    return 0;
}

static void close_keys(struct keys *keys) {
    if (!keys->list) PyBuffer_Release(&keys->buffer);
}

/* Returns item `n` of a list, which other code may have made shorter; NULL with an error. */
static PyObject *item_at(PyObject *list, Py_ssize_t n) {
    if (n < PySequence_Fast_GET_SIZE(list)) return PySequence_Fast_GET_ITEM(list, n);
    return PyErr_SetString(PyExc_ValueError, "the list became shorter"), NULL;
}

static int get_key(const struct keys *keys, Py_ssize_t n, uint64_t *key) {
    if (!keys->list) {
        memcpy(key, (const char *)keys->buffer.buf + n * (Py_ssize_t)sizeof *key, sizeof *key);
        return 0;
    }
    PyObject *item = item_at(keys->list, n);
    return item ? read_key(item, key) : -1;
}

/* Inserts block `n` of a prompt, appending its key to `added`; returns its entry, or NONE. */
static int32_t add_block(
    BlockTable *table, uint64_t key, PyObject *ends, Py_ssize_t n, PyObject *added) {
    PyObject *last = item_at(ends, n), *before = n ? item_at(ends, n - 1) : NULL;
    if (!last || (n && !before)) return NONE;
    long long end = PyLong_AsLongLong(last), begin = before ? PyLong_AsLongLong(before) : 0;
    PyObject *object = PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(key);
    int failed = !object || PyList_Append(added, object);
    Py_XDECREF(object);
    return failed ? NONE : insert(table, key, end - begin);
}

/* Uses the blocks of a prompt, the last one first. `deepest` is set to the last of those that were
 * held, and `since_use` to how much was inserted since that was used. */
static int use_blocks(
    BlockTable *table, const struct keys *keys, PyObject *ends, PyObject *new_use, PyObject *added,
    Py_ssize_t *deepest, long long *since_use) {
    long long inserted_before = table->inserted;
    for (Py_ssize_t n = keys->count - 1; n >= 0; n--) {
        uint64_t key;
        if (get_key(keys, n, &key)) return -1;
        int32_t number = find(table, key);
        if (number == NONE) {
            number = add_block(table, key, ends, n, added);
            if (number == NONE) return -1;
        } else {
            /* A block that a prompt has twice was not held before. */
            if (*deepest < 0 && table->entries[number].use != new_use) {
                *deepest = n;
                *since_use = inserted_before - table->entries[number].used_at_inserted;
            }
            unlink_entry(table, &table->entries[number]);
        }
        link_newest(table, number);
        struct entry *entry = &table->entries[number];
        PyObject *earlier = entry->use;
        entry->used_at_inserted = table->inserted;
        Py_INCREF(new_use);
        entry->use = new_use;
        /* Last, because it may run any code. */
        Py_XDECREF(earlier);
    }
    return 0;
}

static PyObject *use(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3 || !is_sequence(arguments[1]))
        return PyErr_SetString(PyExc_TypeError, "expected keys, a list and a use"), NULL;
    struct keys keys;
    if (open_keys(arguments[0], &keys)) return NULL;
    PyObject *added = PyList_New(0), *result = NULL;
    Py_ssize_t deepest = -1;
    long long since_use = 0;
    if (PySequence_Fast_GET_SIZE(arguments[1]) != keys.count)
        PyErr_SetString(PyExc_ValueError, "as many ends as keys");
    else if (added && !use_blocks((BlockTable *)self, &keys, arguments[1], arguments[2], added,
                                  &deepest, &since_use))
        result = Py_BuildValue("OnL", added, deepest, since_use);
    Py_XDECREF(added);
    close_keys(&keys);
    return result;
}

static PyObject *oldest_use(PyObject *self, PyObject *ignored) {
    (void)ignored;
    const BlockTable *table = (BlockTable *)self;
    if (table->oldest == NONE) Py_RETURN_NONE;
    PyObject *found = table->entries[table->oldest].use;
    Py_INCREF(found);
    return found;
}

static PyObject *use_of(PyObject *self, PyObject *key) {
    int32_t number = entry_of((BlockTable *)self, key);
    if (number == NONE) return NULL;
    PyObject *found = ((BlockTable *)self)->entries[number].use;
    Py_INCREF(found);
    return found;
}

static PyObject *oldest(PyObject *self, PyObject *ignored) {
    (void)ignored;
    return key_at((BlockTable *)self, ((BlockTable *)self)->oldest);
}

static PyObject *sent_before(PyObject *self, PyObject *time) {
    BlockTable *table = (BlockTable *)self;
    double time_s = PyFloat_AsDouble(time);
    if (time_s == -1.0 && PyErr_Occurred()) return NULL;
    PyObject *keys = PyList_New(0);
    for (int32_t n = table->oldest; keys && n != NONE; n = table->entries[n].newer) {
        PyObject *sent = PyObject_GetAttr(table->entries[n].use, sent_at_s);
        double sent_s = sent ? PyFloat_AsDouble(sent) : -1.0;
        Py_XDECREF(sent);
        if (sent_s >= time_s) return keys;
        PyObject *key = PyErr_Occurred() ? NULL : key_at(table, n);
        if (!key || PyList_Append(keys, key)) Py_CLEAR(keys);
        Py_XDECREF(key);
    }
    return keys;
}

static PyObject *remove_block(PyObject *self, PyObject *object) {
    BlockTable *table = (BlockTable *)self;
    int32_t number = entry_of(table, object);
    if (number == NONE) return NULL;
    struct entry *entry = &table->entries[number];
    vacate(table, place_of(table, entry->key));
    unlink_entry(table, entry);
    PyObject *earlier = entry->use;
    table->size -= entry->size;
    table->count--;
    entry->newer = table->unused;
    table->unused = number;
    Py_DECREF(earlier);
    Py_RETURN_NONE;
}

static PyObject *oldest_first(PyObject *self, PyObject *ignored) {
    (void)ignored;
    BlockTable *table = (BlockTable *)self;
    PyObject *keys = PyList_New(table->count);
    Py_ssize_t at = 0;
    for (int32_t n = table->oldest; keys && n != NONE; n = table->entries[n].newer) {
        PyObject *key = key_at(table, n);
        if (!key) return Py_DECREF(keys), NULL;
        PyList_SET_ITEM(keys, at++, key);
    }
    return keys;
}

static Py_ssize_t length(PyObject *self) { return ((BlockTable *)self)->count; }

static int contains(PyObject *self, PyObject *object) {
    uint64_t key;
    return read_key(object, &key) ? -1 : find((BlockTable *)self, key) != NONE;
}

static PyObject *new_table(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *none[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "", none)) return NULL;
    BlockTable *table = (BlockTable *)type->tp_alloc(type, 0);
    if (table) table->oldest = table->newest = table->unused = NONE;
    return (PyObject *)table;
}

static void dealloc(PyObject *self) {
    BlockTable *table = (BlockTable *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (int32_t n = table->oldest; n != NONE; n = table->entries[n].newer)
        Py_DECREF(table->entries[n].use);
    PyMem_Free(table->entries);
    PyMem_Free(table->places);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"use", (PyCFunction)(void (*)(void))use, METH_FASTCALL, NULL},
    {"oldest_use", oldest_use, METH_NOARGS, NULL},
    {"use_of", use_of, METH_O, NULL},
    {"oldest", oldest, METH_NOARGS, NULL},
    {"sent_before", sent_before, METH_O, NULL},
    {"remove", remove_block, METH_O, NULL},
    {"oldest_first", oldest_first, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef MEMBERS[] = {
    {"inserted", T_LONGLONG, offsetof(BlockTable, inserted), READONLY, NULL},
    {"size", T_LONGLONG, offsetof(BlockTable, size), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, new_table},     {Py_tp_dealloc, dealloc},   {Py_tp_methods, METHODS},
    {Py_tp_members, MEMBERS},   {Py_sq_length, length},     {Py_sq_contains, contains},
    {0, NULL},
};

static PyType_Spec SPEC = {
    "router.decide.caches.block_table.BlockTable", sizeof(BlockTable), 0, Py_TPFLAGS_DEFAULT, SLOTS,
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.decide.caches.block_table", NULL, 0, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_block_table(void) {
    PyObject *module = PyModule_Create(&MODULE);
    PyObject *type = module ? PyType_FromSpec(&SPEC) : NULL;
    /* Python hashes text with a key of this process. */
    PyObject *text = PyUnicode_FromString("the salt of the block tables");
    salt = text ? (uint64_t)PyObject_Hash(text) | 1 : 1;
    Py_XDECREF(text);
    sent_at_s = PyUnicode_InternFromString("sent_at_s");
    if (!type || !text || !sent_at_s || PyModule_AddObject(module, "BlockTable", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
