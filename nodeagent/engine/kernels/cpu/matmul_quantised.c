/* Matrix products by quantised weights with AVX-512 VNNI; `packing.c` describes the layout of a
 * matrix.
 *
 * Rows of x are rounded to 16 bits with a scale for each group of 32. The error is 2^-16 of the
 * largest number of a group, far below that of the weights. For weights that are rounded to 14
 * bits, x is too, with an error of 2^-14. One VNNI instruction multiplies a pair of columns of
 * 16 rows: the two numbers of a line that are 16 bits apart.
 */

#include "amx.h"
#include "strips.h"

#include <stdlib.h>

#define PAIRS (GROUP / 2)

struct product {
    const uint8_t *packed;
    const float *x;
    float *out;
    /* The rounded rows of x: by strip, by group, by pair of columns in the order of the matrix,
     * by row of the strip. Scales and scaled sums: by strip, by group, by row. */
    int32_t *pairs;
    float *scales, *sums;
    int64_t bits, rows, groups, count;
};

/* Round the group at `x`, store its pairs `several` apart, and return the scale. */
static float round_group(const float *x, int64_t bits, int64_t several, int32_t *pairs,
                         float *sum) {
    struct rounded by = round_to_integers(*(const lanes *)x, *(const lanes *)(x + LANES),
                                          bits == 16 ? ROUNDED_MAX_BY_16_BITS : ROUNDED_MAX);
    *sum = by.scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(by.first, by.second));
    int32_t here[PAIRS];
    for (int half = 0; half < 2; half++) {
        __m256i four = _mm512_cvtsepi32_epi16(half ? by.second : by.first);
        /* Of four neighbours, pair the first with the third, and the second with the fourth. */
        four = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(four, 0xd8), 0xd8);
        _mm256_storeu_si256((__m256i *)(here + half * PAIRS / 2), four);
    }
    for (int64_t pair = 0; pair < PAIRS; pair++) {
        /* With four bits, the pair 16 columns further on is in the same bytes. */
        int64_t to = bits == 4 ? 2 * pair % PAIRS + 2 * pair / PAIRS : pair;
        pairs[to * several] = here[pair];
    }
    return by.scale;
}

static void round_rows(const void *arguments, int64_t row, int64_t end) {
    const struct product *by = arguments;
    for (; row < end; row++) {
        int64_t first = row / STRIP * STRIP, several = strip_of(first, by->count);
        for (int64_t group = 0; group < by->groups; group++) {
            int64_t to = first * by->groups + group * several + row - first;
            int64_t pairs = (first * by->groups + group * several) * PAIRS + row - first;
            const float *x = by->x + (row * by->groups + group) * GROUP;
            by->scales[to] = round_group(x, by->bits, several, by->pairs + pairs, by->sums + to);
        }
    }
}

/* Extract pair `shift` of columns of a line; unless `as_it_is`, it stays shifted: 16 or 256
 * times as large. */
INLINED __m512i pair_of(const int bits, const int shift, __m512i line, const int as_it_is) {
    const int mask = bits == 4 ? 0x000f000f : 0x00ff00ff;
    if (shift * bits + bits == 16) return _mm512_srli_epi16(line, shift * bits);
    if (!as_it_is) return _mm512_and_si512(line, _mm512_set1_epi32(mask << shift * bits));
    return _mm512_and_si512(_mm512_srli_epi32(line, shift * bits), _mm512_set1_epi32(mask));
}

/* One strip of `several` rows by one panel. */
INLINED void multiply_strip(const int several, const int bits, const uint8_t *panel, int64_t groups,
                            const int32_t *pairs, const float *scales, const float *sums,
                            float *out, int64_t out_stride) {
    /* With few rows each has several sums, so that none waits for itself. If there is one for
     * each pair of a line, shifted pairs are corrected once at the end. */
    const int shifts = 16 / bits;
    const int chains = several == 1 ? shifts : several == 2 && shifts > 1 ? 2 : 1;
    const int late = bits == 4 && chains == shifts;
    __m512 answers[STRIP];
#pragma GCC unroll 8
    for (int m = 0; m < several; m++) answers[m] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++, panel += group_bytes(bits)) {
        __m512i dots[STRIP];
#pragma GCC unroll 8
        for (int m = 0; m < several * chains; m++) dots[m] = _mm512_setzero_si512();
#pragma GCC unroll 17
        for (int at = 0; at < group_bytes(bits); at += LINE) __builtin_prefetch(panel + at + AHEAD);
#pragma GCC unroll 8
        for (int line = 0; line < PAIRS / shifts; line++) {
            __m512i numbers = _mm512_loadu_si512(panel + line * LINE);
#pragma GCC unroll 4
            for (int shift = 0; shift < shifts; shift++) {
                __m512i two = pair_of(bits, shift, numbers, !late);
                const int32_t *of_x = pairs + (line * shifts + shift) * several;
                int chain = shift % chains * several;
#pragma GCC unroll 8
                for (int m = 0; m < several; m++)
                    dots[chain + m] =
                        _mm512_dpwssd_epi32(dots[chain + m], two, _mm512_set1_epi32(of_x[m]));
            }
        }
        const __m256i *halves = (const __m256i *)(panel + GROUP * PANEL * bits / 8);
        __m512 scale =
            bits == 16 ? _mm512_loadu_ps(halves) : _mm512_cvtph_ps(_mm256_loadu_si256(halves));
        __m512 offset = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
#pragma GCC unroll 8
        for (int m = 0; m < several; m++) {
#pragma GCC unroll 4
            for (int chain = 1; chain < chains; chain++) {
                int large = late && chain < shifts - 1 ? chain * bits : 0;
                dots[m] =
                    _mm512_add_epi32(dots[m], _mm512_srai_epi32(dots[chain * several + m], large));
            }
            __m512 scaled = _mm512_mul_ps(scale, _mm512_set1_ps(scales[m]));
            answers[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[m]), scaled, answers[m]);
            if (bits < 16)
                answers[m] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[m]), answers[m]);
        }
        pairs += PAIRS * several;
        scales += several;
        sums += several;
    }
#pragma GCC unroll 8
    for (int m = 0; m < several; m++) _mm512_storeu_ps(out + m * out_stride, answers[m]);
}

INLINED void multiply_panel(const int bits, const struct product *by, int64_t panel) {
    const uint8_t *from = by->packed + panel * by->groups * group_bytes(bits);
    for (int64_t row = 0, several; row < by->count; row += several) {
        int64_t at = row * by->groups;
        float *out = by->out + row * by->rows + panel * PANEL;
        several = strip_of(row, by->count);
#define STRIP_OF(number)                                                                           \
    if (several == number)                                                                         \
        multiply_strip(number, bits, from, by->groups, by->pairs + at * PAIRS, by->scales + at,    \
                       by->sums + at, out, by->rows);
        EACH_STRIP(STRIP_OF)
#undef STRIP_OF
    }
}

static void multiply_panels(const void *arguments, int64_t panel, int64_t end) {
    const struct product *by = arguments;
    for (; panel < end; panel++)
        if (by->bits == 4)
            multiply_panel(4, by, panel);
        else if (by->bits == 8)
            multiply_panel(8, by, panel);
        else
            multiply_panel(16, by, panel);
}

/* Multiply rows of x by a matrix of any kind; return -1 if there is no memory for their rounded
 * copy. */
int64_t multiply(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns, const float *x,
                 int64_t count, int64_t threads, float *out) {
#ifdef WITH_AMX
    if (amx_allowed() && count >= many_rows(kind))
        return multiply_by_amx(packed, kind, rows, columns, x, count, threads, out);
#endif
    if (kind > BY_BYTES)
        return multiply_by_bytes(packed, bits_of(kind), rows, columns, x, count, threads, out);
    if (kind <= FP32) {
        multiply_floats(packed, kind, rows, columns, x, count, threads, out);
        return 0;
    }
    int64_t groups = columns / GROUP, all = count * groups;
    int32_t *pairs = aligned_alloc(LINE, (all * (PAIRS * 4 + 2 * 4) + LINE) / LINE * LINE);
    if (pairs == NULL) return -1;
    float *scales = (float *)(pairs + all * PAIRS);
    int64_t portions = portions_of(rows * columns * count, threads);
    const struct product arguments = {packed,       x,    out,  pairs,  scales,
                                      scales + all, kind, rows, groups, count};
    parallel_for(round_rows, &arguments, count, portions_of(count * columns, threads), threads);
    parallel_for(multiply_panels, &arguments, rows / PANEL, portions, threads);
    free(pairs);
    return 0;
}
