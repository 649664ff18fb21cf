/* Attention over the paged KV cache, for decodes and prefill chunks. Pieces of many rows go to
 * `attention_amx.c` if the processor has AMX and the caller allows results that differ in the
 * last bits.
 *
 * The work is cut into pieces: a few neighbouring tokens of one sequence under one KV head, or a
 * single token under all KV heads in block. The rows of a piece are all query heads of all its
 * tokens. They go together through blocks of 64 keys, the last ones of 32 or 16. The keys of a
 * block are transposed once, so that 16 scores are computed at a time without sums across lanes.
 * The softmax is computed online, without memory for the scores of a whole context.
 */

#include "attention.h"

#define KEYS 64 /* keys of a block: with their values they stay in the L2 cache */
#define PARTS (KEYS / LANES)
#define MANY_ROWS 32 /* from this many rows on, AMX is faster */
#define ROWS 128     /* rows that share one transposition of keys; they are on the stack */
#define STRIP 6      /* rows at a time: their outputs stay in registers */

/* One block of keys, transposed to [dim][KEYS] and zero after the last, and its values. */
struct key_block {
    float keys[KEYS * DIM_MAX] __attribute__((aligned(LINE)));
    const float *values[KEYS];
    /* Keys and values of pages that are not fp32, as fp32. */
    float read_keys[KEYS * DIM_MAX] __attribute__((aligned(LINE)));
    float read_values[KEYS * DIM_MAX] __attribute__((aligned(LINE)));
    int64_t count, parts; /* parts of sixteen keys: 4, 2 or 1 */
    /* The keys of the next block under this KV head, and how many of them are prefetched. */
    const float *next[KEYS];
    int64_t next_count, prefetched;
};

/* Transpose numbers `at` to `at + 15` of 16 keys into `to`. */
static void transpose_keys(const float *const *keys, int64_t at, float *to) {
    lanes x[LANES];
#pragma GCC unroll 16
    for (int key = 0; key < LANES; key++) x[key] = *(const lanes *)(keys[key] + at);
    transpose(x);
#pragma GCC unroll 16
    for (int number = 0; number < LANES; number++) *(lanes *)(to + number * KEYS) = x[number];
}

/* Find the keys of the next block, of the same piece or of the next one. */
static void find_next(struct key_block *block, const struct pages *pages, const struct piece *piece,
                      int64_t kv_head, int64_t first, int64_t end) {
    block->next_count = block->prefetched = 0;
    if (first >= end) {
        piece = piece->next;
        if (piece == NULL) return;
        first = first_seen(piece);
        end = piece->start + piece->tokens;
    }
    block->next_count = end - first < KEYS ? end - first : KEYS;
    locate(pages, piece, first, block->next_count, block->next);
    for (int64_t key = 0; key < block->next_count; key++) block->next[key] += kv_head * pages->dim;
}

/* Prefetch `several` of the next keys and values. They lie too far apart for the hardware
 * prefetcher, and too many prefetches at once would stall: so they are spread over the
 * computation. */
INLINED void prefetch_next(struct key_block *block, const struct pages *pages, int64_t several) {
    for (; several > 0 && block->prefetched < block->next_count; several--) {
        const float *keys = block->next[block->prefetched++];
        prefetch_token(keys, keys + pages->kv_heads * pages->dim, pages->dim);
    }
}

/* Find the keys and values of the block in pages of fp32. */
static void find_keys(struct key_block *block, const struct pages *pages, const struct piece *piece,
                      int64_t kv_head, int64_t first, int64_t end, const float **keys) {
    int64_t dim = pages->dim;
    find_next(block, pages, piece, kv_head, first + block->count, end);
    locate(pages, piece, first, block->count, keys);
    for (int64_t key = 0; key < block->count; key++) {
        keys[key] += kv_head * dim;
        block->values[key] = keys[key] + pages->kv_heads * dim;
    }
}

/* Read the keys and values of the block from pages of another form. */
static void read_keys(struct key_block *block, const struct pages *pages, const struct piece *piece,
                      int64_t kv_head, int64_t first, const float **keys) {
    int64_t dim = pages->dim, size = kv_head_bytes(pages->form, dim);
    int64_t block_tokens = pages->block_tokens, slot_bytes = 2 * pages->kv_heads * size;
    block->next_count = block->prefetched = 0;
    for (int64_t key = 0; key < block->count; key++) {
        int64_t at = first + key;
        int64_t slot = piece->blocks[at / block_tokens] * block_tokens + at % block_tokens;
        const uint8_t *stored = (const uint8_t *)pages->slots + slot * slot_bytes;
        stored += (piece->kv_head + kv_head) * size;
        load_kv_head(pages->form, stored, dim, block->read_keys + key * dim);
        load_kv_head(pages->form, stored + pages->kv_heads * size, dim,
                     block->read_values + key * dim);
        keys[key] = block->read_keys + key * dim;
        block->values[key] = block->read_values + key * dim;
    }
}

/* Load the block of keys of one KV head that begins at `first`; none from `end` on. */
static void load_keys(struct key_block *block, const struct pages *pages, const struct piece *piece,
                      int64_t kv_head, int64_t first, int64_t end) {
    static const float zeros[DIM_MAX];
    const float *keys[KEYS];
    int64_t dim = pages->dim, left = end - first;
    block->parts = left >= KEYS ? PARTS : left > LANES ? 2 : 1;
    block->count = left < block->parts * LANES ? left : block->parts * LANES;
    if (pages->form == KV_FP32)
        find_keys(block, pages, piece, kv_head, first, end, keys);
    else
        read_keys(block, pages, piece, kv_head, first, keys);
    for (int64_t key = block->count; key < block->parts * LANES; key++) keys[key] = zeros;
    for (int64_t part = 0; part < block->parts; part++)
        for (int64_t at = 0; at < dim; at += LANES) {
            prefetch_next(block, pages, 2);
            transpose_keys(keys + part * LANES, at, block->keys + at * KEYS + part * LANES);
        }
}

/* Compute the scores of `rows` rows for `parts` * 16 keys of the block, as exponents of two. */
INLINED void score(const int rows, const int parts, const struct key_block *block, struct row *row,
                   int64_t dim, float scores[STRIP][KEYS]) {
    lanes sums[STRIP][PARTS];
    float root = LOG2_E / sqrtf(dim);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) sums[r][part] = (lanes){0};
    for (int64_t at = 0; at < dim; at++) {
        const lanes *keys = (const lanes *)(block->keys + at * KEYS);
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

/* Rescale `parts` * 16 numbers of the outputs of `rows` rows, and add the weighted values. */
INLINED void add_values(const int rows, const int parts, struct key_block *block,
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
    for (int64_t key = 0; key < block->count; key++) {
        const lanes *value = (const lanes *)(block->values[key] + at);
        prefetch_next(block, pages, 1);
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

INLINED void take_strip(const int rows, const int parts, struct key_block *block,
                        const struct pages *pages, struct row *row) {
    int64_t dim = pages->dim;
    float weights[STRIP][KEYS] __attribute__((aligned(LINE))), shrink[STRIP];
    score(rows, parts, block, row, dim, weights);
    for (int r = 0; r < rows; r++) shrink[r] = weigh(row + r, parts, (lanes *)weights[r]);
    int64_t at = 0;
    for (; at + 4 * LANES <= dim; at += 4 * LANES)
        add_values(rows, 4, block, pages, row, at, shrink, weights);
    for (; at < dim; at += LANES) add_values(rows, 1, block, pages, row, at, shrink, weights);
}

/* Compute `count` rows for one block of keys. */
static void attend_block(struct key_block *block, const struct pages *pages, struct row *row,
                         int64_t count) {
#define STRIPS(rows)                                                                               \
    for (; count >= rows; count -= rows, row += rows) {                                            \
        if (block->parts == 4) take_strip(rows, 4, block, pages, row);                             \
        if (block->parts == 2) take_strip(rows, 2, block, pages, row);                             \
        if (block->parts == 1) take_strip(rows, 1, block, pages, row);                             \
    }
    STRIPS(6)
    STRIPS(5)
    STRIPS(4)
    STRIPS(3)
    STRIPS(2)
    STRIPS(1)
#undef STRIPS
}

/* Compute `count` rows of a piece under each of its KV heads, from row `begin` on. */
static void attend_rows(const struct pages *pages, const struct piece *piece, int64_t begin,
                        int64_t count) {
    struct row rows[ROWS];
    struct key_block block;
    int64_t dim = pages->dim, all = piece->kv_heads * count;
    for (int64_t head = 0; head < piece->kv_heads; head++)
        begin_rows(piece, head, begin, count, dim, rows + head * count);
    for (int64_t r = 0; r < all; r++) memset(rows[r].answer, 0, dim * sizeof(float));
    int64_t at = piece->start + begin / piece->heads + 1 - piece->window;
    int64_t end = piece->start + (begin + count - 1) / piece->heads + 1;
    for (at = at < 0 ? 0 : at; at < end; at += block.count)
        for (int64_t head = 0; head < piece->kv_heads; head++) {
            struct row *under = rows + head * count;
            load_keys(&block, pages, piece, head, at, end);
            for (int64_t r = 0; r < count; r++) set_visible(under + r, piece->window, at);
            attend_block(&block, pages, under, count);
            prefetch_next(&block, pages, KEYS);
        }
    for (int64_t r = 0; r < all; r++) {
        float total = total_of(rows + r);
        for (int64_t at = 0; at < dim; at++) rows[r].answer[at] /= total;
    }
}

/* Store the keys and values of every row of `mixed` (queries, keys, values) in its slot. */
void store_kv(const float *mixed, int64_t rows, int64_t heads, const int64_t *slots, void *pages,
              int64_t kv_heads, int64_t dim, int64_t form) {
    int64_t size = kv_head_bytes(form, dim), stride = (heads + 2 * kv_heads) * dim;
    for (int64_t row = 0; row < rows; row++) {
        const float *from = mixed + row * stride + heads * dim;
        uint8_t *slot = (uint8_t *)pages + slots[row] * 2 * kv_heads * size;
        if (form == KV_FP32)
            memcpy(slot, from, 2 * kv_heads * size);
        else
            for (int64_t head = 0; head < 2 * kv_heads; head++)
                store_kv_head(form, from + head * dim, dim, slot + head * size);
    }
}

/* The arguments of `attend`, from which pieces are cut: one for each KV head, or one for all. */
struct attention {
    struct pages pages;
    const float *mixed;
    float *out;
    const int64_t *tables, *cuts;
    int64_t heads, width, window, each;
    int64_t use_amx; /* whether many rows may be computed with AMX */
};

static struct piece piece_of(const struct attention *attention, int64_t at) {
    int64_t heads = attention->heads, kv_heads = attention->pages.kv_heads,
            dim = attention->pages.dim;
    int64_t together = heads / kv_heads, several = kv_heads / attention->each;
    int64_t kv_head = at % attention->each * several;
    const int64_t *cut = attention->cuts + at / attention->each * 4;
    return (struct piece){
        .queries = attention->mixed + (cut[0] * (heads + 2 * kv_heads) + kv_head * together) * dim,
        .answers = attention->out + (cut[0] * heads + kv_head * together) * dim,
        .blocks = attention->tables + cut[3] * attention->width,
        .tokens = cut[1],
        .start = cut[2],
        .window = attention->window,
        .kv_head = kv_head,
        .kv_heads = several,
        .heads = together,
        .query_stride = (heads + 2 * kv_heads) * dim,
        .answer_stride = heads * dim,
    };
}

static void attend_pieces(const void *arguments, int64_t at, int64_t end) {
    const struct attention *attention = arguments;
    for (; at < end; at++) {
        struct piece piece = piece_of(attention, at), next;
        if (at + 1 < end) {
            next = piece_of(attention, at + 1);
            piece.next = &next;
        }
        int64_t rows = piece.tokens * piece.heads, rows_max = ROWS / piece.kv_heads;
        if (attention->use_amx && rows >= MANY_ROWS && piece.kv_heads == 1 &&
            attend_by_amx(&attention->pages, &piece))
            continue;
        for (int64_t begin = 0; begin < rows; begin += rows_max)
            attend_rows(&attention->pages, &piece, begin,
                        rows - begin < rows_max ? rows - begin : rows_max);
    }
}

/* Compute attention of `count` pieces: [first row of `mixed`, tokens, position of the first
 * token in its blocks, row of `tables` that lists these]. Without `use_amx` the output of a row
 * is bit-identical whatever it is batched with, unless a window starts inside a block of keys. */
void attend(const float *mixed, int64_t heads, const void *slots, int64_t block_tokens,
            int64_t kv_heads, int64_t dim, int64_t form, const int64_t *tables, int64_t width,
            const int64_t *pieces, int64_t count, int64_t window, int64_t use_amx, int64_t threads,
            float *out) {
    int64_t pairs = 0, tokens = 0;
    for (int64_t at = 0; at < count; at++) {
        tokens += pieces[4 * at + 1];
        pairs += pieces[4 * at + 1] * (pieces[4 * at + 2] + 1);
    }
    /* If there are enough single tokens for all threads, one piece takes all heads: slots are
     * then read once and in order. */
    int64_t together = tokens == count && heads <= ROWS && (threads == 1 || count >= 2 * threads);
    const struct attention attention = {{slots, block_tokens, kv_heads, dim, form},
                                        mixed,
                                        out,
                                        tables,
                                        pieces,
                                        heads,
                                        width,
                                        window,
                                        together ? 1 : kv_heads,
                                        use_amx && form == KV_FP32};
    int64_t portions = pairs * heads * dim <= SMALL ? 1 : count * attention.each;
    parallel_for(attend_pieces, &attention, count * attention.each, portions, threads);
}
