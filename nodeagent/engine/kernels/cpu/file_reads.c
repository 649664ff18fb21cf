/* Reads matrices from files piece by piece, and packs each piece, on all threads. */

#include "packing.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* Read at a time: smaller reads are slower. */
#define PIECE_BYTES (1024 * 1024)
#define SECTOR 4096

/* Rows in an open file, and the packed matrix of `kind` to make of them. Rows are whole panels, and
 * whole heads if `head_rows` is not 0; heads are whole panels. */
struct fetch {
    int64_t file, start, layout, kind, rows, columns, head_rows;
    uint8_t *out;
};

struct fetching {
    const struct fetch *fetches, *end;
    int64_t buffer_bytes;
    _Atomic int64_t *next_piece;
    _Atomic int *failed;
};

static int64_t rows_at_once(const struct fetch *by) {
    int64_t unit = by->head_rows ? by->head_rows : PANEL;
    int64_t units = PIECE_BYTES / (unit * row_bytes(by->layout, by->columns));
    return units ? units * unit : unit;
}

static int64_t pieces_of(const struct fetch *by) {
    return (by->rows + rows_at_once(by) - 1) / rows_at_once(by);
}

/* Read at least the first `wanted` of `bytes`; at the end of a file there may be fewer than
 * `bytes`. */
static int read_sectors(int file, uint8_t *to, int64_t wanted, int64_t bytes, int64_t start) {
    for (int64_t at = 0; at < wanted;) {
        ssize_t taken = pread(file, to + at, bytes - at, start + at);
        if (taken < 0 && errno == EINTR) continue;
        if (taken <= 0) return -1;
        at += taken;
    }
    return 0;
}

/* Read whole sectors, as O_DIRECT requires, and pack the rows among them. */
static int fetch_piece(const struct fetch *by, int64_t piece, uint8_t *buffer) {
    int64_t row = piece * rows_at_once(by), left = by->rows - row;
    int64_t bytes = row_bytes(by->layout, by->columns);
    int64_t count = left < rows_at_once(by) ? left : rows_at_once(by);
    int64_t start = by->start + row * bytes, before = start % SECTOR;
    int64_t wanted = before + count * bytes;
    int64_t whole = (wanted + SECTOR - 1) / SECTOR * SECTOR;
    if (read_sectors(by->file, buffer, wanted, whole, start - before)) return -1;
    pack_file_rows(buffer + before, by->layout, by->kind, count, by->columns, by->head_rows,
                   by->out + row / PANEL * panel_bytes(by->kind, by->columns));
    return 0;
}

/* One thread: take piece after piece, read it into a buffer of its own, and pack it. */
static void fetch_pieces(const void *arguments, int64_t thread, int64_t threads) {
    (void)thread, (void)threads;
    const struct fetching *all = arguments;
    const struct fetch *by = all->fetches;
    uint8_t *buffer = aligned_alloc(SECTOR, all->buffer_bytes);
    if (buffer == NULL) *all->failed = 1;
    for (int64_t passed = 0; !*all->failed;) {
        int64_t piece = (*all->next_piece)++;
        while (by < all->end && piece - passed >= pieces_of(by)) passed += pieces_of(by++);
        if (by == all->end) break;
        if (fetch_piece(by, piece - passed, buffer)) *all->failed = 1;
    }
    free(buffer);
}

/* Read and pack all `fetches`; each free thread takes the next piece. Return -1 if a file cannot
 * be read. */
int64_t read_and_pack(const struct fetch *fetches, int64_t count, int64_t threads) {
    int64_t max_bytes = 0;
    for (const struct fetch *by = fetches; by < fetches + count; by++) {
        int64_t bytes = rows_at_once(by) * row_bytes(by->layout, by->columns);
        if (bytes > max_bytes) max_bytes = bytes;
    }
    _Atomic int64_t next_piece = 0;
    _Atomic int failed = 0;
    int64_t buffer_bytes = (max_bytes / SECTOR + 2) * SECTOR;
    const struct fetching all = {fetches, fetches + count, buffer_bytes, &next_piece, &failed};
    parallel_for(fetch_pieces, &all, threads, threads, threads);
    return failed ? -1 : 0;
}
