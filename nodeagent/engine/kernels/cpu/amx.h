/* The processor's matrix unit (AMX): eight registers, each a tile of 16 lines of 64 bytes, and one
 * instruction that multiplies two tiles of bf16 and adds the products to a third of fp32.
 *
 * One factor's line is a row: 32 numbers. The other's line is a pair of neighbouring numbers of each
 * of 16 columns. An fp32 number is the sum of three of bf16, its terms: as many of them are
 * multiplied as the answer's exactness asks for (Henry, Tang, Heinecke: "Leveraging the bfloat16
 * artificial intelligence datatype for higher-precision computations", 2019).
 */

#ifndef AMX_H
#define AMX_H

#include "kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define WITH_AMX
#endif

#define TILE_NUMBERS 512 /* of bf16: 16 lines of 32 */

/* Whether tiles may be used: only once `allow_amx` has tried them. */
int amx_allowed(void);
int64_t allow_amx(int64_t wanted);

/* From how many rows on products by tiles are the faster ones: the more terms, the more. Weights of 16
 * bits in groups are better kept as the floats that they were, where there are tiles. */
INLINED int64_t many_rows(int64_t kind) {
    return kind == FP32 ? 80 : kind < FP32 ? 24 : kind < 16 ? 12 : INT64_MAX;
}

int64_t multiply_by_amx(const uint8_t *packed, int64_t kind, int64_t rows, int64_t columns,
                          const float *x, int64_t count, int64_t threads, float *out);

#ifdef WITH_AMX

/* Not the compiler's own: gcc before 13 takes them to read nothing, or no more than eight bytes, and
 * leaves out or puts off what was to be written there before. */
#define TILE_NOUGHT(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, apart)                                                               \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(apart)) : "memory")
#define TILE_STORE(tile, to, apart)                                                                \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(apart)) : "memory")
/* `sums` += `rows` times `columns`: of bf16; of bytes, rows with a sign (`s`) or without (`u`). */
#define TILE_MULTIPLY(sums, rows, columns)                                                         \
    __asm__ volatile("tdpbf16ps %%tmm" #columns ", %%tmm" #rows ", %%tmm" #sums ::)
#define TILE_MULTIPLY_BYTES(sign, sums, rows, columns)                                             \
    __asm__ volatile("tdpb" #sign "ud %%tmm" #columns ", %%tmm" #rows ", %%tmm" #sums ::)
#define TILES_END() __asm__ volatile("tilerelease" ::)

/* Make tiles 0 to 3 of sums, 4 and 5 of rows, all of so many `lines`, for few take less time; and 6
 * and 7 of columns, for rows of so many `bytes`. A thread gives its tiles back by TILES_END. */
void begin_tiles(int64_t lines, int64_t bytes);

/* The largest bf16 towards nought, and what is left. */
INLINED __m512i term_of(__m512 *x) {
    __m512i term = _mm512_and_si512(_mm512_castps_si512(*x), _mm512_set1_epi32(0xffff0000));
    *x = _mm512_sub_ps(*x, _mm512_castsi512_ps(term));
    return term;
}

/* Two vectors of terms as pairs: the first of both, the second of both, and so on. */
INLINED __m512i paired(__m512i first, __m512i second) {
    return _mm512_or_si512(_mm512_srli_epi32(first, 16), second);
}

#endif

#endif
