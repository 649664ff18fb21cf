/* Products of many rows on the processor's matrix unit; `packing.c` says how matrices lie.
 *
 * Rows of x are cut into strips that are all of one size, 16 at most, and into blocks of 32 columns.
 * What a block holds becomes terms of bf16, of weights and of x:
 *
 * - Groups of four bits: their numbers are one term, and x is rounded to whole numbers as in
 *   `matmul_quantised.c`, which are two. All sums are below 2^24, and so exact.
 * - Groups of eight bits: their numbers are multiplied as the bytes that they are, by the higher byte
 *   and by the lower of the whole numbers of x.
 * - Floats: x and fp32 are three terms, fp16 two and bf16 one, without loss; the products of terms
 *   that are left out are 2^-24 of the largest.
 *
 * By groups the answers are those of `matmul_quantised.c`, bit for bit: a text must not depend on how many
 * others are computed with it.
 */

#include "amx.h"

#include <stdlib.h>

#ifdef WITH_AMX

/* Blocks of columns for which the terms of a pair of tiles stay in a near cache. */
#define GROUPS 8
#define FLOATS 16
#define TERMS 3
#define TERM (TILE_NUMBERS * 2) /* bytes of one term of 16 columns' 32 numbers */

struct product {
    const uint8_t *packed;
    const float *x;
    float *out;
    int64_t kind, rows, columns, count;
    int64_t blocks, strips, lines; /* of a strip */
    /* Strip by strip, block by block, term by term: so many lines of 32 numbers. By eight bits a line
     * has their higher bytes, then their lower. */
    uint8_t *terms;
    float *scales, *sums; /* of groups: strip by strip, group by group, line by line */
};

INLINED int64_t terms_of_x(int64_t kind) { return kind <= FP32 ? TERMS : kind == 4 ? 2 : 1; }

INLINED int64_t terms_of(int64_t kind) { return kind == FP32 ? 3 : kind == FP16 ? 2 : 1; }

/* In which order a line of x has the columns of a block, for pairs to be those of the weights' lines;
 * as places of the upper halves of 32 numbers in fp32. */
static __m512i order_of(int64_t kind) {
    uint16_t order[2 * LANES];
    for (int place = 0; place < 2 * LANES; place++) {
        int line = place / 2, second = place % 2, column = place;
        if (kind == 4) column = line / 4 * 4 + line % 4 / 2 + line % 2 * LANES + 2 * second;
        order[place] = 2 * column + 1;
    }
    return _mm512_loadu_si512(order);
}

/* Put a term of 32 numbers of a row where it is wanted. */
INLINED void put_term(__m512i first, __m512i second, __m512i order, uint8_t *to) {
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, order, second));
}

/* Cut a group's whole numbers into multiples of 256 and what is left: two terms, or bytes. */
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

static void cut_rows(const void *told, int64_t row, int64_t end) {
    const struct product *by = told;
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
                from = near; /* a strip's last lines: what lay there might be slow to compute with */
            else if (left < GROUP)
                from = memcpy(near, x, left * sizeof(float));
            __m512 first = _mm512_loadu_ps(from), second = _mm512_loadu_ps(from + LANES);
            if (by->kind > FP32) {
                struct rounded group = rounded((lanes)first, (lanes)second, FINE);
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

/* The whole numbers of four bits in bf16. */
static const uint16_t WHOLE[LANES] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
                                      0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130,
                                      0x4140, 0x4150, 0x4160, 0x4170};

/* The numbers of a group of four bits as a term: 16 lines, a pair of columns each. */
INLINED void widen_group(const uint8_t *group, uint8_t *to) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)WHOLE));
    for (int line = 0; line < 4; line++)
#pragma GCC unroll 4
        for (int shift = 0; shift < 16; shift += 4, to += LINE) {
            __m512i numbers = _mm512_srli_epi16(_mm512_loadu_si512(group + line * LINE), shift);
            /* What is above the number does no harm: the table repeats itself. */
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(numbers, table));
        }
}

/* One strip of `lines` rows by a few groups of 16 rows. */
INLINED void multiply_groups(const int lines, const int bits, const struct product *by,
                             const uint8_t *groups, const uint8_t *terms, int64_t count,
                             int64_t strip, int64_t block, int64_t rows, float *out) {
    const int64_t of_x = terms_of_x(bits) * lines * LINE;
    const uint8_t *x = by->terms + (strip * by->blocks + block) * of_x;
    const float *scales = by->scales + (strip * by->blocks + block) * lines;
    const float *sums = by->sums + (strip * by->blocks + block) * lines;
    /* The first strip has the next pair of tiles brought from memory. */
    const int64_t bytes = group_bytes(bits), ahead = 2 * by->blocks * bytes;
    __m512i dots[2][TILE];
    __m512 answers[TILE];
#pragma GCC unroll 16
    for (int line = 0; line < lines; line++)
        answers[line] = block > 0 && line < rows ? _mm512_loadu_ps(out + line * by->rows)
                                                 : _mm512_setzero_ps();
    for (int64_t group = 0; group < count; group++) {
        TILE_NOUGHT(0);
        TILE_LOAD(4, x, LINE);
        if (bits == 4) {
            TILE_LOAD(5, x + lines * LINE, LINE);
            TILE_LOAD(6, terms, LINE);
            TILE_MULTIPLY(0, 4, 6);
            TILE_MULTIPLY(0, 5, 6);
        } else {
            TILE_NOUGHT(1);
            TILE_LOAD(5, x + LINE / 2, LINE);
            TILE_LOAD(6, groups, LINE);
            TILE_MULTIPLY_BYTES(s, 0, 4, 6);
            TILE_MULTIPLY_BYTES(u, 1, 5, 6);
            TILE_STORE(1, dots[1], LINE);
        }
        TILE_STORE(0, dots[0], LINE);
        const __m256i *halves = (const __m256i *)(groups + GROUP * TILE * bits / 8);
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

/* All rows by pairs of tiles. */
INLINED void by_groups(const int lines, const int bits, const struct product *by, int64_t pair,
                       int64_t end) {
    const int64_t bytes = group_bytes(bits), tiles = by->rows / TILE;
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
                                    by->out + row * by->rows + (first + one) * TILE);
        }
    }
}

/* A block of 32 columns of a tile of floats as terms. */
INLINED void widen_floats(const enum kind kind, const uint8_t *tile, int64_t columns, uint8_t *to) {
    const int64_t terms = terms_of(kind), bytes = TILE * bytes_of(kind);
    for (int64_t column = 0; column < GROUP; column += 2, to += LINE) {
        __m512 first = _mm512_setzero_ps(), second = first;
        if (column < columns) first = (__m512)widened(kind, tile + column * bytes);
        if (column + 1 < columns) second = (__m512)widened(kind, tile + (column + 1) * bytes);
#pragma GCC unroll 3
        for (int64_t term = 0; term < terms; term++)
            _mm512_storeu_si512(to + term * TERM, paired(term_of(&first), term_of(&second)));
    }
}

struct sums {
    float near[TILE * LANES] __attribute__((aligned(LINE)));
    float *out;
    int64_t rows; /* of the strip; none where there is no such strip, or tile */
};

/* The sums so far of a strip by a tile. */
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

/* Two strips by two tiles: what is loaded is multiplied twice. The first two strips have the next
 * pair of tiles, which begins `ahead`, brought from memory. */
INLINED void multiply_floats_by(const enum kind kind, const struct product *by, int64_t strip,
                                int64_t block, int64_t count, const uint8_t *const wide[2],
                                const uint8_t *ahead, float *out, int64_t tiles) {
    const int64_t lines = by->lines, bytes = lines * LINE, apart = by->rows;
    const int64_t rows = by->count - strip * lines, others = rows - lines;
    const int64_t terms = terms_of(kind), of_block = GROUP * TILE * bytes_of(kind);
    const uint8_t *x = by->terms + (strip * by->blocks + block) * TERMS * bytes;
    const uint8_t *other_x = x + by->blocks * TERMS * bytes;
    struct sums sums[4];
    for (int at = 0; at < 4; at++) {
        int64_t of_strip = at < 2 ? rows : others;
        sums[at].out = out + at / 2 * lines * apart + at % 2 * TILE;
        sums[at].rows = of_strip < lines ? of_strip : lines;
        if (at % 2 == 1 && tiles == 1) sums[at].rows = 0;
    }
    if (block == 0) {
        TILE_NOUGHT(0);
        TILE_NOUGHT(1);
        TILE_NOUGHT(2);
        TILE_NOUGHT(3);
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
    const int64_t bytes = TILE * bytes_of(kind), apart = by->columns * bytes, all = by->rows / TILE;
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
                                   by->out + strip * by->lines * by->rows + tile * TILE, tiles);
        }
    }
}

static void multiply_pairs(const void *told, int64_t pair, int64_t end) {
    const struct product *by = told;
    begin_tiles(by->lines, by->kind == 8 ? LINE / 2 : LINE);
    if (by->kind == FP16) by_floats(FP16, by, pair, end);
    if (by->kind == BF16) by_floats(BF16, by, pair, end);
    if (by->kind == FP32) by_floats(FP32, by, pair, end);
    /* Twelve rows or more make strips of twelve or sixteen. */
    if (by->kind == 4 && by->lines == 12) by_groups(12, 4, by, pair, end);
    if (by->kind == 4 && by->lines == 16) by_groups(16, 4, by, pair, end);
    if (by->kind == 8 && by->lines == 12) by_groups(12, 8, by, pair, end);
    if (by->kind == 8 && by->lines == 16) by_groups(16, 8, by, pair, end);
    TILES_END();
}

/* -1 where there is no memory for the terms of x. */
int64_t multiply_by_amx(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                          const float *x, int64_t count, int64_t threads, float *out) {
    struct product by = {.packed = packed, .x = x, .out = out, .kind = kind, .rows = rows,
                         .columns = columns, .count = count};
    by.blocks = (columns + GROUP - 1) / GROUP;
    by.strips = (count + TILE - 1) / TILE;
    by.lines = ((count + by.strips - 1) / by.strips + 3) / 4 * 4;
    by.strips = (count + by.lines - 1) / by.lines;
    int64_t lines = by.strips * by.lines * by.blocks, bytes = lines * terms_of_x(kind) * LINE;
    by.terms = aligned_alloc(LINE, (bytes + lines * 2 * sizeof(float) + LINE) / LINE * LINE);
    if (by.terms == NULL) return -1;
    by.scales = (float *)(by.terms + bytes);
    by.sums = by.scales + lines;
    int64_t pairs = (rows / TILE + 1) / 2;
    share(cut_rows, &by, by.strips * by.lines, portions_of(count * columns, threads), threads);
    /* The longer a portion, the more tiles find the terms of x in a near cache. */
    share(multiply_pairs, &by, pairs, 4 * threads, threads);
    free(by.terms);
    return 0;
}

#endif
