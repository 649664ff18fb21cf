/* Attention of many rows with AMX, the processor's matrix unit.
 *
 * Rows go in strips of 32 through blocks of 64 keys: first queries are multiplied by keys, which
 * gives scores; then softmax weights by values. Vector code computes the weights and brings keys
 * and values into tile order, which takes about as long as the products. It runs interleaved
 * with them: first the weights row by row, then the keys of the next block, once no row needs
 * those of this block.
 *
 * Both factors of both products are split into three bf16 terms, which hold all bits of an fp32
 * number. The six largest products of terms are summed; the others are below the last bit.
 */

#include "amx.h"
#include "attention.h"

#ifdef WITH_AMX

#define KEYS 64
#define PARTS (KEYS / LANES)
#define STRIP (2 * PANEL)
#define ROWS 256          /* rows that share one ordering of keys; they are on the stack */
#define CHUNK (2 * LANES) /* numbers of a line: two interleaved vectors */
#define CHUNKS_MAX (DIM_MAX / CHUNK)
#define TERMS 3

typedef uint16_t tile[TILE_NUMBERS];
typedef float sums[PANEL * LANES];

/* Tiles of 16 queries or keys are stored by chunk of their numbers, then by term. Tiles of
 * values are stored by half of the keys, by 16 numbers, then by term. */
struct state {
    tile queries[ROWS / PANEL * CHUNKS_MAX * TERMS] __attribute__((aligned(LINE)));
    tile keys[PARTS * CHUNKS_MAX * TERMS];
    tile values[PARTS * CHUNKS_MAX * TERMS];
    float scores[ROWS][KEYS * TERMS / 2]; /* of a row; later the terms of its weights */
    sums outputs[ROWS / PANEL * 2 * CHUNKS_MAX];
    struct row rows[ROWS];
    int64_t count, dim, chunks, window;
    int64_t first;      /* the position of the first key of this block */
    int64_t next_count; /* keys of the next block, and where they and their values are */
    const float *next_keys[KEYS], *next_values[KEYS];
    /* Progress of the vector code, and its limits: rows of this block, parts of the next. */
    int64_t weighed, scored, prefetched, ordered, to_order;
};

/* Interleave `first` and `second`, and store a tile line for each term. */
INLINED void put_terms(lanes first, lanes second, void *to, int64_t apart) {
    __m512 x = (__m512)first, y = (__m512)second;
#pragma GCC unroll 3
    for (int term = 0; term < TERMS; term++) {
        __m512i one = term_of(&x), other = term_of(&y);
        _mm512_store_si512((char *)to + term * apart, paired(one, other));
    }
}

static void order_queries(struct state *state) {
    lanes root = (lanes){0} + LOG2_E / sqrtf(state->dim);
    for (int64_t r = 0; r < state->count; r++)
        for (int64_t at = 0; at < state->dim; at += CHUNK) {
            const lanes *query = (const lanes *)(state->rows[r].query + at);
            tile *to = state->queries + (r / PANEL * state->chunks + at / CHUNK) * TERMS;
            lanes second = {0};
            if (at + LANES < state->dim) second = root * query[1];
            put_terms(root * query[0], second, to[0] + r % PANEL * CHUNK, sizeof(tile));
        }
}

/* Order 16 keys as tiles: a line has two numbers of each. */
static void order_keys(const float *const *keys, int64_t dim, tile *to) {
    for (int64_t at = 0; at < dim; at += CHUNK, to += TERMS) {
        lanes x[LANES], y[LANES] = {{0}};
#pragma GCC unroll 16
        for (int key = 0; key < LANES; key++) x[key] = *(const lanes *)(keys[key] + at);
        transpose(x);
        if (at + LANES < dim) {
#pragma GCC unroll 16
            for (int key = 0; key < LANES; key++) y[key] = *(const lanes *)(keys[key] + at + LANES);
            transpose(y);
        }
        for (int line = 0; line < LANES; line++)
            put_terms(x[line], y[line], to[0] + line * CHUNK, sizeof(tile));
    }
}

/* Order the values of 32 keys as tiles: a line has 16 numbers of two of them. */
static void order_values(const float *const *values, int64_t dim, tile *to) {
    for (int line = 0; line < LANES; line++)
        for (int64_t at = 0; at < dim; at += LANES)
            put_terms(*(const lanes *)(values[line] + at),
                      *(const lanes *)(values[LANES + line] + at),
                      to[at / LANES * TERMS] + line * CHUNK, sizeof(tile));
}

/* Find the keys and values of the block at position `first`; none are visible from `end` on. */
static void find_next(struct state *state, const struct pages *pages, const struct piece *piece,
                      int64_t first, int64_t end) {
    static const float zeros[DIM_MAX];
    int64_t left = end - first;
    state->next_count = left < 0 ? 0 : left < KEYS ? left : KEYS;
    state->prefetched = state->ordered = 0;
    locate(pages, piece, first, state->next_count, state->next_keys);
    for (int64_t key = 0; key < KEYS; key++)
        if (key < state->next_count)
            state->next_values[key] = state->next_keys[key] + pages->kv_heads * state->dim;
        else
            state->next_keys[key] = state->next_values[key] = zeros;
}

/* 16 numbers of a row's output. */
static lanes *output_at(struct state *state, int64_t r, int64_t at) {
    sums *sums = state->outputs + r / PANEL * 2 * state->chunks + at / LANES;
    return (lanes *)*sums + r % PANEL;
}

/* Replace a row's scores by the terms of its weights. */
static void weigh_row(struct state *state, int64_t r) {
    lanes x[PARTS], *scores = (lanes *)state->scores[r];
    set_visible(state->rows + r, state->window, state->first);
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) x[part] = scores[part];
    float shrink = weigh(state->rows + r, PARTS, x);
    for (int64_t at = 0; shrink != 1 && at < state->dim; at += LANES)
        *output_at(state, r, at) *= shrink;
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part += 2)
        put_terms(x[part], x[part + 1], scores + part / 2 * TERMS, LINE);
}

/* Do the next piece of vector work while AMX multiplies. Not inlined, because it is called in many
 * places. */
static __attribute__((noinline)) void vector_work(struct state *state) {
    if (state->weighed < state->scored) {
        int64_t next = state->prefetched;
        if (next < state->next_count)
            prefetch_token(state->next_keys[next], state->next_values[next], state->dim);
        state->prefetched++;
        weigh_row(state, state->weighed++);
    } else if (state->ordered < state->to_order) {
        int64_t part = state->ordered++;
        order_keys(state->next_keys + part * LANES, state->dim,
                   state->keys + part * state->chunks * TERMS);
    }
}

/* Tiles 0 to 3 are the sums of two tiles of rows (4 and 5) times two of columns (6 and 7). */
#define ROWS_FROM(upper, lower, apart)                                                             \
    TILE_LOAD(4, upper, apart);                                                                    \
    TILE_LOAD(5, lower, apart)
#define COLUMNS_FROM(left, right)                                                                  \
    TILE_LOAD(6, left, LINE);                                                                      \
    TILE_LOAD(7, right, LINE)
#define MULTIPLY(state)                                                                            \
    vector_work(state);                                                                            \
    TILE_MULTIPLY(0, 4, 6);                                                                        \
    TILE_MULTIPLY(2, 5, 6);                                                                        \
    TILE_MULTIPLY(1, 4, 7);                                                                        \
    TILE_MULTIPLY(3, 5, 7)
/* The six largest products of terms, the smallest first; neighbours in this order share a
 * factor. */
#define MULTIPLY_TERMS(state, ROWS_OF, COLUMNS_OF)                                                 \
    ROWS_OF(2);                                                                                    \
    COLUMNS_OF(0);                                                                                 \
    MULTIPLY(state);                                                                               \
    ROWS_OF(1);                                                                                    \
    MULTIPLY(state);                                                                               \
    COLUMNS_OF(1);                                                                                 \
    MULTIPLY(state);                                                                               \
    ROWS_OF(0);                                                                                    \
    MULTIPLY(state);                                                                               \
    COLUMNS_OF(2);                                                                                 \
    MULTIPLY(state);                                                                               \
    COLUMNS_OF(0);                                                                                 \
    MULTIPLY(state)

/* Compute the scores of a strip of rows. */
static void score(struct state *state, int64_t strip) {
    const int64_t apart = state->chunks * TERMS, stride = sizeof *state->scores;
    for (int64_t part = 0; part < PARTS; part += 2) {
        const tile *query = state->queries + strip / PANEL * apart,
                   *key = state->keys + part * apart;
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int64_t chunk = 0; chunk < state->chunks; chunk++, query += TERMS, key += TERMS) {
#define QUERIES(term) ROWS_FROM(query + (term), query + apart + (term), LINE)
#define KEYS_OF(term) COLUMNS_FROM(key + (term), key + apart + (term))
            MULTIPLY_TERMS(state, QUERIES, KEYS_OF);
        }
        float *upper = state->scores[strip] + part * LANES;
        float *lower = state->scores[strip + PANEL] + part * LANES;
        TILE_STORE(0, upper, stride);
        TILE_STORE(1, upper + LANES, stride);
        TILE_STORE(2, lower, stride);
        TILE_STORE(3, lower + LANES, stride);
    }
}

/* Add the weighted values to the outputs of a strip of rows. If head_dim is an odd multiple of
 * 16, the last tile has undefined numbers, whose products are never read. */
static void add_values(struct state *state, int64_t strip) {
    const int64_t numbers = 2 * state->chunks, stride = sizeof *state->scores;
    sums *upper = state->outputs + strip / PANEL * numbers, *lower = upper + numbers;
    for (int64_t at = 0; at < numbers; at += 2) {
        TILE_LOAD(0, upper + at, LINE);
        TILE_LOAD(1, upper + at + 1, LINE);
        TILE_LOAD(2, lower + at, LINE);
        TILE_LOAD(3, lower + at + 1, LINE);
        for (int64_t half = 0; half < PARTS / 2; half++) {
            const float *weight = state->scores[strip] + half * TERMS * LANES;
            const float *below = state->scores[strip + PANEL] + half * TERMS * LANES;
            const tile *value = state->values + (half * numbers + at) * TERMS;
#define WEIGHTS(term) ROWS_FROM(weight + (term) * LANES, below + (term) * LANES, stride)
#define VALUES(term) COLUMNS_FROM(value + (term), value + TERMS + (term))
            MULTIPLY_TERMS(state, WEIGHTS, VALUES);
        }
        TILE_STORE(0, upper + at, LINE);
        TILE_STORE(1, upper + at + 1, LINE);
        TILE_STORE(2, lower + at, LINE);
        TILE_STORE(3, lower + at + 1, LINE);
    }
}

/* Compute all rows for the block whose keys are ordered, and order those of the next. */
static void attend_block(struct state *state, const struct pages *pages, const struct piece *piece,
                         int64_t end) {
    for (int64_t half = 0; half < PARTS / 2; half++)
        order_values(state->next_values + half * CHUNK, state->dim,
                     state->values + half * 2 * state->chunks * TERMS);
    find_next(state, pages, piece, state->first + KEYS, end);
    state->scored = state->weighed = state->to_order = 0;
    for (int64_t strip = 0; strip < state->count; strip += STRIP) {
        score(state, strip);
        state->scored = strip + STRIP < state->count ? strip + STRIP : state->count;
    }
    state->to_order = state->next_count ? PARTS : 0;
    for (int64_t strip = 0; strip < state->count; strip += STRIP) {
        while (state->weighed < strip + STRIP && state->weighed < state->count) vector_work(state);
        add_values(state, strip);
    }
    while (state->ordered < state->to_order) vector_work(state);
}

/* Compute `count` rows of a piece from row `begin` on. */
static void attend_rows(const struct pages *pages, const struct piece *piece, int64_t begin,
                        int64_t count) {
    struct state state;
    int64_t dim = pages->dim, chunks = (dim + CHUNK - 1) / CHUNK;
    state.count = count;
    state.dim = dim;
    state.chunks = chunks;
    state.window = piece->window;
    begin_rows(piece, 0, begin, count, dim, state.rows);
    order_queries(&state);
    memset(state.outputs, 0, (count + STRIP - 1) / STRIP * 2 * 2 * chunks * sizeof(sums));
    int64_t first = state.rows[0].place + 1 - piece->window, end = state.rows[count - 1].place + 1;
    state.first = first < 0 ? 0 : first;
    find_next(&state, pages, piece, state.first, end);
    state.scored = state.weighed = 0;
    state.to_order = PARTS;
    while (state.ordered < PARTS) vector_work(&state);
    for (; state.first < end; state.first += KEYS) attend_block(&state, pages, piece, end);
    for (int64_t r = 0; r < count; r++) {
        float total = total_of(state.rows + r);
        for (int64_t at = 0; at < dim; at += LANES)
            *(lanes *)(state.rows[r].answer + at) = *output_at(&state, r, at) / total;
    }
}

int attend_by_amx(const struct pages *pages, const struct piece *piece) {
    if (!amx_allowed()) return 0;
    int64_t rows = piece->tokens * piece->heads;
    /* The last term of a small weight is denormal, which makes vector code a hundred times
     * slower and sharp attention five times: flush it to zero. */
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    begin_tiles(PANEL, LINE);
    for (int64_t begin = 0; begin < rows; begin += ROWS)
        attend_rows(pages, piece, begin, rows - begin < ROWS ? rows - begin : ROWS);
    TILES_END();
    _mm_setcsr(mode);
    return 1;
}

#else

int attend_by_amx(const struct pages *pages, const struct piece *piece) { return 0; }

#endif
