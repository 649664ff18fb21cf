/* Rows under a KV head and the keys they see: what attention by vectors and by tiles have in common. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include "kernels.h"

#define DIM_MAX 256
#define ABOVE 24.0f /* a weight is at most two to this */

/* Where a token's keys and values lie: slot by slot, keys of all heads, then values. */
struct pages {
    const float *slots;
    int64_t block_tokens, kv_heads, dim;
};

/* One piece: some tokens under one KV head or several. Token i is at place `start + i` of `blocks` and sees `window` tokens back from there,
 * itself among them. */
struct piece {
    const float *queries; /* of the first token's first head; heads lie one behind another */
    float *answers;
    const int64_t *blocks;
    int64_t tokens, start, window;
    int64_t kv_head, kv_heads, heads;    /* the first KV head, how many, and what share each */
    int64_t query_stride, answer_stride; /* from token to token */
    const struct piece *next;            /* what is answered by this thread then, if anything */
};

/* One row: what it asks, what it found, and which keys of this turn it sees. */
struct row {
    lanes totals __attribute__((aligned(LINE)));
    const float *query;
    float *answer;
    int64_t place;
    float reference; /* a score of its own: weights are two to what is between */
    int32_t from, to;
};

/* Make rows of what a piece asks under one of its KV heads, from its row `begin` there on. */
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

/* The first place that any token of the piece sees. */
INLINED int64_t first_seen(const struct piece *piece) {
    int64_t place = piece->start + 1 - piece->window;
    return place < 0 ? 0 : place;
}

/* Have the row look at the turn of keys that begins at place `at`. */
INLINED void look(struct row *row, int64_t window, int64_t at) {
    int64_t from = row->place + 1 - window - at;
    row->from = from < 0 ? 0 : from;
    row->to = row->place + 1 - at;
}

/* Where the keys of `count` places from `first` on lie. */
INLINED void locate(const struct pages *pages, const struct piece *piece, int64_t first,
                    int64_t count, const float **keys) {
    int64_t room = pages->block_tokens, width = 2 * pages->kv_heads * pages->dim;
    int64_t block = first / room, in_block = first % room;
    for (int64_t key = 0; key < count; block++, in_block = 0) {
        const float *slot = pages->slots + (piece->blocks[block] * room + in_block) * width;
        for (; key < count && in_block < room; key++, in_block++, slot += width)
            keys[key] = slot + piece->kv_head * pages->dim;
    }
}

/* Have a token's keys and values on their way that are soon computed with. */
INLINED void announce(const float *keys, const float *values, int64_t numbers) {
    for (int64_t line = 0; line < numbers; line += LANES) {
        __builtin_prefetch(keys + line, 0, 2);
        __builtin_prefetch(values + line, 0, 2);
    }
}

/* Put `other` where the row does not see the keys of `part`. */
INLINED lanes seen(const struct row *row, int part, lanes x, float other) {
    const places count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    places at = count + part * LANES;
    return where((at >= row->from) & (at < row->to), x, (lanes){0} + other);
}

/* From scores to weights relative to the row's reference, which moves where a score is so far above
 * it that its weight might grow too large; return what the answer so far shrinks by. References are
 * found sixteen keys after sixteen, and are whole numbers, so that all that shrinks is exact: weights
 * do not depend on how many keys come in a turn. */
INLINED float weigh(struct row *row, const int parts, lanes *x) {
    const int whole = row->from == 0 && row->to >= parts * LANES;
    float shrink = 1;
    lanes totals = row->totals;
#pragma GCC unroll 4
    for (int part = 0; part < parts; part++) {
        if (!whole) x[part] = seen(row, part, x[part], -INFINITY);
        if (_mm512_cmp_ps_mask((__m512)x[part], _mm512_set1_ps(row->reference + ABOVE),
                               _CMP_GT_OQ)) {
            /* What is no number is passed over here, and stays none. */
            float most = ceilf(_mm512_reduce_max_ps(_mm512_max_ps(
                (__m512)x[part], _mm512_set1_ps(-INFINITY))));
            /* By whole numbers it is exact, which a polynomial is not. */
            float step = _mm_cvtss_f32(
                _mm_scalef_ss(_mm_set_ss(1), _mm_set_ss(row->reference - most)));
            for (int before = 0; before < part; before++) x[before] *= step;
            totals *= step;
            shrink *= step;
            row->reference = most;
        }
        x[part] = power_of_two(x[part] - row->reference);
        if (!whole) x[part] = seen(row, part, x[part], 0);
        totals += x[part];
    }
    row->totals = totals;
    return shrink;
}

/* What the row's answer is to be divided by. */
INLINED float total_of(const struct row *row) {
    return _mm512_reduce_add_ps((__m512)row->totals);
}

/* Answer the piece by the matrix unit; 0 where that may not be used. */
int attend_by_amx(const struct pages *pages, const struct piece *piece);

#endif
