/* Matrix products by weights that are floats: fp32, or fp16 and bf16, which are widened on their way
 * into the processor. Weights are exact, products and sums fp32.
 *
 * A matrix [rows, columns] lies in tiles of 16 rows; in a tile column behind column.
 */

#include "kernels.h"

#define STRIP 12 /* rows of x at a time, by two tiles: 24 sums stay in registers */
#define BLOCK 64 /* columns at a time: all strips find their weights in the nearest cache */
#define MANY 192 /* of so many rows strips take all columns: then it is x that is read again and again */

/* Sixteen weights of a column, `column` columns behind `tile`. */
INLINED lanes weights_at(const enum kind kind, const uint8_t *tile, int64_t column) {
    return widened(kind, tile + column * TILE * bytes_of(kind));
}

/* One row of x by one tile, four columns side by side so that no sum waits for itself. */
INLINED void multiply_one(const enum kind kind, const uint8_t *tile, int64_t columns, const float *x,
                          float *out) {
    lanes sums[4] = {{0}, {0}, {0}, {0}};
    int64_t column = 0;
    for (; column + 4 <= columns; column += 4)
#pragma GCC unroll 4
        for (int one = 0; one < 4; one++)
            sums[one] += x[column + one] * weights_at(kind, tile, column + one);
    for (; column < columns; column++)
        sums[0] += x[column] * weights_at(kind, tile, column);
    *(lanes *)out = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* Some columns of neighbouring tiles, which lie `apart` bytes from one another, and a strip of x. */
struct strip {
    const uint8_t *tile, *ahead; /* where the next block begins: each strip brings a share of it */
    int64_t apart, share, columns, x_stride, out_stride;
    const float *x;
    float *out;
    int first; /* no columns came before: sums begin with nought */
};

/* `several` rows of x by `tiles` neighbouring tiles. */
INLINED void multiply_strip(const int several, const int tiles, const enum kind kind,
                            const struct strip *by) {
    lanes sums[STRIP][2];
#pragma GCC unroll 12
    for (int m = 0; m < several; m++)
        for (int tile = 0; tile < tiles; tile++)
            sums[m][tile] = by->first ? (lanes){0}
                                      : ((const lanes *)(by->out + m * by->out_stride))[tile];
    for (int64_t column = 0; column < by->columns; column++) {
        lanes one = weights_at(kind, by->tile, column), other = one;
        if (tiles == 2) other = weights_at(kind, by->tile + by->apart, column);
        __builtin_prefetch(by->ahead + column * by->share);
        __builtin_prefetch(by->ahead + column * by->share + by->apart);
#pragma GCC unroll 12
        for (int m = 0; m < several; m++) {
            float number = by->x[m * by->x_stride + column];
            sums[m][0] += number * one;
            if (tiles == 2) sums[m][1] += number * other;
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < several; m++)
        for (int tile = 0; tile < tiles; tile++)
            ((lanes *)(by->out + m * by->out_stride))[tile] = sums[m][tile];
}

INLINED void multiply_tiles(const int tiles, const enum kind kind, const uint8_t *tile,
                            int64_t columns, const float *x, int64_t count, float *out,
                            int64_t out_stride) {
    const int64_t bytes = TILE * bytes_of(kind), apart = columns * bytes;
    if (count == 1) {
        multiply_one(kind, tile, columns, x, out);
        if (tiles == 2) multiply_one(kind, tile + apart, columns, x, out + TILE);
        return;
    }
    const int64_t block = count < MANY ? BLOCK : columns;
    for (int64_t column = 0; column < columns; column += block) {
        const int64_t left = columns - column, here = left < block ? left : block;
        /* Behind the last tile it may lead anywhere: whoever only announces reads nothing. */
        const uint8_t *ahead = left > block ? tile + (column + block) * bytes : tile + 2 * apart;
        for (int64_t row = 0, taken; row < count; row += taken) {
            const int64_t rest = count - row, share = bytes / ((count + STRIP - 1) / STRIP);
            const struct strip by = {.tile = tile + column * bytes,
                                     .ahead = ahead + row / STRIP * here * share,
                                     .apart = apart,
                                     .share = share,
                                     .columns = here,
                                     .x_stride = columns,
                                     .out_stride = out_stride,
                                     .x = x + row * columns + column,
                                     .out = out + row * out_stride,
                                     .first = column == 0};
            taken = rest >= 12 ? 12 : rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
            if (taken == 12) multiply_strip(12, tiles, kind, &by);
            if (taken == 8) multiply_strip(8, tiles, kind, &by);
            if (taken == 4) multiply_strip(4, tiles, kind, &by);
            if (taken == 2) multiply_strip(2, tiles, kind, &by);
            if (taken == 1) multiply_strip(1, tiles, kind, &by);
        }
    }
}

struct product {
    const uint8_t *packed;
    const float *x;
    float *out;
    int64_t kind, rows, columns, count;
};

/* Pairs of tiles; the last may be a single one. */
static void multiply_pairs(const void *told, int64_t pair, int64_t end) {
    const struct product *by = told;
    int64_t tiles = by->rows / TILE;
    for (int64_t at = 2 * pair; at < 2 * end && at < tiles; at += 2) {
        const uint8_t *tile = by->packed + at * TILE * by->columns * bytes_of(by->kind);
        float *to = by->out + at * TILE;
#define TILES(several, kind)                                                                       \
    multiply_tiles(several, kind, tile, by->columns, by->x, by->count, to, by->rows)
        if (at + 1 < tiles && by->kind == FP16) TILES(2, FP16);
        if (at + 1 < tiles && by->kind == BF16) TILES(2, BF16);
        if (at + 1 < tiles && by->kind == FP32) TILES(2, FP32);
        if (at + 1 == tiles && by->kind == FP16) TILES(1, FP16);
        if (at + 1 == tiles && by->kind == BF16) TILES(1, BF16);
        if (at + 1 == tiles && by->kind == FP32) TILES(1, FP32);
#undef TILES
    }
}

void multiply_floats(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                     const float *x, int64_t count, int64_t threads, float *out) {
    const struct product told = {packed, x, out, kind, rows, columns, count};
    int64_t pairs = (rows / TILE + 1) / 2;
    share(multiply_pairs, &told, pairs, portions_of(rows * columns * count, threads), threads);
}
