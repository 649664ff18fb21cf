/* How quantised weights lie, and bringing them there from a file's blocks.
 *
 * A matrix [rows, columns] of numbers in groups of 32 along a row, each `number * scale + offset`,
 * lies in tiles of 16 rows; in a tile group behind group; a group is its 512 numbers (eight bits,
 * or four), then 16 scales and 16 offsets in fp16. Byte 4 * row + column of a line has the number of
 * one of four neighbouring columns; where numbers have four bits, the higher ones are of the column
 * 16 further on. Numbers of 16 bits have a sign, 16 scales in fp32 and no offsets; of four
 * neighbouring columns the first and the third share a line, the second and the fourth the next.
 */

#include "kernels.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* Of a file at a time: a disk that is asked for less gives less in a second. */
#define PIECE_BYTES (1024 * 1024)
#define SECTOR 4096

static int64_t tile_bytes(int64_t bits, int64_t columns) {
    return columns / GROUP * group_bytes(bits);
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
void pack(const uint8_t *numbers, const float *scales, const float *offsets, int64_t bits,
          int64_t rows, int64_t columns, int64_t threads, uint8_t *out) {
    const struct numbers told = {numbers, scales, offsets, bits, columns, out};
    share(pack_numbers, &told, rows / TILE, portions_of(rows * columns, threads), threads);
}

struct wide {
    const uint8_t *weights;
    int64_t kind, columns;
    uint8_t *out;
};

/* Where in its group the number of a row and a column is, of 16 bits. */
INLINED int64_t wide_at(int64_t row, int64_t column) {
    return (column / 4 * 2 + column % 2) * 2 * TILE + 2 * row + column % 4 / 2;
}

INLINED void round_tiles(const enum kind kind, const struct wide *by, int64_t tile, int64_t end) {
    int64_t groups = by->columns / GROUP, bytes = bytes_of(kind);
    for (int64_t at = tile * groups; at < end * groups; at++) {
        int16_t *to = (int16_t *)(by->out + at * group_bytes(16)), numbers[GROUP];
        float *scales = (float *)(to + GROUP * TILE);
        for (int64_t row = 0; row < TILE; row++) {
            int64_t number = (at / groups * TILE + row) * by->columns + at % groups * GROUP;
            const uint8_t *from = by->weights + number * bytes;
            struct rounded group =
                rounded(widened(kind, from), widened(kind, from + LANES * bytes), COARSE);
            _mm256_storeu_si256((__m256i *)numbers, _mm512_cvtsepi32_epi16(group.first));
            _mm256_storeu_si256((__m256i *)numbers + 1, _mm512_cvtsepi32_epi16(group.second));
            for (int64_t column = 0; column < GROUP; column++)
                to[wide_at(row, column)] = numbers[column];
            scales[row] = group.scale;
        }
    }
}

static void pack_wide(const void *told, int64_t tile, int64_t end) {
    const struct wide *by = told;
    if (by->kind == FP16) round_tiles(FP16, by, tile, end);
    if (by->kind == BF16) round_tiles(BF16, by, tile, end);
    if (by->kind == FP32) round_tiles(FP32, by, tile, end);
}

/* The same of floats [rows, columns], rounded to 14 bits. */
void pack_rounded(const uint8_t *weights, int64_t kind, int64_t rows, int64_t columns,
                  int64_t threads, uint8_t *out) {
    const struct wide told = {weights, kind, columns, out};
    share(pack_wide, &told, rows / TILE, portions_of(rows * columns, threads), threads);
}

/* The same from the blocks of a GGUF file: [rows, columns / 32], each a scale, an offset in Q4_1
 * alone, and the numbers. Four bits lie there as they lie here, byte by byte. */
enum layout { Q4_0, Q4_1, Q8_0 };

static int64_t block_bytes(int64_t layout) {
    return layout == Q8_0 ? 34 : layout == Q4_1 ? 20 : 18;
}

static int64_t bits_of(int64_t layout) { return layout == Q8_0 ? 8 : 4; }

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

/* Whole tiles, and whole heads where there are any. */
static void pack_rows(const uint8_t *blocks, int64_t layout, int64_t rows, int64_t columns,
                      int64_t head_rows, uint8_t *out) {
    int64_t groups = columns / GROUP, bits = bits_of(layout);
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *from = blocks + filed_at(row, head_rows) * groups * block_bytes(layout);
        uint8_t *to = out + row / TILE * tile_bytes(bits, columns);
        for (int64_t group = 0; group < groups; group++) {
            if (layout == Q4_0) pack_block(Q4_0, from, row % TILE, to);
            if (layout == Q4_1) pack_block(Q4_1, from, row % TILE, to);
            if (layout == Q8_0) pack_block(Q8_0, from, row % TILE, to);
            from += block_bytes(layout);
            to += group_bytes(bits);
        }
    }
}

struct blocks {
    const uint8_t *blocks;
    int64_t layout, columns;
    uint8_t *out;
};

static void pack_tiles(const void *told, int64_t tile, int64_t end) {
    const struct blocks *by = told;
    int64_t row_bytes = by->columns / GROUP * block_bytes(by->layout);
    pack_rows(by->blocks + tile * TILE * row_bytes, by->layout, (end - tile) * TILE, by->columns, 0,
              by->out + tile * tile_bytes(bits_of(by->layout), by->columns));
}

/* `rows` must be whole tiles. */
void pack_blocks(const uint8_t *blocks, int64_t layout, int64_t rows, int64_t columns,
                 int64_t threads, uint8_t *out) {
    const struct blocks told = {blocks, layout, columns, out};
    share(pack_tiles, &told, rows / TILE, portions_of(rows * columns, threads), threads);
}

/* Blocks where they lie in an open file, and where they are wanted. `rows` must be whole tiles, and
 * whole heads where those have any rows; heads are whole tiles. */
struct fetch {
    int64_t file, start, layout, rows, columns, head_rows;
    uint8_t *out;
};

struct fetching {
    const struct fetch *fetches, *end;
    int64_t room;
    _Atomic int64_t *begun;
    _Atomic int *failed;
};

static int64_t row_bytes(const struct fetch *by) {
    return by->columns / GROUP * block_bytes(by->layout);
}

static int64_t rows_at_once(const struct fetch *by) {
    int64_t unit = by->head_rows ? by->head_rows : TILE;
    int64_t units = PIECE_BYTES / (unit * row_bytes(by));
    return units ? units * unit : unit;
}

static int64_t pieces_of(const struct fetch *by) {
    return (by->rows + rows_at_once(by) - 1) / rows_at_once(by);
}

/* Read at least the first `wanted` of `bytes`; at the end of a file there may be no more. */
static int read_sectors(int file, uint8_t *to, int64_t wanted, int64_t bytes, int64_t start) {
    for (int64_t at = 0; at < wanted;) {
        ssize_t taken = pread(file, to + at, bytes - at, start + at);
        if (taken < 0 && errno == EINTR) continue;
        if (taken <= 0) return -1;
        at += taken;
    }
    return 0;
}

/* Whole sectors, which is what a file gives that is open past the page cache. */
static int fetch_piece(const struct fetch *by, int64_t piece, uint8_t *near) {
    int64_t row = piece * rows_at_once(by), left = by->rows - row;
    int64_t count = left < rows_at_once(by) ? left : rows_at_once(by);
    int64_t start = by->start + row * row_bytes(by), before = start % SECTOR;
    int64_t wanted = before + count * row_bytes(by);
    int64_t bytes = (wanted + SECTOR - 1) / SECTOR * SECTOR;
    if (read_sectors(by->file, near, wanted, bytes, start - before)) return -1;
    pack_rows(near + before, by->layout, count, by->columns, by->head_rows,
              by->out + row / TILE * tile_bytes(bits_of(by->layout), by->columns));
    return 0;
}

/* What one thread does: read a piece into memory of its own, and pack it from there. */
static void fetch_pieces(const void *told, int64_t thread, int64_t threads) {
    (void)thread, (void)threads;
    const struct fetching *all = told;
    const struct fetch *by = all->fetches;
    uint8_t *near = aligned_alloc(SECTOR, all->room);
    if (near == NULL) *all->failed = 1;
    for (int64_t passed = 0; !*all->failed;) {
        int64_t piece = (*all->begun)++;
        while (by < all->end && piece - passed >= pieces_of(by)) passed += pieces_of(by++);
        if (by == all->end) break;
        if (fetch_piece(by, piece - passed, near)) *all->failed = 1;
    }
    free(near);
}

/* Read and pack, piece by piece, whichever thread is free the next one. Return -1 where a file cannot
 * be read so far. */
int64_t fetch_blocks(const struct fetch *fetches, int64_t count, int64_t threads) {
    int64_t most = 0;
    for (const struct fetch *by = fetches; by < fetches + count; by++) {
        int64_t bytes = rows_at_once(by) * row_bytes(by);
        if (bytes > most) most = bytes;
    }
    _Atomic int64_t begun = 0;
    _Atomic int failed = 0;
    int64_t room = (most / SECTOR + 2) * SECTOR;
    const struct fetching all = {fetches, fetches + count, room, &begun, &failed};
    share(fetch_pieces, &all, threads, threads, threads);
    return failed ? -1 : 0;
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
int64_t read_packed(const uint8_t *packed, int64_t bits, int64_t rows, int64_t columns,
                    const int64_t *wanted, int64_t count, float *out) {
    for (int64_t at = 0; at < count; at++) {
        if (wanted[at] < 0 || wanted[at] >= rows) return -1;
        const uint8_t *tile = packed + wanted[at] / TILE * tile_bytes(bits, columns);
        for (int64_t column = 0; column < columns; column++)
            *out++ = number_at(tile + column / GROUP * group_bytes(bits), bits, wanted[at] % TILE,
                               column % GROUP);
    }
    return 0;
}
