/* What lies between the products and attention. */

#include "kernels.h"

void normalise(const float *x, const float *weight, float epsilon, int64_t rows, int64_t columns,
               int64_t threads, float *out) {
#pragma omp parallel for num_threads(threads) if (rows * columns > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * columns;
        float *to = out + row * columns, squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t at = 0; at < columns; at++) squares += from[at] * from[at];
        float scale = 1.0f / sqrtf(squares / columns + epsilon);
#pragma omp simd
        for (int64_t at = 0; at < columns; at++) to[at] = from[at] * scale * weight[at];
    }
}

/* `gate / (1 + e^-gate) * value`. */
INLINED lanes gated(lanes gate, lanes value) {
    const lanes most = (lanes){0} + 127.0f;
    lanes power = -LOG2_E * gate;
    return gate / (1.0f + power_of_two(where(power > most, most, power))) * value;
}

/* Rows of gates, each followed by its values: [rows, 2 * columns]. */
void gate(const float *x, int64_t rows, int64_t columns, int64_t threads, float *out) {
#pragma omp parallel for num_threads(threads) if (rows * columns > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const float *gates = x + 2 * row * columns, *values = gates + columns;
        float *to = out + row * columns;
        int64_t at = 0, rest = columns % LANES * sizeof(float);
        for (; at + LANES <= columns; at += LANES)
            *(lanes *)(to + at) = gated(*(const lanes *)(gates + at), *(const lanes *)(values + at));
        lanes gate = {0}, value = {0};
        memcpy(&gate, gates + at, rest);
        memcpy(&value, values + at, rest);
        gate = gated(gate, value);
        memcpy(to + at, &gate, rest);
    }
}

/* The first `heads` of each row of x, turned by cosines and sines [rows, dim]. */
void turn(float *x, int64_t stride, int64_t heads, int64_t dim, const float *cos, const float *sin,
          int64_t rows, int64_t threads) {
    int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cos + row * dim, *s = sin + row * dim;
        for (int64_t head = 0; head < heads; head++) {
            float *low = x + row * stride + head * dim, *high = low + half;
#pragma omp simd
            for (int64_t at = 0; at < half; at++) {
                float one = low[at], other = high[at];
                low[at] = one * c[at] + other * s[at];
                high[at] = other * c[half + at] + one * s[half + at];
            }
        }
    }
}
