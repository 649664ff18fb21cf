"""Attention over paged KV: one call for decodes of like length, one call for each prompt chunk.
Where our own kernels serve, one call for all of both, which reads keys and values where they lie.

A query of a decode is one token; its grouped heads are folded into the query dimension, so that
keys and values are read once per KV head and never repeated.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nodeagent.engine.kernels.cpu.huge_pages import lasting
from nodeagent.engine.kernels.cpu.kernels import HEAD_DIM_MAX, LANES, host_kernels
from nodeagent.engine.kernels.cuda.batch_layout import Paged
from nodeagent.engine.kernels.cuda.kernels import page_kernels
from nodeagent.engine.model.layers.kv_format import KvFormat


class LayerKV:
    """Keys and values of one layer: block by block, and within a block slot by slot."""

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        device: str,
        dtype: torch.dtype,
        form: KvFormat | None = None,
    ) -> None:
        self.kv_heads = kv_heads
        self._dtype = dtype
        self._form = form = form or KvFormat(dtype)
        width = form.width(head_dim)
        # Zeroed, not empty: masked slots are multiplied by zero, and zero times NaN is NaN.
        # Values lie beside their keys, so that one gather brings both.
        self.pages = _zeroed((blocks, block_tokens, 2 * kv_heads, width), device, form.dtype)
        fits = head_dim % LANES == 0 and head_dim <= HEAD_DIM_MAX
        served = fits and form.dtype is dtype
        self.paged = page_kernels(self.pages)
        self.kernels = host_kernels(self.pages) if served and self.paged is None else None
        self._slots = self.pages.view(-1, 2 * kv_heads, width)

    def write(self, slots: Tensor, mixed: Tensor, heads: int) -> None:
        """Fill `slots` with the keys and values that follow the queries of `mixed`."""
        if self.paged is not None:
            self.paged.keep(mixed, heads, slots, self.pages)
        elif self.kernels is not None:
            self.kernels.keep(mixed, heads, slots, self.pages)
        else:
            self._slots.index_copy_(0, slots, self._form.kept(mixed[:, heads:]))

    def read(self, blocks: "Run | Tensor", rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [rows, kv_heads, tokens, head_dim]."""
        pages = (
            self.pages[blocks.first : blocks.end]
            if isinstance(blocks, Run)
            else self.pages.index_select(0, blocks)
        )
        wide = self._form.wide(pages, self._dtype)
        slots = wide.view(rows, -1, 2 * self.kv_heads, wide.shape[-1]).transpose(1, 2)
        return slots[:, : self.kv_heads], slots[:, self.kv_heads :]


def _zeroed(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Tensor:
    if device != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # The system zeroes it when it is first touched; torch would before the first request.
    return lasting(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks [first, end) that lie side by side, so that they are read where they are."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows [start, end) of the flat batch: one token each, over equally many blocks each."""

    start: int
    end: int
    blocks: Run | Tensor
    """The rows' blocks, one row after another, padded with a block of its own."""
    context: int
    """How many tokens of the blocks any row sees."""
    mask: Tensor | None
    """[rows, 1, 1, context], 0 where seen, else -inf; None where each row sees all of them."""


@dataclass(frozen=True, slots=True)
class Listed:
    """All rows of the flat batch, in pieces: a few neighbouring tokens of one sequence each."""

    tables: Tensor
    """[sequences, blocks], each one's blocks, and anything behind them."""
    pieces: Tensor
    """[pieces, 4]: the first row, how many tokens, the place of the first in its blocks, and which
    of `tables` lists those. A token sees those before it in its blocks, and itself."""
    window_tokens: int
    """So many of them at most, itself included."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One prompt chunk in the flat batch: rows [start, end) see `context` tokens in `blocks`."""

    start: int
    end: int
    blocks: Run | Tensor
    context: int
    mask: Tensor | None
    """[rows, context], True where seen; None where the chunk starts the sequence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where this step's tokens lie in the KV, and what each row attends to."""

    write_slots: Tensor
    """KV slot [tokens] that each row of the flat batch fills."""
    decodes: tuple[Decodes, ...] | Listed | Paged
    """`Listed` for our own kernels, `Paged` for a device's; there are no segments then."""
    segments: tuple[Segment, ...]


def attend(mixed: Tensor, heads: int, kv: LayerKV, layout: Layout) -> Tensor:
    """Write this step's keys and values, then answer its queries: [tokens, heads, head_dim].

    `mixed` is [tokens, heads and twice the KV heads, head_dim]: queries, keys, values.
    """
    kv.write(layout.write_slots, mixed, heads)
    decodes = layout.decodes
    if isinstance(decodes, Paged):
        assert kv.paged is not None
        return kv.paged.attend(mixed, heads, kv.pages, decodes)
    if isinstance(decodes, Listed):
        assert kv.kernels is not None
        tables, pieces, window = decodes.tables, decodes.pieces, decodes.window_tokens
        return kv.kernels.attend(mixed, heads, kv.pages, tables, pieces, window)
    parts = [_decode(mixed[part.start : part.end, :heads], kv, part) for part in decodes]
    parts += [_prefill(mixed[part.start : part.end, :heads], kv, part) for part in layout.segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(query: Tensor, kv: LayerKV, part: Decodes) -> Tensor:
    rows, heads, head_dim = query.shape
    keys, values = kv.read(part.blocks, rows)
    grouped = query.reshape(rows, kv.kv_heads, heads // kv.kv_heads, head_dim)
    answer = scaled_dot_product_attention(
        grouped,
        keys[:, :, : part.context],
        values[:, :, : part.context],
        attn_mask=part.mask,
    )
    return answer.reshape(rows, heads, head_dim)


def _prefill(query: Tensor, kv: LayerKV, part: Segment) -> Tensor:
    keys, values = kv.read(part.blocks, 1)
    answer = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys[:, :, : part.context],
        values[:, :, : part.context],
        attn_mask=part.mask,
        is_causal=part.mask is None,
        enable_gqa=True,
    )
    return answer[0].transpose(0, 1)
