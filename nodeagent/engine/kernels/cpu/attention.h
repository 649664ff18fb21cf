/* Shared by attention with vectors and with AMX: rows under a KV head, and the keys they see. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include "kv_forms.h"

#define DIM_MAX 256
#define WEIGHT_LOG2_MAX 24.0f /* a softmax weight is at most 2 to this */

/* The KV pages of a layer. A slot is the keys of all heads of a token, then its values. `locate`
 * and AMX read fp32 only. */
struct pages {
    const void *slots;
    int64_t block_tokens, kv_heads, dim, form;
};

/* Neighbouring tokens of a sequence under one KV head or several. Token i is at position `start
 * + i` of `blocks`, and sees `window` tokens up to and including itself. */
struct piece {
    const float *queries; /* of the first token's first head; heads lie one behind another */
    float *answers;
    const int64_t *blocks;
    int64_t tokens, start, window;
    int64_t kv_head, kv_heads, heads;    /* the first KV head, their number, query heads of each */
    int64_t query_stride, answer_stride; /* from token to token */
    const struct piece *next;            /* the piece that this thread computes next, or NULL */
};

/* One query head of one token, its state of the online softmax, and the keys of the current
 * block it sees. */
struct row {
    lanes totals __attribute__((aligned(LINE)));
    const float *query;
    float *answer;
    int64_t place;
    float reference; /* weights are 2^(score - reference) */
    int32_t from, to;
};

/* Initialise `count` rows of a piece under one of its KV heads, from row `begin` on. */
INLINED void begin_rows(const struct piece *piece, int64_t kv_head, int64_t begin, int64_t count,
                        int64_t dim, struct row *rows) {
    for (int64_t r = 0; r < count; r++) {
        int64_t token = (begin + r) / piece->heads;
        int64_t head = (begin + r) % piece->heads + kv_head * piece->heads;
        rows[r] = (struct row){
            .query = piece->queries + token * piece->query_stride + head * dim,
            .answer = piece->answers + token * piece->answer_stride + head * dim,
            .place = piece->start + token,
            .reference = -INFINITY,
        };
    }
}

/* The first position that any token of the piece sees. */
INLINED int64_t first_seen(const struct piece *piece) {
    int64_t place = piece->start + 1 - piece->window;
    return place < 0 ? 0 : place;
}

/* Set which keys of the block that begins at position `at` the row sees. */
INLINED void set_visible(struct row *row, int64_t window, int64_t at) {
    int64_t from = row->place + 1 - window - at;
    row->from = from < 0 ? 0 : from;
    row->to = row->place + 1 - at;
}

/* Find the keys of `count` positions from `first` on. */
INLINED void locate(const struct pages *pages, const struct piece *piece, int64_t first,
                    int64_t count, const float **keys) {
    int64_t block_tokens = pages->block_tokens, width = 2 * pages->kv_heads * pages->dim;
    int64_t block = first / block_tokens, in_block = first % block_tokens;
    for (int64_t key = 0; key < count; block++, in_block = 0) {
        const float *slots = pages->slots;
        const float *slot = slots + (piece->blocks[block] * block_tokens + in_block) * width;
        for (; key < count && in_block < block_tokens; key++, in_block++, slot += width)
            keys[key] = slot + piece->kv_head * pages->dim;
    }
}

/* Prefetch a token's keys and values. */
INLINED void prefetch_token(const float *keys, const float *values, int64_t numbers) {
    for (int64_t line = 0; line < numbers; line += LANES) {
        __builtin_prefetch(keys + line, 0, 2);
        __builtin_prefetch(values + line, 0, 2);
    }
}

/* Replace x by `other` where the row does not see the keys of `part`. */
INLINED lanes mask_hidden(const struct row *row, int part, lanes x, float other) {
    const indices count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    indices at = count + part * LANES;
    return where((at >= row->from) & (at < row->to), x, (lanes){0} + other);
}

/* From scores to weights relative to the row's reference, which moves where a score is so far
 * above it that its weight might grow too large; return what the answer so far shrinks by.
 * References are found sixteen keys after sixteen, and are whole numbers, so that all that
 * shrinks is exact: weights do not depend on how many keys come in a turn. */
INLINED float weigh(struct row *row, const int parts, lanes *x) {
    const int whole = row->from == 0 && row->to >= parts * LANES;
    float shrink = 1;
    lanes totals = row->totals;
#pragma GCC unroll 4
    for (int part = 0; part < parts; part++) {
        if (!whole) x[part] = mask_hidden(row, part, x[part], -INFINITY);
        if (_mm512_cmp_ps_mask((__m512)x[part], _mm512_set1_ps(row->reference + WEIGHT_LOG2_MAX),
                               _CMP_GT_OQ)) {
            /* NaN is ignored here, and stays NaN in the weights. */
            float max = ceilf(
                _mm512_reduce_max_ps(_mm512_max_ps((__m512)x[part], _mm512_set1_ps(-INFINITY))));
            /* References move by integers: then the factor is an exact power of two. */
            float step =
                _mm_cvtss_f32(_mm_scalef_ss(_mm_set_ss(1), _mm_set_ss(row->reference - max)));
            for (int before = 0; before < part; before++) x[before] *= step;
            totals *= step;
            shrink *= step;
            row->reference = max;
        }
        x[part] = power_of_two(x[part] - row->reference);
        if (!whole) x[part] = mask_hidden(row, part, x[part], 0);
        totals += x[part];
    }
    row->totals = totals;
    return shrink;
}

/* The sum of the row's softmax weights. */
INLINED float total_of(const struct row *row) { return _mm512_reduce_add_ps((__m512)row->totals); }

/* Compute a piece with AMX; return 0 if that may not be used. */
int attend_by_amx(const struct pages *pages, const struct piece *piece);

#endif
