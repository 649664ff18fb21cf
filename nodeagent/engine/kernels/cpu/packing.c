/* The layout of packed matrices, and packing rows into it.
 *
 * A matrix [rows, columns] is stored in panels of 16 rows.
 *
 * - Floats: a panel is its columns, one after another, of 16 numbers each.
 * - Groups of 4 or 8 bits, each number * scale + offset: a panel is its groups of 32 columns, one
 * after another. A group is 512 numbers, then 16 scales and 16 offsets in fp16. A line of 64 bytes
 * has four neighbouring columns: byte 4 * row + column. With 4 bits, the upper half of a byte is
 * the column 16 further on.
 * - Rounded floats: groups of 512 signed 16-bit numbers, then 16 scales in fp32, without offsets.
 * Of four neighbouring columns the first and the third share a line, the second and the fourth the
 * next.
 */

#include "packing.h"

/* The size of a panel. `kind` is an `enum kind` for floats, or the bits of groups and maybe
 * BY_BYTES. */
int64_t panel_bytes(int64_t kind, int64_t columns) {
    return kind <= FP32 ? PANEL * columns * bytes_of(kind) : columns / GROUP * group_bytes(bits_of(kind));
}

struct numbers {
    const uint8_t *numbers;
    const float *scales, *offsets;
    int64_t bits, columns;
    uint8_t *out;
};

static void pack_numbers(const void *arguments, int64_t panel, int64_t end) {
    const struct numbers *by = arguments;
    int64_t groups = by->columns / GROUP, bits = by->bits, bytes = group_bytes(bits);
    for (int64_t at = panel * groups; at < end * groups; at++) {
        int64_t group = at % groups;
        uint8_t *to = by->out + at * bytes;
        uint16_t *halves = (uint16_t *)(to + GROUP * PANEL * bits / 8);
        memset(to, 0, GROUP * PANEL * bits / 8);
        for (int64_t row = 0; row < PANEL; row++) {
            int64_t wide = at / groups * PANEL + row;
            const uint8_t *from = by->numbers + wide * by->columns + group * GROUP;
            for (int64_t column = 0; column < GROUP; column++) {
                int64_t high = bits == 4 && column >= GROUP / 2;
                int64_t line = column / 4 - high * GROUP / 8;
                to[line * LINE + 4 * row + column % 4] |= from[column] << (4 * high);
            }
            halves[row] = _cvtss_sh(by->scales[wide * groups + group], 0);
            halves[PANEL + row] = _cvtss_sh(by->offsets[wide * groups + group], 0);
        }
    }
}

/* Pack numbers, scales and offsets; `rows` are whole panels. */
void pack_groups(const uint8_t *numbers, const float *scales, const float *offsets, int64_t kind,
                 int64_t rows, int64_t columns, int64_t threads, uint8_t *out) {
    const struct numbers arguments = {numbers, scales, offsets, bits_of(kind), columns, out};
    parallel_for(pack_numbers, &arguments, rows / PANEL, portions_of(rows * columns, threads),
                 threads);
}

/* Pack one panel of floats in the same kind, or (`wide`) in fp32. */
INLINED void pack_floats(const enum kind kind, const int wide, const uint8_t *const *from,
                         int64_t columns, uint8_t *out) {
    int64_t bytes = bytes_of(kind);
    for (int64_t column = 0; column < columns; column += LANES) {
        int64_t left = columns - column < LANES ? columns - column : LANES;
        lanes x[LANES];
        for (int64_t row = 0; row < PANEL; row++) {
            uint8_t near[LINE] = {0};
            const uint8_t *at = from[row] + column * bytes;
            if (left < LANES) at = memcpy(near, at, left * bytes);
            x[row] = wide ? load_fp32(kind, at)
                          : (lanes)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
        }
        transpose(x);
        for (int64_t at = 0; at < left; at++, out += PANEL * (wide ? 4 : bytes))
            if (wide)
                *(lanes *)out = x[at];
            else
                _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16((__m512i)x[at]));
    }
}

/* Pack one panel of floats, rounded to 14 bits. */
INLINED void round_floats(const enum kind kind, const uint8_t *const *from, int64_t columns,
                          uint8_t *out) {
    int64_t bytes = bytes_of(kind);
    for (int64_t column = 0; column < columns; column += GROUP, out += group_bytes(16)) {
        lanes pairs[PANEL];
        for (int64_t row = 0; row < PANEL; row++) {
            const uint8_t *at = from[row] + column * bytes;
            struct rounded group = round_to_integers(
                load_fp32(kind, at), load_fp32(kind, at + LANES * bytes), ROUNDED_MAX_BY_16_BITS);
            __m512i numbers =
                _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtsepi32_epi16(group.first)),
                                   _mm512_cvtsepi32_epi16(group.second), 1);
            /* Of four neighbours, pair the first with the third, and the second with the fourth. */
            numbers = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(numbers, 0xd8), 0xd8);
            pairs[row] = (lanes)numbers;
            memcpy(out + GROUP * PANEL * 2 + 4 * row, &group.scale, sizeof(group.scale));
        }
        transpose(pairs);
        memcpy(out, pairs, sizeof(pairs));
    }
}

/* Pack one panel of floats, rounded to bytes as GGUF's Q8_0 rounds them. Its scales have 16 bits:
 * a group below 2^-18 becomes zero or inexact. */
INLINED void round_floats_to_bytes(const enum kind kind, const uint8_t *const *from,
                                   int64_t columns, uint8_t *out) {
    int64_t bytes = bytes_of(kind);
    for (int64_t column = 0; column < columns; column += GROUP, out += group_bytes(8)) {
        uint16_t *halves = (uint16_t *)(out + GROUP * PANEL);
        for (int64_t row = 0; row < PANEL; row++) {
            const uint8_t *at = from[row] + column * bytes;
            __m512 one = (__m512)load_fp32(kind, at);
            __m512 other = (__m512)load_fp32(kind, at + LANES * bytes);
            struct rounded group = round_to_integers((lanes)one, (lanes)other, INT8_MAX);
            uint8_t numbers[GROUP];
            halves[row] = _cvtss_sh(group.scale, 0);
            float scale = _cvtsh_ss(halves[row]);
            __m512 inverse = _mm512_set1_ps(scale > 0 ? 1 / scale : 0);
            halves[PANEL + row] = _cvtss_sh(-128 * scale, 0);
            /* Rounded again, by the scale as it is stored; an integer saturates. */
            __m128i low = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(one, inverse)));
            __m128i high = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(other, inverse)));
            const __m128i sign = _mm_set1_epi8(-128); /* int8 to uint8 */
            _mm_storeu_si128((__m128i *)numbers, _mm_xor_si128(low, sign));
            _mm_storeu_si128((__m128i *)(numbers + LANES), _mm_xor_si128(high, sign));
            for (int64_t word = 0; word < GROUP / 4; word++)
                memcpy(out + word * LINE + 4 * row, numbers + 4 * word, 4);
        }
    }
}

/* Pack one GGUF block: a scale, an offset (Q4_1 only) and the numbers. Its bytes of four bits
 * have the order of ours. */
INLINED void pack_block(const enum row_format layout, const uint8_t *from, int64_t row,
                        uint8_t *to) {
    int64_t words = layout == Q8_0 ? GROUP / 4 : GROUP / 8;
    uint16_t *halves = (uint16_t *)(to + words * LINE), scale;
    memcpy(&scale, from, sizeof(scale));
    halves[row] = scale;
    if (layout == Q4_1)
        memcpy(halves + PANEL + row, from + 2, sizeof(scale));
    else
        halves[PANEL + row] = _cvtss_sh((layout == Q8_0 ? -128 : -8) * _cvtsh_ss(scale), 0);
    from += layout == Q4_1 ? 4 : 2;
    for (int64_t word = 0; word < words; word++) {
        uint32_t numbers;
        memcpy(&numbers, from + 4 * word, sizeof(numbers));
        /* int8 to uint8: the offset is -128 * scale. */
        if (layout == Q8_0) numbers ^= 0x80808080u;
        memcpy(to + word * LINE + 4 * row, &numbers, sizeof(numbers));
    }
}

INLINED void pack_blocks(const enum row_format layout, const uint8_t *const *from, int64_t columns,
                         uint8_t *out) {
    int64_t bytes = group_bytes(layout == Q8_0 ? 8 : 4);
    for (int64_t group = 0; group < columns / GROUP; group++, out += bytes)
        for (int64_t row = 0; row < PANEL; row++)
            pack_block(layout, from[row] + group * block_bytes(layout), row, out);
}

/* Pack one panel of a matrix of `kind`. Blocks have one possible size, floats four. */
static void pack_panel(const uint8_t *const *from, int64_t layout, int64_t kind, int64_t columns,
                       uint8_t *out) {
    if (layout == Q4_0) pack_blocks(Q4_0, from, columns, out);
    if (layout == Q4_1) pack_blocks(Q4_1, from, columns, out);
    if (layout == Q8_0) pack_blocks(Q8_0, from, columns, out);
    if (layout == FP16 && kind == 16) round_floats(FP16, from, columns, out);
    if (layout == BF16 && kind == 16) round_floats(BF16, from, columns, out);
    if (layout == FP32 && kind == 16) round_floats(FP32, from, columns, out);
    if (layout == FP16 && bits_of(kind) == 8) round_floats_to_bytes(FP16, from, columns, out);
    if (layout == BF16 && bits_of(kind) == 8) round_floats_to_bytes(BF16, from, columns, out);
    if (layout == FP32 && bits_of(kind) == 8) round_floats_to_bytes(FP32, from, columns, out);
    if (layout == FP16 && kind == FP32) pack_floats(FP16, 1, from, columns, out);
    if (layout == BF16 && kind == FP32) pack_floats(BF16, 1, from, columns, out);
    if (layout == FP32 && kind == FP32) pack_floats(FP32, 1, from, columns, out);
    if (layout < FP32 && kind < FP32) pack_floats(FP16, 0, from, columns, out);
}

/* The index in the file of the row that is `row` in the matrix; see `head_rows` in packing.h. */
static int64_t row_in_file(int64_t row, int64_t head_rows) {
    if (head_rows == 0) return row;
    int64_t at = row % head_rows, half = head_rows / 2;
    return row - at + 2 * (at % half) + at / half;
}

void pack_file_rows(const uint8_t *filed, int64_t layout, int64_t kind, int64_t rows,
                    int64_t columns, int64_t head_rows, uint8_t *out) {
    int64_t bytes = row_bytes(layout, columns);
    for (int64_t row = 0; row < rows; row += PANEL, out += panel_bytes(kind, columns)) {
        const uint8_t *from[PANEL];
        for (int64_t at = 0; at < PANEL; at++)
            from[at] = filed + row_in_file(row + at, head_rows) * bytes;
        pack_panel(from, layout, kind, columns, out);
    }
}

struct filed {
    const uint8_t *rows;
    int64_t layout, kind, columns;
    uint8_t *out;
};

static void pack_panels(const void *arguments, int64_t panel, int64_t end) {
    const struct filed *by = arguments;
    pack_file_rows(by->rows + panel * PANEL * row_bytes(by->layout, by->columns), by->layout,
                   by->kind, (end - panel) * PANEL, by->columns, 0,
                   by->out + panel * panel_bytes(by->kind, by->columns));
}

/* Pack rows in the form of a file; `rows` are whole panels. */
void pack_rows(const uint8_t *filed, int64_t layout, int64_t kind, int64_t rows, int64_t columns,
               int64_t threads, uint8_t *out) {
    const struct filed arguments = {filed, layout, kind, columns, out};
    parallel_for(pack_panels, &arguments, rows / PANEL, portions_of(rows * columns, threads),
                 threads);
}

/* The index in its group of the 16-bit number of a row and a column. */
INLINED int64_t index_of_16_bits(int64_t row, int64_t column) {
    return (column / 4 * 2 + column % 2) * 2 * PANEL + 2 * row + column % 4 / 2;
}

/* Return one dequantised number of a group. */
static float number_at(const uint8_t *group, int64_t bits, int64_t row, int64_t column) {
    const uint8_t *behind = group + GROUP * PANEL * bits / 8;
    if (bits == 16)
        return ((const int16_t *)group)[index_of_16_bits(row, column)] *
               ((const float *)behind)[row];
    int64_t high = bits == 4 && column >= GROUP / 2;
    uint8_t number = group[(column / 4 - high * GROUP / 8) * LINE + 4 * row + column % 4];
    const uint16_t *halves = (const uint16_t *)behind;
    if (bits == 4) number = number >> (4 * high) & 15;
    return number * _cvtsh_ss(halves[row]) + _cvtsh_ss(halves[PANEL + row]);
}

/* Write the rows `wanted` in fp32; return -1 if there is no such row. */
int64_t unpack_rows(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                    const int64_t *wanted, int64_t count, float *out) {
    for (int64_t at = 0; at < count; at++) {
        if (wanted[at] < 0 || wanted[at] >= rows) return -1;
        const uint8_t *panel = packed + wanted[at] / PANEL * panel_bytes(kind, columns);
        for (int64_t column = 0, row = wanted[at] % PANEL; column < columns; column++)
            *out++ = kind <= FP32 ? load_fp32(kind, panel + column * PANEL * bytes_of(kind))[row]
                                  : number_at(panel + column / GROUP * group_bytes(bits_of(kind)),
                                              bits_of(kind), row, column % GROUP);
    }
    return 0;
}
