"""Norm, gate, rotary embedding and KV store in Triton: one pass over each row, sums in fp32."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_rows(
    x,
    added,
    weight,
    summed,
    output,
    columns,
    epsilon,
    ADDS: tl.constexpr,
    COLUMNS_TILE: tl.constexpr,
):
    """Divide a row by its root mean square; with `ADDS`, of `x + added`, stored in `summed`."""
    row = tl.program_id(0).to(tl.int64) * columns
    lane = tl.arange(0, COLUMNS_TILE)
    in_bounds = lane < columns
    numbers = tl.load(x + row + lane, mask=in_bounds, other=0.0).to(tl.float32)
    if ADDS:
        numbers += tl.load(added + row + lane, mask=in_bounds, other=0.0).to(tl.float32)
        rounded = numbers.to(summed.dtype.element_ty)
        tl.store(summed + row + lane, rounded, mask=in_bounds)
        numbers = rounded.to(tl.float32)
    mean = tl.sum(numbers * numbers, 0) / columns
    scales = tl.load(weight + lane, mask=in_bounds, other=0.0).to(tl.float32)
    numbers = numbers * tl.rsqrt(mean + epsilon) * scales
    tl.store(output + row + lane, numbers.to(output.dtype.element_ty), mask=in_bounds)


@triton.jit
def silu_gate_rows(x, output, columns, COLUMNS_TILE: tl.constexpr):
    """Return silu of the first half of a row times its second half."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    in_bounds = lane < columns
    gate = tl.load(x + row * 2 * columns + lane, mask=in_bounds, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * columns + columns + lane, mask=in_bounds, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * columns + lane, product.to(output.dtype.element_ty), mask=in_bounds)


@triton.jit
def rotate_heads(x, cos, sin, row_stride, DIM: tl.constexpr, HALF_TILE: tl.constexpr):
    """Rotate one head of one row in place; the first half of `sin` has its sign inverted."""
    HALF: tl.constexpr = DIM // 2
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, HALF_TILE)
    in_bounds = lane < HALF
    target = x + row * row_stride + tl.program_id(1) * DIM + lane
    angles = row * DIM + lane
    first = tl.load(target, mask=in_bounds, other=0.0).to(tl.float32)
    second = tl.load(target + HALF, mask=in_bounds, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + angles, mask=in_bounds, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + angles + HALF, mask=in_bounds, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angles, mask=in_bounds, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + angles + HALF, mask=in_bounds, other=0.0).to(tl.float32)
    rotated = first * cos_first + second * sin_first
    tl.store(target, rotated.to(x.dtype.element_ty), mask=in_bounds)
    rotated = second * cos_second + first * sin_second
    tl.store(target + HALF, rotated.to(x.dtype.element_ty), mask=in_bounds)


@triton.jit
def store_heads(
    mixed,
    slots,
    pages,
    scales,
    mixed_row,
    HEADS: tl.constexpr,
    KV_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_FP8: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Copy one head of one row's keys or values into its slot, unless the slot is negative."""
    row, head, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DIM_TILE)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    in_bounds = lane < DIM
    numbers = tl.load(
        mixed + row * mixed_row + (HEADS + head) * DIM + lane, mask=in_bounds, other=0.0
    )
    target = (slot * KV_ROWS + head) * WIDTH
    if IS_FP8:
        numbers = numbers.to(tl.float32)
        # 448 is the largest fp8 number. The scale is at least the smallest normal fp32 number.
        scale = tl.maximum(tl.max(tl.abs(numbers), 0) / 448.0, 1.1754943508222875e-38)
        # A maximum drops NaN and a sum keeps it: a head with NaN gets the scale NaN.
        scale += tl.sum(numbers * 0.0, 0)
        tl.store(scales + (target + DIM) // 4, scale)
        numbers = numbers / scale
    tl.store(pages + target + lane, numbers.to(pages.dtype.element_ty), mask=in_bounds)
