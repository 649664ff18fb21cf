"""What a layer does beside its products, in Triton: one pass over each row, sums in fp32."""

import triton
import triton.language as tl


@triton.jit
def normalise_rows(
    x, added, weight, summed, answer, columns, epsilon, ADDS: tl.constexpr, WIDE: tl.constexpr
):
    """Normalise a row by its root mean square; what is `added` first is left in `summed`."""
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, WIDE)
    real = at < columns
    numbers = tl.load(x + row + at, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        numbers += tl.load(added + row + at, mask=real, other=0.0).to(tl.float32)
        rounded = numbers.to(summed.dtype.element_ty)
        tl.store(summed + row + at, rounded, mask=real)
        numbers = rounded.to(tl.float32)
    mean = tl.sum(numbers * numbers, 0) / columns
    scales = tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    numbers = numbers * tl.rsqrt(mean + epsilon) * scales
    tl.store(answer + row + at, numbers.to(answer.dtype.element_ty), mask=real)


@triton.jit
def gate_rows(x, answer, columns, WIDE: tl.constexpr):
    """Return silu of the first half of a row times its second half."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    real = at < columns
    gate = tl.load(x + row * 2 * columns + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * columns + columns + at, mask=real, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(answer + row * columns + at, product.to(answer.dtype.element_ty), mask=real)


@triton.jit
def turn_heads(x, cos, sin, row_stride, DIM: tl.constexpr, HALF_WIDE: tl.constexpr):
    """Turn one head of one row to its position, in place; sines bring their signs."""
    HALF: tl.constexpr = DIM // 2
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, HALF_WIDE)
    real = at < HALF
    place = x + row * row_stride + tl.program_id(1) * DIM + at
    angles = row * DIM + at
    first = tl.load(place, mask=real, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=real, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + angles, mask=real, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + angles + HALF, mask=real, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angles, mask=real, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + angles + HALF, mask=real, other=0.0).to(tl.float32)
    turned = first * cos_first + second * sin_first
    tl.store(place, turned.to(x.dtype.element_ty), mask=real)
    turned = second * cos_second + first * sin_second
    tl.store(place + HALF, turned.to(x.dtype.element_ty), mask=real)


@triton.jit
def keep_heads(
    mixed,
    slots,
    pages,
    scales,
    mixed_row,
    HEADS: tl.constexpr,
    KEPT: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    EIGHT: tl.constexpr,
    DIM_WIDE: tl.constexpr,
):
    """Put one head of one row's keys or values into its slot; a slot below nought is none."""
    row, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DIM_WIDE)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    real = at < DIM
    numbers = tl.load(mixed + row * mixed_row + (HEADS + head) * DIM + at, mask=real, other=0.0)
    place = (slot * KEPT + head) * WIDTH
    if EIGHT:
        numbers = numbers.to(tl.float32)
        # The largest number that eight bits know; the least scale is fp32's least normal number.
        scale = tl.maximum(tl.max(tl.abs(numbers), 0) / 448.0, 1.1754943508222875e-38)
        # What is no number is dropped by a maximum; a sum keeps it.
        scale += tl.sum(numbers * 0.0, 0)
        tl.store(scales + (place + DIM) // 4, scale)
        numbers = numbers / scale
    tl.store(pages + place + at, numbers.to(pages.dtype.element_ty), mask=real)
