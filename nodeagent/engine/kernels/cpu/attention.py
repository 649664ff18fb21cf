"""Attention by the C kernels: one call for all rows of a step, over pages in place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nodeagent.engine.kernels.attention_backend import (
    AttentionBackend,
    AttentionConfig,
    AttentionLayout,
    StepInputs,
)
from nodeagent.engine.kernels.cpu.library import (
    HEAD_DIM_MAX,
    KV_FORMS,
    LANES,
    PIECE_TOKENS,
    CpuKernels,
)
from nodeagent.engine.scheduler.forward_batch import (
    ForwardBatch,
    block_count,
    first_visible_token,
    flatten_rows,
)


@dataclass(frozen=True, slots=True)
class AttentionPieces:
    """All rows of a step, in pieces: a few neighbouring tokens of one sequence each."""

    tables: Tensor
    """[sequences, blocks], the blocks of each sequence, padded with any number."""
    pieces: Tensor
    """[pieces, 4]: the first row, the number of tokens, the position of the first token in its
    blocks, and the row of `tables` that lists these. A token sees itself and the tokens before it
    in its blocks."""
    window_tokens: int
    """A token sees this many tokens, itself included."""


class CpuAttention(AttentionBackend):
    """fp32 queries on the CPU, over keys and values of any form."""

    def __init__(self, config: AttentionConfig, kernels: CpuKernels) -> None:
        super().__init__(config)
        self._kernels = kernels

    @staticmethod
    def fits(config: AttentionConfig) -> bool:
        """Return whether the C kernels compute attention of this shape and dtype."""
        fp32 = config.dtype is torch.float32 and config.kv_format.dtype in KV_FORMS
        width_fits = config.head_dim % LANES == 0 and config.head_dim <= HEAD_DIM_MAX
        return config.device == "cpu" and fp32 and width_fits

    def prepare(self, batch: ForwardBatch) -> StepInputs:
        """Build the tensors of a step."""
        rows = flatten_rows(batch)
        return StepInputs(
            tokens=torch.tensor(rows.tokens),
            positions=torch.tensor(rows.positions),
            sampled=torch.tensor(rows.sampled, dtype=torch.int64),
            layout=AttentionLayout(torch.tensor(rows.slots), self._pieces(batch)),
        )

    def attend(self, mixed: Tensor, heads: int, pages: Tensor, layout: AttentionLayout) -> Tensor:
        """Store the step's keys and values in `pages`, then attend: [rows, heads, head_dim]."""
        plan = layout.plan
        assert isinstance(plan, AttentionPieces)
        self._kernels.store_kv(mixed, heads, layout.write_slots, pages)
        return self._kernels.attend(
            mixed, heads, pages, plan.tables, plan.pieces, plan.window_tokens
        )

    def _pieces(self, batch: ForwardBatch) -> AttentionPieces:
        config = self.config
        pieces: list[tuple[int, int, int, int]] = []
        tables: list[list[int]] = []
        row = 0
        for chunk in batch.chunks:
            first_block = first_visible_token(chunk, config.window_tokens) // config.block_tokens
            position = chunk.start - first_block * config.block_tokens
            for done in range(0, chunk.tokens, PIECE_TOKENS):
                tokens = min(PIECE_TOKENS, chunk.tokens - done)
                pieces.append((row + done, tokens, position + done, len(tables)))
            tables.append(chunk.blocks[first_block : block_count(chunk)])
            row += chunk.tokens
        width = max(len(blocks) for blocks in tables)
        padded = [blocks + [0] * (width - len(blocks)) for blocks in tables]
        window = config.window_tokens or config.blocks * config.block_tokens
        return AttentionPieces(torch.tensor(padded), torch.tensor(pieces), window)
