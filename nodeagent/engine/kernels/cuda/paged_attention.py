"""Attention over the paged KV cache in Triton: reads keys and values in place, once per KV head.

Decodes are also split along their tokens, so that a few sequences fill the whole device; a second
kernel merges the splits (as in FlashDecoding). Prefill chunks see what precedes them, and
themselves causally.

A page is [tokens, keys then values of each KV head, width]. In fp8 the scale lies behind the
numbers of a head; scores and probabilities are multiplied by it instead of keys and values. Scores
are exponents of two. Tokens of a page that a row does not see never enter a sum.
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
    logsums,
    mixed_row,
    tables_row,
    splits,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    IS_FP8: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend for one row, one KV head and one split of the row's tokens."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
    split_tokens = tl.cdiv(tl.cdiv(end - first, splits), TILE) * TILE
    start = first + split * split_tokens
    stop = tl.minimum(start + split_tokens, end)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lane, dims = tl.arange(0, GROUP_TILE), tl.arange(0, DIM_TILE)
    heads = kv_head * GROUP + lane
    valid = (lane < GROUP)[:, None] & (dims < DIM)[None, :]
    query = tl.load(
        mixed + row.to(tl.int64) * mixed_row + heads[:, None] * DIM + dims[None, :],
        mask=valid,
        other=0.0,
    )
    row_max = tl.full([GROUP_TILE], -float("inf"), tl.float32)
    row_sum = tl.zeros([GROUP_TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    for begin in range(start, stop, TILE):
        tokens = begin + tl.arange(0, TILE)
        seen = tokens < stop
        table = tables + row * tables_row
        offset = _offsets(table, tokens, seen, kv_head, KV_HEADS, BLOCK_TOKENS)
        row_max, row_sum, acc = _add_tile(
            query,
            pages,
            scales,
            offset,
            seen,
            seen[None, :],
            scale,
            row_max,
            row_sum,
            acc,
            KV_HEADS,
            DIM,
            WIDTH,
            IS_FP8,
        )
    # A padding row, or a split past the end, sees nothing: its output is zero.
    empty = stop <= start
    output = (acc / tl.where(empty, 1.0, row_sum)[:, None]).to(parts.dtype.element_ty)
    target = (row * HEADS + heads).to(tl.int64) * splits + split
    tl.store(parts + target[:, None] * DIM + dims[None, :], output, mask=valid)
    if SPLIT:
        logsum = row_max + tl.log2(tl.where(empty, 1.0, row_sum))
        tl.store(logsums + target, logsum, mask=lane < GROUP)


@triton.jit
def _offsets(table, tokens, seen, kv_head, KV_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Return the offsets of the keys of `tokens` in the pages, counted in heads."""
    block = tl.load(table + tokens // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
    return (block * BLOCK_TOKENS + tokens % BLOCK_TOKENS) * (2 * KV_HEADS) + kv_head


@triton.jit
def _add_tile(
    query,
    pages,
    scales,
    offset,
    in_range,
    seen,
    scale,
    row_max,
    row_sum,
    acc,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Add a tile of tokens to the online softmax of each row.

    Returns the new `row_max` (of scores), `row_sum` (of probabilities) and `acc` (of values).
    """
    dims = tl.arange(0, acc.shape[1])
    keys = tl.load(
        pages + offset[None, :] * WIDTH + dims[:, None],
        mask=in_range[None, :] & (dims < DIM)[:, None],
        other=0.0,
    ).to(query.dtype)
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if IS_FP8:
        scores *= tl.load(scales + (offset * WIDTH + DIM) // 4, mask=in_range, other=0.0)[None, :]
    scores = tl.where(seen, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row may see nothing of a tile that other rows see.
    finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    probs = tl.exp2(scores - finite_max[:, None])
    rescale = tl.exp2(row_max - finite_max)
    row_sum = row_sum * rescale + tl.sum(probs, 1)
    offset += KV_HEADS
    if IS_FP8:
        probs *= tl.load(scales + (offset * WIDTH + DIM) // 4, mask=in_range, other=0.0)[None, :]
    values = tl.load(
        pages + offset[:, None] * WIDTH + dims[None, :],
        mask=in_range[:, None] & (dims < DIM)[None, :],
        other=0.0,
    ).to(query.dtype)
    added = tl.dot(probs.to(query.dtype), values, input_precision="ieee")
    return new_max, row_sum, acc * rescale[:, None] + added


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    parts,
    logsums,
    output,
    splits,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
):
    """Merge the splits of one head of one row."""
    head = tl.program_id(0).to(tl.int64)
    lane, dims = tl.arange(0, SPLITS_TILE), tl.arange(0, DIM_TILE)
    logsum = tl.load(logsums + head * splits + lane, mask=lane < splits, other=-float("inf"))
    max_logsum = tl.max(logsum, 0)
    # All splits of a padding row are empty.
    rescale = tl.exp2(logsum - tl.where(max_logsum == -float("inf"), 0.0, max_logsum))
    row_sum = tl.sum(rescale, 0)
    part = tl.load(
        parts + (head * splits + lane)[:, None] * DIM + dims[None, :],
        mask=(lane < splits)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(part * rescale[:, None], 0) / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(output + head * DIM + dims, merged.to(output.dtype.element_ty), mask=dims < DIM)


@triton.jit(do_not_specialize=["tables_row"])
def attend_chunks(
    mixed,
    pages,
    scales,
    tables,
    places,
    output,
    mixed_row,
    tables_row,
    window,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    IS_FP8: tl.constexpr,
    DIM_TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend for a tile of one chunk's rows and one KV head with all its query heads."""
    chunk, kv_head = tl.program_id(2), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = QUERIES // GROUP
    first_row, rows = tl.load(places + 3 * chunk), tl.load(places + 3 * chunk + 1)
    start, row = tl.load(places + 3 * chunk + 2), tl.program_id(0) * ROWS
    if row >= rows:
        return
    lane, dims = tl.arange(0, QUERIES), tl.arange(0, DIM_TILE)
    index = row + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    valid = ((lane < ROWS * GROUP) & (index < rows))[:, None] & (dims < DIM)[None, :]
    source = ((first_row + index) * mixed_row + head * DIM)[:, None] + dims[None, :]
    query = tl.load(mixed + source, mask=valid, other=0.0)
    position = start + index
    stop = start + tl.minimum(row + ROWS, rows)
    row_max = tl.full([QUERIES], -float("inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM_TILE], tl.float32)
    for begin in range(tl.maximum(start + row - window + 1, 0) // TILE * TILE, stop, TILE):
        tokens = begin + tl.arange(0, TILE)
        in_range = tokens < stop
        table = tables + chunk * tables_row
        offset = _offsets(table, tokens, in_range, kv_head, KV_HEADS, BLOCK_TOKENS)
        distance = position[:, None] - tokens[None, :]
        seen = (distance >= 0) & (distance < window)
        row_max, row_sum, acc = _add_tile(
            query,
            pages,
            scales,
            offset,
            in_range,
            seen,
            scale,
            row_max,
            row_sum,
            acc,
            KV_HEADS,
            DIM,
            WIDTH,
            IS_FP8,
        )
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    target = ((first_row + index) * HEADS + head) * DIM
    tl.store(
        output + target[:, None] + dims[None, :],
        acc.to(output.dtype.element_ty),
        mask=valid,
    )
