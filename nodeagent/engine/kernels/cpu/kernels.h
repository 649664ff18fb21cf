/* What the files here share: sixteen numbers at once, and e^x.
 *
 * Rule 1: every function takes fp32 rows that lie one behind another, writes where it is told, and
 * keeps nothing.
 * Rule 2: they are written for AVX-512 with VNNI; `build.py` builds them for no other processor.
 * Rule 3: `threads` are OpenMP's, of the runtime that torch has loaded: one pool for both. Work is
 * given to them by `share` alone.
 */

#ifndef KERNELS_H
#define KERNELS_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define LINE 64
#define GROUP 32   /* neighbouring weights of a row with a scale in common */
#define TILE LANES /* rows of a matrix that lie together */
#define FINE INT16_MAX /* the largest of a rounded group, by weights of eight bits at most */
#define COARSE 8191    /* and by weights of 16: 32 products of two such fit into 32 bits */
#define LOG2_E 1.44269504f
/* So many numbers are done before another thread has begun; soon; and after long. */
#define SMALL 16384
#define MEDIUM (4 * 1024 * 1024)
#define LARGE (64 * 1024 * 1024)
#define INLINED static inline __attribute__((always_inline))

/* Sixteen numbers at once, wherever they lie. */
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef int32_t places __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINED lanes where(places wanted, lanes one, lanes other) {
    return (lanes)((wanted & (places)one) | (~wanted & (places)other));
}

/* Have a product rounded where it is made: else a compiler takes it and a later sum as one in one place,
 * and as two in another. */
#define ROUND_HERE(x) __asm__("" : "+v"(x))

/* How weights that are floats are stored. */
enum kind { FP16, BF16, FP32 };

INLINED int64_t bytes_of(const enum kind kind) { return kind == FP32 ? 4 : 2; }

INLINED lanes widened(const enum kind kind, const uint8_t *at) {
    if (kind == FP32) return (lanes)_mm512_loadu_ps(at);
    __m256i bits = _mm256_loadu_si256((const __m256i *)at);
    if (kind == BF16) return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    return (lanes)_mm512_cvtph_ps(bits);
}

/* Of two vectors, the halves of each run of `2 * apart` lanes: the first of both, or the second. */
INLINED lanes halves(lanes one, lanes other, const int apart, const int second) {
    places from;
    for (int at = 0; at < LANES; at++)
        if (second)
            from[at] = at & apart ? LANES + at : at + apart;
        else
            from[at] = at & apart ? LANES + at - apart : at;
    return (lanes)_mm512_permutex2var_ps((__m512)one, (__m512i)from, (__m512)other);
}

/* Sixteen vectors turned about: the first gets the first lane of each, and so on. */
INLINED void turn_about(lanes x[LANES]) {
#define ACROSS(apart)                                                                              \
    _Pragma("GCC unroll 16") for (int at = 0; at < LANES; at++) if (!(at & apart)) {               \
        lanes one = x[at], other = x[at + apart];                                                  \
        x[at] = halves(one, other, apart, 0);                                                      \
        x[at + apart] = halves(one, other, apart, 1);                                              \
    }
    ACROSS(1)
    ACROSS(2)
    ACROSS(4)
    ACROSS(8)
#undef ACROSS
}

/* A group of numbers rounded to whole ones, `most` at most, and what those are multiplied by. */
struct rounded {
    __m512i first, second;
    float scale;
};

INLINED struct rounded rounded(lanes first, lanes second, float most) {
    __m512 one = (__m512)first, other = (__m512)second;
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(one), _mm512_abs_ps(other)));
    /* The largest passes over what is no number; the scale, and so the answer, must not. */
    int sound = !(_mm512_cmp_ps_mask(one, one, _CMP_UNORD_Q) |
                  _mm512_cmp_ps_mask(other, other, _CMP_UNORD_Q));
    __m512 inverse = _mm512_set1_ps(largest > 0 ? most / largest : 0);
    return (struct rounded){.first = _mm512_cvtps_epi32(_mm512_mul_ps(one, inverse)),
                            .second = _mm512_cvtps_epi32(_mm512_mul_ps(other, inverse)),
                            .scale = sound ? largest / most : NAN};
}

/* 2^x to 2e-7 of itself where x is below 128, nought where it is below -126; what is no number stays
 * none. Written for sixteen at once: from a loop over single numbers compilers make branches, which
 * take many times as long. */
INLINED lanes power_of_two(lanes x) {
    const lanes least = (lanes){0} - 126.0f, rounding = (lanes){0} + 12582912.0f;
    x = (lanes)_mm512_max_ps((__m512)least, (__m512)x);
    /* Adding 1.5 * 2^23 leaves no bits below one: the sum's last bits are the whole number. */
    lanes sum = x + rounding, rest = x - (sum - rounding);
    lanes near = 1.3390863364533504e-3f * rest + 9.676031918326564e-3f;
    near = near * rest + 5.550357114219461e-2f;
    near = near * rest + 2.4022107485308208e-1f;
    near = near * rest + 6.931471880262287e-1f;
    near = near * rest + 1.0000000754548972f;
    return (lanes)_mm512_scalef_ps((__m512)near, (__m512)(sum - rounding));
}

/* Does items `from` to before `to` of what it was told. */
typedef void work(const void *told, int64_t from, int64_t to);

/* Have `count` items done by `threads`, in so many portions at most. */
void share(work *work, const void *told, int64_t count, int64_t portions, int64_t threads);
void with_team(int64_t threads, void (*lead)(void *), void *told);

/* Portions for work that is the same for each item, of so many `numbers` in all. Of long work there
 * are more, for the last to finish holds up the others by one at most; but whoever reads weights once
 * reads them faster the longer they lie in a row: a third faster in two portions than in eight. */
static inline int64_t portions_of(int64_t numbers, int64_t threads) {
    if (numbers <= SMALL) return 1;
    return (numbers <= MEDIUM ? 1 : numbers <= LARGE ? 4 : 32) * threads;
}

INLINED void add(float *x, const float *y, int64_t count) {
#pragma omp simd
    for (int64_t at = 0; at < count; at++) x[at] += y[at];
}

void rms_norm(float *x, const float *added, const float *weight, float epsilon, int64_t rows,
               int64_t columns, int64_t threads, float *out);
void silu_gate(const float *x, int64_t rows, int64_t columns, int64_t threads, float *out);
void rotate(float *x, int64_t stride, int64_t heads, int64_t dim, const float *cos, const float *sin,
          int64_t rows, int64_t threads);
void store_kv(const float *mixed, int64_t rows, int64_t heads, const int64_t *slots, float *pages,
          int64_t kv_heads, int64_t dim);
void attend(const float *mixed, int64_t heads, const float *slots, int64_t block_tokens,
            int64_t kv_heads, int64_t dim, const int64_t *tables, int64_t width,
            const int64_t *pieces, int64_t count, int64_t window, int64_t by_tiles, int64_t threads,
            float *out);

INLINED int64_t group_bytes(int64_t bits) { return GROUP * TILE * bits / 8 + 4 * TILE; }

int64_t panel_bytes(int64_t kind, int64_t columns);

int64_t multiply(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns, const float *x,
                 int64_t count, int64_t threads, float *out);
void multiply_floats(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                     const float *x, int64_t count, int64_t threads, float *out);

#endif
