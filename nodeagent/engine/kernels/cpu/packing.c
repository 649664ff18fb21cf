/* How matrices lie, and bringing them there from rows as files keep them.
 *
 * A matrix [rows, columns] lies in tiles of 16 rows. Of floats a tile has column behind column. Of
 * numbers in groups of 32 along a row, each `number * scale + offset`, it has group behind group; a
 * group is its 512 numbers (eight bits, or four), then 16 scales and 16 offsets in fp16. Byte
 * 4 * row + column of a line has the number of one of four neighbouring columns; where numbers have
 * four bits, the higher ones are of the column 16 further on. Numbers of 16 bits have a sign, 16
 * scales in fp32 and no offsets; of four neighbouring columns the first and the third share a line,
 * the second and the fourth the next.
 */

#include "packing.h"

/* Of a matrix of floats, by their kind; or of numbers, by their bits. */
int64_t panel_bytes(int64_t kind, int64_t columns) {
    return kind <= FP32 ? TILE * columns * bytes_of(kind) : columns / GROUP * group_bytes(kind);
}

struct numbers {
    const uint8_t *numbers;
    const float *scales, *offsets;
    int64_t bits, columns;
    uint8_t *out;
};

static void pack_numbers(const void *told, int64_t tile, int64_t end) {
    const struct numbers *by = told;
    int64_t groups = by->columns / GROUP, bits = by->bits, bytes = group_bytes(bits);
    for (int64_t at = tile * groups; at < end * groups; at++) {
        int64_t group = at % groups;
        uint8_t *to = by->out + at * bytes;
        uint16_t *halves = (uint16_t *)(to + GROUP * TILE * bits / 8);
        memset(to, 0, GROUP * TILE * bits / 8);
        for (int64_t row = 0; row < TILE; row++) {
            int64_t wide = at / groups * TILE + row;
            const uint8_t *from = by->numbers + wide * by->columns + group * GROUP;
            for (int64_t column = 0; column < GROUP; column++) {
                int64_t high = bits == 4 && column >= GROUP / 2;
                int64_t line = column / 4 - high * GROUP / 8;
                to[line * LINE + 4 * row + column % 4] |= from[column] << (4 * high);
            }
            halves[row] = _cvtss_sh(by->scales[wide * groups + group], 0);
            halves[TILE + row] = _cvtss_sh(by->offsets[wide * groups + group], 0);
        }
    }
}

/* `rows` must be whole tiles. */
void pack_groups(const uint8_t *numbers, const float *scales, const float *offsets, int64_t bits,
          int64_t rows, int64_t columns, int64_t threads, uint8_t *out) {
    const struct numbers told = {numbers, scales, offsets, bits, columns, out};
    share(pack_numbers, &told, rows / TILE, portions_of(rows * columns, threads), threads);
}

/* Floats as a tile of the same kind, or of fp32. */
INLINED void lay_floats(const enum kind kind, const int wide, const uint8_t *const *from,
                        int64_t columns, uint8_t *out) {
    int64_t bytes = bytes_of(kind);
    for (int64_t column = 0; column < columns; column += LANES) {
        int64_t left = columns - column < LANES ? columns - column : LANES;
        lanes x[LANES];
        for (int64_t row = 0; row < TILE; row++) {
            uint8_t near[LINE] = {0};
            const uint8_t *at = from[row] + column * bytes;
            if (left < LANES) at = memcpy(near, at, left * bytes);
            x[row] = wide ? widened(kind, at) : (lanes)_mm512_cvtepu16_epi32(
                                                    _mm256_loadu_si256((const __m256i *)at));
        }
        turn_about(x);
        for (int64_t at = 0; at < left; at++, out += TILE * (wide ? 4 : bytes))
            if (wide)
                *(lanes *)out = x[at];
            else
                _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16((__m512i)x[at]));
    }
}

/* Floats rounded to 14 bits. */
INLINED void round_floats(const enum kind kind, const uint8_t *const *from, int64_t columns,
                          uint8_t *out) {
    int64_t bytes = bytes_of(kind);
    for (int64_t column = 0; column < columns; column += GROUP, out += group_bytes(16)) {
        lanes pairs[TILE];
        for (int64_t row = 0; row < TILE; row++) {
            const uint8_t *at = from[row] + column * bytes;
            struct rounded group = rounded(widened(kind, at), widened(kind, at + LANES * bytes), COARSE);
            __m512i numbers = _mm512_inserti64x4(
                _mm512_castsi256_si512(_mm512_cvtsepi32_epi16(group.first)),
                _mm512_cvtsepi32_epi16(group.second), 1);
            /* Of four neighbours, the first goes with the third, the second with the fourth. */
            numbers = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(numbers, 0xd8), 0xd8);
            pairs[row] = (lanes)numbers;
            memcpy(out + GROUP * TILE * 2 + 4 * row, &group.scale, sizeof(group.scale));
        }
        turn_about(pairs);
        memcpy(out, pairs, sizeof(pairs));
    }
}

/* A GGUF file's blocks, each a scale, an offset in Q4_1 alone, and the numbers. Four bits lie there
 * as they lie here, byte by byte. */
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

INLINED void pack_blocks(const enum layout layout, const uint8_t *const *from, int64_t columns,
                         uint8_t *out) {
    int64_t bytes = group_bytes(layout == Q8_0 ? 8 : 4);
    for (int64_t group = 0; group < columns / GROUP; group++, out += bytes)
        for (int64_t row = 0; row < TILE; row++)
            pack_block(layout, from[row] + group * block_bytes(layout), row, out);
}

/* One tile of a matrix of `kind`: rows in blocks have but one, floats three. */
static void pack_tile(const uint8_t *const *from, int64_t layout, int64_t kind, int64_t columns,
                      uint8_t *out) {
    if (layout == Q4_0) pack_blocks(Q4_0, from, columns, out);
    if (layout == Q4_1) pack_blocks(Q4_1, from, columns, out);
    if (layout == Q8_0) pack_blocks(Q8_0, from, columns, out);
    if (layout == FP16 && kind == 16) round_floats(FP16, from, columns, out);
    if (layout == BF16 && kind == 16) round_floats(BF16, from, columns, out);
    if (layout == FP32 && kind == 16) round_floats(FP32, from, columns, out);
    if (layout == FP16 && kind == FP32) lay_floats(FP16, 1, from, columns, out);
    if (layout == BF16 && kind == FP32) lay_floats(BF16, 1, from, columns, out);
    if (layout == FP32 && kind == FP32) lay_floats(FP32, 1, from, columns, out);
    if (layout < FP32 && kind < FP32) lay_floats(FP16, 0, from, columns, out);
}

/* Where a file has the row that is `row` here: it may keep the two halves of each head's rows, which
 * are turned together, as neighbours. */
static int64_t filed_at(int64_t row, int64_t head_rows) {
    if (head_rows == 0) return row;
    int64_t at = row % head_rows, half = head_rows / 2;
    return row - at + 2 * (at % half) + at / half;
}

/* Whole tiles, and whole heads where there are any. */
void pack_file_rows(const uint8_t *filed, int64_t layout, int64_t kind, int64_t rows, int64_t columns,
               int64_t head_rows, uint8_t *out) {
    int64_t bytes = row_bytes(layout, columns);
    for (int64_t row = 0; row < rows; row += TILE, out += panel_bytes(kind, columns)) {
        const uint8_t *from[TILE];
        for (int64_t at = 0; at < TILE; at++) from[at] = filed + filed_at(row + at, head_rows) * bytes;
        pack_tile(from, layout, kind, columns, out);
    }
}

struct filed {
    const uint8_t *rows;
    int64_t layout, kind, columns;
    uint8_t *out;
};

static void pack_tiles(const void *told, int64_t tile, int64_t end) {
    const struct filed *by = told;
    pack_file_rows(by->rows + tile * TILE * row_bytes(by->layout, by->columns), by->layout, by->kind,
              (end - tile) * TILE, by->columns, 0, by->out + tile * panel_bytes(by->kind, by->columns));
}

/* `rows` must be whole tiles. */
void pack_rows(const uint8_t *filed, int64_t layout, int64_t kind, int64_t rows, int64_t columns,
                int64_t threads, uint8_t *out) {
    const struct filed told = {filed, layout, kind, columns, out};
    share(pack_tiles, &told, rows / TILE, portions_of(rows * columns, threads), threads);
}

/* Where in its group the number of a row and a column is, of 16 bits. */
INLINED int64_t wide_at(int64_t row, int64_t column) {
    return (column / 4 * 2 + column % 2) * 2 * TILE + 2 * row + column % 4 / 2;
}

/* One number of a group. */
static float number_at(const uint8_t *group, int64_t bits, int64_t row, int64_t column) {
    const uint8_t *behind = group + GROUP * TILE * bits / 8;
    if (bits == 16)
        return ((const int16_t *)group)[wide_at(row, column)] * ((const float *)behind)[row];
    int64_t high = bits == 4 && column >= GROUP / 2;
    uint8_t number = group[(column / 4 - high * GROUP / 8) * LINE + 4 * row + column % 4];
    const uint16_t *halves = (const uint16_t *)behind;
    if (bits == 4) number = number >> (4 * high) & 15;
    return number * _cvtsh_ss(halves[row]) + _cvtsh_ss(halves[TILE + row]);
}

/* Rows of the matrix by their numbers; -1 where there is no such row. */
int64_t unpack_rows(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                  const int64_t *wanted, int64_t count, float *out) {
    for (int64_t at = 0; at < count; at++) {
        if (wanted[at] < 0 || wanted[at] >= rows) return -1;
        const uint8_t *tile = packed + wanted[at] / TILE * panel_bytes(kind, columns);
        for (int64_t column = 0, row = wanted[at] % TILE; column < columns; column++)
            *out++ = kind <= FP32
                         ? widened(kind, tile + column * TILE * bytes_of(kind))[row]
                         : number_at(tile + column / GROUP * group_bytes(kind), kind, row,
                                     column % GROUP);
    }
    return 0;
}
