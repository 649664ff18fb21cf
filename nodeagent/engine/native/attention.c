/* Attention over paged keys and values, of decodes and of prompt chunks alike.
 *
 * The work is cut into pieces: a few neighbouring tokens of one sequence under one KV head. All
 * query heads of all its tokens (its rows) go together through 32 keys at a time. Those keys are
 * turned about once, so that one number of each lies side by side and sixteen scores grow at once,
 * with no sum across lanes. What a row has seen is kept relative to a score of its own: no room is
 * needed for the scores of a whole context.
 */

#include "kernels.h"

#define KEYS 32 /* keys at a time: with their values they stay in the nearest cache */
#define NEAR_TOKENS 512 /* all heads of so many stay in a near cache from one head to the next */
#define STRIP 6 /* rows at a time: their answers stay in registers */
#define ABOVE 24.0f /* a weight is at most two to this */

/* Where a token's keys and values lie: slot by slot, keys of all heads, then values. */
struct pages {
    const float *slots;
    int64_t block_tokens, kv_heads, dim;
};

/* One piece. Token i is at place `start + i` of `blocks` and sees `window` tokens back from there,
 * itself among them. */
struct piece {
    const float *queries; /* of the first token's first head; heads lie one behind another */
    float *answers;
    const int64_t *blocks;
    int64_t tokens, start, window, kv_head, heads; /* `heads` share the KV head */
    int64_t query_stride, answer_stride;           /* from token to token */
    int first_here; /* nobody has just read these keys, and they are read but once */
};

/* The keys of one turn: number by number [dim][KEYS], nought behind the last; and its values. */
struct turn {
    float keys[KEYS * 256] __attribute__((aligned(LINE)));
    const float *values[KEYS];
    int64_t first, count;
};

/* One row: what it asks, what it found, and which keys of this turn it sees. */
struct row {
    const float *query;
    float *answer;
    float reference; /* a score of its own: weights are two to what is between */
    int32_t from, to;
    lanes totals;
};

/* Of two vectors, the halves of each run of `2 * apart` lanes: the first of both, or the second. */
INLINED lanes halves(lanes one, lanes other, const int apart, const int second) {
    places from;
    for (int at = 0; at < LANES; at++)
        if (second)
            from[at] = at & apart ? LANES + at : at + apart;
        else
            from[at] = at & apart ? LANES + at - apart : at;
#if defined(__clang__)
    lanes both;
    for (int at = 0; at < LANES; at++)
        both[at] = from[at] < LANES ? one[from[at]] : other[from[at] - LANES];
    return both;
#else
    return __builtin_shuffle(one, other, from);
#endif
}

INLINED int any(places wanted) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)wanted, (__m512i)wanted) != 0;
#else
    int found = 0;
    for (int64_t at = 0; at < LANES; at++) found |= wanted[at];
    return found;
#endif
}

/* Sixteen keys of sixteen numbers: `to` gets sixteen times the same number of each key. */
static void turn_about(const float *const *keys, int64_t at, float *to) {
    lanes x[LANES];
#pragma GCC unroll 16
    for (int key = 0; key < LANES; key++) x[key] = *(const lanes *)(keys[key] + at);
#define ACROSS(apart)                                                                              \
    _Pragma("GCC unroll 16") for (int key = 0; key < LANES; key++) if (!(key & apart)) {           \
        lanes one = x[key], other = x[key + apart];                                                \
        x[key] = halves(one, other, apart, 0);                                                    \
        x[key + apart] = halves(one, other, apart, 1);                                            \
    }
    ACROSS(1)
    ACROSS(2)
    ACROSS(4)
    ACROSS(8)
#undef ACROSS
#pragma GCC unroll 16
    for (int number = 0; number < LANES; number++) *(lanes *)(to + number * KEYS) = x[number];
}

/* Walk through one slot from end to end. One head's keys lie too far apart for the processor to read
 * ahead; going through all that lies between, in order, brings them twice as fast, and those of the
 * other heads with them. */
static void walk(const float *slot, int64_t width) {
    for (int64_t at = 0; at < width; at += LINE / sizeof(float)) *(const volatile float *)(slot + at);
}

/* Fetch the keys from `first` on, at most KEYS and none from `end` on. */
static void fetch(struct turn *turn, const struct pages *pages, const struct piece *piece,
                  int64_t first, int64_t end) {
    static const float nought[256];
    const float *keys[KEYS];
    int64_t dim = pages->dim, width = 2 * pages->kv_heads * dim, room = pages->block_tokens;
    turn->first = first;
    turn->count = end - first < KEYS ? end - first : KEYS;
    for (int64_t key = 0; key < KEYS; key++) {
        int64_t at = first + key;
        keys[key] = nought;
        if (key >= turn->count) continue;
        const float *slot =
            pages->slots + (piece->blocks[at / room] * room + at % room) * width;
        if (piece->first_here) walk(slot, width);
        keys[key] = slot + piece->kv_head * dim;
        turn->values[key] = keys[key] + pages->kv_heads * dim;
    }
    for (int64_t half = 0; half < KEYS; half += LANES)
        for (int64_t at = 0; at < dim; at += LANES)
            turn_about(keys + half, at, turn->keys + at * KEYS + half);
}

/* The scores of `rows` rows for all keys of the turn, as powers of two. */
INLINED void score(const int rows, const struct turn *turn, struct row *row, int64_t dim,
                   float scores[STRIP][KEYS]) {
    lanes low[STRIP], high[STRIP];
    float root = LOG2_E / sqrtf(dim);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) low[r] = high[r] = (lanes){0};
    for (int64_t at = 0; at < dim; at++) {
        const lanes *keys = (const lanes *)(turn->keys + at * KEYS);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            low[r] += row[r].query[at] * keys[0];
            high[r] += row[r].query[at] * keys[1];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        *(lanes *)scores[r] = root * low[r];
        *(lanes *)(scores[r] + LANES) = root * high[r];
    }
}

/* Put the row's reference where its scores are; return what all that was kept shrinks by. */
static float refer(struct row *row, const float *scores) {
    float most = row->reference;
    for (int64_t key = row->from < 0 ? 0 : row->from; key < row->to && key < KEYS; key++)
        most = scores[key] > most ? scores[key] : most;
    float shrink = row->reference == most ? 1 : power_of_two((lanes){row->reference - most})[0];
    row->reference = most;
    row->totals *= shrink;
    return shrink;
}

/* From scores to weights relative to the row's reference, which moves where a score is so far above
 * it that its weight might grow too large; return what the answer so far shrinks by. */
INLINED float weigh(struct row *row, lanes *scores) {
    const places count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int whole = row->from <= 0 && row->to >= KEYS;
    places seen[2] = {(count >= row->from) & (count < row->to),
                      (count + LANES >= row->from) & (count + LANES < row->to)};
    if (!whole)
        for (int half = 0; half < 2; half++)
            scores[half] = where(seen[half], scores[half], (lanes){0} - INFINITY);
    float above = row->reference + ABOVE, shrink = 1;
    if (row->reference == -INFINITY || any((scores[0] > above) | (scores[1] > above)))
        shrink = refer(row, (const float *)scores);
    for (int half = 0; half < 2; half++) {
        scores[half] = power_of_two(scores[half] - row->reference);
        if (!whole) scores[half] = where(seen[half], scores[half], (lanes){0});
        row->totals += scores[half];
    }
    return shrink;
}

/* Shrink `parts` times 16 numbers of the answers of `rows` rows, and add the values by weight. */
INLINED void gather(const int rows, const int parts, const struct turn *turn, struct row *row,
                    int64_t at, const float *shrink, float weights[STRIP][KEYS]) {
    lanes answers[STRIP][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++)
            answers[r][part] = shrink[r] * ((const lanes *)(row[r].answer + at))[part];
    for (int64_t key = 0; key < turn->count; key++) {
        const lanes *value = (const lanes *)(turn->values[key] + at);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++)
                answers[r][part] += weights[r][key] * value[part];
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++)
            ((lanes *)(row[r].answer + at))[part] = answers[r][part];
}

INLINED void take_strip(const int rows, const struct turn *turn, struct row *row, int64_t dim) {
    float weights[STRIP][KEYS] __attribute__((aligned(LINE))), shrink[STRIP];
    score(rows, turn, row, dim, weights);
    for (int r = 0; r < rows; r++) shrink[r] = weigh(row + r, (lanes *)weights[r]);
    int64_t at = 0;
    for (; at + 4 * LANES <= dim; at += 4 * LANES)
        gather(rows, 4, turn, row, at, shrink, weights);
    for (; at < dim; at += LANES) gather(rows, 1, turn, row, at, shrink, weights);
}

/* Bring `count` rows through one turn of keys. */
static void take(const struct turn *turn, struct row *row, int64_t count, int64_t dim) {
    for (; count >= 6; count -= 6, row += 6) take_strip(6, turn, row, dim);
    if (count == 5) take_strip(5, turn, row, dim);
    if (count == 4) take_strip(4, turn, row, dim);
    if (count == 3) take_strip(3, turn, row, dim);
    if (count == 2) take_strip(2, turn, row, dim);
    if (count == 1) take_strip(1, turn, row, dim);
}

static void attend_piece(const struct pages *pages, const struct piece *piece) {
    int64_t dim = pages->dim, count = piece->tokens * piece->heads;
    int64_t end = piece->start + piece->tokens;
    int64_t first = piece->start + 1 - piece->window;
    struct row rows[count];
    struct turn turn;
    for (int64_t r = 0; r < count; r++) {
        int64_t token = r / piece->heads, head = r % piece->heads;
        rows[r].query = piece->queries + token * piece->query_stride + head * dim;
        rows[r].answer = piece->answers + token * piece->answer_stride + head * dim;
        rows[r].reference = -INFINITY;
        rows[r].totals = (lanes){0};
        memset(rows[r].answer, 0, dim * sizeof(float));
    }
    for (int64_t at = first < 0 ? 0 : first; at < end; at += KEYS) {
        fetch(&turn, pages, piece, at, end);
        for (int64_t r = 0; r < count; r++) {
            int64_t place = piece->start + r / piece->heads;
            rows[r].from = place + 1 - piece->window - at;
            rows[r].to = place + 1 - at;
        }
        take(&turn, rows, count, dim);
    }
    for (int64_t r = 0; r < count; r++) {
        float total = 0;
        for (int64_t lane = 0; lane < LANES; lane++) total += rows[r].totals[lane];
        for (int64_t at = 0; at < dim; at++) rows[r].answer[at] /= total;
    }
}

/* Put the keys and values of every row of `mixed` (queries, keys, values) into its slot. */
void keep(const float *mixed, int64_t rows, int64_t heads, const int64_t *slots, float *pages,
          int64_t kv_heads, int64_t dim) {
    int64_t width = 2 * kv_heads * dim, stride = heads * dim + width;
    for (int64_t row = 0; row < rows; row++)
        memcpy(pages + slots[row] * width, mixed + row * stride + heads * dim,
               width * sizeof(float));
}

/* What all pieces are cut from. */
struct asked {
    struct pages pages;
    const float *mixed;
    float *out;
    const int64_t *tables, *pieces;
    int64_t heads, width, window;
};

static void attend_pieces(const void *told, int64_t at, int64_t end) {
    const struct asked *asked = told;
    int64_t heads = asked->heads, kv_heads = asked->pages.kv_heads, dim = asked->pages.dim;
    int64_t together = heads / kv_heads;
    for (; at < end; at++) {
        const int64_t *cut = asked->pieces + at / kv_heads * 4, kv_head = at % kv_heads;
        const struct piece piece = {
            .queries = asked->mixed + (cut[0] * (heads + 2 * kv_heads) + kv_head * together) * dim,
            .answers = asked->out + (cut[0] * heads + kv_head * together) * dim,
            .blocks = asked->tables + cut[3] * asked->width,
            .tokens = cut[1],
            .start = cut[2],
            .window = asked->window,
            .kv_head = kv_head,
            .heads = together,
            .query_stride = (heads + 2 * kv_heads) * dim,
            .answer_stride = heads * dim,
            .first_here = cut[1] == 1 && (kv_head == 0 || cut[2] > NEAR_TOKENS),
        };
        attend_piece(&asked->pages, &piece);
    }
}

/* Answer the queries of `count` pieces: [first row of `mixed`, tokens, place of the first in its
 * blocks, row of `tables` that lists those]. */
void attend(const float *mixed, int64_t heads, const float *slots, int64_t block_tokens,
            int64_t kv_heads, int64_t dim, const int64_t *tables, int64_t width,
            const int64_t *pieces, int64_t count, int64_t window, int64_t threads, float *out) {
    const struct asked asked = {{slots, block_tokens, kv_heads, dim}, mixed, out, tables, pieces,
                                heads, width, window};
    int64_t pairs = 0;
    for (int64_t at = 0; at < count; at++) pairs += pieces[4 * at + 1] * (pieces[4 * at + 2] + 1);
    /* Pieces differ in what they see: each is a portion, or each head where they are few. */
    int64_t portions = count < 2 * threads ? count * kv_heads : count;
    if (pairs * heads * dim <= SMALL) portions = 1;
    share(attend_pieces, &asked, count * kv_heads, portions, threads);
}
