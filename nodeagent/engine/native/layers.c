/* All layers of a dense model of Llama's kind in one call: a step of few tokens would otherwise spend
 * a sixth of its time on the way in and out of a dozen calls for each layer.
 */

#include "kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

/* One matrix as `multiply` keeps it, or `multiply_floats`. */
struct matrix {
    const uint8_t *packed;
    int64_t kind, rows, columns;
};

struct layer {
    const float *attention_norm, *mlp_norm;
    const float *bias, *head_norms; /* of queries and keys; either may be none */
    struct matrix query_key_value, output, gate_up, down;
    float *pages;
};

struct step {
    float *x, *room; /* [rows, hidden]; a row's room is for all that lies between two of its x */
    const float *cos, *sin;
    const int64_t *slots, *tables, *pieces;
    int64_t rows, hidden, heads, kv_heads, dim, block_tokens, table_width, pieces_count, window;
    int64_t threads;
    float epsilon;
};

static int64_t multiply_by(const struct matrix *by, const float *x, const struct step *step,
                           float *out) {
    if (by->kind == 4 || by->kind == 8)
        return multiply(by->packed, by->kind, by->rows, by->columns, x, step->rows, step->threads,
                        out);
    multiply_floats(by->packed, by->kind, by->rows, by->columns, x, step->rows, step->threads, out);
    return 0;
}

static void add(float *x, const float *y, int64_t count) {
    for (int64_t at = 0; at < count; at++) x[at] += y[at];
}

/* From normalised rows to the answers of attention. */
static int64_t attend_layer(const struct layer *layer, const struct step *step, const float *normed,
                            float *mixed, float *answers) {
    int64_t turning = step->heads + step->kv_heads, dim = step->dim;
    int64_t stride = (turning + step->kv_heads) * dim;
    if (multiply_by(&layer->query_key_value, normed, step, mixed)) return -1;
    for (int64_t row = 0; row < step->rows; row++) {
        float *here = mixed + row * stride;
        if (layer->bias) add(here, layer->bias, stride);
        for (int64_t head = 0; layer->head_norms && head < turning; head++)
            normalise(here + head * dim, layer->head_norms + head * dim, step->epsilon, 1, dim, 1,
                      here + head * dim);
    }
    turn(mixed, stride, turning, dim, step->cos, step->sin, step->rows, step->threads);
    keep(mixed, step->rows, step->heads, step->slots, layer->pages, step->kv_heads, dim);
    attend(mixed, step->heads, layer->pages, step->block_tokens, step->kv_heads, dim, step->tables,
           step->table_width, step->pieces, step->pieces_count, step->window, step->threads,
           answers);
    return 0;
}

struct run {
    const struct layer *layers;
    int64_t count;
    const struct step *step;
    int64_t failed;
};

static int64_t run_layer(const struct layer *layer, const struct step *step) {
    int64_t rows = step->rows, hidden = step->hidden;
    float *normed = step->room, *made = normed + rows * hidden;
    float *mixed = made + rows * hidden, *answers = mixed + rows * layer->query_key_value.rows;
    normalise(step->x, layer->attention_norm, step->epsilon, rows, hidden, step->threads, normed);
    if (attend_layer(layer, step, normed, mixed, answers)) return -1;
    if (multiply_by(&layer->output, answers, step, made)) return -1;
    add(step->x, made, rows * hidden);
    normalise(step->x, layer->mlp_norm, step->epsilon, rows, hidden, step->threads, normed);
    float *both = mixed, *gated = both + rows * layer->gate_up.rows;
    if (multiply_by(&layer->gate_up, normed, step, both)) return -1;
    gate(both, rows, layer->down.columns, step->threads, gated);
    if (multiply_by(&layer->down, gated, step, made)) return -1;
    add(step->x, made, rows * hidden);
    return 0;
}

static void run_all(void *told) {
    struct run *run = told;
    for (int64_t at = 0; at < run->count && !run->failed; at++)
        run->failed = run_layer(run->layers + at, run->step);
}

int64_t run_layers(const struct layer *layers, int64_t count, const struct step *step) {
    struct run run = {layers, count, step, 0};
    with_team(step->threads, run_all, &run);
    return run.failed;
}

#endif
