"""Attention over paged KV in Triton: keys and values are read where they lie, once per KV head.

Decodes are split along their tokens as well, so that few sequences fill the whole device; a second
kernel brings the parts together. Prompt chunks see what precedes them, and themselves causally.

A page is [tokens, keys then values of each KV head, width]. In eight bits the scale lies behind the
numbers of a head, and multiplies scores and shares instead of keys and values. Scores are in powers
of two. What lies in a page past the tokens that a row sees is never read into a sum.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tables_row", "splits"])
def attend_decodes(
    mixed,
    pages,
    scales,
    tables,
    spans,
    parts,
    weights,
    mixed_row,
    tables_row,
    splits,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    EIGHT: tl.constexpr,
    GROUP_WIDE: tl.constexpr,
    DIM_WIDE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Answer for one row, one KV head and one share of the row's tokens."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
    share = tl.cdiv(tl.cdiv(end - first, splits), TILE) * TILE
    start = first + split * share
    stop = tl.minimum(start + share, end)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    at, dims = tl.arange(0, GROUP_WIDE), tl.arange(0, DIM_WIDE)
    heads = kv_head * GROUP + at
    real = (at < GROUP)[:, None] & (dims < DIM)[None, :]
    query = tl.load(
        mixed + row.to(tl.int64) * mixed_row + heads[:, None] * DIM + dims[None, :],
        mask=real,
        other=0.0,
    )
    best = tl.full([GROUP_WIDE], -float("inf"), tl.float32)
    total, sums = tl.zeros([GROUP_WIDE], tl.float32), tl.zeros([GROUP_WIDE, DIM_WIDE], tl.float32)
    for begin in range(start, stop, TILE):
        tokens = begin + tl.arange(0, TILE)
        seen = tokens < stop
        place = _places(tables + row * tables_row, tokens, seen, kv_head, KV_HEADS, BLOCK_TOKENS)
        best, total, sums = _take_in(
            query,
            pages,
            scales,
            place,
            seen,
            seen[None, :],
            scale,
            best,
            total,
            sums,
            KV_HEADS,
            DIM,
            WIDTH,
            EIGHT,
        )
    # Who saw nothing answers nought: a row of padding, or a share past the end.
    empty = stop <= start
    answer = sums / tl.where(empty, 1.0, total)[:, None]
    target = (row * HEADS + heads).to(tl.int64) * splits + split
    tl.store(
        parts + target[:, None] * DIM + dims[None, :], answer.to(parts.dtype.element_ty), mask=real
    )
    if SPLIT:
        tl.store(weights + target, best + tl.log2(tl.where(empty, 1.0, total)), mask=at < GROUP)


@triton.jit
def _places(table, tokens, seen, kv_head, KV_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return where the keys of `tokens` lie, counted in heads."""
    block = tl.load(table + tokens // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
    return (block * BLOCK_TOKENS + tokens % BLOCK_TOKENS) * (2 * KV_HEADS) + kv_head


@triton.jit
def _take_in(
    query,
    pages,
    scales,
    place,
    there,
    seen,
    scale,
    best,
    total,
    sums,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    EIGHT: tl.constexpr,
):
    """Take a tile of tokens into each row's running answer: its best, its total and its sums."""
    dims = tl.arange(0, sums.shape[1])
    keys = tl.load(
        pages + place[None, :] * WIDTH + dims[:, None],
        mask=there[None, :] & (dims < DIM)[:, None],
        other=0.0,
    ).to(query.dtype)
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if EIGHT:
        scores *= tl.load(scales + (place * WIDTH + DIM) // 4, mask=there, other=0.0)[None, :]
    scores = tl.where(seen, scores, -float("inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    # A row may see nothing of a tile that its neighbours see.
    ground = tl.where(highest == -float("inf"), 0.0, highest)
    shares = tl.exp2(scores - ground[:, None])
    kept = tl.exp2(best - ground)
    total = total * kept + tl.sum(shares, 1)
    place += KV_HEADS
    if EIGHT:
        shares *= tl.load(scales + (place * WIDTH + DIM) // 4, mask=there, other=0.0)[None, :]
    values = tl.load(
        pages + place[:, None] * WIDTH + dims[None, :],
        mask=there[:, None] & (dims < DIM)[None, :],
        other=0.0,
    ).to(query.dtype)
    added = tl.dot(shares.to(query.dtype), values, input_precision="ieee")
    return highest, total, sums * kept[:, None] + added


@triton.jit(do_not_specialize=["splits"])
def merge_parts(
    parts,
    weights,
    answer,
    splits,
    DIM: tl.constexpr,
    DIM_WIDE: tl.constexpr,
    SPLITS_WIDE: tl.constexpr,
):
    """Bring the shares of one head of one row together."""
    head = tl.program_id(0).to(tl.int64)
    at, dims = tl.arange(0, SPLITS_WIDE), tl.arange(0, DIM_WIDE)
    weight = tl.load(weights + head * splits + at, mask=at < splits, other=-float("inf"))
    best = tl.max(weight, 0)
    # All are empty where the row is padding.
    share = tl.exp2(weight - tl.where(best == -float("inf"), 0.0, best))
    total = tl.sum(share, 0)
    part = tl.load(
        parts + (head * splits + at)[:, None] * DIM + dims[None, :],
        mask=(at < splits)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(part * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(answer + head * DIM + dims, merged.to(answer.dtype.element_ty), mask=dims < DIM)


@triton.jit(do_not_specialize=["tables_row"])
def attend_chunks(
    mixed,
    pages,
    scales,
    tables,
    places,
    answer,
    mixed_row,
    tables_row,
    window,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    EIGHT: tl.constexpr,
    DIM_WIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Answer for a tile of one chunk's rows and one KV head, whose heads lie side by side."""
    chunk, kv_head = tl.program_id(2), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = QUERIES // GROUP
    first_row, rows = tl.load(places + 3 * chunk), tl.load(places + 3 * chunk + 1)
    start, begin_row = tl.load(places + 3 * chunk + 2), tl.program_id(0) * ROWS
    if begin_row >= rows:
        return
    at, dims = tl.arange(0, QUERIES), tl.arange(0, DIM_WIDE)
    number = begin_row + at // GROUP
    real = (at < ROWS * GROUP) & (number < rows)
    head = kv_head * GROUP + at % GROUP
    cells = real[:, None] & (dims < DIM)[None, :]
    query = tl.load(
        mixed + ((first_row + number) * mixed_row + head * DIM)[:, None] + dims[None, :],
        mask=cells,
        other=0.0,
    )
    position = start + number
    stop = start + tl.minimum(begin_row + ROWS, rows)
    least = tl.maximum(start + begin_row - window + 1, 0) // TILE * TILE
    best, total = tl.full([QUERIES], -float("inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, DIM_WIDE], tl.float32)
    for begin in range(least, stop, TILE):
        tokens = begin + tl.arange(0, TILE)
        there = tokens < stop
        place = _places(tables + chunk * tables_row, tokens, there, kv_head, KV_HEADS, BLOCK_TOKENS)
        behind = position[:, None] - tokens[None, :]
        seen = (behind >= 0) & (behind < window)
        best, total, sums = _take_in(
            query,
            pages,
            scales,
            place,
            there,
            seen,
            scale,
            best,
            total,
            sums,
            KV_HEADS,
            DIM,
            WIDTH,
            EIGHT,
        )
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    target = ((first_row + number) * HEADS + head) * DIM
    tl.store(answer + target[:, None] + dims[None, :], sums.to(answer.dtype.element_ty), mask=cells)
