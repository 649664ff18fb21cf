/* Where base64 ends, 32 bytes at a time. */
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef unsigned char letters16 __attribute__((vector_size(16)));

/* Returns a bit for each of 16 bytes that is no letter of base64. */
static uint32_t not_base64(const unsigned char *at) {
    letters16 block;
    memcpy(&block, at, sizeof block);
    /* The slash is the byte before the digits. */
    letters16 letters = (letters16)((block | 0x20) - 'a' < 26) | (letters16)(block - '/' < 11) |
                        (letters16)(block == '+');
#ifdef __SSE2__
    return 0xffff ^ (uint32_t)_mm_movemask_epi8((__m128i)letters);
#else
    uint32_t bits = 0;
    for (int n = 0; n < 16; n++) bits |= (uint32_t)(~letters[n] & 1) << n;
    return bits;
#endif
}

/* Returns where a run of base64's letters that begins at `at`, with its padding, ends. */
static const unsigned char *base64_end(const unsigned char *at, const unsigned char *end) {
    for (; end - at >= 32; at += 32) {
        uint32_t other = not_base64(at) | not_base64(at + 16) << 16;
        if (!other) continue;
        at += __builtin_ctz(other);
        goto padding;
    }
    unsigned char last[32] = {0};
    memcpy(last, at, (size_t)(end - at));
    /* A zero is no letter, so what is behind the last byte ends the run. */
    at += __builtin_ctzll(not_base64(last) | (uint64_t)not_base64(last + 16) << 16 | 1ULL << 32);
padding:
    for (int n = 0; n < 2 && at < end && *at == '='; n++) at++;
    return at;
}
