"""The Triton kernels on tensors. They check nothing: their callers in `layers` do.

Triton is a part of torch's builds for CUDA. Where it cannot be imported, torch's own kernels serve.
"""

import functools
import logging
import math
from subprocess import SubprocessError
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import silu

from nodeagent.engine.kernels.cuda.batch_layout import Chunked, Paged
from nodeagent.engine.kernels.cuda.capture import SPLITS_MAX, splits_of

log = logging.getLogger(__name__)

DEVICE_TYPES: Final = {"cuda"}
_EIGHT_BITS_FROM: Final = (8, 9)
"""Devices that convert eight-bit floats by themselves."""
_DECODE_TILE: Final = 64
_QUERIES: Final = 128
_GATE_WIDE: Final = 1024
_LEAST: Final = 16
"""Tensor cores multiply by sixteen in each direction."""
_PROCESSORS_UNKNOWN: Final = 4
_FUSED: Final = {"enable_fp_fusion": True}
"""Multiply and add in one rounding: said, for from Triton 3.10 on it is off unless asked for."""


class DeviceKernels:
    """The kernels, each a method that takes and returns tensors on one device."""

    def __init__(self) -> None:
        # Imported here, for only devices have it.
        from nodeagent.engine.kernels.cuda import paged_attention as paged
        from nodeagent.engine.kernels.cuda import row_kernels as rows

        self._paged: Any = paged
        self._rows: Any = rows

    def normalise(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the rows of `x` by their root mean square, scaled by `weight`."""
        return self._normalise(x.contiguous(), None, weight, epsilon)[1]

    def add_and_normalise(
        self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return `x` plus `added`, and that normalised."""
        return self._normalise(x, added.contiguous(), weight, epsilon)

    def gate(self, x: Tensor) -> Tensor:
        """Return silu of the first half of each row of `x`, times the second half."""
        rows, columns = x.shape[0], x.shape[1] // 2
        answer = x.new_empty(rows, columns)
        grid = (rows, -(-columns // _GATE_WIDE))
        self._rows.gate_rows[grid](x, answer, columns, WIDE=_GATE_WIDE, **_FUSED)
        return answer

    def turn(self, mixed: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Turn the first `heads` of `mixed` [tokens, all heads, dim] in place."""
        dim = mixed.shape[2]
        self._rows.turn_heads[(mixed.shape[0], heads)](
            mixed,
            cos,
            sin,
            mixed.stride(0),
            DIM=dim,
            HALF_WIDE=_wide(dim // 2),
            num_warps=1,
            **_FUSED,
        )

    def keep(self, mixed: Tensor, heads: int, slots: Tensor, pages: Tensor) -> None:
        """Put keys and values, which follow the `heads` of queries, into `slots` of `pages`."""
        dim, kept = mixed.shape[2], pages.shape[2]
        numbers, scales = _views(pages)
        self._rows.keep_heads[(mixed.shape[0], kept)](
            mixed,
            slots,
            numbers,
            scales,
            mixed.stride(0),
            HEADS=heads,
            KEPT=kept,
            DIM=dim,
            WIDTH=pages.shape[3],
            EIGHT=scales is not numbers,
            DIM_WIDE=_wide(dim),
            num_warps=1,
            **_FUSED,
        )

    def attend(self, mixed: Tensor, heads: int, pages: Tensor, layout: Paged) -> Tensor:
        """Answer the queries of `mixed`: [tokens, heads, dim]."""
        answer = mixed.new_empty(mixed.shape[0], heads, mixed.shape[2])
        if layout.decodes is not None:
            tables, spans = layout.decodes.tables, layout.decodes.spans
            self._decode(mixed, heads, pages, tables, spans, answer)
        if layout.chunks is not None:
            self._prefill(mixed, heads, pages, layout.chunks, answer)
        return answer

    def _normalise(
        self, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        rows, columns = x.shape
        answer = torch.empty_like(x)
        summed = x if added is None else torch.empty_like(x)
        wide = _power_of_two(columns)
        self._rows.normalise_rows[(rows,)](
            x,
            x if added is None else added,
            weight,
            summed,
            answer,
            columns,
            epsilon,
            ADDS=added is not None,
            WIDE=wide,
            num_warps=min(max(wide // 512, 1), 16),
            **_FUSED,
        )
        return summed, answer

    def _decode(
        self,
        mixed: Tensor,
        heads: int,
        pages: Tensor,
        tables: Tensor,
        spans: Tensor,
        answer: Tensor,
    ) -> None:
        rows, dim, kv_heads = len(spans), mixed.shape[2], pages.shape[2] // 2
        block_tokens = pages.shape[1]
        context = tables.shape[1] * block_tokens
        splits = splits_of(rows, kv_heads, context, _processors(mixed.device), _DECODE_TILE)
        parts, weights = answer, answer
        if splits > 1:
            parts = torch.empty(rows, heads, splits, dim, device=mixed.device, dtype=torch.float32)
            weights = torch.empty(rows, heads, splits, device=mixed.device, dtype=torch.float32)
        numbers, scales = _views(pages)
        self._paged.attend_decodes[(rows, kv_heads, splits)](
            mixed,
            numbers,
            scales,
            tables,
            spans,
            parts,
            weights,
            mixed.stride(0),
            tables.stride(0),
            splits,
            _scale(dim),
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            WIDTH=pages.shape[3],
            BLOCK_TOKENS=block_tokens,
            EIGHT=scales is not numbers,
            GROUP_WIDE=_wide(heads // kv_heads),
            DIM_WIDE=_wide(dim),
            TILE=_DECODE_TILE,
            SPLIT=splits > 1,
            num_warps=4,
            **_FUSED,
        )
        if splits > 1:
            self._paged.merge_parts[(rows * heads,)](
                parts,
                weights,
                answer,
                splits,
                DIM=dim,
                DIM_WIDE=_wide(dim),
                SPLITS_WIDE=SPLITS_MAX,
                **_FUSED,
            )

    def _prefill(
        self, mixed: Tensor, heads: int, pages: Tensor, chunks: Chunked, answer: Tensor
    ) -> None:
        dim, kv_heads = mixed.shape[2], pages.shape[2] // 2
        numbers, scales = _views(pages)
        narrow = mixed.dtype is torch.float32
        queries = max(_QUERIES // (2 if narrow else 1), _wide(heads // kv_heads))
        rows = queries // (heads // kv_heads)
        grid = (-(-chunks.rows_max // rows), kv_heads, len(chunks.places))
        self._paged.attend_chunks[grid](
            mixed,
            numbers,
            scales,
            chunks.tables,
            chunks.places,
            answer,
            mixed.stride(0),
            chunks.tables.stride(0),
            chunks.window_tokens,
            _scale(dim),
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            WIDTH=pages.shape[3],
            BLOCK_TOKENS=pages.shape[1],
            EIGHT=scales is not numbers,
            DIM_WIDE=_wide(dim),
            QUERIES=queries,
            TILE=32 if narrow else 64,
            num_warps=4 if narrow else 8,
            **_FUSED,
        )


def enter(device: str) -> None:
    """Make `device` the one on which this thread starts kernels; else it is the first."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)


def device_kernels(x: Tensor) -> DeviceKernels | None:
    """Return the kernels where they compute on what `x` is; None where torch's own do."""
    return _found(x.device) if x.device.type in DEVICE_TYPES else None


def page_kernels(pages: Tensor) -> DeviceKernels | None:
    """Return the kernels where they read such pages."""
    eight = pages.dtype is torch.uint8
    if (
        eight
        and pages.is_cuda
        and torch.cuda.get_device_capability(pages.device) < _EIGHT_BITS_FROM
    ):
        log.info("pages in eight bits are read by torch: this device does not convert them")
        return None
    return device_kernels(pages)


def _try(found: DeviceKernels, device: torch.device) -> None:
    """Run one: Triton needs a C compiler, and a driver that knows what it made."""
    # Triton's errors are no RuntimeErrors.
    from triton import TritonError

    enter(str(device))
    x = torch.linspace(-2.0, 2.0, 64, device=device).view(2, 32)
    wanted = silu(x[:, :16]) * x[:, 16:]
    try:
        answer = found.gate(x)
    except TritonError as error:
        raise RuntimeError(str(error)) from error
    if not torch.allclose(answer, wanted, atol=1e-5):
        raise RuntimeError("they do not compute what torch does")


@functools.cache
def _found(device: torch.device) -> DeviceKernels | None:
    try:
        found = DeviceKernels()
        _try(found, device)
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        log.info("no kernels for this device", extra={"fields": {"because": str(error)}})
        return None
    log.info("kernels for this device", extra={"fields": {"made_by": "Triton"}})
    return found


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS_UNKNOWN
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _views(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return pages as numbers and as scales; both are the same where numbers have no scale."""
    if pages.dtype is not torch.uint8:
        return pages, pages
    return pages.view(torch.float8_e4m3fn), pages.view(torch.float32)


def _scale(dim: int) -> float:
    return math.log2(math.e) / math.sqrt(dim)


def _wide(size: int) -> int:
    return max(_power_of_two(size), _LEAST)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
