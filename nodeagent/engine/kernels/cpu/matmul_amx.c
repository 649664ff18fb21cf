/* Products of many rows with AMX; `packing.c` describes the layout of a matrix.
 *
 * Rows of x are cut into strips of equal size, 16 at most, and into blocks of 32 columns. Blocks of
 * weights and of x are converted to bf16 terms or to bytes:
 *
 * - Groups of 4 bits: their numbers are one term. x is rounded to integers as in
 * `matmul_quantised.c`, which are two terms. All sums are below 2^24, and so exact.
 * - Groups of 8 bits: bytes, multiplied by the upper and the lower byte of the integers of x.
 * - Floats: x and fp32 weights are three terms, fp16 two and bf16 one, without loss. The products
 * of terms that are left out are 2^-24 of the largest.
 *
 * Products by groups are bit-identical to those of `matmul_quantised.c`, so that a text does not
 * depend on what it is batched with.
 */

#include "amx.h"

#include <stdlib.h>

#ifdef WITH_AMX

/* Blocks of columns whose terms, for a pair of panels, stay in the L2 cache. */
#define GROUPS 8
#define FLOATS 16
#define TERMS 3
#define TERM (TILE_NUMBERS * 2) /* bytes of one term of 32 numbers of 16 columns */

struct product {
    const uint8_t *packed;
    const float *x;
    float *out;
    int64_t kind, rows, columns, count;
    int64_t blocks, strips, lines; /* of a strip */
    /* By strip, by block, by term: `lines` lines of 32 numbers. With 8 bits a line has the upper
     * bytes, then the lower. */
    uint8_t *terms;
    float *scales, *sums; /* of groups: by strip, by group, by line */
};

INLINED int64_t terms_of_x(int64_t kind) { return kind <= FP32 ? TERMS : kind == 4 ? 2 : 1; }

INLINED int64_t terms_of(int64_t kind) { return kind == FP32 ? 3 : kind == FP16 ? 2 : 1; }

/* The order of the columns of a block in a line of x, which matches the pairs in the weights'
 * lines, as indices of the upper halves of 32 fp32 numbers. */
static __m512i order_of(int64_t kind) {
    uint16_t order[2 * LANES];
    for (int place = 0; place < 2 * LANES; place++) {
        int line = place / 2, second = place % 2, column = place;
        if (kind == 4) column = line / 4 * 4 + line % 4 / 2 + line % 2 * LANES + 2 * second;
        order[place] = 2 * column + 1;
    }
    return _mm512_loadu_si512(order);
}

/* Store a term of 32 numbers of a row. */
INLINED void put_term(__m512i first, __m512i second, __m512i order, uint8_t *to) {
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, order, second));
}

/* Split the integers of a group into multiples of 256 and the rest: two terms, or two bytes. */
INLINED void cut_numbers(struct rounded group, int64_t bits, __m512i order, uint8_t *to,
                         int64_t apart) {
    const __m512i low = _mm512_set1_epi32(255);
    if (bits == 8) {
        __m128i *bytes = (__m128i *)to;
        bytes[0] = _mm512_cvtepi32_epi8(_mm512_srai_epi32(group.first, 8));
        bytes[1] = _mm512_cvtepi32_epi8(_mm512_srai_epi32(group.second, 8));
        bytes[2] = _mm512_cvtepi32_epi8(group.first);
        bytes[3] = _mm512_cvtepi32_epi8(group.second);
        return;
    }
#define AS_FLOATS(whole) _mm512_castps_si512(_mm512_cvtepi32_ps(whole))
    put_term(AS_FLOATS(_mm512_andnot_si512(low, group.first)),
             AS_FLOATS(_mm512_andnot_si512(low, group.second)), order, to);
    put_term(AS_FLOATS(_mm512_and_si512(low, group.first)),
             AS_FLOATS(_mm512_and_si512(low, group.second)), order, to + apart);
}

static void cut_rows(const void *arguments, int64_t row, int64_t end) {
    const struct product *by = arguments;
    const int64_t terms = terms_of_x(by->kind), bytes = by->lines * LINE;
    const __m512i order = order_of(by->kind);
    for (; row < end; row++) {
        int64_t at = row / by->lines * by->blocks, line = row % by->lines;
        const float *x = by->x + row * by->columns;
        for (int64_t left = by->columns; left > 0; left -= GROUP, x += GROUP, at++) {
            uint8_t *to = by->terms + at * terms * bytes + line * LINE;
            float near[GROUP] = {0};
            const float *from = x;
            if (row >= by->count)
                from = near; /* padding lines of the last strip: old memory might hold denormals,
                                which are slow */
            else if (left < GROUP)
                from = memcpy(near, x, left * sizeof(float));
            __m512 first = _mm512_loadu_ps(from), second = _mm512_loadu_ps(from + LANES);
            if (by->kind > FP32) {
                struct rounded group = round_to_integers((lanes)first, (lanes)second, ROUNDED_MAX);
                int64_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(group.first, group.second));
                by->scales[at * by->lines + line] = group.scale;
                by->sums[at * by->lines + line] = group.scale * (float)sum;
                cut_numbers(group, by->kind, order, to, bytes);
            } else {
                for (int64_t term = 0; term < TERMS; term++, to += bytes) {
                    __m512i one = term_of(&first), other = term_of(&second);
                    put_term(one, other, order, to);
                }
            }
        }
    }
}

/* The integers 0 to 15 in bf16. */
static const uint16_t INTEGERS[LANES] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                         0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130,
                                         0x4140, 0x4150, 0x4160, 0x4170};

/* Convert a group of 4 bits to one bf16 term: 16 lines of a pair of columns each. */
INLINED void widen_group(const uint8_t *group, uint8_t *to) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)INTEGERS));
    for (int line = 0; line < 4; line++)
#pragma GCC unroll 4
        for (int shift = 0; shift < 16; shift += 4, to += LINE) {
            __m512i numbers = _mm512_srli_epi16(_mm512_loadu_si512(group + line * LINE), shift);
            /* The bits above the number do not matter, because the table repeats. */
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(numbers, table));
        }
}

/* One strip of `lines` rows by some groups of one panel. */
INLINED void multiply_groups(const int lines, const int bits, const struct product *by,
                             const uint8_t *groups, const uint8_t *terms, int64_t count,
                             int64_t strip, int64_t block, int64_t rows, float *out) {
    const int64_t of_x = terms_of_x(bits) * lines * LINE;
    const uint8_t *x = by->terms + (strip * by->blocks + block) * of_x;
    const float *scales = by->scales + (strip * by->blocks + block) * lines;
    const float *sums = by->sums + (strip * by->blocks + block) * lines;
    /* The first strip prefetches the next pair of panels. */
    const int64_t bytes = group_bytes(bits), ahead = 2 * by->blocks * bytes;
    __m512i dots[2][PANEL];
    __m512 answers[PANEL];
#pragma GCC unroll 16
    for (int line = 0; line < lines; line++)
        answers[line] =
            block > 0 && line < rows ? _mm512_loadu_ps(out + line * by->rows) : _mm512_setzero_ps();
    for (int64_t group = 0; group < count; group++) {
        TILE_ZERO(0);
        TILE_LOAD(4, x, LINE);
        if (bits == 4) {
            TILE_LOAD(5, x + lines * LINE, LINE);
            TILE_LOAD(6, terms, LINE);
            TILE_MULTIPLY(0, 4, 6);
            TILE_MULTIPLY(0, 5, 6);
        } else {
            TILE_ZERO(1);
            TILE_LOAD(5, x + LINE / 2, LINE);
            TILE_LOAD(6, groups, LINE);
            TILE_MULTIPLY_BYTES(s, 0, 4, 6);
            TILE_MULTIPLY_BYTES(u, 1, 5, 6);
            TILE_STORE(1, dots[1], LINE);
        }
        TILE_STORE(0, dots[0], LINE);
        const __m256i *halves = (const __m256i *)(groups + GROUP * PANEL * bits / 8);
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
        __m512 offset = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
#pragma GCC unroll 16
        for (int line = 0; line < lines; line++) {
            __m512 scaled = _mm512_mul_ps(scale, _mm512_set1_ps(scales[line]));
            __m512 sum = _mm512_castsi512_ps(dots[0][line]);
            if (bits == 8)
                sum = _mm512_cvtepi32_ps(
                    _mm512_add_epi32(_mm512_slli_epi32(dots[0][line], 8), dots[1][line]));
            answers[line] = _mm512_fmadd_ps(sum, scaled, answers[line]);
            answers[line] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[line]), answers[line]);
        }
        for (int64_t line = 0; strip == 0 && line < bytes; line += LINE)
            __builtin_prefetch(groups + ahead + line);
        x += of_x;
        scales += lines;
        sums += lines;
        terms += TERM;
        groups += bytes;
    }
#pragma GCC unroll 16
    for (int line = 0; line < lines; line++)
        if (line < rows) _mm512_storeu_ps(out + line * by->rows, answers[line]);
}

/* Multiply all rows by pairs of panels in groups. */
INLINED void by_groups(const int lines, const int bits, const struct product *by, int64_t pair,
                       int64_t end) {
    const int64_t bytes = group_bytes(bits), tiles = by->rows / PANEL;
    uint8_t wide[2][GROUPS * TERM] __attribute__((aligned(LINE)));
    for (int64_t block = 0, count; block < by->blocks; block += count) {
        count = by->blocks - block < GROUPS ? by->blocks - block : GROUPS;
        for (int64_t first = 2 * pair; first < 2 * end; first += 2) {
            const uint8_t *groups = by->packed + (first * by->blocks + block) * bytes;
            const int64_t two = first + 1 < tiles, apart = by->blocks * bytes;
            for (int64_t one = 0; bits == 4 && one <= two; one++)
                for (int64_t group = 0; group < count; group++)
                    widen_group(groups + one * apart + group * bytes, wide[one] + group * TERM);
            for (int64_t strip = 0, row = 0; strip < by->strips; strip++, row += lines)
                for (int64_t one = 0; one <= two; one++)
                    multiply_groups(lines, bits, by, groups + one * apart, wide[one], count, strip,
                                    block, by->count - row,
                                    by->out + row * by->rows + (first + one) * PANEL);
        }
    }
}

/* Convert a block of 32 columns of a float panel to terms. */
INLINED void widen_floats(const enum kind kind, const uint8_t *tile, int64_t columns, uint8_t *to) {
    const int64_t terms = terms_of(kind), bytes = PANEL * bytes_of(kind);
    for (int64_t column = 0; column < GROUP; column += 2, to += LINE) {
        __m512 first = _mm512_setzero_ps(), second = first;
        if (column < columns) first = (__m512)load_fp32(kind, tile + column * bytes);
        if (column + 1 < columns) second = (__m512)load_fp32(kind, tile + (column + 1) * bytes);
#pragma GCC unroll 3
        for (int64_t term = 0; term < terms; term++)
            _mm512_storeu_si512(to + term * TERM, paired(term_of(&first), term_of(&second)));
    }
}

struct sums {
    float near[PANEL * LANES] __attribute__((aligned(LINE)));
    float *out;
    int64_t rows; /* of the strip; 0 if there is no such strip or panel */
};

/* Load and store the sums of a strip by a panel; a strip with padding lines goes through `near`. */
#define LOAD_SUMS(tile, from, lines, apart)                                                        \
    if ((from)->rows == (lines)) {                                                                 \
        TILE_LOAD(tile, (from)->out, (apart) * sizeof(float));                                     \
    } else {                                                                                       \
        for (int64_t row = 0; row < (from)->rows; row++)                                           \
            memcpy((from)->near + row * LANES, (from)->out + row * (apart), LINE);                 \
        TILE_LOAD(tile, (from)->near, LINE);                                                       \
    }
#define STORE_SUMS(tile, to, lines, apart)                                                         \
    if ((to)->rows == (lines)) {                                                                   \
        TILE_STORE(tile, (to)->out, (apart) * sizeof(float));                                      \
    } else {                                                                                       \
        TILE_STORE(tile, (to)->near, LINE);                                                        \
        for (int64_t row = 0; row < (to)->rows; row++)                                             \
            memcpy((to)->out + row * (apart), (to)->near + row * LANES, LINE);                     \
    }

/* Two strips by two panels, so that each loaded tile is multiplied twice. The first two strips
 * prefetch the next pair of panels, which begins at `ahead`. */
INLINED void multiply_floats_by(const enum kind kind, const struct product *by, int64_t strip,
                                int64_t block, int64_t count, const uint8_t *const wide[2],
                                const uint8_t *ahead, float *out, int64_t tiles) {
    const int64_t lines = by->lines, bytes = lines * LINE, apart = by->rows;
    const int64_t rows = by->count - strip * lines, others = rows - lines;
    const int64_t terms = terms_of(kind), of_block = GROUP * PANEL * bytes_of(kind);
    const uint8_t *x = by->terms + (strip * by->blocks + block) * TERMS * bytes;
    const uint8_t *other_x = x + by->blocks * TERMS * bytes;
    struct sums sums[4];
    for (int at = 0; at < 4; at++) {
        int64_t of_strip = at < 2 ? rows : others;
        sums[at].out = out + at / 2 * lines * apart + at % 2 * PANEL;
        sums[at].rows = of_strip < lines ? of_strip : lines;
        if (at % 2 == 1 && tiles == 1) sums[at].rows = 0;
    }
    if (block == 0) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    } else {
        LOAD_SUMS(0, sums, lines, apart)
        LOAD_SUMS(1, sums + 1, lines, apart)
        LOAD_SUMS(2, sums + 2, lines, apart)
        LOAD_SUMS(3, sums + 3, lines, apart)
    }
    for (int64_t at = 0; at < count; at++, x += TERMS * bytes, other_x += TERMS * bytes) {
        for (int64_t line = 0; strip == 0 && line < of_block; line += LINE) {
            __builtin_prefetch(ahead + line);
            __builtin_prefetch(ahead + panel_bytes(kind, by->columns) + line);
        }
        ahead += of_block;
#pragma GCC unroll 3
        for (int64_t term = 0; term < terms; term++) {
            TILE_LOAD(6, wide[0] + (at * terms + term) * TERM, LINE);
            TILE_LOAD(7, wide[1] + (at * terms + term) * TERM, LINE);
#pragma GCC unroll 3
            for (int64_t one = 0; one < TERMS - term; one++) {
                TILE_LOAD(4, x + one * bytes, LINE);
                TILE_MULTIPLY(0, 4, 6);
                TILE_MULTIPLY(1, 4, 7);
                if (others <= 0) continue;
                TILE_LOAD(5, other_x + one * bytes, LINE);
                TILE_MULTIPLY(2, 5, 6);
                TILE_MULTIPLY(3, 5, 7);
            }
        }
    }
    STORE_SUMS(0, sums, lines, apart)
    STORE_SUMS(1, sums + 1, lines, apart)
    STORE_SUMS(2, sums + 2, lines, apart)
    STORE_SUMS(3, sums + 3, lines, apart)
}

INLINED void by_floats(const enum kind kind, const struct product *by, int64_t pair, int64_t end) {
    const int64_t bytes = PANEL * bytes_of(kind), apart = by->columns * bytes,
                  all = by->rows / PANEL;
    uint8_t near[2][FLOATS * TERMS * TERM] __attribute__((aligned(LINE)));
    for (int64_t block = 0, count; block < by->blocks; block += count) {
        count = by->blocks - block < FLOATS ? by->blocks - block : FLOATS;
        for (int64_t tile = 2 * pair; tile < 2 * end; tile += 2) {
            const int64_t tiles = tile + 1 < all ? 2 : 1;
            const uint8_t *from = by->packed + tile * apart + block * GROUP * bytes;
            const uint8_t *const wide[2] = {near[0], near[tiles - 1]};
            for (int64_t one = 0; one < tiles; one++)
                for (int64_t at = 0; at < count; at++)
                    widen_floats(kind, from + one * apart + at * GROUP * bytes,
                                 by->columns - (block + at) * GROUP,
                                 near[one] + at * terms_of(kind) * TERM);
            for (int64_t strip = 0; strip < by->strips; strip += 2)
                multiply_floats_by(kind, by, strip, block, count, wide, from + 2 * apart,
                                   by->out + strip * by->lines * by->rows + tile * PANEL, tiles);
        }
    }
}

static void multiply_pairs(const void *arguments, int64_t pair, int64_t end) {
    const struct product *by = arguments;
    begin_tiles(by->lines, by->kind == 8 ? LINE / 2 : LINE);
    if (by->kind == FP16) by_floats(FP16, by, pair, end);
    if (by->kind == BF16) by_floats(BF16, by, pair, end);
    if (by->kind == FP32) by_floats(FP32, by, pair, end);
    /* Twelve rows or more make strips of 12 or 16. */
    if (by->kind == 4 && by->lines == 12) by_groups(12, 4, by, pair, end);
    if (by->kind == 4 && by->lines == 16) by_groups(16, 4, by, pair, end);
    if (by->kind == 8 && by->lines == 12) by_groups(12, 8, by, pair, end);
    if (by->kind == 8 && by->lines == 16) by_groups(16, 8, by, pair, end);
    TILES_END();
}

/* Multiply rows of x by a matrix; return -1 if there is no memory for the terms of x. */
int64_t multiply_by_amx(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                        const float *x, int64_t count, int64_t threads, float *out) {
    struct product by = {.packed = packed,
                         .x = x,
                         .out = out,
                         .kind = kind,
                         .rows = rows,
                         .columns = columns,
                         .count = count};
    by.blocks = (columns + GROUP - 1) / GROUP;
    by.strips = (count + PANEL - 1) / PANEL;
    by.lines = ((count + by.strips - 1) / by.strips + 3) / 4 * 4;
    by.strips = (count + by.lines - 1) / by.lines;
    int64_t lines = by.strips * by.lines * by.blocks, bytes = lines * terms_of_x(kind) * LINE;
    by.terms = aligned_alloc(LINE, (bytes + lines * 2 * sizeof(float) + LINE) / LINE * LINE);
    if (by.terms == NULL) return -1;
    by.scales = (float *)(by.terms + bytes);
    by.sums = by.scales + lines;
    int64_t pairs = (rows / PANEL + 1) / 2;
    parallel_for(cut_rows, &by, by.strips * by.lines, portions_of(count * columns, threads),
                 threads);
    /* In longer portions more panels find the terms of x in the cache. */
    parallel_for(multiply_pairs, &by, pairs, 4 * threads, threads);
    free(by.terms);
    return 0;
}

#endif
