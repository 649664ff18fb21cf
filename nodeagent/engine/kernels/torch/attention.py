"""Attention by torch's `scaled_dot_product_attention`, on any device.

Decodes that read about equally many blocks share one call; each prefill chunk has a call of its
own. In a decode the query heads of a KV head are folded into the query dimension, so that keys and
values are read once per KV head and never repeated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nodeagent.engine.kernels.attention_backend import (
    AttentionBackend,
    AttentionLayout,
    StepInputs,
)
from nodeagent.engine.scheduler.forward_batch import (
    ForwardBatch,
    ForwardChunk,
    block_count,
    first_visible_token,
    flatten_rows,
)

_PADDING_MAX: Final = 2
"""Decodes share a call if the longest reads at most this many times the blocks of the shortest."""
_BLOCKS_ALWAYS_TOGETHER: Final = 8
"""Up to this many blocks, padding costs less than another call."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks [first, end) that lie side by side: they are read in place, without a gather."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [start, end) of the batch: one token each, over equally many blocks each."""

    start: int
    end: int
    blocks: BlockRange | Tensor
    """The blocks of all rows, one row after another. A row is padded with its own first block."""
    context: int
    """How many tokens of the blocks the longest row reads."""
    mask: Tensor | None
    """[rows, 1, 1, context], 0 where visible, else -inf; None where every row sees everything."""


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Rows [start, end) of the batch: one prefill chunk, which sees `context` tokens."""

    start: int
    end: int
    blocks: BlockRange | Tensor
    context: int
    mask: Tensor | None
    """[rows, context], True where visible; None where the chunk starts the sequence."""


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """All calls of one step; the decodes come first."""

    decodes: tuple[DecodeGroup, ...]
    segments: tuple[PrefillSegment, ...]


@dataclass(frozen=True, slots=True)
class _VisibleBlocks:
    """The first token that a chunk sees, and the chunk's blocks from that token's on."""

    first_token: int
    blocks: list[int]


class TorchAttention(AttentionBackend):
    """Gathers the pages of a step, and attends by torch."""

    def prepare(self, batch: ForwardBatch) -> StepInputs:
        """Build the tensors of a step."""
        rows = flatten_rows(batch)
        plan = TorchPlan(tuple(self._decode_groups(batch.decodes)), tuple(self._segments(batch)))
        # Decodes read blocks whole. A block that was just allocated may still hold NaN.
        started = [block for chunk in batch.chunks for block in self._started_block(chunk)]
        return StepInputs(
            tokens=self._to_device(rows.tokens),
            positions=self._to_device(rows.positions),
            sampled=self._to_device(rows.sampled),
            layout=AttentionLayout(self._to_device(rows.slots), plan),
            blocks_to_clear=started,
        )

    def attend(self, mixed: Tensor, heads: int, pages: Tensor, layout: AttentionLayout) -> Tensor:
        """Store the step's keys and values in `pages`, then attend: [rows, heads, head_dim]."""
        plan, kv_format = layout.plan, self.config.kv_format
        assert isinstance(plan, TorchPlan)
        slots = pages.view(-1, *pages.shape[2:])
        slots.index_copy_(0, layout.write_slots, kv_format.encode(mixed[:, heads:]))
        outputs = [
            self._attend_decodes(mixed[group.start : group.end, :heads], pages, group)
            for group in plan.decodes
        ]
        outputs += [
            self._attend_segment(mixed[segment.start : segment.end, :heads], pages, segment)
            for segment in plan.segments
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_decodes(self, query: Tensor, pages: Tensor, group: DecodeGroup) -> Tensor:
        rows, heads, head_dim = query.shape
        kv_heads = self.config.kv_heads
        keys, values = self._read(pages, group.blocks, rows)
        output = scaled_dot_product_attention(
            query.reshape(rows, kv_heads, heads // kv_heads, head_dim),
            keys[:, :, : group.context],
            values[:, :, : group.context],
            attn_mask=group.mask,
        )
        return output.reshape(rows, heads, head_dim)

    def _attend_segment(self, query: Tensor, pages: Tensor, segment: PrefillSegment) -> Tensor:
        keys, values = self._read(pages, segment.blocks, 1)
        output = scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys[:, :, : segment.context],
            values[:, :, : segment.context],
            attn_mask=segment.mask,
            is_causal=segment.mask is None,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)

    def _read(self, pages: Tensor, blocks: BlockRange | Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [rows, kv_heads, tokens, head_dim]."""
        gathered = (
            pages[blocks.first : blocks.end]
            if isinstance(blocks, BlockRange)
            else pages.index_select(0, blocks)
        )
        kv_heads = self.config.kv_heads
        numbers = self.config.kv_format.decode(gathered, self.config.dtype)
        slots = numbers.view(rows, -1, 2 * kv_heads, numbers.shape[-1]).transpose(1, 2)
        return slots[:, :kv_heads], slots[:, kv_heads:]

    def _decode_groups(self, chunks: Sequence[ForwardChunk]) -> Iterator[DecodeGroup]:
        """Group neighbouring decodes whose block counts differ little."""
        start = 0
        visible = [self._visible_blocks(chunk) for chunk in chunks]
        while start < len(chunks):
            shortest = longest = len(visible[start].blocks)
            end = start + 1
            while end < len(chunks):
                blocks = len(visible[end].blocks)
                low, high = min(shortest, blocks), max(longest, blocks)
                if high > max(_PADDING_MAX * low, _BLOCKS_ALWAYS_TOGETHER):
                    break
                shortest, longest, end = low, high, end + 1
            yield self._group(start, chunks[start:end], visible[start:end], longest)
            start = end

    def _visible_blocks(self, chunk: ForwardChunk) -> _VisibleBlocks:
        first = first_visible_token(chunk, self.config.window_tokens)
        first_block = first // self.config.block_tokens
        return _VisibleBlocks(first, chunk.blocks[first_block : block_count(chunk)])

    def _group(
        self,
        start: int,
        chunks: Sequence[ForwardChunk],
        visible: Sequence[_VisibleBlocks],
        width: int,
    ) -> DecodeGroup:
        """Return the group of `chunks`, whose rows begin at `start`, padded to `width` blocks."""
        block_tokens = self.config.block_tokens
        table: list[int] = []
        for row in visible:
            table += row.blocks
            # Masked tokens are multiplied by zero, which keeps NaN: pad with a block of the row.
            table += row.blocks[:1] * (width - len(row.blocks))
        # Positions count from the first token of the first visible block.
        skipped = np.asarray([row.first_token // block_tokens * block_tokens for row in visible])
        firsts = np.asarray([row.first_token for row in visible]) - skipped
        ends = np.asarray([chunk.start + 1 for chunk in chunks]) - skipped
        context = int(ends.max())
        mask = None
        if firsts.any() or (ends < context).any():
            columns = np.arange(context)
            hidden = (columns < firsts[:, None]) | (columns >= ends[:, None])
            mask = self._score_mask(hidden)[:, None, None, :]
        return DecodeGroup(start, start + len(chunks), self._block_index(table), context, mask)

    def _score_mask(self, hidden: np.ndarray) -> Tensor:
        """Return what is added to scores: -inf where `hidden`, else 0.

        Made once for all layers: torch would convert a mask of booleans in each of them.
        """
        config = self.config
        return torch.from_numpy(np.where(hidden, -np.inf, 0.0)).to(config.device, config.dtype)

    def _segments(self, batch: ForwardBatch) -> Iterator[PrefillSegment]:
        start = len(batch.decodes)
        for chunk in batch.segments:
            end = start + chunk.tokens
            blocks = self._block_index(chunk.blocks[: block_count(chunk)])
            context = chunk.start + chunk.tokens
            yield PrefillSegment(start, end, blocks, context, self._segment_mask(chunk))
            start = end

    def _segment_mask(self, chunk: ForwardChunk) -> Tensor | None:
        context, window = chunk.start + chunk.tokens, self.config.window_tokens
        if window is not None and window >= context:
            window = None
        if chunk.start == 0 and window is None:
            return None
        visible = torch.ones(chunk.tokens, context, dtype=torch.bool, device=self.config.device)
        visible = visible.tril(chunk.start)
        return visible if window is None else visible.triu(chunk.start - window + 1)

    def _block_index(self, blocks: list[int]) -> BlockRange | Tensor:
        first = blocks[0]
        if blocks == list(range(first, first + len(blocks))):
            return BlockRange(first, first + len(blocks))
        return self._to_device(blocks)

    def _to_device(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.config.device)

    def _started_block(self, chunk: ForwardChunk) -> list[int]:
        """Return the block that the chunk starts and does not fill, if there is one."""
        block_tokens = self.config.block_tokens
        end = chunk.start + chunk.tokens
        last_block = end // block_tokens
        if chunk.start <= last_block * block_tokens < end:
            return [chunk.blocks[last_block]]
        return []
