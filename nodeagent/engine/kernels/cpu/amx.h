/* AMX, the processor's matrix unit: eight tile registers of 16 lines of 64 bytes, and an
 * instruction that multiplies two bf16 tiles and adds the products to a third tile of fp32.
 *
 * A line of the first factor is a row of 32 numbers. A line of the second has a pair of
 * neighbouring numbers of each of 16 columns. An fp32 number is the sum of three bf16 numbers,
 * its terms; as many terms are multiplied as the accuracy of the result needs (Henry, Tang,
 * Heinecke: "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
 * computations", 2019).
 */

#ifndef AMX_H
#define AMX_H

#include "kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define WITH_AMX
#endif

#define TILE_NUMBERS 512 /* bf16 numbers of a tile: 16 lines of 32 */

/* Whether AMX may be used: only after `allow_amx` has tested it. */
int amx_allowed(void);
int64_t allow_amx(int64_t wanted);

/* The number of rows from which products by AMX are faster: more terms need more rows. Rounded
 * floats have no AMX product, because with AMX the floats themselves are faster. */
INLINED int64_t many_rows(int64_t kind) {
    return kind == FP32 ? 80 : kind < FP32 ? 24 : kind < 16 ? 12 : INT64_MAX;
}

int64_t multiply_by_amx(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                        const float *x, int64_t count, int64_t threads, float *out);

#ifdef WITH_AMX

/* Inline assembly instead of intrinsics: gcc before 13 believes that those read at most eight
 * bytes, and drops or delays earlier writes to the tile's memory. */
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile::)
#define TILE_LOAD(tile, from, apart)                                                               \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(from), "r"((int64_t)(apart))          \
                     : "memory")
#define TILE_STORE(tile, to, apart)                                                                \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(apart))       \
                     : "memory")
/* sums += rows * columns: of bf16; of bytes, where rows are signed (`s`) or unsigned (`u`). */
#define TILE_MULTIPLY(sums, rows, columns)                                                         \
    __asm__ volatile("tdpbf16ps %%tmm" #columns ", %%tmm" #rows ", %%tmm" #sums::)
#define TILE_MULTIPLY_BYTES(sign, sums, rows, columns)                                             \
    __asm__ volatile("tdpb" #sign "ud %%tmm" #columns ", %%tmm" #rows ", %%tmm" #sums::)
#define TILES_END() __asm__ volatile("tilerelease" ::)

/* Configure the tiles of this thread: 0 to 3 for sums and 4 and 5 for rows, all of `lines` lines
 * (fewer take less time); 6 and 7 for columns, for rows of `bytes` bytes. TILES_END releases
 * them. */
void begin_tiles(int64_t lines, int64_t bytes);

/* Return the bf16 number next to x towards zero, as the upper half of fp32; leave the rest in x. */
INLINED __m512i term_of(__m512 *x) {
    __m512i term = _mm512_and_si512(_mm512_castps_si512(*x), _mm512_set1_epi32(0xffff0000));
    *x = _mm512_sub_ps(*x, _mm512_castsi512_ps(term));
    return term;
}

/* Interleave two vectors of terms: the first of both, the second of both, and so on. */
INLINED __m512i paired(__m512i first, __m512i second) {
    return _mm512_or_si512(_mm512_srli_epi32(first, 16), second);
}

#endif

#endif
