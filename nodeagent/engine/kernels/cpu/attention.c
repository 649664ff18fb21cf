/* Attention over paged keys and values, of decodes and of prompt chunks alike.
 * Where the processor has a matrix unit, and its answers may differ in the last bits from those of
 * few rows, pieces of many rows go to `attention_amx.c`.
 *
 * The work is cut into pieces: a few neighbouring tokens of one sequence under one KV head, or a
 * single token under all of them in turn. All query heads of all its tokens (its rows) go together
 * through 64 keys of a KV head at a time, the last ones through 32 or 16. Those keys are turned about
 * once, so that one number of each lies side by side and sixteen scores grow at once, with no sum
 * across lanes. What a row has seen is kept relative to a score of its own: no room is needed for the
 * scores of a whole context.
 */

#include "attention.h"

#define KEYS 64 /* keys at a time: with their values they stay in a near cache */
#define PARTS (KEYS / LANES)
#define MANY_ROWS 32 /* from so many on the matrix unit is faster */
#define ROWS 128 /* rows for which keys are turned about once: room for them is on the stack */
#define STRIP 6  /* rows at a time: their answers stay in registers */

/* The keys of one turn: number by number [dim][KEYS], nought behind the last; and its values. */
struct turn {
    float keys[KEYS * DIM_MAX] __attribute__((aligned(LINE)));
    const float *values[KEYS];
    int64_t count, parts; /* parts of sixteen keys: 4, 2 or 1 */
    /* Where the keys lie that come next under this KV head, and how many of them are on their way. */
    const float *next[KEYS];
    int64_t to_come, announced;
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

/* Find the keys that come after a turn's, of the same piece or of the next. */
static void find_next(struct turn *turn, const struct pages *pages, const struct piece *piece,
                      int64_t kv_head, int64_t first, int64_t end) {
    turn->to_come = turn->announced = 0;
    if (first >= end) {
        piece = piece->next;
        if (piece == NULL) return;
        first = first_seen(piece);
        end = piece->start + piece->tokens;
    }
    turn->to_come = end - first < KEYS ? end - first : KEYS;
    locate(pages, piece, first, turn->to_come, turn->next);
    for (int64_t key = 0; key < turn->to_come; key++) turn->next[key] += kv_head * pages->dim;
}

/* Have some of them and their values on their way, between what is computed: they lie too far apart
 * for the processor to read ahead by itself, and it waits where too many are asked for at once. */
INLINED void go_ahead(struct turn *turn, const struct pages *pages, int64_t several) {
    for (; several > 0 && turn->announced < turn->to_come; several--) {
        const float *keys = turn->next[turn->announced++];
        announce(keys, keys + pages->kv_heads * pages->dim, pages->dim);
    }
}

/* Fetch the keys of one KV head from `first` on, as many as a turn holds and none from `end` on. */
static void fetch(struct turn *turn, const struct pages *pages, const struct piece *piece,
                  int64_t kv_head, int64_t first, int64_t end) {
    static const float nought[DIM_MAX];
    const float *keys[KEYS];
    int64_t dim = pages->dim, left = end - first;
    turn->parts = left >= KEYS ? PARTS : left > LANES ? 2 : 1;
    turn->count = left < turn->parts * LANES ? left : turn->parts * LANES;
    find_next(turn, pages, piece, kv_head, first + turn->count, end);
    locate(pages, piece, first, turn->count, keys);
    for (int64_t key = 0; key < turn->parts * LANES; key++) {
        keys[key] = key < turn->count ? keys[key] + kv_head * dim : nought;
        if (key < turn->count) turn->values[key] = keys[key] + pages->kv_heads * dim;
    }
    for (int64_t part = 0; part < turn->parts; part++)
        for (int64_t at = 0; at < dim; at += LANES) {
            go_ahead(turn, pages, 2);
            put_keys(keys + part * LANES, at, turn->keys + at * KEYS + part * LANES);
        }
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
        for (int part = 0; part < parts; part++) {
            sums[r][part] *= root;
            ROUND_HERE(sums[r][part]);
            ((lanes *)scores[r])[part] = sums[r][part];
        }
}

/* Shrink `parts` times sixteen numbers of the answers of `rows` rows; add the values by weight. */
INLINED void gather(const int rows, const int parts, struct turn *turn,
                    const struct pages *pages, struct row *row, int64_t at, const float *shrink,
                    float weights[STRIP][KEYS]) {
    lanes answers[STRIP][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            answers[r][part] = shrink[r] * ((const lanes *)(row[r].answer + at))[part];
            ROUND_HERE(answers[r][part]);
        }
    for (int64_t key = 0; key < turn->count; key++) {
        const lanes *value = (const lanes *)(turn->values[key] + at);
        go_ahead(turn, pages, 1);
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

INLINED void take_strip(const int rows, const int parts, struct turn *turn,
                        const struct pages *pages, struct row *row) {
    int64_t dim = pages->dim;
    float weights[STRIP][KEYS] __attribute__((aligned(LINE))), shrink[STRIP];
    score(rows, parts, turn, row, dim, weights);
    for (int r = 0; r < rows; r++) shrink[r] = weigh(row + r, parts, (lanes *)weights[r]);
    int64_t at = 0;
    for (; at + 4 * LANES <= dim; at += 4 * LANES)
        gather(rows, 4, turn, pages, row, at, shrink, weights);
    for (; at < dim; at += LANES) gather(rows, 1, turn, pages, row, at, shrink, weights);
}

/* Bring `count` rows through one turn of keys. */
static void take(struct turn *turn, const struct pages *pages, struct row *row, int64_t count) {
#define STRIPS(rows)                                                                               \
    for (; count >= rows; count -= rows, row += rows) {                                            \
        if (turn->parts == 4) take_strip(rows, 4, turn, pages, row);                               \
        if (turn->parts == 2) take_strip(rows, 2, turn, pages, row);                               \
        if (turn->parts == 1) take_strip(rows, 1, turn, pages, row);                               \
    }
    STRIPS(6)
    STRIPS(5)
    STRIPS(4)
    STRIPS(3)
    STRIPS(2)
    STRIPS(1)
#undef STRIPS
}

/* Answer `count` rows of a piece under each of its KV heads, from row `begin` on. */
static void attend_rows(const struct pages *pages, const struct piece *piece, int64_t begin,
                        int64_t count) {
    struct row rows[ROWS];
    struct turn turn;
    int64_t dim = pages->dim, all = piece->kv_heads * count;
    for (int64_t head = 0; head < piece->kv_heads; head++)
        begin_rows(piece, head, begin, count, dim, rows + head * count);
    for (int64_t r = 0; r < all; r++) memset(rows[r].answer, 0, dim * sizeof(float));
    int64_t at = piece->start + begin / piece->heads + 1 - piece->window;
    int64_t end = piece->start + (begin + count - 1) / piece->heads + 1;
    for (at = at < 0 ? 0 : at; at < end; at += turn.count)
        for (int64_t head = 0; head < piece->kv_heads; head++) {
            struct row *under = rows + head * count;
            fetch(&turn, pages, piece, head, at, end);
            for (int64_t r = 0; r < count; r++) look(under + r, piece->window, at);
            take(&turn, pages, under, count);
            go_ahead(&turn, pages, KEYS);
        }
    for (int64_t r = 0; r < all; r++) {
        float total = total_of(rows + r);
        for (int64_t at = 0; at < dim; at++) rows[r].answer[at] /= total;
    }
}

/* Put the keys and values of every row of `mixed` (queries, keys, values) into its slot. */
void store_kv(const float *mixed, int64_t rows, int64_t heads, const int64_t *slots, float *pages,
          int64_t kv_heads, int64_t dim) {
    int64_t width = 2 * kv_heads * dim, stride = heads * dim + width;
    for (int64_t row = 0; row < rows; row++)
        memcpy(pages + slots[row] * width, mixed + row * stride + heads * dim,
               width * sizeof(float));
}

/* What all pieces are cut from: one for each KV head, or one for all. */
struct asked {
    struct pages pages;
    const float *mixed;
    float *out;
    const int64_t *tables, *cuts;
    int64_t heads, width, window, each;
    int64_t by_tiles; /* whether many rows may be answered by tiles */
};

static struct piece piece_of(const struct asked *asked, int64_t at) {
    int64_t heads = asked->heads, kv_heads = asked->pages.kv_heads, dim = asked->pages.dim;
    int64_t together = heads / kv_heads, several = kv_heads / asked->each;
    int64_t kv_head = at % asked->each * several;
    const int64_t *cut = asked->cuts + at / asked->each * 4;
    return (struct piece){
        .queries = asked->mixed + (cut[0] * (heads + 2 * kv_heads) + kv_head * together) * dim,
        .answers = asked->out + (cut[0] * heads + kv_head * together) * dim,
        .blocks = asked->tables + cut[3] * asked->width,
        .tokens = cut[1],
        .start = cut[2],
        .window = asked->window,
        .kv_head = kv_head,
        .kv_heads = several,
        .heads = together,
        .query_stride = (heads + 2 * kv_heads) * dim,
        .answer_stride = heads * dim,
    };
}

static void attend_pieces(const void *told, int64_t at, int64_t end) {
    const struct asked *asked = told;
    for (; at < end; at++) {
        struct piece piece = piece_of(asked, at), next;
        if (at + 1 < end) {
            next = piece_of(asked, at + 1);
            piece.next = &next;
        }
        int64_t rows = piece.tokens * piece.heads, most = ROWS / piece.kv_heads;
        if (asked->by_tiles && rows >= MANY_ROWS && piece.kv_heads == 1 &&
            attend_by_amx(&asked->pages, &piece))
            continue;
        for (int64_t begin = 0; begin < rows; begin += most)
            attend_rows(&asked->pages, &piece, begin, rows - begin < most ? rows - begin : most);
    }
}

/* Answer the queries of `count` pieces: [first row of `mixed`, tokens, place of the first in its
 * blocks, row of `tables` that lists those]. Not `by_tiles`, a row's answer is the same bit for bit
 * whatever it is computed with, but for where a window makes it begin. */
void attend(const float *mixed, int64_t heads, const float *slots, int64_t block_tokens,
            int64_t kv_heads, int64_t dim, const int64_t *tables, int64_t width,
            const int64_t *pieces, int64_t count, int64_t window, int64_t by_tiles, int64_t threads,
            float *out) {
    int64_t pairs = 0, tokens = 0;
    for (int64_t at = 0; at < count; at++) {
        tokens += pieces[4 * at + 1];
        pairs += pieces[4 * at + 1] * (pieces[4 * at + 2] + 1);
    }
    /* All heads of single tokens go through the slots together, which are then read once and in
     * order, if each thread has some. */
    int64_t together = tokens == count && heads <= ROWS && (threads == 1 || count >= 2 * threads);
    const struct asked asked = {{slots, block_tokens, kv_heads, dim}, mixed, out, tables, pieces,
                                heads, width, window, together ? 1 : kv_heads, by_tiles};
    int64_t portions = pairs * heads * dim <= SMALL ? 1 : count * asked.each;
    share(attend_pieces, &asked, count * asked.each, portions, threads);
}
