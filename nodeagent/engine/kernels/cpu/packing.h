/* The formats of rows in files, and packing them into panels. */

#ifndef PACKING_H
#define PACKING_H

#include "kernels.h"

/* Floats have their `enum kind`; these are GGUF blocks of 32 weights. */
enum row_format { Q4_0 = FP32 + 1, Q4_1, Q8_0 };

INLINED int64_t block_bytes(int64_t layout) {
    return layout == Q8_0 ? 34 : layout == Q4_1 ? 20 : 18;
}

INLINED int64_t row_bytes(int64_t layout, int64_t columns) {
    return layout <= FP32 ? columns * bytes_of(layout) : columns / GROUP * block_bytes(layout);
}

/* Pack whole panels of rows in the form of a file. `head_rows` not 0: the rows are whole heads
 * of that many, whose two halves the file interleaves. */
void pack_file_rows(const uint8_t *filed, int64_t layout, int64_t kind, int64_t rows,
                    int64_t columns, int64_t head_rows, uint8_t *out);

#endif
