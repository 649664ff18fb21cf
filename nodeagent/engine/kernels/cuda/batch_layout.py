"""Where a step's tokens lie, as numbers in one piece: written on the host, sent to the device.

Rule 1: nothing here asks the device for anything; a step's layout is one copy that nobody awaits.
Rule 2: each part begins where sixteen bytes do, and tables are whole sixteens wide: kernels are
compiled anew for what is aligned in another way.
Rule 3: rows of padding write nowhere (slot -1) and see nothing (an empty span).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from nodeagent.engine.core.model_step import Piece, Work, blocks_of, first_seen, rows_of
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS

_NOWHERE: Final = -1
_ALIGNED: Final = 2
"""Numbers in sixteen bytes."""
_WIDTHS: Final = 16
_FOREVER: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class Rows:
    """The first rows of the flat batch: one token each, each over blocks of its own."""

    tables: Tensor
    """[rows, blocks], each row's blocks, and anything behind them."""
    spans: Tensor
    """[rows, 2], which tokens of its blocks a row sees: from the first to before the second."""


@dataclass(frozen=True, slots=True)
class Chunked:
    """Prompt chunks of the flat batch, each over the blocks of its own sequence."""

    tables: Tensor
    """[chunks, blocks], from the sequence's first block on."""
    places: Tensor
    """[chunks, 3]: its first row of the flat batch, its rows, and the first one's position."""
    rows_max: int
    window_tokens: int
    """How many tokens back a token sees, itself included."""


@dataclass(frozen=True, slots=True)
class Paged:
    """What each row attends to, for kernels that read pages where they lie."""

    decodes: Rows | None
    chunks: Chunked | None


@dataclass(frozen=True, slots=True)
class Numbers:
    """A step's numbers, each a part of one array on the host or of one tensor on the device."""

    tokens: Any
    positions: Any
    slots: Any
    sampled: Any
    tables: Any
    spans: Any
    chunk_tables: Any
    places: Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of everything a step has."""

    rows: int
    sampled: int
    decodes: int
    decode_blocks: int
    chunks: int = 0
    chunk_blocks: int = 0
    chunk_rows_max: int = 0

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each part, in the order of `Numbers`."""
        row, decodes, chunks = (self.rows,), self.decodes, self.chunks
        tables, chunk_tables = (decodes, self.decode_blocks), (chunks, self.chunk_blocks)
        return [row, row, row, (self.sampled,), tables, (decodes, 2), chunk_tables, (chunks, 3)]

    def total(self) -> int:
        """Return how many numbers there are in all."""
        return sum(_aligned(shape) for shape in self.shapes())

    def split(self, flat: Any) -> Numbers:
        """Return the parts of `flat`, where they lie."""
        shapes = self.shapes()
        starts = accumulate((_aligned(shape) for shape in shapes), initial=0)
        parts = zip(starts, shapes, strict=False)
        return Numbers(*(flat[at : at + math.prod(shape)].reshape(shape) for at, shape in parts))

    def layout(self, numbers: Numbers, window_tokens: int | None) -> Paged:
        """Return what attention reads of `numbers` on the device."""
        chunks = Chunked(
            numbers.chunk_tables,
            numbers.places,
            self.chunk_rows_max,
            _FOREVER if window_tokens is None else window_tokens,
        )
        return Paged(
            Rows(numbers.tables, numbers.spans) if self.decodes else None,
            chunks if self.chunks else None,
        )


def sizes_of(batch: Work, window_tokens: int | None) -> Sizes:
    """Return how many of everything `batch` has."""
    decodes, chunks = batch.decodes, batch.segments
    return Sizes(
        rows=len(decodes) + sum(chunk.tokens for chunk in chunks),
        sampled=sum(1 + len(chunk.drafts) for chunk in batch.chunks if chunk.samples),
        decodes=len(decodes),
        decode_blocks=wide(blocks_seen(decodes, window_tokens)),
        chunks=len(chunks),
        chunk_blocks=wide(max((blocks_of(chunk) for chunk in chunks), default=0)),
        chunk_rows_max=max((chunk.tokens for chunk in chunks), default=0),
    )


def wide(blocks: int) -> int:
    """Return how wide a table for so many blocks is."""
    return -(-blocks // _WIDTHS) * _WIDTHS


def _aligned(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) // _ALIGNED) * _ALIGNED


def blocks_seen(decodes: Sequence[Piece], window_tokens: int | None) -> int:
    """Return how many blocks the decode that sees the most of them sees."""
    return max(
        (blocks_of(one) - first_seen(one, window_tokens) // BLOCK_TOKENS for one in decodes),
        default=0,
    )


def host_numbers(sizes: Sizes, batch: Work, window_tokens: int | None, pinned: bool) -> Tensor:
    """Return the numbers of `batch` in one piece; what `sizes` has beyond it is padding."""
    flat = torch.empty(sizes.total(), dtype=torch.int64, pin_memory=pinned)
    numbers = sizes.split(flat.numpy())
    tokens, positions, slots, sampled = rows_of(batch)
    _put(numbers.tokens, tokens, 0)
    _put(numbers.positions, positions, 0)
    _put(numbers.slots, slots, _NOWHERE)
    _put(numbers.sampled, sampled, 0)
    _write_decodes(numbers, batch.decodes, window_tokens)
    _write_chunks(numbers, batch.segments, len(batch.decodes))
    return flat


def _write_decodes(numbers: Numbers, decodes: Sequence[Piece], window: int | None) -> None:
    numbers.spans[len(decodes) :] = 0
    tables = []
    for row, chunk in enumerate(decodes):
        first = first_seen(chunk, window)
        skipped = first // BLOCK_TOKENS
        tables.append(chunk.blocks[skipped : blocks_of(chunk)])
        before = skipped * BLOCK_TOKENS
        numbers.spans[row] = first - before, chunk.start + 1 - before
    _put_tables(numbers.tables, tables)


def _write_chunks(numbers: Numbers, chunks: Sequence[Piece], first_row: int) -> None:
    _put_tables(numbers.chunk_tables, [chunk.blocks[: blocks_of(chunk)] for chunk in chunks])
    for number, chunk in enumerate(chunks):
        numbers.places[number] = first_row, chunk.tokens, chunk.start
        first_row += chunk.tokens


def _put(part: Any, values: list[int], padding: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding


def _put_tables(part: Any, tables: list[list[int]]) -> None:
    """Write each table into a row of its own; what lies behind is read by nobody."""
    if tables:
        lengths = np.fromiter(map(len, tables), np.int64, len(tables))
        there = np.arange(part.shape[1]) < lengths[:, None]
        part[: len(tables)][there] = np.fromiter(
            chain.from_iterable(tables), np.int64, int(lengths.sum())
        )
