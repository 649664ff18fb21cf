/* Matrix products by quantised weights, for a processor with AVX-512 VNNI. */

#include "kernels.h"

#include <stdlib.h>

#define GROUP 32
#define TILE 16

int64_t can_multiply(void) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

/* Matrix products.
 *
 * A matrix [rows, columns] of numbers in groups of 32 along a row, each `number * scale + offset`,
 * lies in tiles of 16 rows; in a tile group behind group; a group is its 512 numbers (eight bits,
 * or four), then 16 scales and 16 offsets in fp16. One multiplication takes four neighbouring
 * columns of 16 rows: byte 4 * row + column of a line.
 *
 * Rows of x are rounded to 16 bits with a scale for each group of 32, as two bytes each: the error
 * is 2^-16 of a group's largest, so that the product is that of the file's own weights.
 */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

static int64_t group_bytes(int64_t bits) { return GROUP * TILE * bits / 8 + 4 * TILE; }

void pack(const uint8_t *numbers, const float *scales, const float *offsets, int64_t bits,
          int64_t rows, int64_t columns, int64_t threads, uint8_t *out) {
    int64_t groups = columns / GROUP, bytes = group_bytes(bits);
#pragma omp parallel for num_threads(threads)
    for (int64_t tile = 0; tile < rows / TILE; tile++)
        for (int64_t group = 0; group < groups; group++) {
            uint8_t *to = out + (tile * groups + group) * bytes;
            uint16_t *halves = (uint16_t *)(to + GROUP * TILE * bits / 8);
            for (int64_t row = 0; row < TILE; row++) {
                int64_t at = tile * TILE + row;
                const uint8_t *from = numbers + at * columns + group * GROUP;
                for (int64_t four = 0; four < GROUP / 4; four++)
                    for (int64_t one = 0; one < 4; one++) {
                        uint8_t number = from[4 * four + one];
                        if (bits == 8)
                            to[four * LINE + 4 * row + one] = number;
                        else if (four < GROUP / 8)
                            to[four * LINE + 4 * row + one] = number;
                        else
                            to[(four - GROUP / 8) * LINE + 4 * row + one] |= number << 4;
                    }
                halves[row] = _cvtss_sh(scales[at * groups + group], 0);
                halves[TILE + row] = _cvtss_sh(offsets[at * groups + group], 0);
            }
        }
}

/* The same from the blocks of a GGUF file: [rows, columns / 32], each a scale, an offset in Q4_1
 * alone, and the numbers. Four bits lie there as they lie here, byte by byte. */
enum layout { Q4_0, Q4_1, Q8_0 };

INLINED void pack_block(const enum layout layout, const uint8_t *from, int64_t row, uint8_t *to) {
    int64_t words = layout == Q8_0 ? GROUP / 4 : GROUP / 8;
    uint16_t *halves = (uint16_t *)(to + words * LINE), scale;
    memcpy(&scale, from, sizeof(scale));
    halves[row] = scale;
    if (layout == Q4_1)
        memcpy(halves + TILE + row, from + 2, sizeof(scale));
    else
        halves[TILE + row] = _cvtss_sh((layout == Q8_0 ? -128 : -8) * _cvtsh_ss(scale), 0);
    from += layout == Q4_1 ? 4 : 2;
    for (int64_t word = 0; word < words; word++) {
        uint32_t numbers;
        memcpy(&numbers, from + 4 * word, sizeof(numbers));
        /* Counted from the least: without a sign. */
        if (layout == Q8_0) numbers ^= 0x80808080u;
        memcpy(to + word * LINE + 4 * row, &numbers, sizeof(numbers));
    }
}

void pack_blocks(const uint8_t *blocks, int64_t layout, int64_t rows, int64_t columns,
                 int64_t threads, uint8_t *out) {
    int64_t groups = columns / GROUP, bytes = group_bytes(layout == Q8_0 ? 8 : 4);
    int64_t block_bytes = layout == Q8_0 ? 34 : layout == Q4_1 ? 20 : 18;
#pragma omp parallel for num_threads(threads)
    for (int64_t tile = 0; tile < rows / TILE; tile++)
        for (int64_t at = 0; at < TILE * groups; at++) {
            int64_t group = at / TILE, row = at % TILE;
            const uint8_t *from = blocks + ((tile * TILE + row) * groups + group) * block_bytes;
            uint8_t *to = out + (tile * groups + group) * bytes;
            if (layout == Q4_0) pack_block(Q4_0, from, row, to);
            if (layout == Q4_1) pack_block(Q4_1, from, row, to);
            if (layout == Q8_0) pack_block(Q8_0, from, row, to);
        }
}

/* A row of x: for each group 32 high bytes and 32 low ones; scales; scaled sums. */
static void round_row(const float *x, int64_t groups, int8_t *bytes, float *scales, float *sums) {
    for (int64_t group = 0; group < groups; group++, x += GROUP, bytes += 2 * GROUP) {
        __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + TILE);
        float largest =
            _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
        /* The largest passes over what is no number; the scale, and so the answer, must not. */
        int sound = !(_mm512_cmp_ps_mask(first, first, _CMP_UNORD_Q) |
                      _mm512_cmp_ps_mask(second, second, _CMP_UNORD_Q));
        float scale = sound ? largest / 32512.0f : NAN;
        __m512 inverse = _mm512_set1_ps(largest > 0 ? 32512.0f / largest : 0);
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(first, inverse));
        __m512i other = _mm512_cvtps_epi32(_mm512_mul_ps(second, inverse));
        __m512i middle = _mm512_set1_epi32(128);
        __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, middle), 8);
        __m512i higher = _mm512_srai_epi32(_mm512_add_epi32(other, middle), 8);
        _mm_storeu_si128((__m128i *)bytes, _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128((__m128i *)(bytes + 16), _mm512_cvtepi32_epi8(higher));
        __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
        __m512i lower = _mm512_sub_epi32(other, _mm512_slli_epi32(higher, 8));
        _mm_storeu_si128((__m128i *)(bytes + 32), _mm512_cvtepi32_epi8(low));
        _mm_storeu_si128((__m128i *)(bytes + 48), _mm512_cvtepi32_epi8(lower));
        scales[group] = scale;
        sums[group] = scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(whole, other));
    }
}

static inline __attribute__((always_inline)) void multiply_tile(
    const int64_t several, const int64_t bits, const uint8_t *tile, int64_t groups,
    const int8_t *bytes, const float *scales, const float *sums, float *out, int64_t out_stride) {
    __m512 answers[several];
    for (int64_t m = 0; m < several; m++) answers[m] = _mm512_setzero_ps();
    const __m512i low_half = _mm512_set1_epi8(15);
    for (int64_t group = 0; group < groups; group++, tile += group_bytes(bits)) {
        __m512i weights[8];
        for (int64_t four = 0; four < 8; four++)
            if (bits == 8)
                weights[four] = _mm512_loadu_si512(tile + four * LINE);
            else if (four < 4)
                weights[four] = _mm512_and_si512(_mm512_loadu_si512(tile + four * LINE), low_half);
            else
                weights[four] = _mm512_and_si512(
                    _mm512_srli_epi32(_mm512_loadu_si512(tile + (four - 4) * LINE), 4), low_half);
        const __m256i *halves = (const __m256i *)(tile + GROUP * TILE * bits / 8);
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
        __m512 offset = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
        for (int64_t m = 0; m < several; m++) {
            const int8_t *x = bytes + (m * groups + group) * 2 * GROUP;
            __m512i high = _mm512_setzero_si512(), low = high;
            for (int64_t four = 0; four < 8; four++) {
                int32_t of_high, of_low;
                memcpy(&of_high, x + 4 * four, 4);
                memcpy(&of_low, x + GROUP + 4 * four, 4);
                high = _mm512_dpbusd_epi32(high, weights[four], _mm512_set1_epi32(of_high));
                low = _mm512_dpbusd_epi32(low, weights[four], _mm512_set1_epi32(of_low));
            }
            __m512 dots = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
            __m512 scaled = _mm512_mul_ps(scale, _mm512_set1_ps(scales[m * groups + group]));
            answers[m] = _mm512_fmadd_ps(dots, scaled, answers[m]);
            answers[m] =
                _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[m * groups + group]), answers[m]);
        }
    }
    for (int64_t m = 0; m < several; m++) _mm512_storeu_ps(out + m * out_stride, answers[m]);
}

static inline __attribute__((always_inline)) void multiply_rows(
    const int64_t bits, const uint8_t *tile, int64_t groups, int64_t count, const int8_t *bytes,
    const float *scales, const float *sums, float *out, int64_t out_stride) {
#define SEVERAL(n)                                                                                 \
    for (; count >= n; count -= n) {                                                               \
        multiply_tile(n, bits, tile, groups, bytes, scales, sums, out, out_stride);                \
        bytes += n * groups * 2 * GROUP;                                                           \
        scales += n * groups;                                                                      \
        sums += n * groups;                                                                        \
        out += n * out_stride;                                                                     \
    }
    SEVERAL(8)
    SEVERAL(4)
    SEVERAL(2)
    SEVERAL(1)
#undef SEVERAL
}

struct product {
    const uint8_t *packed;
    const float *x;
    float *out, *scales, *sums;
    int8_t *bytes;
    int64_t bits, rows, groups, count;
};

static void round_rows(const void *told, int64_t row, int64_t end) {
    const struct product *by = told;
    int64_t groups = by->groups;
    for (; row < end; row++)
        round_row(by->x + row * groups * GROUP, groups, by->bytes + row * groups * 2 * GROUP,
                  by->scales + row * groups, by->sums + row * groups);
}

static void multiply_all(const void *told, int64_t tile, int64_t end) {
    const struct product *by = told;
    for (; tile < end; tile++) {
        const uint8_t *from = by->packed + tile * by->groups * group_bytes(by->bits);
        float *to = by->out + tile * TILE;
        if (by->bits == 4)
            multiply_rows(4, from, by->groups, by->count, by->bytes, by->scales, by->sums, to,
                          by->rows);
        else
            multiply_rows(8, from, by->groups, by->count, by->bytes, by->scales, by->sums, to,
                          by->rows);
    }
}

int64_t multiply(const uint8_t *packed, int64_t bits, int64_t rows, int64_t columns, const float *x,
                 int64_t count, int64_t threads, float *out) {
    int64_t groups = columns / GROUP;
    int8_t *bytes = aligned_alloc(LINE, count * groups * (2 * GROUP + LINE));
    if (bytes == NULL) return -1;
    float *scales = (float *)(bytes + count * groups * 2 * GROUP);
    const struct product told = {packed, x,    out,  scales, scales + count * groups,
                                 bytes,  bits, rows, groups, count};
    share(round_rows, &told, count, portions_of(count * columns, threads), threads);
    share(multiply_all, &told, rows / TILE, portions_of(rows * columns, threads), threads);
    free(bytes);
    return 0;
}

int64_t read_rows(const uint8_t *packed, int64_t bits, int64_t rows, int64_t columns,
                  const int64_t *wanted, int64_t count, float *out) {
    int64_t groups = columns / GROUP, bytes = group_bytes(bits);
    for (int64_t at = 0; at < count; at++) {
        if (wanted[at] < 0 || wanted[at] >= rows) return -1;
        int64_t row = wanted[at] % TILE;
        const uint8_t *from = packed + wanted[at] / TILE * groups * bytes;
        for (int64_t group = 0; group < groups; group++, from += bytes) {
            const uint16_t *halves = (const uint16_t *)(from + GROUP * TILE * bits / 8);
            float scale = _cvtsh_ss(halves[row]), offset = _cvtsh_ss(halves[TILE + row]);
            for (int64_t column = 0; column < GROUP; column++) {
                int64_t four = column / 4, high = bits == 4 && four >= GROUP / 8;
                uint8_t number =
                    from[(four - high * GROUP / 8) * LINE + 4 * row + column % 4] >> (4 * high);
                *out++ = (bits == 4 ? number & 15 : number) * scale + offset;
            }
        }
    }
    return 0;
}

#endif
