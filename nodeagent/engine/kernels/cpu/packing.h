/* Rows as files keep them, and packing those. */

#ifndef PACKING_H
#define PACKING_H

#include "kernels.h"

/* Floats, by their kind, or blocks of 32 weights each. */
enum layout { Q4_0 = FP32 + 1, Q4_1, Q8_0 };

INLINED int64_t block_bytes(int64_t layout) {
    return layout == Q8_0 ? 34 : layout == Q4_1 ? 20 : 18;
}

INLINED int64_t row_bytes(int64_t layout, int64_t columns) {
    return layout <= FP32 ? columns * bytes_of(layout) : columns / GROUP * block_bytes(layout);
}

void pack_file_rows(const uint8_t *filed, int64_t layout, int64_t kind, int64_t rows, int64_t columns,
               int64_t head_rows, uint8_t *out);

#endif
