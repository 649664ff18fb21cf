"""The Triton kernels on tensors: chooses their block sizes and starts them.

Triton is part of torch's builds for CUDA. Where it cannot be imported or fails a test, torch's
kernels are used instead. Nothing here checks its arguments: callers do.
"""

import functools
import logging
import math
from subprocess import SubprocessError
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import silu

from nodeagent.engine.kernels.cuda.batch_layout import PagedBatch, PrefillChunks

log = logging.getLogger(__name__)

DEVICE_TYPES: Final = {"cuda"}
_FP8_CAPABILITY_MIN: Final = (8, 9)
"""The first compute capability that converts fp8 numbers in hardware."""
_DECODE_TILE: Final = 64
"""Keys that a decode kernel reads at a time."""
_PREFILL_QUERIES: Final = 128
"""Queries (rows times heads of a KV head) of one prefill program; half as many in fp32."""
_GATE_COLUMNS: Final = 1024
_TENSOR_CORE_MIN: Final = 16
"""The smallest dimension of a tensor core product."""
_MULTIPROCESSORS_UNKNOWN: Final = 4
_SPLITS_MAX: Final = 64
_WAVES: Final = 2
"""Decode programs for each multiprocessor: some end early, and the next one starts."""
_FUSED: Final = {"enable_fp_fusion": True}
"""Fused multiply-add. Given explicitly, because Triton 3.10 turned the default off."""


class TritonKernels:
    """Starts the kernels on tensors of one device. It implements `kernels.row_ops.RowOps`."""

    def __init__(self) -> None:
        # Imported here, because Triton is installed only where there is a device.
        from nodeagent.engine.kernels.cuda import paged_attention as paged
        from nodeagent.engine.kernels.cuda import row_kernels as rows

        self._paged: Any = paged
        self._rows: Any = rows

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Divide each row of `x` by its root mean square, and scale it by `weight`."""
        return self._rms_norm(x.contiguous(), None, weight, epsilon)[1]

    def add_rms_norm(
        self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return `x + added`, and its `rms_norm`."""
        return self._rms_norm(x, added.contiguous(), weight, epsilon)

    def silu_gate(self, x: Tensor) -> Tensor:
        """Return silu of the first half of each row of `x`, times the second half."""
        rows, columns = x.shape[0], x.shape[1] // 2
        output = x.new_empty(rows, columns)
        grid = (rows, -(-columns // _GATE_COLUMNS))
        self._rows.silu_gate_rows[grid](x, output, columns, COLUMNS_TILE=_GATE_COLUMNS, **_FUSED)
        return output

    def rotate_(self, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `heads` of `x` [tokens, heads, head_dim] in place."""
        dim = x.shape[2]
        self._rows.rotate_heads[(x.shape[0], heads)](
            x,
            cos,
            sin,
            x.stride(0),
            DIM=dim,
            HALF_TILE=_tile(dim // 2),
            num_warps=1,
            **_FUSED,
        )

    def store_kv(self, mixed: Tensor, heads: int, slots: Tensor, pages: Tensor) -> None:
        """Copy keys and values, which follow the `heads` of queries, into `slots` of `pages`."""
        dim, kv_rows = mixed.shape[2], pages.shape[2]
        numbers, scales = _number_and_scale_views(pages)
        self._rows.store_heads[(mixed.shape[0], kv_rows)](
            mixed,
            slots,
            numbers,
            scales,
            mixed.stride(0),
            HEADS=heads,
            KV_ROWS=kv_rows,
            DIM=dim,
            WIDTH=pages.shape[3],
            IS_FP8=scales is not numbers,
            DIM_TILE=_tile(dim),
            num_warps=1,
            **_FUSED,
        )

    def attend(self, mixed: Tensor, heads: int, pages: Tensor, batch: PagedBatch) -> Tensor:
        """Attend from the queries of `mixed`: [tokens, heads, dim]."""
        output = mixed.new_empty(mixed.shape[0], heads, mixed.shape[2])
        if batch.decodes is not None:
            tables, spans = batch.decodes.tables, batch.decodes.spans
            self._decode(mixed, heads, pages, tables, spans, output)
        if batch.chunks is not None:
            self._prefill(mixed, heads, pages, batch.chunks, output)
        return output

    def _rms_norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        rows, columns = x.shape
        output = torch.empty_like(x)
        summed = x if added is None else torch.empty_like(x)
        tile = _power_of_two(columns)
        self._rows.rms_norm_rows[(rows,)](
            x,
            x if added is None else added,
            weight,
            summed,
            output,
            columns,
            epsilon,
            ADDS=added is not None,
            COLUMNS_TILE=tile,
            num_warps=min(max(tile // 512, 1), 16),
            **_FUSED,
        )
        return summed, output

    def _decode(
        self,
        mixed: Tensor,
        heads: int,
        pages: Tensor,
        tables: Tensor,
        spans: Tensor,
        output: Tensor,
    ) -> None:
        rows, dim, kv_heads = len(spans), mixed.shape[2], pages.shape[2] // 2
        block_tokens = pages.shape[1]
        context = tables.shape[1] * block_tokens
        splits = splits_of(rows, kv_heads, context, _multiprocessors(mixed.device), _DECODE_TILE)
        parts, weights = output, output
        if splits > 1:
            parts = torch.empty(rows, heads, splits, dim, device=mixed.device, dtype=torch.float32)
            weights = torch.empty(rows, heads, splits, device=mixed.device, dtype=torch.float32)
        numbers, scales = _number_and_scale_views(pages)
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
            _score_scale(dim),
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            WIDTH=pages.shape[3],
            BLOCK_TOKENS=block_tokens,
            IS_FP8=scales is not numbers,
            GROUP_TILE=_tile(heads // kv_heads),
            DIM_TILE=_tile(dim),
            TILE=_DECODE_TILE,
            SPLIT=splits > 1,
            num_warps=4,
            **_FUSED,
        )
        if splits > 1:
            self._paged.merge_splits[(rows * heads,)](
                parts,
                weights,
                output,
                splits,
                DIM=dim,
                DIM_TILE=_tile(dim),
                SPLITS_TILE=_SPLITS_MAX,
                **_FUSED,
            )

    def _prefill(
        self, mixed: Tensor, heads: int, pages: Tensor, chunks: PrefillChunks, output: Tensor
    ) -> None:
        dim, kv_heads = mixed.shape[2], pages.shape[2] // 2
        numbers, scales = _number_and_scale_views(pages)
        is_fp32 = mixed.dtype is torch.float32
        queries = max(_PREFILL_QUERIES // (2 if is_fp32 else 1), _tile(heads // kv_heads))
        rows = queries // (heads // kv_heads)
        grid = (-(-chunks.rows_max // rows), kv_heads, len(chunks.places))
        self._paged.attend_chunks[grid](
            mixed,
            numbers,
            scales,
            chunks.tables,
            chunks.places,
            output,
            mixed.stride(0),
            chunks.tables.stride(0),
            chunks.window_tokens,
            _score_scale(dim),
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            WIDTH=pages.shape[3],
            BLOCK_TOKENS=pages.shape[1],
            IS_FP8=scales is not numbers,
            DIM_TILE=_tile(dim),
            QUERIES=queries,
            TILE=32 if is_fp32 else 64,
            num_warps=4 if is_fp32 else 8,
            **_FUSED,
        )


def select_device(device: str) -> None:
    """Start this thread's kernels on `device`; without this call they start on the first."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)


def triton_kernels(device: torch.device) -> TritonKernels | None:
    """Return the kernels for `device`, tested at the first call; None where torch's serve."""
    return _tested_kernels(device) if device.type in DEVICE_TYPES else None


def paged_kernels(device: torch.device, kv_dtype: torch.dtype) -> TritonKernels | None:
    """Return the kernels where they read pages of `kv_dtype`."""
    is_fp8 = kv_dtype is torch.uint8
    if (
        is_fp8
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY_MIN
    ):
        log.info("torch reads the fp8 KV cache: this device does not convert fp8")
        return None
    return triton_kernels(device)


def splits_of(rows: int, kv_heads: int, context_tokens: int, processors: int, tile: int) -> int:
    """Return how many programs share the tokens of a row: a power of two that fills the device."""
    wanted = min(_WAVES * processors // max(rows * kv_heads, 1), context_tokens // tile)
    splits = 1
    while 2 * splits <= min(wanted, _SPLITS_MAX):
        splits *= 2
    return splits


def _test(kernels: TritonKernels, device: torch.device) -> None:
    """Run one kernel: Triton needs a C compiler, and a driver that loads the result."""
    # Triton's errors are not RuntimeErrors.
    from triton import TritonError

    select_device(str(device))
    x = torch.linspace(-2.0, 2.0, 64, device=device).view(2, 32)
    expected = silu(x[:, :16]) * x[:, 16:]
    try:
        product = kernels.silu_gate(x)
    except TritonError as error:
        raise RuntimeError(str(error)) from error
    if not torch.allclose(product, expected, atol=1e-5):
        raise RuntimeError("they do not compute what torch does")


@functools.cache
def _tested_kernels(device: torch.device) -> TritonKernels | None:
    try:
        kernels = TritonKernels()
        _test(kernels, device)
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        log.info("no Triton kernels", extra={"fields": {"because": str(error)}})
        return None
    log.info("Triton kernels", extra={"fields": {"device": str(device)}})
    return kernels


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS_UNKNOWN
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _number_and_scale_views(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of `pages` as numbers and as scales; the same view where there are no scales."""
    if pages.dtype is not torch.uint8:
        return pages, pages
    return pages.view(torch.float8_e4m3fn), pages.view(torch.float32)


def _score_scale(dim: int) -> float:
    return math.log2(math.e) / math.sqrt(dim)


def _tile(size: int) -> int:
    return max(_power_of_two(size), _TENSOR_CORE_MIN)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
