/* Takes the long texts of a chat's messages out of its body: see router/apis/openai/long_texts.py.
 *
 * A body is read as tokens only as far as needed to know which string is the `content` of a
 * message. Such a string is checked and decoded here; everything else is copied as it is, for the
 * decoder to check. Whatever is unusual is left to the decoder as a whole: the result is None.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { LONG_BYTES = 128, TEXTS_MAX = 10000, MESSAGES_DEPTH = 2, MESSAGE_DEPTH = 3 };

typedef unsigned char bytes16 __attribute__((vector_size(16)));

struct bytes {
    const unsigned char *begin, *end;
};

struct reader {
    const unsigned char *at, *end;
    /* The body is copied to `skeleton` up to `copied`, but for the texts. */
    const unsigned char *copied;
    unsigned char *skeleton, *skeleton_at;
    unsigned char *texts, *texts_at;
    PyObject *text_ends;
    /* The last string, and whether it is a key because of the colon that came last. */
    struct bytes string;
    int is_value, depth, in_messages, in_message;
};

/* Returns a bit for each of 16 bytes at which a run of plain text ends: `"`, `\` and controls. */
static uint64_t special_of(bytes16 block) {
    bytes16 special =
        (bytes16)(block == '"') | (bytes16)(block == '\\') | (bytes16)(block < 0x20);
#ifdef __SSE2__
    return (uint64_t)_mm_movemask_epi8((__m128i)special);
#else
    uint64_t bits = 0;
    for (int n = 0; n < 16; n++) bits |= (uint64_t)(special[n] & 1) << n;
    return bits;
#endif
}

static int is_special(unsigned char byte) { return byte == '"' || byte == '\\' || byte < 0x20; }

/* Moves behind a run of plain text, copying it to `to` unless that is NULL. Up to 64 bytes more
 * than the run are written. */
static const unsigned char *skip_plain(const unsigned char *at, const unsigned char *end,
                                       unsigned char **to) {
    for (; end - at >= 64; at += 64) {
        bytes16 block[4];
        memcpy(block, at, 64);
        if (to) memcpy(*to, block, 64);
        uint64_t special = special_of(block[0]) | special_of(block[1]) << 16 |
                           special_of(block[2]) << 32 | special_of(block[3]) << 48;
        if (special) {
            int count = __builtin_ctzll(special);
            if (to) *to += count;
            return at + count;
        }
        if (to) *to += 64;
    }
    for (; at < end && !is_special(*at); at++)
        if (to) *(*to)++ = *at;
    return at;
}

/* Returns the number of four hexadecimal digits, -1 if that is not what is there. */
static int hex4(const unsigned char *at, const unsigned char *end) {
    if (end - at < 4) return -1;
    int number = 0;
    for (int n = 0; n < 4; n++) {
        unsigned char byte = at[n], letter = byte | 0x20;
        if (byte >= '0' && byte <= '9')
            number = number << 4 | (byte - '0');
        else if (letter >= 'a' && letter <= 'f')
            number = number << 4 | (letter - 'a' + 10);
        else
            return -1;
    }
    return number;
}

static unsigned char *put_utf8(unsigned char *to, uint32_t point) {
    if (point < 0x80) return *to++ = (unsigned char)point, to;
    int more = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    static const unsigned char heads[] = {0, 0xc0, 0xe0, 0xf0};
    *to++ = (unsigned char)(heads[more] | point >> 6 * more);
    while (more--) *to++ = (unsigned char)(0x80 | (point >> 6 * more & 0x3f));
    return to;
}

/* Decodes the escape at `at`; returns what follows it, NULL if it is invalid or half a pair. */
static const unsigned char *decode_escape(const unsigned char *at, const unsigned char *end,
                                          unsigned char **to) {
    static const unsigned char meant[256] = {
        ['"'] = '"',  ['\\'] = '\\', ['/'] = '/',  ['b'] = '\b',
        ['f'] = '\f', ['n'] = '\n',  ['r'] = '\r', ['t'] = '\t',
    };
    if (end - at < 2) return NULL;
    if (at[1] != 'u') {
        *(*to)++ = meant[at[1]];
        return meant[at[1]] ? at + 2 : NULL;
    }
    int point = hex4(at + 2, end);
    at += 6;
    if (point >= 0xd800 && point < 0xe000) {
        if (point >= 0xdc00 || end - at < 6 || at[0] != '\\' || at[1] != 'u') return NULL;
        int low = hex4(at + 2, end);
        if (low < 0xdc00 || low > 0xdfff) return NULL;
        point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
        at += 6;
    }
    if (point < 0) return NULL;
    *to = put_utf8(*to, (uint32_t)point);
    return at;
}

/* Reads the string at `at` without decoding it; returns 0 if it does not end. */
static int read_string(struct reader *reader) {
    const unsigned char *at = reader->string.begin = reader->at + 1;
    while ((at = skip_plain(at, reader->end, NULL)) < reader->end && *at != '"')
        at += *at == '\\' ? 2 : 1;
    if (at >= reader->end) return 0;
    reader->string.end = at;
    reader->at = at + 1;
    return 1;
}

static int is_string(const struct reader *reader, const char *expected) {
    size_t size = (size_t)(reader->string.end - reader->string.begin);
    return size == strlen(expected) && !memcmp(reader->string.begin, expected, size);
}

/* Takes the text at `at` out if it is long; returns 0 if it is not a valid string. */
static int read_text(struct reader *reader) {
    unsigned char *to = reader->texts_at;
    const unsigned char *begin = reader->at, *at = begin + 1;
    while ((at = skip_plain(at, reader->end, &to)) < reader->end && *at == '\\')
        if (!(at = decode_escape(at, reader->end, &to))) return 0;
    if (at >= reader->end || *at != '"') return 0;
    reader->at = at + 1;
    if (at - begin < LONG_BYTES) return 1;
    Py_ssize_t number = PyList_GET_SIZE(reader->text_ends);
    if (number == TEXTS_MAX) return 0;
    PyObject *text_end = PyLong_FromSsize_t(to - reader->texts);
    int failed = !text_end || PyList_Append(reader->text_ends, text_end);
    Py_XDECREF(text_end);
    if (failed) return 0;
    memcpy(reader->skeleton_at, reader->copied, (size_t)(begin - reader->copied));
    reader->skeleton_at += begin - reader->copied;
    /* The spaces keep the number apart from whatever wrongly stands beside it. */
    reader->skeleton_at += sprintf((char *)reader->skeleton_at, " %zd ", number);
    reader->copied = reader->at;
    reader->texts_at = to;
    return 1;
}

/* Reads the byte at `at`, or the string that begins there; returns 0 to give up. */
static int read_token(struct reader *reader) {
    int is_content = reader->is_value && reader->in_message && reader->depth == MESSAGE_DEPTH &&
                     is_string(reader, "content");
    unsigned char byte = *reader->at;
    switch (byte) {
        case ' ': case '\n': case '\r': case '\t':
            break;
        case '"':
            if (is_content ? !read_text(reader) : !read_string(reader)) return 0;
            reader->is_value = 0;
            return 1;
        case ':':
            /* A key with an escape may be any key. */
            if (memchr(reader->string.begin, '\\',
                       (size_t)(reader->string.end - reader->string.begin)))
                return 0;
            reader->is_value = 1;
            break;
        case '{': case '[':
            /* Parts of a message may be images: then most of the body is no text. */
            if (is_content && byte == '[') return 0;
            reader->depth++;
            if (reader->depth == MESSAGES_DEPTH)
                reader->in_messages =
                    byte == '[' && reader->is_value && is_string(reader, "messages");
            if (reader->depth == MESSAGE_DEPTH)
                reader->in_message = byte == '{' && reader->in_messages;
            reader->is_value = 0;
            break;
        case '}': case ']':
            if (--reader->depth < 0) return 0;
            reader->is_value = 0;
            break;
        default:
            /* A number would not differ from those that stand for texts. */
            if (is_content && (byte == '-' || (byte >= '0' && byte <= '9'))) return 0;
            reader->is_value = 0;
    }
    reader->at++;
    return 1;
}

/* Returns the result; `texts` is the object that the texts were written into. */
static PyObject *result_of(struct reader *reader, PyObject **texts) {
    size_t rest = (size_t)(reader->end - reader->copied);
    memcpy(reader->skeleton_at, reader->copied, rest);
    if (_PyBytes_Resize(texts, reader->texts_at - reader->texts)) return NULL;
    return Py_BuildValue("y#OO", reader->skeleton,
                         (Py_ssize_t)(reader->skeleton_at + rest - reader->skeleton), *texts,
                         reader->text_ends);
}

static PyObject *without_long_texts(PyObject *module, PyObject *body) {
    (void)module;
    if (!PyBytes_Check(body)) return PyErr_SetString(PyExc_TypeError, "expected bytes"), NULL;
    size_t size = (size_t)PyBytes_GET_SIZE(body);
    unsigned char *skeleton = PyMem_Malloc(size + 64);
    PyObject *texts = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size + 64);
    PyObject *text_ends = PyList_New(0), *result = NULL;
    if (!skeleton) PyErr_NoMemory();
    if (texts && skeleton && text_ends) {
        unsigned char *texts_at = (unsigned char *)PyBytes_AS_STRING(texts);
        const unsigned char *begin = (const unsigned char *)PyBytes_AS_STRING(body);
        struct reader reader = {
            .at = begin, .end = begin + size, .copied = begin, .skeleton = skeleton,
            .skeleton_at = skeleton, .texts = texts_at, .texts_at = texts_at,
            .text_ends = text_ends,
            .string = {begin, begin},
        };
        while (reader.at < reader.end && read_token(&reader)) continue;
        if (reader.at == reader.end && reader.copied != begin) result = result_of(&reader, &texts);
    }
    Py_XDECREF(texts);
    PyMem_Free(skeleton);
    Py_XDECREF(text_ends);
    if (!result && !PyErr_Occurred()) Py_RETURN_NONE;
    return result;
}

static PyMethodDef METHODS[] = {
    {"without_long_texts", without_long_texts, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "router.apis.openai.text_bytes", NULL, 0, METHODS,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_text_bytes(void) { return PyModule_Create(&MODULE); }
