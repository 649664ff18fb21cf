/* Shared by all C kernels: vectors of 16 numbers, 2^x, rounding to groups, the exported functions.
 *
 * Rule 1: every function takes contiguous fp32 rows, writes to the given output, and keeps no
 * state.
 *
 * Rule 2: the code is written for AVX-512 with VNNI; `build.py` builds it for no other processor.
 *
 * Rule 3: all work for other threads is given to them by `parallel_for`.
 */

#ifndef KERNELS_H
#define KERNELS_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define LINE 64
#define GROUP 32    /* neighbouring weights of a row that share a scale */
#define PANEL LANES /* rows of a matrix that are stored interleaved */
/* The largest number of a rounded group, for products by weights of up to 8 bits, and of 16
 * bits: the sum of 32 products of two such numbers fits into 32 bits. */
#define ROUNDED_MAX INT16_MAX
#define ROUNDED_MAX_BY_16_BITS 8191
#define LOG2_E 1.44269504f
/* Work of this many numbers: done before another thread has started; short; long. */
#define SMALL 16384
#define MEDIUM (4 * 1024 * 1024)
#define LARGE (64 * 1024 * 1024)
#define INLINED static inline __attribute__((always_inline))

/* A vector of 16 fp32 numbers at any address. */
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef int32_t indices __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINED lanes where(indices mask, lanes x, lanes other) {
    return (lanes)((mask & (indices)x) | (~mask & (indices)other));
}

/* Round a product before it is used: otherwise the compiler fuses it with a later sum in one
 * place and not in another, and results differ in the last bit. */
#define ROUND_HERE(x) __asm__("" : "+v"(x))

/* How float weights are stored. */
enum kind { FP16, BF16, FP32 };

INLINED int64_t bytes_of(const enum kind kind) { return kind == FP32 ? 4 : 2; }

INLINED lanes load_fp32(const enum kind kind, const uint8_t *at) {
    if (kind == FP32) return (lanes)_mm512_loadu_ps(at);
    __m256i bits = _mm256_loadu_si256((const __m256i *)at);
    if (kind == BF16) return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    return (lanes)_mm512_cvtph_ps(bits);
}

/* Combine the halves of each run of `2 * apart` lanes of two vectors: the first halves of both,
 * or the second. One step of a transposition. */
INLINED lanes halves(lanes one, lanes other, const int apart, const int second) {
    indices from;
    for (int at = 0; at < LANES; at++)
        if (second)
            from[at] = at & apart ? LANES + at : at + apart;
        else
            from[at] = at & apart ? LANES + at - apart : at;
    return (lanes)_mm512_permutex2var_ps((__m512)one, (__m512i)from, (__m512)other);
}

/* Transpose 16 vectors in place. */
INLINED void transpose(lanes x[LANES]) {
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

/* A group of 32 numbers rounded to integers of at most `max`, and their scale. */
struct rounded {
    __m512i first, second;
    float scale;
};

INLINED struct rounded round_to_integers(lanes first, lanes second, float max) {
    __m512 one = (__m512)first, other = (__m512)second;
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(one), _mm512_abs_ps(other)));
    /* The maximum ignores NaN; the scale, and with it the product, must not. */
    int is_finite = !(_mm512_cmp_ps_mask(one, one, _CMP_UNORD_Q) |
                      _mm512_cmp_ps_mask(other, other, _CMP_UNORD_Q));
    __m512 inverse = _mm512_set1_ps(largest > 0 ? max / largest : 0);
    return (struct rounded){.first = _mm512_cvtps_epi32(_mm512_mul_ps(one, inverse)),
                            .second = _mm512_cvtps_epi32(_mm512_mul_ps(other, inverse)),
                            .scale = is_finite ? largest / max : NAN};
}

/* 2^x with a relative error of 2e-7 where x is below 128, and 0 where it is below -126. NaN
 * stays NaN. Written for whole vectors: compilers turn a loop over single numbers into branches,
 * which take many times as long. */
INLINED lanes power_of_two(lanes x) {
    const lanes min = (lanes){0} - 126.0f, rounding = (lanes){0} + 12582912.0f;
    x = (lanes)_mm512_max_ps((__m512)min, (__m512)x);
    /* Adding 1.5 * 2^23 rounds to an integer, which is in the last bits of the sum. */
    lanes sum = x + rounding, rest = x - (sum - rounding);
    lanes polynomial = 1.3390863364533504e-3f * rest + 9.676031918326564e-3f;
    polynomial = polynomial * rest + 5.550357114219461e-2f;
    polynomial = polynomial * rest + 2.4022107485308208e-1f;
    polynomial = polynomial * rest + 6.931471880262287e-1f;
    polynomial = polynomial * rest + 1.0000000754548972f;
    return (lanes)_mm512_scalef_ps((__m512)polynomial, (__m512)(sum - rounding));
}

/* Processes items [from, to). */
typedef void work(const void *arguments, int64_t from, int64_t to);

/* Process `count` items on `threads`, in at most `portions` portions. */
void parallel_for(work *work, const void *arguments, int64_t count, int64_t portions,
                  int64_t threads);
/* Call `lead`, whose calls of `parallel_for` run on a team of threads that stay awake. */
void with_team(int64_t threads, void (*lead)(void *), void *arguments);

/* Return the portions for uniform work on `numbers` numbers. Long work has more of them, so that
 * the last thread delays the others by one portion at most. But weights that are read once are
 * read faster in long runs: in two portions a third faster than in eight. */
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
void rotate(float *x, int64_t stride, int64_t heads, int64_t dim, const float *cos,
            const float *sin, int64_t rows, int64_t threads);
void store_kv(const float *mixed, int64_t rows, int64_t heads, const int64_t *slots, void *pages,
              int64_t kv_heads, int64_t dim, int64_t form);
void attend(const float *mixed, int64_t heads, const void *slots, int64_t block_tokens,
            int64_t kv_heads, int64_t dim, int64_t form, const int64_t *tables, int64_t width,
            const int64_t *pieces, int64_t count, int64_t window, int64_t use_amx, int64_t threads,
            float *out);

/* Added to the kind of a matrix in groups of 4 or 8 bits: rows of x are rounded to bytes, not to
 * 16 bits. */
#define BY_BYTES 32

/* The bits of the numbers of a matrix in groups. */
INLINED int64_t bits_of(int64_t kind) { return kind % BY_BYTES; }

/* The size of one group of a panel. */
INLINED int64_t group_bytes(int64_t bits) { return GROUP * PANEL * bits / 8 + 4 * PANEL; }

int64_t panel_bytes(int64_t kind, int64_t columns);

int64_t multiply(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns, const float *x,
                 int64_t count, int64_t threads, float *out);
void multiply_floats(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                     const float *x, int64_t count, int64_t threads, float *out);
int64_t multiply_by_bytes(const uint8_t *packed, int64_t bits, int64_t rows, int64_t columns,
                          const float *x, int64_t count, int64_t threads, float *out);

#endif
