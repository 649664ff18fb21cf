/* Row operations between the matrix products and attention: norm, gate, rotary embedding. */

#include "kernels.h"

struct rows {
    float *x, *out;
    const float *added, *weight, *cos, *sin;
    int64_t columns, stride, heads;
    float epsilon;
};

static void rms_norm_rows(const void *arguments, int64_t row, int64_t end) {
    const struct rows *rows = arguments;
    for (; row < end; row++) {
        float *from = rows->x + row * rows->columns;
        const float *weight = rows->weight;
        float *to = rows->out + row * rows->columns, squares = 0;
        if (rows->added) add(from, rows->added + row * rows->columns, rows->columns);
#pragma omp simd reduction(+ : squares)
        for (int64_t at = 0; at < rows->columns; at++) squares += from[at] * from[at];
        float scale = 1.0f / sqrtf(squares / rows->columns + rows->epsilon);
#pragma omp simd
        for (int64_t at = 0; at < rows->columns; at++) to[at] = from[at] * scale * weight[at];
    }
}

/* Add `added`, unless it is NULL, to the rows of x in place; write their RMS norm to `out`. */
void rms_norm(float *x, const float *added, const float *weight, float epsilon, int64_t rows,
              int64_t columns, int64_t threads, float *out) {
    const struct rows arguments = {.x = x,
                                   .added = added,
                                   .weight = weight,
                                   .epsilon = epsilon,
                                   .columns = columns,
                                   .out = out};
    parallel_for(rms_norm_rows, &arguments, rows, portions_of(rows * columns, threads), threads);
}

/* `gate / (1 + e^-gate) * value`. */
INLINED lanes gated(lanes gate, lanes value) {
    const lanes max = (lanes){0} + 127.0f;
    lanes power = -LOG2_E * gate;
    return gate / (1.0f + power_of_two(where(power > max, max, power))) * value;
}

static void gate_rows(const void *arguments, int64_t row, int64_t end) {
    const struct rows *rows = arguments;
    for (; row < end; row++) {
        int64_t columns = rows->columns, at = 0, rest = columns % LANES * sizeof(float);
        const float *gates = rows->x + 2 * row * columns, *values = gates + columns;
        float *to = rows->out + row * columns;
        for (; at + LANES <= columns; at += LANES)
            *(lanes *)(to + at) =
                gated(*(const lanes *)(gates + at), *(const lanes *)(values + at));
        lanes gate = {0}, value = {0};
        memcpy(&gate, gates + at, rest);
        memcpy(&value, values + at, rest);
        gate = gated(gate, value);
        memcpy(to + at, &gate, rest);
    }
}

/* Write silu(gate) * value. A row of x is its gates, then its values: [rows, 2 * columns]. */
void silu_gate(const float *x, int64_t rows, int64_t columns, int64_t threads, float *out) {
    const struct rows arguments = {.x = (float *)x, .columns = columns, .out = out};
    parallel_for(gate_rows, &arguments, rows, portions_of(rows * columns, threads), threads);
}

static void rotate_rows(const void *arguments, int64_t row, int64_t end) {
    const struct rows *rows = arguments;
    int64_t dim = rows->columns, half = dim / 2;
    for (; row < end; row++) {
        const float *c = rows->cos + row * dim, *s = rows->sin + row * dim;
        for (int64_t head = 0; head < rows->heads; head++) {
            float *low = rows->out + row * rows->stride + head * dim, *high = low + half;
#pragma omp simd
            for (int64_t at = 0; at < half; at++) {
                float one = low[at], other = high[at];
                low[at] = one * c[at] + other * s[at];
                high[at] = other * c[half + at] + one * s[half + at];
            }
        }
    }
}

/* Rotate the first `heads` of each row of x in place, by cosines and sines [rows, dim]. */
void rotate(float *x, int64_t stride, int64_t heads, int64_t dim, const float *cos,
            const float *sin, int64_t rows, int64_t threads) {
    const struct rows arguments = {
        .out = x, .stride = stride, .heads = heads, .columns = dim, .cos = cos, .sin = sin};
    parallel_for(rotate_rows, &arguments, rows, portions_of(rows * heads * dim, threads), threads);
}
