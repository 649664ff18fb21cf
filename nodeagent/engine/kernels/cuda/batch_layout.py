"""The integers of one step in one buffer: written on the host, copied to the device at once.

Rule 1: nothing here reads from the device, so that preparing a step never waits for it.
Rule 2: each part begins at a multiple of 16 bytes, and tables are multiples of 16 wide: Triton
compiles a kernel again for arguments with another alignment.
Rule 3: padding rows write nowhere (slot -1) and see nothing (an empty span).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from nodeagent.engine.kernels.attention_backend import AttentionLayout, StepInputs
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.scheduler.forward_batch import (
    ForwardBatch,
    ForwardChunk,
    block_count,
    first_visible_token,
    flatten_rows,
)

_NO_SLOT: Final = -1
_ALIGNMENT: Final = 2
"""int64 numbers in 16 bytes."""
_TABLE_WIDTH_MULTIPLE: Final = 16
_NO_WINDOW: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first rows of the batch: one token each, over the blocks of its own sequence."""

    tables: Tensor
    """[rows, blocks], the blocks of each row, followed by any numbers."""
    spans: Tensor
    """[rows, 2], the tokens of its blocks that a row sees: [first, end)."""


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """The prefill chunks of the batch, each over the blocks of its own sequence."""

    tables: Tensor
    """[chunks, blocks], from the first block of the sequence on."""
    places: Tensor
    """[chunks, 3]: first row of the batch, number of rows, position of the first row."""
    rows_max: int
    window_tokens: int
    """A token sees this many tokens, itself included."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The positions that each row attends to, for kernels that read pages in place."""

    decodes: DecodeRows | None
    chunks: PrefillChunks | None


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The parts of a step's buffer: numpy arrays on the host, tensors on the device."""

    tokens: Any
    positions: Any
    slots: Any
    sampled: Any
    tables: Any
    spans: Any
    chunk_tables: Any
    places: Any


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How many items each part of a step has."""

    rows: int
    sampled: int
    decodes: int
    decode_blocks: int
    chunks: int = 0
    chunk_blocks: int = 0
    chunk_rows_max: int = 0

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each part, in the order of `StepNumbers`."""
        row, decodes, chunks = (self.rows,), self.decodes, self.chunks
        tables, chunk_tables = (decodes, self.decode_blocks), (chunks, self.chunk_blocks)
        return [row, row, row, (self.sampled,), tables, (decodes, 2), chunk_tables, (chunks, 3)]

    def total(self) -> int:
        """Return the length of the buffer."""
        return sum(_aligned_length(shape) for shape in self.shapes())

    def split(self, buffer: Any) -> StepNumbers:
        """Return views of the parts of `buffer`."""
        shapes = self.shapes()
        starts = accumulate((_aligned_length(shape) for shape in shapes), initial=0)
        parts = zip(starts, shapes, strict=False)
        return StepNumbers(
            *(buffer[start : start + math.prod(shape)].reshape(shape) for start, shape in parts)
        )

    def paged_batch(self, numbers: StepNumbers, window_tokens: int | None) -> PagedBatch:
        """Return what attention reads of `numbers`, which are on the device."""
        chunks = PrefillChunks(
            numbers.chunk_tables,
            numbers.places,
            self.chunk_rows_max,
            _NO_WINDOW if window_tokens is None else window_tokens,
        )
        return PagedBatch(
            DecodeRows(numbers.tables, numbers.spans) if self.decodes else None,
            chunks if self.chunks else None,
        )

    def inputs(self, buffer: Tensor, window_tokens: int | None) -> StepInputs:
        """Return the inputs of the step whose numbers are in `buffer` on the device."""
        numbers = self.split(buffer)
        layout = AttentionLayout(numbers.slots, self.paged_batch(numbers, window_tokens))
        return StepInputs(numbers.tokens, numbers.positions, numbers.sampled, layout)


def step_sizes(batch: ForwardBatch, window_tokens: int | None) -> StepSizes:
    """Return the sizes of the parts of `batch`."""
    decodes, chunks = batch.decodes, batch.segments
    return StepSizes(
        rows=len(decodes) + sum(chunk.tokens for chunk in chunks),
        sampled=sum(1 + len(chunk.drafts) for chunk in batch.chunks if chunk.samples),
        decodes=len(decodes),
        decode_blocks=table_width(max_visible_blocks(decodes, window_tokens)),
        chunks=len(chunks),
        chunk_blocks=table_width(max((block_count(chunk) for chunk in chunks), default=0)),
        chunk_rows_max=max((chunk.tokens for chunk in chunks), default=0),
    )


def table_width(blocks: int) -> int:
    """Return the width of a table for this many blocks."""
    return -(-blocks // _TABLE_WIDTH_MULTIPLE) * _TABLE_WIDTH_MULTIPLE


def max_visible_blocks(decodes: Sequence[ForwardChunk], window_tokens: int | None) -> int:
    """Return the largest number of blocks that one of `decodes` sees."""
    return max(
        (
            block_count(decode) - first_visible_token(decode, window_tokens) // BLOCK_TOKENS
            for decode in decodes
        ),
        default=0,
    )


def write_step(
    sizes: StepSizes, batch: ForwardBatch, window_tokens: int | None, pinned: bool
) -> Tensor:
    """Return the numbers of `batch` in one host buffer; whatever `sizes` has beyond is padding."""
    buffer = torch.empty(sizes.total(), dtype=torch.int64, pin_memory=pinned)
    numbers = sizes.split(buffer.numpy())
    rows = flatten_rows(batch)
    _fill(numbers.tokens, rows.tokens, 0)
    _fill(numbers.positions, rows.positions, 0)
    _fill(numbers.slots, rows.slots, _NO_SLOT)
    _fill(numbers.sampled, rows.sampled, 0)
    _write_decodes(numbers, batch.decodes, window_tokens)
    _write_chunks(numbers, batch.segments, len(batch.decodes))
    return buffer


def _aligned_length(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT


def _write_decodes(
    numbers: StepNumbers, decodes: Sequence[ForwardChunk], window_tokens: int | None
) -> None:
    numbers.spans[len(decodes) :] = 0
    tables = []
    for row, decode in enumerate(decodes):
        first = first_visible_token(decode, window_tokens)
        first_block = first // BLOCK_TOKENS
        tables.append(decode.blocks[first_block : block_count(decode)])
        skipped = first_block * BLOCK_TOKENS
        numbers.spans[row] = first - skipped, decode.start + 1 - skipped
    _fill_tables(numbers.tables, tables)


def _write_chunks(numbers: StepNumbers, chunks: Sequence[ForwardChunk], first_row: int) -> None:
    _fill_tables(numbers.chunk_tables, [chunk.blocks[: block_count(chunk)] for chunk in chunks])
    for index, chunk in enumerate(chunks):
        numbers.places[index] = first_row, chunk.tokens, chunk.start
        first_row += chunk.tokens


def _fill(part: Any, values: list[int], padding: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding


def _fill_tables(part: Any, tables: list[list[int]]) -> None:
    """Write each table into a row of its own; the rest of the row is never read."""
    if tables:
        lengths = np.fromiter(map(len, tables), np.int64, len(tables))
        used = np.arange(part.shape[1]) < lengths[:, None]
        part[: len(tables)][used] = np.fromiter(
            chain.from_iterable(tables), np.int64, int(lengths.sum())
        )
