/* Strips of rows, of which products by groups compute several at once. */

#ifndef STRIPS_H
#define STRIPS_H

#include "kernels.h"

#define STRIP 8    /* rows of x at a time: their sums and answers stay in registers */
#define AHEAD 2560 /* bytes between the weights in use and those that are prefetched */

/* `of` for each number of rows that a strip may have: as a constant, the compiler unrolls by it. */
#define EACH_STRIP(of) of(8) of(7) of(6) of(5) of(4) of(3) of(2) of(1)

/* The number of rows of the strip that begins with row `first`. */
INLINED int64_t strip_of(int64_t first, int64_t count) {
    return count - first < STRIP ? count - first : STRIP;
}

#endif
