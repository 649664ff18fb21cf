/* All layers of a dense model of Llama's kind in one call: a step of few tokens would otherwise spend
 * a sixth of its time on the way in and out of a dozen calls for each layer.
 *
 * What a layer adds to x, the next norm adds on its way. Of the last layer's rows those alone are
 * finished that anybody asks for: the others of a prompt leave nothing there but keys and values.
 */

#include "kernels.h"

#include <stdlib.h>

/* One matrix as `multiply` has it. */
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
    const int64_t *wanted; /* the rows that anybody asks for, in order: they come first in `x` then */
    int64_t rows, hidden, heads, kv_heads, dim, block_tokens, table_width, pieces_count, window;
    int64_t wanted_count, threads;
    float epsilon;
};

static int64_t multiply_by(const struct matrix *by, const float *x, const struct step *step,
                           float *out) {
    return multiply(by->packed, by->kind, by->rows, by->columns, x, step->rows, step->threads, out);
}

/* Where in a step's room lies what. */
struct places {
    float *normed, *made, *mixed, *answers, *both, *gated;
};

static struct places places_of(const struct layer *layer, const struct step *step) {
    int64_t rows = step->rows;
    float *normed = step->room, *made = normed + rows * step->hidden;
    float *mixed = made + rows * step->hidden;
    return (struct places){.normed = normed,
                           .made = made,
                           .mixed = mixed,
                           .answers = mixed + rows * layer->query_key_value.rows,
                           .both = mixed,
                           .gated = mixed + rows * layer->gate_up.rows};
}

struct run {
    const struct layer *layers;
    int64_t count;
    const struct step *step;
    int64_t failed;
    float *mixed;
};

/* Queries and keys of some rows to their positions, keys and values to their slots. */
static void place_rows(const void *told, int64_t row, int64_t end) {
    const struct run *run = told;
    const struct step *step = run->step;
    const struct layer *layer = run->layers;
    int64_t turning = step->heads + step->kv_heads, dim = step->dim;
    int64_t stride = (turning + step->kv_heads) * dim;
    for (; row < end; row++) {
        float *here = run->mixed + row * stride;
        if (layer->bias) add(here, layer->bias, stride);
        for (int64_t head = 0; layer->head_norms && head < turning; head++)
            rms_norm(here + head * dim, NULL, layer->head_norms + head * dim, step->epsilon, 1,
                      dim, 1, here + head * dim);
        rotate(here, stride, turning, dim, step->cos + row * dim, step->sin + row * dim, 1, 1);
        store_kv(here, 1, step->heads, step->slots + row, layer->pages, step->kv_heads, dim);
    }
}

static void attend_to(const struct layer *layer, const struct step *step, const int64_t *pieces,
                      int64_t count, const struct places *at) {
    /* Products that round what they multiply make much of a last bit: by those, a text would depend
     * on how many of its tokens are computed at once. */
    const int rounding = layer->output.kind > FP32;
    attend(at->mixed, step->heads, layer->pages, step->block_tokens, step->kv_heads, step->dim,
           step->tables, step->table_width, pieces, count, step->window, !rounding, step->threads,
           at->answers);
}

/* Attend for the rows that are wanted alone, and bring those, and their answers, to the front. */
static int64_t attend_wanted(const struct layer *layer, const struct step *step,
                             const struct places *at) {
    int64_t count = step->wanted_count, hidden = step->hidden, width = step->heads * step->dim;
    int64_t(*pieces)[4] = malloc((count + 1) * sizeof(*pieces));
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
        memmove(at->answers + one * width, at->answers + row * width, width * sizeof(float));
    }
    return 0;
}

static int64_t run_layer(const struct layer *layer, const struct step *step, int first, int last) {
    const struct places at = places_of(layer, step);
    struct step left = *step;
    struct run run = {.layers = layer, .step = step, .mixed = at.mixed};
    int64_t numbers = step->rows * layer->query_key_value.rows;
    rms_norm(step->x, first ? NULL : at.made, layer->attention_norm, step->epsilon, step->rows,
              step->hidden, step->threads, at.normed);
    if (multiply_by(&layer->query_key_value, at.normed, step, at.mixed)) return -1;
    share(place_rows, &run, step->rows, portions_of(numbers, step->threads), step->threads);
    if (last && step->wanted_count < step->rows) {
        if (attend_wanted(layer, step, &at)) return -1;
        left.rows = step->wanted_count;
    } else
        attend_to(layer, step, step->pieces, step->pieces_count, &at);
    if (multiply_by(&layer->output, at.answers, &left, at.made)) return -1;
    rms_norm(step->x, at.made, layer->mlp_norm, step->epsilon, left.rows, step->hidden,
              step->threads, at.normed);
    if (multiply_by(&layer->gate_up, at.normed, &left, at.both)) return -1;
    silu_gate(at.both, left.rows, layer->down.columns, step->threads, at.gated);
    if (multiply_by(&layer->down, at.gated, &left, at.made)) return -1;
    if (last) add(step->x, at.made, left.rows * step->hidden);
    return 0;
}

static void run_all(void *told) {
    struct run *run = told;
    for (int64_t at = 0; at < run->count && !run->failed; at++)
        run->failed = run_layer(run->layers + at, run->step, at == 0, at + 1 == run->count);
}

int64_t run_layers(const struct layer *layers, int64_t count, const struct step *step) {
    struct run run = {.layers = layers, .count = count, .step = step};
    with_team(step->threads, run_all, &run);
    return run.failed;
}
