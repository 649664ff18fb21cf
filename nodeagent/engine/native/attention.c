/* Attention over paged keys and values, of decodes and of prompt chunks alike.
 * Where the processor has a matrix unit, pieces of many rows go to `attention_tiles.c`.
 *
 * The work is cut into pieces: a few neighbouring tokens of one sequence under one KV head. All
 * query heads of all its tokens (its rows) go together through 64 keys at a time, the last ones
 * through 32 or 16. Those keys are turned about once, so that one number of each lies side by side
 * and sixteen scores grow at once, with no sum across lanes. What a row has seen is kept relative to
 * a score of its own: no room is needed for the scores of a whole context.
 */

#include "attention.h"

#define KEYS 64 /* keys at a time: with their values they stay in a near cache */
#define PARTS (KEYS / LANES)
#define NEAR_TOKENS 512 /* all heads of so many stay in a near cache from one head to the next */
#define MANY_ROWS 32 /* from so many on the matrix unit is faster */
#define ROWS 128 /* rows for which keys are turned about once: room for them is on the stack */
#define STRIP 6  /* rows at a time: their answers stay in registers */

/* The keys of one turn: number by number [dim][KEYS], nought behind the last; and its values. */
struct turn {
    float keys[KEYS * DIM_MAX] __attribute__((aligned(LINE)));
    const float *values[KEYS];
    int64_t count, parts; /* parts of sixteen keys: 4, 2 or 1 */
};

/* Sixteen keys of sixteen numbers: `to` gets sixteen times the same number of each key. */
static void put_keys(const float *const *keys, int64_t at, float *to) {
    lanes x[LANES];
#pragma GCC unroll 16
    for (int key = 0; key < LANES; key++) x[key] = *(const lanes *)(keys[key] + at);
    turn_about(x);
#pragma GCC unroll 16
    for (int number = 0; number < LANES; number++) *(lanes *)(to + number * KEYS) = x[number];
}

/* Walk through one slot from end to end. One head's keys lie too far apart for the processor to read
 * ahead; going through all that lies between, in order, brings them twice as fast, and those of the
 * other heads with them. */
static void walk(const float *slot, int64_t width) {
    for (int64_t at = 0; at < width; at += LINE / sizeof(float)) *(const volatile float *)(slot + at);
}

/* Fetch the keys from `first` on, as many as a turn holds and none from `end` on. */
static void fetch(struct turn *turn, const struct pages *pages, const struct piece *piece,
                  int64_t first, int64_t end) {
    static const float nought[DIM_MAX];
    const float *keys[KEYS];
    int64_t dim = pages->dim, values = pages->kv_heads * dim, left = end - first;
    turn->parts = left >= KEYS ? PARTS : left > LANES ? 2 : 1;
    turn->count = left < turn->parts * LANES ? left : turn->parts * LANES;
    left -= turn->count;
    if (piece->tokens > 1) {
        int64_t next = left < KEYS ? left : KEYS;
        locate(pages, piece, first + turn->count, next, keys);
        for (int64_t key = 0; key < next; key++) announce(keys[key], keys[key] + values, dim);
    }
    locate(pages, piece, first, turn->count, keys);
    for (int64_t key = 0; key < turn->parts * LANES; key++) {
        if (key >= turn->count) {
            keys[key] = nought;
            continue;
        }
        turn->values[key] = keys[key] + values;
        if (piece->first_here) walk(keys[key] - piece->kv_head * dim, 2 * values);
    }
    for (int64_t part = 0; part < turn->parts; part++)
        for (int64_t at = 0; at < dim; at += LANES)
            put_keys(keys + part * LANES, at, turn->keys + at * KEYS + part * LANES);
}

/* The scores of `rows` rows for `parts` times sixteen keys of the turn, as powers of two. */
INLINED void score(const int rows, const int parts, const struct turn *turn, struct row *row,
                   int64_t dim, float scores[STRIP][KEYS]) {
    lanes sums[STRIP][PARTS];
    float root = LOG2_E / sqrtf(dim);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) sums[r][part] = (lanes){0};
    for (int64_t at = 0; at < dim; at++) {
        const lanes *keys = (const lanes *)(turn->keys + at * KEYS);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) sums[r][part] += row[r].query[at] * keys[part];
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++)
            ((lanes *)scores[r])[part] = root * sums[r][part];
}

/* Shrink `parts` times sixteen numbers of the answers of `rows` rows; add the values by weight. */
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

INLINED void take_strip(const int rows, const int parts, const struct turn *turn, struct row *row,
                        int64_t dim) {
    float weights[STRIP][KEYS] __attribute__((aligned(LINE))), shrink[STRIP];
    score(rows, parts, turn, row, dim, weights);
    for (int r = 0; r < rows; r++) {
        lanes x[PARTS];
        memcpy(x, weights[r], parts * sizeof(lanes));
        shrink[r] = weigh(row + r, parts, x);
        memcpy(weights[r], x, parts * sizeof(lanes));
    }
    int64_t at = 0;
    for (; at + 4 * LANES <= dim; at += 4 * LANES)
        gather(rows, 4, turn, row, at, shrink, weights);
    for (; at < dim; at += LANES) gather(rows, 1, turn, row, at, shrink, weights);
}

/* Bring `count` rows through one turn of keys. */
static void take(const struct turn *turn, struct row *row, int64_t count, int64_t dim) {
#define STRIPS(rows)                                                                               \
    for (; count >= rows; count -= rows, row += rows) {                                            \
        if (turn->parts == 4) take_strip(rows, 4, turn, row, dim);                                 \
        if (turn->parts == 2) take_strip(rows, 2, turn, row, dim);                                 \
        if (turn->parts == 1) take_strip(rows, 1, turn, row, dim);                                 \
    }
    STRIPS(6)
    STRIPS(5)
    STRIPS(4)
    STRIPS(3)
    STRIPS(2)
    STRIPS(1)
#undef STRIPS
}

/* Answer `count` rows of a piece from its row `begin` on. */
static void attend_rows(const struct pages *pages, const struct piece *piece, int64_t begin,
                        int64_t count) {
    struct row rows[ROWS];
    struct turn turn;
    int64_t dim = pages->dim;
    begin_rows(piece, begin, count, dim, rows);
    for (int64_t r = 0; r < count; r++) memset(rows[r].answer, 0, dim * sizeof(float));
    int64_t at = rows[0].place + 1 - piece->window, end = rows[count - 1].place + 1;
    for (at = at < 0 ? 0 : at; at < end; at += turn.count) {
        fetch(&turn, pages, piece, at, end);
        for (int64_t r = 0; r < count; r++) look(rows + r, piece->window, at);
        take(&turn, rows, count, dim);
    }
    for (int64_t r = 0; r < count; r++) {
        float total = total_of(rows + r);
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
        int64_t rows = piece.tokens * piece.heads;
        if (rows >= MANY_ROWS && attend_by_tiles(&asked->pages, &piece)) continue;
        for (int64_t begin = 0; begin < rows; begin += ROWS)
            attend_rows(&asked->pages, &piece, begin,
                        rows - begin < ROWS ? rows - begin : ROWS);
    }
}

/* Answer the queries of `count` pieces: [first row of `mixed`, tokens, place of the first in its
 * blocks, row of `tables` that lists those]. */
void attend(const float *mixed, int64_t heads, const float *slots, int64_t block_tokens,
            int64_t kv_heads, int64_t dim, const int64_t *tables, int64_t width,
            const int64_t *pieces, int64_t count, int64_t window, int64_t threads, float *out) {
    const struct asked asked = {{slots, block_tokens, kv_heads, dim}, mixed, out, tables, pieces,
                                heads, width, window};
    int64_t pairs = 0, tokens = 0;
    for (int64_t at = 0; at < count; at++) {
        tokens += pieces[4 * at + 1];
        pairs += pieces[4 * at + 1] * (pieces[4 * at + 2] + 1);
    }
    /* Pieces differ in what they see. Each head of each is a portion; but where they are of single
     * tokens, who has read one head's keys has the other heads' near. */
    int64_t portions = count < 2 * threads || tokens > count ? count * kv_heads : count;
    if (pairs * heads * dim <= SMALL) portions = 1;
    share(attend_pieces, &asked, count * kv_heads, portions, threads);
}
