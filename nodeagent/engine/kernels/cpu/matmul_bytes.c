/* Matrix products by groups of 4 or 8 bits, with rows of x rounded to bytes; `packing.c` describes
 * the layout of a matrix.
 *
 * One VNNI instruction multiplies four neighbouring columns of 16 rows by four bytes of x: half as
 * many as for 16 bits. A row of x has a scale for each group of 32. A group with a number far
 * above the root mean square of its row gets a second, lower byte: with one byte, its smaller
 * numbers and so the whole row would be inexact. Which groups these are depends on the row alone,
 * and all sums of a group are exact: a row's result does not depend on the rows beside it.
 */

#include "strips.h"

#include <stdlib.h>

#define WORDS (GROUP / 4)
#define BYTE_MAX 127        /* the largest number of a group of one byte */
#define TWO_BYTES_MAX 32639 /* of two: each part of it fits into a signed byte */
/* A group gets two bytes if its largest number is above this many times the row's root mean
 * square. At 8 one group in 24 of SmolLM2's has two, and the next token's distribution is three
 * times as near to fp32's as with one byte for all; at 4 one in five, and six times. */
#define OUTLIER 8.0f

struct product {
    const uint8_t *packed;
    const float *x;
    float *out;
    /* The rounded rows of x: by strip, by group, upper bytes and lower bytes, by word of four
     * columns, by row of the strip. Scales and scaled sums: by strip, by group, by row. */
    int32_t *words;
    float *scales, *sums;
    uint8_t *low; /* by strip, by group: whether a row has lower bytes */
    int64_t bits, rows, groups, count;
};

/* A group of x as bytes: its numbers are (upper * 256 + lower) * scale. */
struct bytes {
    __m256i upper, lower;
    float scale, sum;
    int low;
};

INLINED struct bytes bytes_of_group(const float *x, float outlier) {
    __m512 one = _mm512_loadu_ps(x), other = _mm512_loadu_ps(x + LANES);
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(one), _mm512_abs_ps(other)));
    struct bytes by = {.low = largest > outlier};
    struct rounded group =
        round_to_integers((lanes)one, (lanes)other, by.low ? TWO_BYTES_MAX : BYTE_MAX);
    __m512i sum = _mm512_add_epi32(group.first, group.second);
    /* In units of the lower byte. Powers of two are exact. */
    by.scale = by.low ? group.scale : group.scale / 256;
    by.sum = group.scale * (float)_mm512_reduce_add_epi32(sum);
    if (by.low) {
        const __m512i half = _mm512_set1_epi32(128);
        __m512i first = _mm512_srai_epi32(_mm512_add_epi32(group.first, half), 8);
        __m512i second = _mm512_srai_epi32(_mm512_add_epi32(group.second, half), 8);
        by.lower = _mm256_set_m128i(_mm512_cvtepi32_epi8(group.second),
                                    _mm512_cvtepi32_epi8(group.first));
        group.first = first;
        group.second = second;
    }
    by.upper = _mm256_set_m128i(_mm512_cvtsepi32_epi8(group.second),
                                _mm512_cvtsepi32_epi8(group.first));
    return by;
}

/* Store the eight words of each of `several` rows, word by word. */
INLINED void store_words(const int several, const __m256i rows[STRIP], int32_t *to) {
    if (several == 1) {
        _mm256_storeu_si256((__m256i *)to, rows[0]);
        return;
    }
    int32_t here[STRIP][WORDS];
#pragma GCC unroll 8
    for (int m = 0; m < several; m++) _mm256_storeu_si256((__m256i *)here[m], rows[m]);
    for (int word = 0; word < WORDS; word++)
#pragma GCC unroll 8
        for (int m = 0; m < several; m++) to[word * several + m] = here[m][word];
}

/* Round one strip of `several` rows from row `first` on. */
INLINED void round_strip(const int several, const struct product *by, int64_t first) {
    const int64_t columns = by->groups * GROUP;
    float outliers[STRIP];
    for (int m = 0; m < several; m++) {
        const float *x = by->x + (first + m) * columns;
        lanes squares = {0};
        for (int64_t at = 0; at < columns; at += LANES)
            squares += *(const lanes *)(x + at) * *(const lanes *)(x + at);
        outliers[m] = OUTLIER * sqrtf(_mm512_reduce_add_ps((__m512)squares) / columns);
    }
    for (int64_t group = 0; group < by->groups; group++) {
        const int64_t to = first * by->groups + group * several;
        int32_t *words = by->words + to * 2 * WORDS;
        __m256i upper[STRIP], lower[STRIP];
        int low = 0;
#pragma GCC unroll 8
        for (int m = 0; m < several; m++) {
            struct bytes bytes =
                bytes_of_group(by->x + (first + m) * columns + group * GROUP, outliers[m]);
            upper[m] = bytes.upper;
            lower[m] = bytes.lower;
            by->scales[to + m] = bytes.scale;
            by->sums[to + m] = bytes.sum;
            low |= bytes.low;
        }
        store_words(several, upper, words);
        if (low) store_words(several, lower, words + WORDS * several);
        by->low[first / STRIP * by->groups + group] = low;
    }
}

static void round_strips(const void *arguments, int64_t strip, int64_t end) {
    const struct product *by = arguments;
    for (; strip < end; strip++) {
        const int64_t first = strip * STRIP, several = strip_of(first, by->count);
#define STRIP_OF(number)                                                                           \
    if (several == number) round_strip(number, by, first);
        EACH_STRIP(STRIP_OF)
#undef STRIP_OF
    }
}

/* Add the products of a group of a panel by one byte of each column of `several` rows. With few
 * rows each has several sums, so that none waits for itself. */
INLINED void add_bytes(const int several, const int chains, const int bits, const uint8_t *group,
                       const int32_t *words, __m512i dots[STRIP]) {
    const int halves = 8 / bits;
#pragma GCC unroll 8
    for (int line = 0; line < WORDS / halves; line++) {
        __m512i numbers = _mm512_loadu_si512(group + line * LINE);
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++) {
            const int word = line + half * WORDS / 2, chain = word % chains * several;
            __m512i four = half ? _mm512_srli_epi16(numbers, 4) : numbers;
            if (bits == 4) four = _mm512_and_si512(four, _mm512_set1_epi8(15));
#pragma GCC unroll 8
            for (int m = 0; m < several; m++)
                dots[chain + m] = _mm512_dpbusd_epi32(dots[chain + m], four,
                                                      _mm512_set1_epi32(words[word * several + m]));
        }
    }
#pragma GCC unroll 8
    for (int at = several; at < several * chains; at++) {
        dots[at % several] = _mm512_add_epi32(dots[at % several], dots[at]);
        dots[at] = _mm512_setzero_si512();
    }
}

/* One strip of `several` rows by one panel. */
INLINED void multiply_strip(const int several, const int bits, const struct product *by,
                            const uint8_t *panel, int64_t first, float *out) {
    const int chains = several == 1 ? 4 : several <= 3 ? 2 : 1;
    const int32_t *words = by->words + first * by->groups * 2 * WORDS;
    const float *scales = by->scales + first * by->groups, *sums = by->sums + first * by->groups;
    const uint8_t *low = by->low + first / STRIP * by->groups;
    __m512 answers[STRIP];
#pragma GCC unroll 8
    for (int m = 0; m < several; m++) answers[m] = _mm512_setzero_ps();
    for (int64_t group = 0; group < by->groups; group++, panel += group_bytes(bits)) {
        __m512i dots[STRIP];
#pragma GCC unroll 8
        for (int m = 0; m < several * chains; m++) dots[m] = _mm512_setzero_si512();
#pragma GCC unroll 9
        for (int at = 0; at < group_bytes(bits); at += LINE) __builtin_prefetch(panel + at + AHEAD);
        add_bytes(several, chains, bits, panel, words, dots);
        const __m256i *halves = (const __m256i *)(panel + GROUP * PANEL * bits / 8);
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
        __m512 offset = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
        if (low[group]) {
#pragma GCC unroll 8
            for (int m = 0; m < several; m++) dots[m] = _mm512_slli_epi32(dots[m], 8);
            add_bytes(several, chains, bits, panel, words + WORDS * several, dots);
        } else
            scale = _mm512_mul_ps(scale, _mm512_set1_ps(256));
#pragma GCC unroll 8
        for (int m = 0; m < several; m++) {
            __m512 scaled = _mm512_mul_ps(scale, _mm512_set1_ps(scales[m]));
            answers[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[m]), scaled, answers[m]);
            answers[m] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[m]), answers[m]);
        }
        words += 2 * WORDS * several;
        scales += several;
        sums += several;
    }
#pragma GCC unroll 8
    for (int m = 0; m < several; m++) _mm512_storeu_ps(out + m * by->rows, answers[m]);
}

INLINED void multiply_panel(const int bits, const struct product *by, int64_t panel) {
    const uint8_t *from = by->packed + panel * by->groups * group_bytes(bits);
    for (int64_t row = 0, several; row < by->count; row += several) {
        float *out = by->out + row * by->rows + panel * PANEL;
        several = strip_of(row, by->count);
#define STRIP_OF(number)                                                                           \
    if (several == number) multiply_strip(number, bits, by, from, row, out);
        EACH_STRIP(STRIP_OF)
#undef STRIP_OF
    }
}

static void multiply_panels(const void *arguments, int64_t panel, int64_t end) {
    const struct product *by = arguments;
    for (; panel < end; panel++)
        if (by->bits == 4)
            multiply_panel(4, by, panel);
        else
            multiply_panel(8, by, panel);
}

/* Multiply rows of x by a matrix of 4 or 8 bits; return -1 if there is no memory for their rounded
 * copy. */
int64_t multiply_by_bytes(const uint8_t *packed, int64_t bits, int64_t rows, int64_t columns,
                          const float *x, int64_t count, int64_t threads, float *out) {
    int64_t groups = columns / GROUP, all = count * groups, strips = (count + STRIP - 1) / STRIP;
    int64_t bytes = all * (2 * WORDS + 2) * 4 + strips * groups;
    int32_t *words = aligned_alloc(LINE, (bytes + LINE) / LINE * LINE);
    if (words == NULL) return -1;
    float *scales = (float *)(words + all * 2 * WORDS);
    const struct product by = {.packed = packed,
                               .x = x,
                               .out = out,
                               .words = words,
                               .scales = scales,
                               .sums = scales + all,
                               .low = (uint8_t *)(scales + 2 * all),
                               .bits = bits,
                               .rows = rows,
                               .groups = groups,
                               .count = count};
    parallel_for(round_strips, &by, strips, portions_of(count * columns, threads), threads);
    parallel_for(multiply_panels, &by, rows / PANEL, portions_of(rows * columns * count, threads),
                 threads);
    free(words);
    return 0;
}
