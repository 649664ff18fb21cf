/* How quantised weights lie, and bringing them there from a file's blocks.
 *
 * A matrix [rows, columns] of numbers in groups of 32 along a row, each `number * scale + offset`,
 * lies in tiles of 16 rows; in a tile group behind group; a group is its 512 numbers (eight bits,
 * or four), then 16 scales and 16 offsets in fp16. Byte 4 * row + column of a line has the number of
 * one of four neighbouring columns; where numbers have four bits, the higher ones are of the column
 * 16 further on.
 */

#include "kernels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define NEAR_BYTES 98304 /* of a file at a time */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

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
