/* Matrices from files: read a piece at a time and packed from there, on all threads. */

#include "packing.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* Of a file at a time: a disk that is asked for less gives less in a second. */
#define PIECE_BYTES (1024 * 1024)
#define SECTOR 4096

/* Rows where they lie in an open file, and the matrix of `kind` that is wanted of them: whole tiles,
 * and whole heads where those have any rows; heads are whole tiles. */
struct fetch {
    int64_t file, start, layout, kind, rows, columns, head_rows;
    uint8_t *out;
};

struct fetching {
    const struct fetch *fetches, *end;
    int64_t room;
    _Atomic int64_t *begun;
    _Atomic int *failed;
};

static int64_t rows_at_once(const struct fetch *by) {
    int64_t unit = by->head_rows ? by->head_rows : TILE;
    int64_t units = PIECE_BYTES / (unit * row_bytes(by->layout, by->columns));
    return units ? units * unit : unit;
}

static int64_t pieces_of(const struct fetch *by) {
    return (by->rows + rows_at_once(by) - 1) / rows_at_once(by);
}

/* Read at least the first `wanted` of `bytes`; at the end of a file there may be no more. */
static int read_sectors(int file, uint8_t *to, int64_t wanted, int64_t bytes, int64_t start) {
    for (int64_t at = 0; at < wanted;) {
        ssize_t taken = pread(file, to + at, bytes - at, start + at);
        if (taken < 0 && errno == EINTR) continue;
        if (taken <= 0) return -1;
        at += taken;
    }
    return 0;
}

/* Whole sectors, which is what a file gives that is open past the page cache. */
static int fetch_piece(const struct fetch *by, int64_t piece, uint8_t *near) {
    int64_t row = piece * rows_at_once(by), left = by->rows - row;
    int64_t bytes = row_bytes(by->layout, by->columns);
    int64_t count = left < rows_at_once(by) ? left : rows_at_once(by);
    int64_t start = by->start + row * bytes, before = start % SECTOR;
    int64_t wanted = before + count * bytes;
    int64_t whole = (wanted + SECTOR - 1) / SECTOR * SECTOR;
    if (read_sectors(by->file, near, wanted, whole, start - before)) return -1;
    pack_file_rows(near + before, by->layout, by->kind, count, by->columns, by->head_rows,
              by->out + row / TILE * panel_bytes(by->kind, by->columns));
    return 0;
}

/* What one thread does: read a piece into memory of its own, and pack it from there. */
static void fetch_pieces(const void *told, int64_t thread, int64_t threads) {
    (void)thread, (void)threads;
    const struct fetching *all = told;
    const struct fetch *by = all->fetches;
    uint8_t *near = aligned_alloc(SECTOR, all->room);
    if (near == NULL) *all->failed = 1;
    for (int64_t passed = 0; !*all->failed;) {
        int64_t piece = (*all->begun)++;
        while (by < all->end && piece - passed >= pieces_of(by)) passed += pieces_of(by++);
        if (by == all->end) break;
        if (fetch_piece(by, piece - passed, near)) *all->failed = 1;
    }
    free(near);
}

/* Read and pack, piece by piece, whichever thread is free the next one. Return -1 where a file cannot
 * be read so far. */
int64_t read_and_pack(const struct fetch *fetches, int64_t count, int64_t threads) {
    int64_t most = 0;
    for (const struct fetch *by = fetches; by < fetches + count; by++) {
        int64_t bytes = rows_at_once(by) * row_bytes(by->layout, by->columns);
        if (bytes > most) most = bytes;
    }
    _Atomic int64_t begun = 0;
    _Atomic int failed = 0;
    int64_t room = (most / SECTOR + 2) * SECTOR;
    const struct fetching all = {fetches, fetches + count, room, &begun, &failed};
    share(fetch_pieces, &all, threads, threads, threads);
    return failed ? -1 : 0;
}
