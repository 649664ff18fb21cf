/* The frames of a stream that stream_pump.c relays: what they look like, and taking one whole chunk of
 * them. Pure except for the memory of a stream's text.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    SIZE_DIGITS_MAX = 6,
    TEXT_CAPACITY_MIN = 256,
    TEXT_BYTES_MAX = 1 << 20, /* then the stream is given back, and its text with it */
    NONE = -1,
};

struct stream {
    int node_fd, client_fd; /* NONE: the slot is free */
    int next;               /* slot that is free, or given back */
    int is_watched, keeps_text;
    char *frame; /* what stands before the text, then what stands behind it */
    size_t before, behind;
    char *text; /* of all tokens, as it is written in JSON */
    size_t text_size, text_capacity;
    unsigned long long tokens;
    int64_t heard_ns;
    char *rest; /* of a stream that is given back: what is unread, then what is unsent */
    size_t unread, unsent;
};

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
    if (wanted > stream->text_capacity) {
        size_t capacity = 2 * wanted < TEXT_CAPACITY_MIN ? TEXT_CAPACITY_MIN : 2 * wanted;
        char *grown = realloc(stream->text, capacity);
        if (!grown) return -1;
        stream->text = grown;
        stream->text_capacity = capacity;
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
