/* Matrix products by weights that are floats: fp32, or fp16 and bf16, which are widened on their way
 * into the processor. Weights are exact, products and sums fp32.
 *
 * A matrix [rows, columns] lies in tiles of 16 rows; in a tile column behind column.
 */

#include "kernels.h"

#define STRIP 12 /* rows of x at a time, by two tiles: 24 sums stay in registers */

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

/* `several` rows of x by `tiles` neighbouring tiles. */
INLINED void multiply_strip(const int several, const int tiles, const enum kind kind,
                            const uint8_t *tile, int64_t columns, const float *x, float *out,
                            int64_t out_stride) {
    lanes sums[STRIP][2];
#pragma GCC unroll 12
    for (int m = 0; m < several; m++) sums[m][0] = sums[m][1] = (lanes){0};
    for (int64_t column = 0; column < columns; column++) {
        lanes one = weights_at(kind, tile, column), other = one;
        if (tiles == 2) other = weights_at(kind, tile, columns + column);
#pragma GCC unroll 12
        for (int m = 0; m < several; m++) {
            float number = x[m * columns + column];
            sums[m][0] += number * one;
            if (tiles == 2) sums[m][1] += number * other;
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < several; m++) {
        *(lanes *)(out + m * out_stride) = sums[m][0];
        if (tiles == 2) *(lanes *)(out + m * out_stride + TILE) = sums[m][1];
    }
}

INLINED void multiply_tiles(const int tiles, const enum kind kind, const uint8_t *tile,
                            int64_t columns, const float *x, int64_t count, float *out,
                            int64_t out_stride) {
    if (count == 1) {
        multiply_one(kind, tile, columns, x, out);
        tile += columns * TILE * bytes_of(kind);
        if (tiles == 2) multiply_one(kind, tile, columns, x, out + TILE);
        return;
    }
    while (count) {
        int64_t taken = count >= 12 ? 12 : count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : 1;
        if (taken == 12) multiply_strip(12, tiles, kind, tile, columns, x, out, out_stride);
        if (taken == 8) multiply_strip(8, tiles, kind, tile, columns, x, out, out_stride);
        if (taken == 4) multiply_strip(4, tiles, kind, tile, columns, x, out, out_stride);
        if (taken == 2) multiply_strip(2, tiles, kind, tile, columns, x, out, out_stride);
        if (taken == 1) multiply_strip(1, tiles, kind, tile, columns, x, out, out_stride);
        x += taken * columns;
        out += taken * out_stride;
        count -= taken;
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
