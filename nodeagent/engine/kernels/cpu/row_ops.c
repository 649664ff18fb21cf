/* What lies between the products and attention. */

#include "kernels.h"

struct rows {
    float *x, *out;
    const float *added, *weight, *cos, *sin;
    int64_t columns, stride, heads;
    float epsilon;
};

static void normalise_rows(const void *told, int64_t row, int64_t end) {
    const struct rows *rows = told;
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

/* Add `added`, where it is somewhere, to the rows of x in place; normalise them to `out`. */
void rms_norm(float *x, const float *added, const float *weight, float epsilon, int64_t rows,
               int64_t columns, int64_t threads, float *out) {
    const struct rows told = {.x = x,
                              .added = added,
                              .weight = weight,
                              .epsilon = epsilon,
                              .columns = columns,
                              .out = out};
    share(normalise_rows, &told, rows, portions_of(rows * columns, threads), threads);
}

/* `gate / (1 + e^-gate) * value`. */
INLINED lanes gated(lanes gate, lanes value) {
    const lanes most = (lanes){0} + 127.0f;
    lanes power = -LOG2_E * gate;
    return gate / (1.0f + power_of_two(where(power > most, most, power))) * value;
}

static void gate_rows(const void *told, int64_t row, int64_t end) {
    const struct rows *rows = told;
    for (; row < end; row++) {
        int64_t columns = rows->columns, at = 0, rest = columns % LANES * sizeof(float);
        const float *gates = rows->x + 2 * row * columns, *values = gates + columns;
        float *to = rows->out + row * columns;
        for (; at + LANES <= columns; at += LANES)
            *(lanes *)(to + at) = gated(*(const lanes *)(gates + at), *(const lanes *)(values + at));
        lanes gate = {0}, value = {0};
        memcpy(&gate, gates + at, rest);
        memcpy(&value, values + at, rest);
        gate = gated(gate, value);
        memcpy(to + at, &gate, rest);
    }
}

/* Rows of gates, each followed by its values: [rows, 2 * columns]. */
void silu_gate(const float *x, int64_t rows, int64_t columns, int64_t threads, float *out) {
    const struct rows told = {.x = (float *)x, .columns = columns, .out = out};
    share(gate_rows, &told, rows, portions_of(rows * columns, threads), threads);
}

static void turn_rows(const void *told, int64_t row, int64_t end) {
    const struct rows *rows = told;
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

/* The first `heads` of each row of x, turned by cosines and sines [rows, dim]. */
void rotate(float *x, int64_t stride, int64_t heads, int64_t dim, const float *cos, const float *sin,
          int64_t rows, int64_t threads) {
    const struct rows told = {
        .out = x, .stride = stride, .heads = heads, .columns = dim, .cos = cos, .sin = sin};
    share(turn_rows, &told, rows, portions_of(rows * heads * dim, threads), threads);
}
