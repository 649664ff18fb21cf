/* Matrix products by float weights: fp32, or fp16 and bf16, which are converted when loaded.
 * Weights are exact, products and sums fp32. `packing.c` describes the layout of a matrix. */

#include "kernels.h"

#define STRIP 12 /* rows of x at a time, by two panels: 24 sums stay in registers */
#define BLOCK 64 /* columns at a time: all strips find their weights in the L1 cache */
#define MANY                                                                                       \
    192 /* from this many rows on, strips take all columns, because rereading x costs more */

/* The 16 weights of column `column` of a panel. */
INLINED lanes weights_at(const enum kind kind, const uint8_t *panel, int64_t column) {
    return load_fp32(kind, panel + column * PANEL * bytes_of(kind));
}

/* One row of x by one panel, four columns at a time so that no sum waits for itself. */
INLINED void multiply_one(const enum kind kind, const uint8_t *panel, int64_t columns,
                          const float *x, float *out) {
    lanes sums[4] = {{0}, {0}, {0}, {0}};
    int64_t column = 0;
    for (; column + 4 <= columns; column += 4)
#pragma GCC unroll 4
        for (int one = 0; one < 4; one++)
            sums[one] += x[column + one] * weights_at(kind, panel, column + one);
    for (; column < columns; column++) sums[0] += x[column] * weights_at(kind, panel, column);
    *(lanes *)out = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* Some columns of neighbouring panels, `apart` bytes from each other, and a strip of x. */
struct strip {
    const uint8_t *panel, *ahead; /* the next block: each strip prefetches a share of it */
    int64_t apart, share, columns, x_stride, out_stride;
    const float *x;
    float *out;
    int first; /* no columns came before: sums start at zero */
};

/* `several` rows of x by `panels` neighbouring panels. */
INLINED void multiply_strip(const int several, const int panels, const enum kind kind,
                            const struct strip *by) {
    lanes sums[STRIP][2];
#pragma GCC unroll 12
    for (int m = 0; m < several; m++)
        for (int panel = 0; panel < panels; panel++)
            sums[m][panel] =
                by->first ? (lanes){0} : ((const lanes *)(by->out + m * by->out_stride))[panel];
    for (int64_t column = 0; column < by->columns; column++) {
        lanes one = weights_at(kind, by->panel, column), other = one;
        if (panels == 2) other = weights_at(kind, by->panel + by->apart, column);
        __builtin_prefetch(by->ahead + column * by->share);
        __builtin_prefetch(by->ahead + column * by->share + by->apart);
#pragma GCC unroll 12
        for (int m = 0; m < several; m++) {
            float number = by->x[m * by->x_stride + column];
            sums[m][0] += number * one;
            if (panels == 2) sums[m][1] += number * other;
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < several; m++)
        for (int panel = 0; panel < panels; panel++)
            ((lanes *)(by->out + m * by->out_stride))[panel] = sums[m][panel];
}

INLINED void multiply_panels(const int panels, const enum kind kind, const uint8_t *panel,
                             int64_t columns, const float *x, int64_t count, float *out,
                             int64_t out_stride) {
    const int64_t bytes = PANEL * bytes_of(kind), apart = columns * bytes;
    if (count == 1) {
        multiply_one(kind, panel, columns, x, out);
        if (panels == 2) multiply_one(kind, panel + apart, columns, x, out + PANEL);
        return;
    }
    const int64_t block = count < MANY ? BLOCK : columns;
    for (int64_t column = 0; column < columns; column += block) {
        const int64_t left = columns - column, here = left < block ? left : block;
        /* After the last panel this may point anywhere: a prefetch of bad memory does nothing. */
        const uint8_t *ahead = left > block ? panel + (column + block) * bytes : panel + 2 * apart;
        for (int64_t row = 0, taken; row < count; row += taken) {
            const int64_t rest = count - row, share = bytes / ((count + STRIP - 1) / STRIP);
            const struct strip by = {.panel = panel + column * bytes,
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
            if (taken == 12) multiply_strip(12, panels, kind, &by);
            if (taken == 8) multiply_strip(8, panels, kind, &by);
            if (taken == 4) multiply_strip(4, panels, kind, &by);
            if (taken == 2) multiply_strip(2, panels, kind, &by);
            if (taken == 1) multiply_strip(1, panels, kind, &by);
        }
    }
}

struct product {
    const uint8_t *packed;
    const float *x;
    float *out;
    int64_t kind, rows, columns, count;
};

/* Multiply by pairs of panels; the last may be a single one. */
static void multiply_pairs(const void *arguments, int64_t pair, int64_t end) {
    const struct product *by = arguments;
    int64_t panels = by->rows / PANEL;
    for (int64_t at = 2 * pair; at < 2 * end && at < panels; at += 2) {
        const uint8_t *panel = by->packed + at * PANEL * by->columns * bytes_of(by->kind);
        float *to = by->out + at * PANEL;
#define BY_PANELS(several, kind)                                                                   \
    multiply_panels(several, kind, panel, by->columns, by->x, by->count, to, by->rows)
        if (at + 1 < panels && by->kind == FP16) BY_PANELS(2, FP16);
        if (at + 1 < panels && by->kind == BF16) BY_PANELS(2, BF16);
        if (at + 1 < panels && by->kind == FP32) BY_PANELS(2, FP32);
        if (at + 1 == panels && by->kind == FP16) BY_PANELS(1, FP16);
        if (at + 1 == panels && by->kind == BF16) BY_PANELS(1, BF16);
        if (at + 1 == panels && by->kind == FP32) BY_PANELS(1, FP32);
#undef BY_PANELS
    }
}

void multiply_floats(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                     const float *x, int64_t count, int64_t threads, float *out) {
    const struct product arguments = {packed, x, out, kind, rows, columns, count};
    int64_t pairs = (rows / PANEL + 1) / 2;
    parallel_for(multiply_pairs, &arguments, pairs, portions_of(rows * columns * count, threads),
                 threads);
}
