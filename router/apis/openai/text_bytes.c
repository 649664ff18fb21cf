/* Takes the long texts and the images of a chat out of its body: see router/apis/openai/long_texts.py.
 *
 * A body is read as tokens only as far as needed to know which string is the text or the image of a
 * message. A text is checked and decoded here, the base64 of an image is checked; everything else is
 * copied as it is, for the decoder to check. Whatever is unusual is left to the decoder, mostly as a
 * whole: then the result is None.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "../../../isochrone/wire/http/base64_letters.h"

enum { LONG_BYTES = 128, TEXTS_MAX = 10000, IMAGES_MAX = 1000, URL_HEAD_BYTES = 64 };
enum { MESSAGES_DEPTH = 2, MESSAGE_DEPTH, PARTS_DEPTH, PART_DEPTH, IMAGE_DEPTH };
enum place { ELSEWHERE, IS_TEXT, IS_IMAGE };

typedef unsigned char bytes16 __attribute__((vector_size(16)));

struct bytes {
    const unsigned char *begin, *end;
};

struct reader {
    const unsigned char *at, *end;
    /* The body is copied to `skeleton` up to `copied`, except for what is taken out. */
    const unsigned char *begin, *copied;
    unsigned char *skeleton, *skeleton_at;
    unsigned char *texts, *texts_at;
    PyObject *text_ends, *images;
    /* The last string, and whether it is a key because of the colon that came last. */
    struct bytes string;
    int is_value, depth;
    /* Whether what is open at the depth of each is that. */
    int in_messages, in_message, in_parts, in_part, in_image;
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

/* Returns a bit for each of 64 bytes at which a run of plain text ends. */
static uint64_t specials_at(const unsigned char *at) {
    bytes16 block[4];
    memcpy(block, at, 64);
    return special_of(block[0]) | special_of(block[1]) << 16 | special_of(block[2]) << 32 |
           special_of(block[3]) << 48;
}

/* Returns where a run of plain text ends. */
static const unsigned char *skip_plain(const unsigned char *at, const unsigned char *end) {
    for (; end - at >= 64; at += 64) {
        uint64_t special = specials_at(at);
        if (special) return at + __builtin_ctzll(special);
    }
    while (at < end && !is_special(*at)) at++;
    return at;
}

/* Returns the number of four hexadecimal digits, -1 if there are no such digits. */
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
    while ((at = skip_plain(at, reader->end)) < reader->end && *at != '"')
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

/* Decodes text up to a byte that no text has, and returns that place; NULL for an invalid escape.
 * Up to 64 bytes more than the text are written. */
static const unsigned char *decode_text(const unsigned char *at, const unsigned char *end,
                                        unsigned char **text) {
    unsigned char *to = *text;
    while (at && end - at >= 128) {
        uint64_t special = specials_at(at);
        Py_ssize_t left = 64;
        while (at && left > 0) {
            /* At most 64 bytes into these 128. */
            memcpy(to, at, 64);
            Py_ssize_t plain = special ? __builtin_ctzll(special) : left;
            at += plain;
            to += plain;
            left -= plain;
            if (!special) break;
            if (*at != '\\') return *text = to, at;
            const unsigned char *next = decode_escape(at, end, &to);
            Py_ssize_t used = plain + (next ? next - at : 0);
            left -= used - plain;
            if (left > 0) special >>= used;
            at = next;
        }
    }
    while (at && at < end && (*at == '\\' || !is_special(*at))) {
        if (*at == '\\')
            at = decode_escape(at, end, &to);
        else
            *to++ = *at++;
    }
    return *text = to, at;
}

static int append_number(PyObject *list, Py_ssize_t number) {
    PyObject *object = PyLong_FromSsize_t(number);
    int failed = !object || PyList_Append(list, object);
    Py_XDECREF(object);
    return !failed;
}

/* Copies a number to the skeleton in place of what was read from `begin` on. */
static void put_number(struct reader *reader, const unsigned char *begin, Py_ssize_t number) {
    memcpy(reader->skeleton_at, reader->copied, (size_t)(begin - reader->copied));
    reader->skeleton_at += begin - reader->copied;
    /* The spaces keep the number apart from whatever wrongly stands beside it. */
    reader->skeleton_at += sprintf((char *)reader->skeleton_at, " %zd ", number);
    reader->copied = reader->at;
}

/* Takes the text at `at` out if it is long; returns 0 if it is not a valid string. */
static int read_text(struct reader *reader) {
    unsigned char *to = reader->texts_at;
    const unsigned char *begin = reader->at, *at = decode_text(begin + 1, reader->end, &to);
    if (!at || at == reader->end || *at != '"') return 0;
    reader->at = at + 1;
    if (at - begin < LONG_BYTES) return 1;
    Py_ssize_t number = PyList_GET_SIZE(reader->text_ends);
    if (number == TEXTS_MAX || !append_number(reader->text_ends, to - reader->texts)) return 0;
    put_number(reader, begin, number);
    reader->texts_at = to;
    return 1;
}

/* Takes the image at `at` out if all behind the comma is base64; returns 0 if the string does not
 * end. What is before the comma is checked in Python. */
static int read_image(struct reader *reader) {
    const unsigned char *begin = reader->at, *at = begin + 1;
    while (at < reader->end && at - begin < URL_HEAD_BYTES && *at != ',' && !is_special(*at)) at++;
    if (at == reader->end || *at != ',') return read_string(reader);
    const unsigned char *data = at + 1, *end = base64_end(data, reader->end);
    int is_image = end < reader->end && *end == '"' && end - begin >= LONG_BYTES;
    if (!is_image || (end - data) % 4) return read_string(reader);
    Py_ssize_t number = PyList_GET_SIZE(reader->images) / 2;
    if (number == IMAGES_MAX || !append_number(reader->images, begin + 1 - reader->begin) ||
        !append_number(reader->images, end - reader->begin))
        return 0;
    reader->at = end + 1;
    put_number(reader, begin, number);
    return 1;
}

/* Returns what the value at `at` is, if it is the value of a key. */
static enum place place_of(const struct reader *reader) {
    if (!reader->is_value) return ELSEWHERE;
    if (reader->depth == MESSAGE_DEPTH && reader->in_message)
        return is_string(reader, "content") ? IS_TEXT : ELSEWHERE;
    if (reader->depth == PART_DEPTH && reader->in_part) {
        if (is_string(reader, "text")) return IS_TEXT;
        return is_string(reader, "image_url") ? IS_IMAGE : ELSEWHERE;
    }
    if (reader->depth == IMAGE_DEPTH && reader->in_image && is_string(reader, "url"))
        return IS_IMAGE;
    return ELSEWHERE;
}

/* Notes what the bracket at `at` opens. */
static void open_bracket(struct reader *reader, enum place place) {
    int is_object = *reader->at == '{', is_array = !is_object;
    switch (++reader->depth) {
        case MESSAGES_DEPTH:
            reader->in_messages = is_array && reader->is_value && is_string(reader, "messages");
            break;
        case MESSAGE_DEPTH:
            reader->in_message = is_object && reader->in_messages;
            break;
        case PARTS_DEPTH:
            reader->in_parts = is_array && place == IS_TEXT;
            break;
        case PART_DEPTH:
            reader->in_part = is_object && reader->in_parts;
            break;
        case IMAGE_DEPTH:
            reader->in_image = is_object && place == IS_IMAGE;
    }
}

/* Reads the byte at `at`, or the string that begins there; returns 0 to give up. */
static int read_token(struct reader *reader) {
    enum place place = place_of(reader);
    unsigned char byte = *reader->at;
    switch (byte) {
        case ' ': case '\n': case '\r': case '\t':
            break;
        case '"':
            reader->is_value = 0;
            if (place == IS_TEXT) return read_text(reader);
            return place == IS_IMAGE ? read_image(reader) : read_string(reader);
        case ':':
            /* A key with an escape may be any key. */
            if (memchr(reader->string.begin, '\\',
                       (size_t)(reader->string.end - reader->string.begin)))
                return 0;
            reader->is_value = 1;
            break;
        case '{': case '[':
            open_bracket(reader, place);
            reader->is_value = 0;
            break;
        case '}': case ']':
            if (--reader->depth < 0) return 0;
            reader->is_value = 0;
            break;
        default:
            /* A number would not differ from those that stand for what is taken out. */
            if (place && (byte == '-' || (byte >= '0' && byte <= '9'))) return 0;
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
    return Py_BuildValue("y#OOO", reader->skeleton,
                         (Py_ssize_t)(reader->skeleton_at + rest - reader->skeleton), *texts,
                         reader->text_ends, reader->images);
}

static PyObject *without_long_texts(PyObject *module, PyObject *body) {
    (void)module;
    if (!PyBytes_Check(body)) return PyErr_SetString(PyExc_TypeError, "expected bytes"), NULL;
    size_t size = (size_t)PyBytes_GET_SIZE(body);
    unsigned char *skeleton = PyMem_Malloc(size + 64);
    PyObject *texts = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size + 64);
    PyObject *text_ends = PyList_New(0), *images = PyList_New(0), *result = NULL;
    if (!skeleton) PyErr_NoMemory();
    if (texts && skeleton && text_ends && images) {
        unsigned char *texts_at = (unsigned char *)PyBytes_AS_STRING(texts);
        const unsigned char *begin = (const unsigned char *)PyBytes_AS_STRING(body);
        struct reader reader = {
            .at = begin, .end = begin + size, .begin = begin, .copied = begin,
            .skeleton = skeleton, .skeleton_at = skeleton, .texts = texts_at, .texts_at = texts_at,
            .text_ends = text_ends, .images = images,
            .string = {begin, begin},
        };
        while (reader.at < reader.end && read_token(&reader)) continue;
        if (reader.at == reader.end && reader.copied != begin) result = result_of(&reader, &texts);
    }
    Py_XDECREF(texts);
    PyMem_Free(skeleton);
    Py_XDECREF(text_ends);
    Py_XDECREF(images);
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
