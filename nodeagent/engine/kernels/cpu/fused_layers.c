/* All layers of a dense Llama-like model in one call. A step of few tokens would otherwise spend
 * a sixth of its time entering and leaving a dozen calls for each layer.
 *
 * The output of a layer is added to x by the next norm. The last layer computes only the rows
 * that are wanted: of the other rows of a prompt it needs only keys and values.
 */

#include "kernels.h"

#include <stdlib.h>

#define INTERRUPTED 1 /* returned instead of 0; -1 is a lack of memory */

/* A matrix, as `multiply` takes it. */
struct matrix {
    const uint8_t *packed;
    int64_t kind, rows, columns;
};

struct layer {
    const float *attention_norm, *mlp_norm;
    const float *bias, *head_norms; /* of queries and keys; either may be NULL */
    struct matrix query_key_value, output, gate_up, down;
    void *pages;
};

struct step {
    const int64_t *interrupt; /* set by another thread to end the step; may be NULL */
    float *x,
        *buffer; /* x is [rows, hidden]; the buffer holds all intermediate results of a layer */
    const float *cos, *sin;
    const int64_t *slots, *tables, *pieces;
    const int64_t *wanted; /* the rows to return, in order; they are moved to the front of `x` */
    int64_t *layers_computed; /* counted up by each layer; other threads read it */
    int64_t rows, hidden, heads, kv_heads, dim, block_tokens, table_width, pieces_count, window;
    int64_t wanted_count, threads, kv_form;
    float epsilon;
};

static int64_t multiply_by(const struct matrix *by, const float *x, const struct step *step,
                           float *out) {
    return multiply(by->packed, by->kind, by->rows, by->columns, x, step->rows, step->threads, out);
}

/* The parts of the buffer. `gate_up` and `gated` reuse the memory of `mixed` and `attended`. */
struct buffers {
    float *normed, *product, *mixed, *attended, *gate_up, *gated;
};

static struct buffers buffers_of(const struct layer *layer, const struct step *step) {
    int64_t rows = step->rows;
    float *normed = step->buffer, *product = normed + rows * step->hidden;
    float *mixed = product + rows * step->hidden;
    return (struct buffers){.normed = normed,
                            .product = product,
                            .mixed = mixed,
                            .attended = mixed + rows * layer->query_key_value.rows,
                            .gate_up = mixed,
                            .gated = mixed + rows * layer->gate_up.rows};
}

struct run {
    const struct layer *layers;
    int64_t count;
    const struct step *step;
    int64_t failed;
    float *mixed;
};

/* Rotate queries and keys of some rows, and store keys and values. */
static void rotate_and_store(const void *arguments, int64_t row, int64_t end) {
    const struct run *run = arguments;
    const struct step *step = run->step;
    const struct layer *layer = run->layers;
    int64_t rotated = step->heads + step->kv_heads, dim = step->dim;
    int64_t stride = (rotated + step->kv_heads) * dim;
    for (; row < end; row++) {
        float *here = run->mixed + row * stride;
        if (layer->bias) add(here, layer->bias, stride);
        for (int64_t head = 0; layer->head_norms && head < rotated; head++)
            rms_norm(here + head * dim, NULL, layer->head_norms + head * dim, step->epsilon, 1, dim,
                     1, here + head * dim);
        rotate(here, stride, rotated, dim, step->cos + row * dim, step->sin + row * dim, 1, 1);
        store_kv(here, 1, step->heads, step->slots + row, layer->pages, step->kv_heads, dim,
                 step->kv_form);
    }
}

static void attend_to(const struct layer *layer, const struct step *step, const int64_t *pieces,
                      int64_t count, const struct buffers *at) {
    /* Products that round their input amplify a difference in the last bit: with AMX attention,
     * a text would depend on how many of its tokens are computed at once. */
    const int rounds_input = layer->output.kind > FP32;
    attend(at->mixed, step->heads, layer->pages, step->block_tokens, step->kv_heads, step->dim,
           step->kv_form, step->tables, step->table_width, pieces, count, step->window, !rounds_input,
           step->threads, at->attended);
}

/* Attend only for the wanted rows, and move these and their attention to the front. */
static int64_t attend_wanted(const struct layer *layer, const struct step *step,
                             const struct buffers *at) {
    int64_t count = step->wanted_count, hidden = step->hidden, width = step->heads * step->dim;
    int64_t (*pieces)[4] = malloc((count + 1) * sizeof(*pieces));
    if (pieces == NULL) return -1;
    const int64_t *piece = step->pieces;
    for (int64_t one = 0; one < count; one++) {
        int64_t row = step->wanted[one];
        while (row >= piece[0] + piece[1]) piece += 4;
        pieces[one][0] = row;
        pieces[one][1] = 1;
        pieces[one][2] = piece[2] + row - piece[0];
        pieces[one][3] = piece[3];
    }
    attend_to(layer, step, pieces[0], count, at);
    free(pieces);
    for (int64_t one = 0; one < count; one++) {
        int64_t row = step->wanted[one];
        memmove(step->x + one * hidden, step->x + row * hidden, hidden * sizeof(float));
        memmove(at->attended + one * width, at->attended + row * width, width * sizeof(float));
    }
    return 0;
}

static int64_t run_layer(const struct layer *layer, const struct step *step, int first, int last) {
    const struct buffers at = buffers_of(layer, step);
    struct step left = *step;
    struct run run = {.layers = layer, .step = step, .mixed = at.mixed};
    int64_t numbers = step->rows * layer->query_key_value.rows;
    rms_norm(step->x, first ? NULL : at.product, layer->attention_norm, step->epsilon, step->rows,
             step->hidden, step->threads, at.normed);
    if (multiply_by(&layer->query_key_value, at.normed, step, at.mixed)) return -1;
    parallel_for(rotate_and_store, &run, step->rows, portions_of(numbers, step->threads),
                 step->threads);
    if (last && step->wanted_count < step->rows) {
        if (attend_wanted(layer, step, &at)) return -1;
        left.rows = step->wanted_count;
    } else
        attend_to(layer, step, step->pieces, step->pieces_count, &at);
    if (multiply_by(&layer->output, at.attended, &left, at.product)) return -1;
    rms_norm(step->x, at.product, layer->mlp_norm, step->epsilon, left.rows, step->hidden,
             step->threads, at.normed);
    if (multiply_by(&layer->gate_up, at.normed, &left, at.gate_up)) return -1;
    silu_gate(at.gate_up, left.rows, layer->down.columns, step->threads, at.gated);
    if (multiply_by(&layer->down, at.gated, &left, at.product)) return -1;
    if (last) add(step->x, at.product, left.rows * step->hidden);
    return 0;
}

static int is_interrupted(const struct step *step) {
    return step->interrupt && __atomic_load_n(step->interrupt, __ATOMIC_RELAXED);
}

static void run_all(void *arguments) {
    struct run *run = arguments;
    for (int64_t at = 0; at < run->count && !run->failed; at++) {
        if (is_interrupted(run->step)) {
            run->failed = INTERRUPTED;
            return;
        }
        run->failed = run_layer(run->layers + at, run->step, at == 0, at + 1 == run->count);
        __atomic_fetch_add(run->step->layers_computed, 1, __ATOMIC_RELAXED);
    }
}

int64_t run_layers(const struct layer *layers, int64_t count, const struct step *step) {
    struct run run = {.layers = layers, .count = count, .step = step};
    with_team(step->threads, run_all, &run);
    return run.failed;
}
