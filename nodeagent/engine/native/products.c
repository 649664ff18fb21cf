/* Matrix products by quantised weights, for a processor with AVX-512 VNNI.
 *
 * A matrix [rows, columns] of numbers in groups of 32 along a row, each `number * scale + offset`,
 * lies in tiles of 16 rows; in a tile group behind group; a group is its 512 numbers (eight bits,
 * or four), then 16 scales and 16 offsets in fp16. Byte 4 * row + column of a line has the number of
 * one of four neighbouring columns; where numbers have four bits, the higher ones are of the column
 * 16 further on.
 *
 * Rows of x are rounded to 16 bits with a scale for each group of 32: the error is 2^-16 of a
 * group's largest, so that the product is that of the file's own weights. One multiplication takes a
 * pair of columns of 16 rows: both numbers of a line that are 16 bits apart.
 */

#include "kernels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define GROUP 32
#define TILE 16
#define PAIRS (GROUP / 2)
#define NEAR_BYTES 98304 /* of a file at a time */
#define STRIP 8 /* rows of x at a time: their sums and answers stay in registers */

int64_t can_multiply(void) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

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

/* Where a file has the row that is `row` here: it may keep the two halves of each head's rows, which
 * are turned together, as neighbours. */
static int64_t filed_at(int64_t row, int64_t head_rows) {
    if (head_rows == 0) return row;
    int64_t at = row % head_rows, half = head_rows / 2;
    return row - at + 2 * (at % half) + at / half;
}

static int64_t block_bytes(int64_t layout) {
    return layout == Q8_0 ? 34 : layout == Q4_1 ? 20 : 18;
}

/* Whole tiles, and whole heads where there are any. */
static void pack_tiles(const uint8_t *blocks, int64_t layout, int64_t rows, int64_t columns,
                       int64_t head_rows, uint8_t *out) {
    int64_t groups = columns / GROUP, bytes = group_bytes(layout == Q8_0 ? 8 : 4);
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *from = blocks + filed_at(row, head_rows) * groups * block_bytes(layout);
        uint8_t *to = out + row / TILE * groups * bytes;
        for (int64_t group = 0; group < groups; group++) {
            if (layout == Q4_0) pack_block(Q4_0, from, row % TILE, to);
            if (layout == Q4_1) pack_block(Q4_1, from, row % TILE, to);
            if (layout == Q8_0) pack_block(Q8_0, from, row % TILE, to);
            from += block_bytes(layout);
            to += bytes;
        }
    }
}

struct packing {
    const uint8_t *blocks;
    int64_t file, start, layout, columns, head_rows, unit; /* rows that are packed together */
    uint8_t *out;
    _Atomic int *failed;
};

static void pack_units(const void *told, int64_t unit, int64_t end) {
    const struct packing *by = told;
    int64_t groups = by->columns / GROUP, row = unit * by->unit;
    pack_tiles(by->blocks + row * groups * block_bytes(by->layout), by->layout,
               (end - unit) * by->unit, by->columns, by->head_rows,
               by->out + row / TILE * groups * group_bytes(by->layout == Q8_0 ? 8 : 4));
}

/* `rows` must be whole tiles. */
void pack_blocks(const uint8_t *blocks, int64_t layout, int64_t rows, int64_t columns,
                 int64_t threads, uint8_t *out) {
    const struct packing told = {
        .blocks = blocks, .layout = layout, .columns = columns, .unit = TILE, .out = out};
    share(pack_units, &told, rows / TILE, portions_of(rows * columns, threads), threads);
}

static int read_all(int file, uint8_t *to, int64_t left, int64_t start) {
    while (left > 0) {
        ssize_t taken = pread(file, to, left, start);
        if (taken <= 0) return -1;
        to += taken;
        left -= taken;
        start += taken;
    }
    return 0;
}

static void fetch_units(const void *told, int64_t unit, int64_t end) {
    const struct packing *by = told;
    int64_t unit_bytes = by->unit * (by->columns / GROUP) * block_bytes(by->layout);
    int64_t together = unit_bytes < NEAR_BYTES ? NEAR_BYTES / unit_bytes : 1;
    uint8_t *blocks = malloc(together * unit_bytes);
    for (int64_t next; unit < end && !*by->failed; unit = next) {
        next = end - unit < together ? end : unit + together;
        struct packing here = *by;
        here.blocks = blocks - unit * unit_bytes;
        if (blocks == NULL || read_all(by->file, blocks, (next - unit) * unit_bytes,
                                       by->start + unit * unit_bytes))
            *by->failed = 1;
        else
            pack_units(&here, unit, next);
    }
    free(blocks);
}

/* The same from where the blocks lie in an open file, read by all threads, each a near cache's fill
 * at a time. `rows` must be whole tiles, and whole heads where those have any rows; heads are whole
 * tiles. Return -1 where the file cannot be read so far. */
int64_t fetch_blocks(int64_t file, int64_t start, int64_t layout, int64_t rows, int64_t columns,
                     int64_t head_rows, int64_t threads, uint8_t *out) {
    _Atomic int failed = 0;
    const struct packing told = {.file = file,
                                 .start = start,
                                 .layout = layout,
                                 .columns = columns,
                                 .head_rows = head_rows,
                                 .unit = head_rows ? head_rows : TILE,
                                 .out = out,
                                 .failed = &failed};
    share(fetch_units, &told, rows / told.unit, portions_of(rows * columns, threads), threads);
    return failed ? -1 : 0;
}

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

/* Of which strip is `row`, where `count` rows are cut into as many of eight as there are, then four,
 * two, one; return how many rows that strip has. */
static int64_t strip_of(int64_t row, int64_t count, int64_t *first) {
    int64_t several = STRIP, end = count / STRIP * STRIP;
    for (*first = 0; row >= end; end += (count - end) / several * several) {
        *first = end;
        several /= 2;
    }
    *first += (row - *first) / several * several;
    return several;
}

/* Round the group at `x`; put its pairs `several` apart and return their scale. */
static float round_group(const float *x, int64_t bits, int64_t several, int32_t *pairs,
                         float *sum) {
    __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + TILE);
    float largest =
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
    /* The largest passes over what is no number; the scale, and so the answer, must not. */
    int sound = !(_mm512_cmp_ps_mask(first, first, _CMP_UNORD_Q) |
                  _mm512_cmp_ps_mask(second, second, _CMP_UNORD_Q));
    float scale = sound ? largest / INT16_MAX : NAN;
    __m512 inverse = _mm512_set1_ps(largest > 0 ? INT16_MAX / largest : 0);
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(first, inverse));
    __m512i other = _mm512_cvtps_epi32(_mm512_mul_ps(second, inverse));
    *sum = scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(whole, other));
    int32_t here[PAIRS];
    for (int half = 0; half < 2; half++) {
        __m256i four = _mm512_cvtsepi32_epi16(half ? other : whole);
        /* Of four neighbours, the first goes with the third, the second with the fourth. */
        four = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(four, 0xd8), 0xd8);
        _mm256_storeu_si256((__m256i *)(here + half * PAIRS / 2), four);
    }
    for (int64_t pair = 0; pair < PAIRS; pair++) {
        /* Where numbers have four bits, the pair 16 columns further on is in the same bytes. */
        int64_t to = bits == 4 ? 2 * pair % PAIRS + 2 * pair / PAIRS : pair;
        pairs[to * several] = here[pair];
    }
    return scale;
}

static void round_rows(const void *told, int64_t row, int64_t end) {
    const struct product *by = told;
    for (; row < end; row++) {
        int64_t first, several = strip_of(row, by->count, &first);
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
    const int shifts = 16 / bits, chains = several == 1 ? shifts : several == 2 ? 2 : 1;
    const int late = bits == 4 && chains == shifts;
    __m512 answers[STRIP];
#pragma GCC unroll 8
    for (int m = 0; m < several; m++) answers[m] = _mm512_setzero_ps();
    for (int64_t group = 0; group < groups; group++, tile += group_bytes(bits)) {
        __m512i dots[STRIP];
#pragma GCC unroll 8
        for (int m = 0; m < several * chains; m++) dots[m] = _mm512_setzero_si512();
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
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
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
        several = strip_of(row, by->count, &row);
#define STRIP_OF(number)                                                                           \
    if (several == number)                                                                         \
        multiply_strip(number, bits, from, by->groups, by->pairs + at * PAIRS, by->scales + at,    \
                       by->sums + at, out, by->rows);
        STRIP_OF(8)
        STRIP_OF(4)
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
        else
            multiply_tile(8, by, tile);
}

int64_t multiply(const uint8_t *packed, int64_t bits, int64_t rows, int64_t columns, const float *x,
                 int64_t count, int64_t threads, float *out) {
    int64_t groups = columns / GROUP, all = count * groups;
    int32_t *pairs = aligned_alloc(LINE, (all * (PAIRS * 4 + 2 * 4) + LINE) / LINE * LINE);
    if (pairs == NULL) return -1;
    float *scales = (float *)(pairs + all * PAIRS);
    int64_t portions = portions_of(rows * columns * count, threads);
    const struct product told = {packed, x,    out,  pairs,  scales, scales + all,
                                 bits,   rows, groups, count};
    share(round_rows, &told, count, portions_of(count * columns, threads), threads);
    share(multiply_tiles, &told, rows / TILE, portions, threads);
    free(pairs);
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
