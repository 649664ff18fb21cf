/* Attention of many rows by the processor's matrix unit.
 *
 * Rows go in strips of 32 through 64 keys at a time: first all of them are multiplied by the keys,
 * which gives scores, then their weights by the values. Vectors make the weights and bring keys and
 * values into the unit's order, which takes about as long as the products. So they go on while the
 * unit multiplies: row by row, and with the next keys once no row needs these any more.
 *
 * Both factors of both products are taken apart into three terms of bf16, which hold all of an fp32
 * number. Of the products of terms the six largest are added up; the others are below the last bit.
 */

#include "attention.h"
#include "amx.h"

#ifdef WITH_AMX

#define KEYS 64
#define PARTS (KEYS / LANES)
#define STRIP (2 * TILE)
#define ROWS 256          /* rows for which keys are ordered once: room for them is on the stack */
#define CHUNK (2 * LANES) /* numbers of a line: sixteen, each beside one of another sixteen */
#define CHUNKS_MAX (DIM_MAX / CHUNK)
#define TERMS 3

typedef uint16_t tile[TILE_NUMBERS];
typedef float sums[TILE * LANES];

/* Tiles of the same sixteen rows or keys lie chunk by chunk of their numbers, those of values sixteen
 * by sixteen for each half of the keys; in all of these term by term. */
struct room {
    tile queries[ROWS / TILE * CHUNKS_MAX * TERMS] __attribute__((aligned(LINE)));
    tile keys[PARTS * CHUNKS_MAX * TERMS];
    tile values[PARTS * CHUNKS_MAX * TERMS];
    float scores[ROWS][KEYS * TERMS / 2]; /* of a row, until its weights' terms take their place */
    sums answers[ROWS / TILE * 2 * CHUNKS_MAX];
    struct row rows[ROWS];
    int64_t count, dim, chunks, window;
    int64_t first;   /* the place of this turn's first key */
    int64_t to_come; /* keys of the next turn, and where they and their values lie */
    const float *next_keys[KEYS], *next_values[KEYS];
    /* How far vectors are, and how far they may go: rows of this turn, parts of the next. */
    int64_t weighed, scored, announced, ordered, to_order;
};

/* Put each of `first` beside one of `second` as lines of tiles, one for each term. */
INLINED void put_terms(lanes first, lanes second, void *to, int64_t apart) {
    __m512 x = (__m512)first, y = (__m512)second;
#pragma GCC unroll 3
    for (int term = 0; term < TERMS; term++) {
        __m512i one = term_of(&x), other = term_of(&y);
        _mm512_store_si512((char *)to + term * apart, paired(one, other));
    }
}

static void order_queries(struct room *room) {
    lanes root = (lanes){0} + LOG2_E / sqrtf(room->dim);
    for (int64_t r = 0; r < room->count; r++)
        for (int64_t at = 0; at < room->dim; at += CHUNK) {
            const lanes *query = (const lanes *)(room->rows[r].query + at);
            tile *to = room->queries + (r / TILE * room->chunks + at / CHUNK) * TERMS;
            lanes second = {0};
            if (at + LANES < room->dim) second = root * query[1];
            put_terms(root * query[0], second, to[0] + r % TILE * CHUNK, sizeof(tile));
        }
}

/* Bring sixteen keys into order: a line has two numbers of each. */
static void order_keys(const float *const *keys, int64_t dim, tile *to) {
    for (int64_t at = 0; at < dim; at += CHUNK, to += TERMS) {
        lanes x[LANES], y[LANES] = {{0}};
#pragma GCC unroll 16
        for (int key = 0; key < LANES; key++) x[key] = *(const lanes *)(keys[key] + at);
        turn_about(x);
        if (at + LANES < dim) {
#pragma GCC unroll 16
            for (int key = 0; key < LANES; key++)
                y[key] = *(const lanes *)(keys[key] + at + LANES);
            turn_about(y);
        }
        for (int line = 0; line < LANES; line++)
            put_terms(x[line], y[line], to[0] + line * CHUNK, sizeof(tile));
    }
}

/* Bring the values of 32 keys into order: a line has sixteen numbers of two of them. */
static void order_values(const float *const *values, int64_t dim, tile *to) {
    for (int line = 0; line < LANES; line++)
        for (int64_t at = 0; at < dim; at += LANES)
            put_terms(*(const lanes *)(values[line] + at),
                      *(const lanes *)(values[LANES + line] + at),
                      to[at / LANES * TERMS] + line * CHUNK, sizeof(tile));
}

/* Find the keys and values of the turn from place `first` on; none are seen from `end` on. */
static void find_next(struct room *room, const struct pages *pages, const struct piece *piece,
                      int64_t first, int64_t end) {
    static const float nought[DIM_MAX];
    int64_t left = end - first;
    room->to_come = left < 0 ? 0 : left < KEYS ? left : KEYS;
    room->announced = room->ordered = 0;
    locate(pages, piece, first, room->to_come, room->next_keys);
    for (int64_t key = 0; key < KEYS; key++)
        if (key < room->to_come)
            room->next_values[key] = room->next_keys[key] + pages->kv_heads * room->dim;
        else
            room->next_keys[key] = room->next_values[key] = nought;
}

/* Sixteen numbers of a row's answer. */
static lanes *answer_at(struct room *room, int64_t r, int64_t at) {
    sums *sums = room->answers + r / TILE * 2 * room->chunks + at / LANES;
    return (lanes *)*sums + r % TILE;
}

/* Put the terms of a row's weights where its scores are. */
static void weigh_row(struct room *room, int64_t r) {
    lanes x[PARTS], *scores = (lanes *)room->scores[r];
    look(room->rows + r, room->window, room->first);
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) x[part] = scores[part];
    float shrink = weigh(room->rows + r, PARTS, x);
    for (int64_t at = 0; shrink != 1 && at < room->dim; at += LANES)
        *answer_at(room, r, at) *= shrink;
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part += 2)
        put_terms(x[part], x[part + 1], scores + part / 2 * TERMS, LINE);
}

/* What vectors do next while the unit multiplies: not inlined, for it is called in a dozen places. */
static __attribute__((noinline)) void go_on(struct room *room) {
    if (room->weighed < room->scored) {
        int64_t next = room->announced;
        if (next < room->to_come)
            announce(room->next_keys[next], room->next_values[next], room->dim);
        room->announced++;
        weigh_row(room, room->weighed++);
    } else if (room->ordered < room->to_order) {
        int64_t part = room->ordered++;
        order_keys(room->next_keys + part * LANES, room->dim,
                   room->keys + part * room->chunks * TERMS);
    }
}

/* Tiles 0 to 3 are sums of two tiles of rows, 4 and 5, by two of columns, 6 and 7. */
#define ROWS_FROM(upper, lower, apart)                                                             \
    TILE_LOAD(4, upper, apart);                                                                    \
    TILE_LOAD(5, lower, apart)
#define COLUMNS_FROM(left, right)                                                                  \
    TILE_LOAD(6, left, LINE);                                                                      \
    TILE_LOAD(7, right, LINE)
#define MULTIPLY(room)                                                                             \
    go_on(room);                                                                                   \
    TILE_MULTIPLY(0, 4, 6);                                                                        \
    TILE_MULTIPLY(2, 5, 6);                                                                        \
    TILE_MULTIPLY(1, 4, 7);                                                                        \
    TILE_MULTIPLY(3, 5, 7)
/* The six largest products of terms, the least first; of two in a row one factor is the same. */
#define MULTIPLY_TERMS(room, ROWS_OF, COLUMNS_OF)                                                  \
    ROWS_OF(2);                                                                                    \
    COLUMNS_OF(0);                                                                                 \
    MULTIPLY(room);                                                                                \
    ROWS_OF(1);                                                                                    \
    MULTIPLY(room);                                                                                \
    COLUMNS_OF(1);                                                                                 \
    MULTIPLY(room);                                                                                \
    ROWS_OF(0);                                                                                    \
    MULTIPLY(room);                                                                                \
    COLUMNS_OF(2);                                                                                 \
    MULTIPLY(room);                                                                                \
    COLUMNS_OF(0);                                                                                 \
    MULTIPLY(room)

/* The scores of a strip of rows. */
static void score(struct room *room, int64_t strip) {
    const int64_t apart = room->chunks * TERMS, stride = sizeof *room->scores;
    for (int64_t part = 0; part < PARTS; part += 2) {
        const tile *query = room->queries + strip / TILE * apart, *key = room->keys + part * apart;
        TILE_NOUGHT(0);
        TILE_NOUGHT(1);
        TILE_NOUGHT(2);
        TILE_NOUGHT(3);
        for (int64_t chunk = 0; chunk < room->chunks; chunk++, query += TERMS, key += TERMS) {
#define QUERIES(term) ROWS_FROM(query + (term), query + apart + (term), LINE)
#define THEIR_KEYS(term) COLUMNS_FROM(key + (term), key + apart + (term))
            MULTIPLY_TERMS(room, QUERIES, THEIR_KEYS);
        }
        float *upper = room->scores[strip] + part * LANES;
        float *lower = room->scores[strip + TILE] + part * LANES;
        TILE_STORE(0, upper, stride);
        TILE_STORE(1, upper + LANES, stride);
        TILE_STORE(2, lower, stride);
        TILE_STORE(3, lower + LANES, stride);
    }
}

/* Add the values to the answers of a strip of rows, by their weights. Where numbers end with an odd
 * sixteen, there may be anything in the tile beside it: nobody reads what becomes of that. */
static void gather(struct room *room, int64_t strip) {
    const int64_t numbers = 2 * room->chunks, stride = sizeof *room->scores;
    sums *upper = room->answers + strip / TILE * numbers, *lower = upper + numbers;
    for (int64_t at = 0; at < numbers; at += 2) {
        TILE_LOAD(0, upper + at, LINE);
        TILE_LOAD(1, upper + at + 1, LINE);
        TILE_LOAD(2, lower + at, LINE);
        TILE_LOAD(3, lower + at + 1, LINE);
        for (int64_t half = 0; half < PARTS / 2; half++) {
            const float *weight = room->scores[strip] + half * TERMS * LANES;
            const float *below = room->scores[strip + TILE] + half * TERMS * LANES;
            const tile *value = room->values + (half * numbers + at) * TERMS;
#define WEIGHTS(term) ROWS_FROM(weight + (term) * LANES, below + (term) * LANES, stride)
#define VALUES(term) COLUMNS_FROM(value + (term), value + TERMS + (term))
            MULTIPLY_TERMS(room, WEIGHTS, VALUES);
        }
        TILE_STORE(0, upper + at, LINE);
        TILE_STORE(1, upper + at + 1, LINE);
        TILE_STORE(2, lower + at, LINE);
        TILE_STORE(3, lower + at + 1, LINE);
    }
}

/* Bring all rows through the turn whose keys are in order, and order those of the next. */
static void take(struct room *room, const struct pages *pages, const struct piece *piece,
                 int64_t end) {
    for (int64_t half = 0; half < PARTS / 2; half++)
        order_values(room->next_values + half * CHUNK, room->dim,
                     room->values + half * 2 * room->chunks * TERMS);
    find_next(room, pages, piece, room->first + KEYS, end);
    room->scored = room->weighed = room->to_order = 0;
    for (int64_t strip = 0; strip < room->count; strip += STRIP) {
        score(room, strip);
        room->scored = strip + STRIP < room->count ? strip + STRIP : room->count;
    }
    room->to_order = room->to_come ? PARTS : 0;
    for (int64_t strip = 0; strip < room->count; strip += STRIP) {
        while (room->weighed < strip + STRIP && room->weighed < room->count) go_on(room);
        gather(room, strip);
    }
    while (room->ordered < room->to_order) go_on(room);
}

/* Answer `count` rows of a piece from its row `begin` on. */
static void attend_rows(const struct pages *pages, const struct piece *piece, int64_t begin,
                        int64_t count) {
    struct room room;
    int64_t dim = pages->dim, chunks = (dim + CHUNK - 1) / CHUNK;
    room.count = count;
    room.dim = dim;
    room.chunks = chunks;
    room.window = piece->window;
    begin_rows(piece, 0, begin, count, dim, room.rows);
    order_queries(&room);
    memset(room.answers, 0, (count + STRIP - 1) / STRIP * 2 * 2 * chunks * sizeof(sums));
    int64_t first = room.rows[0].place + 1 - piece->window, end = room.rows[count - 1].place + 1;
    room.first = first < 0 ? 0 : first;
    find_next(&room, pages, piece, room.first, end);
    room.scored = room.weighed = 0;
    room.to_order = PARTS;
    while (room.ordered < PARTS) go_on(&room);
    for (; room.first < end; room.first += KEYS) take(&room, pages, piece, end);
    for (int64_t r = 0; r < count; r++) {
        float total = total_of(room.rows + r);
        for (int64_t at = 0; at < dim; at += LANES)
            *(lanes *)(room.rows[r].answer + at) = *answer_at(&room, r, at) / total;
    }
}

int attend_by_amx(const struct pages *pages, const struct piece *piece) {
    if (!amx_allowed()) return 0;
    int64_t rows = piece->tokens * piece->heads;
    /* The last term of a small weight is no normal number any more, with which vectors take a hundred
     * times as long, and sharp attention five times: it is nought instead. */
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    begin_tiles(TILE, LINE);
    for (int64_t begin = 0; begin < rows; begin += ROWS)
        attend_rows(pages, piece, begin, rows - begin < ROWS ? rows - begin : ROWS);
    TILES_END();
    _mm_setcsr(mode);
    return 1;
}

#else

int attend_by_amx(const struct pages *pages, const struct piece *piece) { return 0; }

#endif
