/* Matrix products by quantised weights, for a processor with AVX-512 VNNI; `packing.c` says how those
 * lie.
 *
 * Rows of x are rounded to 16 bits with a scale for each group of 32: the error is 2^-16 of a
 * group's largest, so that the product is that of the file's own weights. By weights that are rounded
 * themselves, to 14 bits, x is too: 2^-14. One multiplication takes a pair of columns of 16 rows: both
 * numbers of a line that are 16 bits apart.
 */

#include "amx.h"

#include <stdlib.h>

#define PAIRS (GROUP / 2)
#define STRIP 8 /* rows of x at a time: their sums and answers stay in registers */
#define AHEAD 2560 /* bytes that are on their way from memory while what is here is multiplied */

struct product {
    const uint8_t *packed;
    const float *x;
    float *out;
    /* The rows of x, rounded: strip by strip, in a strip group by group; of each group, pair by pair
     * as the matrix has them, what all rows of the strip have there. Scales, and scaled sums, likewise
     * one for each group. */
    int32_t *pairs;
    float *scales, *sums;
    int64_t bits, rows, groups, count;
};

/* How many rows the strip has that begins with the row `first`. */
INLINED int64_t strip_of(int64_t first, int64_t count) {
    return count - first < STRIP ? count - first : STRIP;
}

/* Round the group at `x`; put its pairs `several` apart and return their scale. */
static float round_group(const float *x, int64_t bits, int64_t several, int32_t *pairs,
                         float *sum) {
    struct rounded by =
        rounded(*(const lanes *)x, *(const lanes *)(x + LANES), bits == 16 ? COARSE : FINE);
    *sum = by.scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(by.first, by.second));
    int32_t here[PAIRS];
    for (int half = 0; half < 2; half++) {
        __m256i four = _mm512_cvtsepi32_epi16(half ? by.second : by.first);
        /* Of four neighbours, the first goes with the third, the second with the fourth. */
        four = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(four, 0xd8), 0xd8);
        _mm256_storeu_si256((__m256i *)(here + half * PAIRS / 2), four);
    }
    for (int64_t pair = 0; pair < PAIRS; pair++) {
        /* Where numbers have four bits, the pair 16 columns further on is in the same bytes. */
        int64_t to = bits == 4 ? 2 * pair % PAIRS + 2 * pair / PAIRS : pair;
        pairs[to * several] = here[pair];
    }
    return by.scale;
}

static void round_rows(const void *told, int64_t row, int64_t end) {
    const struct product *by = told;
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

/* The next pair of columns of a line: 16 times, 256 times as large where it need not be as it is. */
INLINED __m512i pair_of(const int bits, const int shift, __m512i line, const int as_it_is) {
    const int mask = bits == 4 ? 0x000f000f : 0x00ff00ff;
    if (shift * bits + bits == 16) return _mm512_srli_epi16(line, shift * bits);
    if (!as_it_is) return _mm512_and_si512(line, _mm512_set1_epi32(mask << shift * bits));
    return _mm512_and_si512(_mm512_srli_epi32(line, shift * bits), _mm512_set1_epi32(mask));
}

/* One strip of `several` rows by one tile. */
INLINED void multiply_strip(const int several, const int bits, const uint8_t *tile, int64_t groups,
                            const int32_t *pairs, const float *scales, const float *sums,
                            float *out, int64_t out_stride) {
    /* Few rows have several sums each, for none to wait for itself. With one for each pair of a line,
     * what was left too large is put right at the end. */
    const int shifts = 16 / bits;
    const int chains = several == 1 ? shifts : several == 2 && shifts > 1 ? 2 : 1;
    const int late = bits == 4 && chains == shifts;
    __m512 answers[STRIP];
#pragma GCC unroll 8
    for (int m = 0; m < several; m++) answers[m] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++, tile += group_bytes(bits)) {
        __m512i dots[STRIP];
#pragma GCC unroll 8
        for (int m = 0; m < several * chains; m++) dots[m] = _mm512_setzero_si512();
#pragma GCC unroll 17
        for (int at = 0; at < group_bytes(bits); at += LINE) __builtin_prefetch(tile + at + AHEAD);
#pragma GCC unroll 8
        for (int line = 0; line < PAIRS / shifts; line++) {
            __m512i numbers = _mm512_loadu_si512(tile + line * LINE);
#pragma GCC unroll 4
            for (int shift = 0; shift < shifts; shift++) {
                __m512i two = pair_of(bits, shift, numbers, !late);
                const int32_t *of_x = pairs + (line * shifts + shift) * several;
                int chain = shift % chains * several;
#pragma GCC unroll 8
                for (int m = 0; m < several; m++)
                    dots[chain + m] = _mm512_dpwssd_epi32(dots[chain + m], two,
                                                          _mm512_set1_epi32(of_x[m]));
            }
        }
        const __m256i *halves = (const __m256i *)(tile + GROUP * TILE * bits / 8);
        __m512 scale = bits == 16 ? _mm512_loadu_ps(halves)
                                  : _mm512_cvtph_ps(_mm256_loadu_si256(halves));
        __m512 offset = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
#pragma GCC unroll 8
        for (int m = 0; m < several; m++) {
#pragma GCC unroll 4
            for (int chain = 1; chain < chains; chain++) {
                int large = late && chain < shifts - 1 ? chain * bits : 0;
                dots[m] = _mm512_add_epi32(
                    dots[m], _mm512_srai_epi32(dots[chain * several + m], large));
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

INLINED void multiply_tile(const int bits, const struct product *by, int64_t tile) {
    const uint8_t *from = by->packed + tile * by->groups * group_bytes(bits);
    for (int64_t row = 0, several; row < by->count; row += several) {
        int64_t at = row * by->groups;
        float *out = by->out + row * by->rows + tile * TILE;
        several = strip_of(row, by->count);
#define STRIP_OF(number)                                                                           \
    if (several == number)                                                                         \
        multiply_strip(number, bits, from, by->groups, by->pairs + at * PAIRS, by->scales + at,    \
                       by->sums + at, out, by->rows);
        STRIP_OF(8)
        STRIP_OF(7)
        STRIP_OF(6)
        STRIP_OF(5)
        STRIP_OF(4)
        STRIP_OF(3)
        STRIP_OF(2)
        STRIP_OF(1)
#undef STRIP_OF
    }
}

static void multiply_tiles(const void *told, int64_t tile, int64_t end) {
    const struct product *by = told;
    for (; tile < end; tile++)
        if (by->bits == 4)
            multiply_tile(4, by, tile);
        else if (by->bits == 8)
            multiply_tile(8, by, tile);
        else
            multiply_tile(16, by, tile);
}

/* Rows of x by a matrix of any kind; -1 where there is no memory to round them in. */
int64_t multiply(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns, const float *x,
                 int64_t count, int64_t threads, float *out) {
#ifdef WITH_AMX
    if (amx_allowed() && count >= many_rows(kind))
        return multiply_by_amx(packed, kind, rows, columns, x, count, threads, out);
#endif
    if (kind <= FP32) {
        multiply_floats(packed, kind, rows, columns, x, count, threads, out);
        return 0;
    }
    int64_t groups = columns / GROUP, all = count * groups;
    int32_t *pairs = aligned_alloc(LINE, (all * (PAIRS * 4 + 2 * 4) + LINE) / LINE * LINE);
    if (pairs == NULL) return -1;
    float *scales = (float *)(pairs + all * PAIRS);
    int64_t portions = portions_of(rows * columns * count, threads);
    const struct product told = {packed, x,    out,  pairs,  scales, scales + all,
                                 kind,   rows, groups, count};
    share(round_rows, &told, count, portions_of(count * columns, threads), threads);
    share(multiply_tiles, &told, rows / TILE, portions, threads);
    free(pairs);
    return 0;
}
