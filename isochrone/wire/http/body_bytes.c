/* The loops over the bytes of a request body, for isochrone/wire/http/body_loops.py, which has the same
 * in Python and says what they mean. Everything else about a body is decided in Python.
 *
 * The hash is XXH3 (64 bits, with a seed) of xxHash, Copyright Yann Collet, BSD 2-Clause, written
 * anew for the only lengths that occur: 128 bytes, and more than 240. Nothing here needs more of
 * a processor than the x86-64 of 2003 has, and other processors run it, too.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base64_letters.h"

enum { NOT_ASCII = 1, LONE_SURROGATE = 2, MANY_BRACKETS = 4, MANY_QUOTES = 8 };
enum { BRACKETS_FEW = 96, QUOTES_FEW = 400000 };
/* Four quotes may be counted in each byte of a vector so many times. */
enum { COUNTS_MAX = 63 };
enum { ESCAPE_BYTES = 2, SURROGATE_BYTES = 6 };

typedef unsigned char bytes16 __attribute__((vector_size(16)));

static int is_hex(unsigned char byte) {
    unsigned char letter = byte | 0x20;
    return (byte >= '0' && byte <= '9') || (letter >= 'a' && letter <= 'f');
}

/* Returns whether `\uD` is at `at`, and a digit behind it from `from` on that is up to `F`. */
static int is_surrogate(const unsigned char *at, const unsigned char *end, unsigned char from) {
    if (end - at < 4 || *at != '\\' || at[1] != 'u' || (at[2] | 0x20) != 'd') return 0;
    unsigned char digit = at[3] > '9' ? at[3] | 0x20 : at[3];
    return is_hex(digit) && digit >= from;
}

static int is_pair(const unsigned char *at, const unsigned char *end) {
    return end - at >= 2 * SURROGATE_BYTES && !is_surrogate(at, end, 'c') && is_hex(at[4]) &&
           is_hex(at[5]) && is_surrogate(at + SURROGATE_BYTES, end, 'c') &&
           is_hex(at[SURROGATE_BYTES + 4]) && is_hex(at[SURROGATE_BYTES + 5]);
}

struct found {
    int has_lone, brackets;
    /* Backslashes before this place belong to an escape that was looked at. */
    const unsigned char *next_escape;
};

static void look_at(const unsigned char *at, const unsigned char *end, struct found *found) {
    if ((*at | 0x20) == '{') {
        found->brackets += found->brackets <= BRACKETS_FEW;
    } else if (*at == '\\' && at >= found->next_escape) {
        found->next_escape = at + ESCAPE_BYTES;
        if (!is_surrogate(at, end, '8')) return;
        if (is_pair(at, end))
            found->next_escape = at + 2 * SURROGATE_BYTES;
        else
            found->has_lone = 1;
    }
}

/* Returns a bit for each of 16 bytes that is a bracket that opens, or a backslash. */
static uint64_t special_of(bytes16 block) {
    bytes16 special = (bytes16)((block | 0x20) == '{') | (bytes16)(block == '\\');
#ifdef __SSE2__
    return (uint64_t)_mm_movemask_epi8((__m128i)special);
#else
    uint64_t bits = 0;
    for (int n = 0; n < 16; n++) bits |= (uint64_t)(special[n] & 1) << n;
    return bits;
#endif
}

static Py_ssize_t sum_of(bytes16 counts) {
    Py_ssize_t sum = 0;
    for (int n = 0; n < 16; n++) sum += counts[n];
    return sum;
}

static int scan(const unsigned char *body, Py_ssize_t size) {
    const unsigned char *at = body, *end = body + size;
    struct found found = {0, 0, body};
    bytes16 high = {0}, counts = {0};
    Py_ssize_t quotes = 0;
    int counted = 0;
    for (; end - at >= 64; at += 64) {
        bytes16 block[4];
        memcpy(block, at, 64);
        high |= block[0] | block[1] | block[2] | block[3];
        /* A comparison is -1 where it holds. */
        counts -= (bytes16)((block[0] == '"') + (block[1] == '"') + (block[2] == '"') +
                            (block[3] == '"'));
        if (++counted == COUNTS_MAX) {
            quotes += sum_of(counts);
            counts = (bytes16){0};
            counted = 0;
        }
        uint64_t special = special_of(block[0]) | special_of(block[1]) << 16 |
                           special_of(block[2]) << 32 | special_of(block[3]) << 48;
        for (; special; special &= special - 1)
            look_at(at + __builtin_ctzll(special), end, &found);
    }
    unsigned char last_high = 0;
    for (; at < end; at++) {
        last_high |= *at;
        quotes += *at == '"';
        look_at(at, end, &found);
    }
    quotes += sum_of(counts);
    for (int n = 0; n < 16; n++) last_high |= high[n];
    return (last_high & 0x80 ? NOT_ASCII : 0) | (found.has_lone ? LONE_SURROGATE : 0) |
           (found.brackets > BRACKETS_FEW ? MANY_BRACKETS : 0) |
           (quotes > QUOTES_FEW ? MANY_QUOTES : 0);
}

static PyObject *scan_body(PyObject *module, PyObject *body) {
    (void)module;
    if (!PyBytes_Check(body)) return PyErr_SetString(PyExc_TypeError, "expected bytes"), NULL;
    const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(body);
    return PyLong_FromLong(scan(bytes, PyBytes_GET_SIZE(body)));
}

static PyObject *is_surely_base64(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyUnicode_Check(arguments[0]))
        return PyErr_SetString(PyExc_TypeError, "expected text and where the base64 begins"), NULL;
    Py_ssize_t begin = PyLong_AsSsize_t(arguments[1]);
    if (begin == -1 && PyErr_Occurred()) return NULL;
    if (!PyUnicode_IS_COMPACT_ASCII(arguments[0])) Py_RETURN_FALSE;
    const unsigned char *text = PyUnicode_DATA(arguments[0]);
    Py_ssize_t size = PyUnicode_GET_LENGTH(arguments[0]) - begin;
    if (begin < 0 || size <= 0 || size % 4) Py_RETURN_FALSE;
    const unsigned char *at = text + begin, *end = at + size;
    return PyBool_FromLong(base64_end(at, end) == end);
}

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL

enum { SHORT_BYTES = 128, LONG_BYTES_MIN = 241, SECRET_BYTES = 192, STRIPE_BYTES = 64 };
enum { STRIPES_PER_BLOCK = (SECRET_BYTES - STRIPE_BYTES) / 8 };

static const unsigned char SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t read64(const unsigned char *at) {
    uint64_t value = 0;
    memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static uint64_t mul_fold(uint64_t one, uint64_t other) {
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9ULL;
    return hash ^ hash >> 32;
}

static uint64_t mix16(const unsigned char *at, const unsigned char *secret, uint64_t seed) {
    uint64_t low = read64(at) ^ (read64(secret) + seed);
    return mul_fold(low, read64(at + 8) ^ (read64(secret + 8) - seed));
}

static uint64_t hash_short(const unsigned char *at, uint64_t seed) {
    uint64_t hash = SHORT_BYTES * PRIME64_1;
    for (int n = 3; n >= 0; n--) {
        hash += mix16(at + 16 * n, SECRET + 32 * n, seed);
        hash += mix16(at + SHORT_BYTES - 16 * (n + 1), SECRET + 32 * n + 16, seed);
    }
    return avalanche(hash);
}

static void accumulate(uint64_t *sums, const unsigned char *at, const uint64_t *secret) {
#ifdef __SSE2__
    for (int n = 0; n < 8; n += 2) {
        __m128i value = _mm_loadu_si128((const __m128i *)(at + 8 * n));
        __m128i mixed = _mm_xor_si128(value, _mm_loadu_si128((const __m128i *)(secret + n)));
        __m128i product = _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32));
        __m128i sum = _mm_loadu_si128((const __m128i *)(sums + n));
        sum = _mm_add_epi64(sum, _mm_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2)));
        _mm_storeu_si128((__m128i *)(sums + n), _mm_add_epi64(sum, product));
    }
#else
    for (int n = 0; n < 8; n++) {
        uint64_t value = read64(at + 8 * n), mixed = value ^ secret[n];
        sums[n ^ 1] += value;
        sums[n] += (uint32_t)mixed * (mixed >> 32);
    }
#endif
}

static uint64_t hash_long(const unsigned char *at, size_t size, uint64_t seed) {
    unsigned char secret[SECRET_BYTES];
    uint64_t keys[SECRET_BYTES / 8];
    for (int n = 0; n < SECRET_BYTES / 8; n++) {
        keys[n] = read64(SECRET + 8 * n) + (n % 2 ? -seed : seed);
        uint64_t stored = keys[n];
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        stored = __builtin_bswap64(stored);
#endif
        memcpy(secret + 8 * n, &stored, 8);
    }
    uint64_t sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                        PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    /* The last stripe is apart, so the stripes before it have one byte behind them. */
    size_t stripes = (size - 1) / STRIPE_BYTES;
    for (size_t n = 0; n < stripes; n++) {
        accumulate(sums, at + STRIPE_BYTES * n, keys + n % STRIPES_PER_BLOCK);
        if (n % STRIPES_PER_BLOCK != STRIPES_PER_BLOCK - 1) continue;
        for (int lane = 0; lane < 8; lane++) {
            sums[lane] ^= sums[lane] >> 47;
            sums[lane] = (sums[lane] ^ keys[STRIPES_PER_BLOCK + lane]) * PRIME32_1;
        }
    }
    uint64_t last[8];
    for (int n = 0; n < 8; n++) last[n] = read64(secret + SECRET_BYTES - STRIPE_BYTES - 7 + 8 * n);
    accumulate(sums, at + size - STRIPE_BYTES, last);
    uint64_t hash = size * PRIME64_1;
    for (int n = 0; n < 4; n++) {
        const unsigned char *pair = secret + 11 + 16 * n;
        hash += mul_fold(sums[2 * n] ^ read64(pair), sums[2 * n + 1] ^ read64(pair + 8));
    }
    return avalanche(hash);
}

/* The hashes of a prompt's blocks: a sequence of integers, and a buffer of eight bytes for each. */
typedef struct {
    PyObject_VAR_HEAD
    uint64_t numbers[];
} Hashes;

static PyTypeObject *hashes_type;

static PyObject *hash_at(PyObject *self, Py_ssize_t index) {
    if (index < 0 || index >= Py_SIZE(self))
        return PyErr_SetString(PyExc_IndexError, "no block has this index"), NULL;
    return PyLong_FromUnsignedLongLong(((Hashes *)self)->numbers[index]);
}

static Py_ssize_t hash_count(PyObject *self) { return Py_SIZE(self); }

static int get_buffer(PyObject *self, Py_buffer *view, int flags) {
    Py_ssize_t bytes = Py_SIZE(self) * (Py_ssize_t)sizeof(uint64_t);
    return PyBuffer_FillInfo(view, self, ((Hashes *)self)->numbers, bytes, 1, flags);
}

static void free_hashes(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot HASHES_SLOTS[] = {
    {Py_tp_dealloc, free_hashes}, {Py_sq_length, hash_count},      {Py_sq_item, hash_at},
    {Py_bf_getbuffer, get_buffer}, {0, NULL},
};

static PyType_Spec HASHES_SPEC = {
    "isochrone.wire.http.body_bytes.Hashes", offsetof(Hashes, numbers), sizeof(uint64_t),
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, HASHES_SLOTS,
};

static PyObject *chained_hashes(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !PyBytes_Check(arguments[0]))
        return PyErr_SetString(PyExc_TypeError, "expected bytes, ends of blocks, a seed"), NULL;
    const unsigned char *prompt = (const unsigned char *)PyBytes_AS_STRING(arguments[0]);
    uint64_t key = PyLong_AsUnsignedLongLong(arguments[2]);
    if (key == (uint64_t)-1 && PyErr_Occurred()) return NULL;
    PyObject *ends = PySequence_Fast(arguments[1], "the ends of blocks are a sequence");
    if (!ends) return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(arguments[0]), begin = 0;
    Py_ssize_t blocks = PySequence_Fast_GET_SIZE(ends);
    PyObject *hashes = hashes_type->tp_alloc(hashes_type, blocks);
    for (Py_ssize_t n = 0; hashes && n < blocks; n++) {
        Py_ssize_t end = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(ends, n)), block = end - begin;
        if (end > size || (block != SHORT_BYTES && block < LONG_BYTES_MIN)) {
            if (!PyErr_Occurred())
                PyErr_SetString(
                    PyExc_ValueError, "a block of a size that is not hashed, or too far");
            Py_CLEAR(hashes);
            break;
        }
        const unsigned char *at = prompt + begin;
        key = block == SHORT_BYTES ? hash_short(at, key) : hash_long(at, (size_t)block, key);
        ((Hashes *)hashes)->numbers[n] = key;
        begin = end;
    }
    Py_DECREF(ends);
    return hashes;
}

static PyMethodDef METHODS[] = {
    {"scan_body", scan_body, METH_O, NULL},
    {"is_surely_base64", (PyCFunction)(void (*)(void))is_surely_base64, METH_FASTCALL, NULL},
    {"chained_hashes", (PyCFunction)(void (*)(void))chained_hashes, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "isochrone.wire.http.body_bytes", NULL, -1, METHODS, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_body_bytes(void) {
    if (!hashes_type) hashes_type = (PyTypeObject *)PyType_FromSpec(&HASHES_SPEC);
    return hashes_type ? PyModule_Create(&MODULE) : NULL;
}
