"""From a decided batch to logits: builds the tensors of one step and runs the model.

Rule 1: this file decides nothing; `decide.batching` says what runs and in which blocks.
Rule 2: rows of the flat batch lie in the order of `Batch.chunks`: decodes first.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from nodeagent.engine.core.model_step import Piece, Work, blocks_of, first_seen, rows_of
from nodeagent.engine.kernels.cpu.kernels import PIECE_TOKENS
from nodeagent.engine.kernels.cuda.batch_layout import Sizes, host_numbers, sizes_of
from nodeagent.engine.kernels.cuda.capture import why_not
from nodeagent.engine.kernels.cuda.graphs import CudaCapture, Graphs
from nodeagent.engine.kernels.cuda.kernels import enter
from nodeagent.engine.model.layers.attention import Decodes, LayerKV, Layout, Listed, Run, Segment
from nodeagent.engine.model.layers.kv_format import KvFormat
from nodeagent.engine.model.layers.lora import Adapter, Adding
from nodeagent.engine.model.shape import ModelShape
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS

log = logging.getLogger(__name__)

_PADDING_MAX: Final = 2
"""Decodes share a call where the longest reads at most so many times the blocks of the shortest."""
_PADDED_BLOCKS_FREE: Final = 8
"""Up to so many blocks, padding costs less than another call."""


class Decoder(Protocol):
    """A model as the runner sees it."""

    shape: ModelShape
    adding: Adding

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: list[LayerKV], layout: Layout, rows: Tensor
    ) -> Tensor:
        """Run a flat batch; return logits for the `rows` given."""
        ...


class Keeps(Protocol):
    """Who keeps something of each token beside its KV, heard while the model ran."""

    def keep(self, slots: Tensor) -> None:
        """Keep what was heard in this step, row by row in `slots`."""
        ...

    def forget(self, blocks: Tensor, block_tokens: int) -> None:
        """Forget what `blocks` held: their KV came from elsewhere."""
        ...


class Runner:
    """A model with its KV on a device."""

    def __init__(
        self,
        model: Decoder,
        blocks: int,
        device: str,
        dtype: torch.dtype,
        form: KvFormat | None = None,
    ) -> None:
        self._model = model
        self.device = device
        self.dtype = dtype
        self.adapters: dict[bytes, Adapter] = {}
        """Of several ranks, its parts of the adapters that a step names by their digests."""
        shape = self.shape = model.shape
        self.blocks = blocks
        self.beside: Keeps | None = None
        self._window_tokens = shape.window_tokens
        self.graphs: Graphs | None = None
        self._kv = [
            LayerKV(blocks, BLOCK_TOKENS, shape.kv_heads, shape.head_dim, device, dtype, form)
            for _ in range(shape.layers)
        ]

    @property
    def kept_as(self) -> torch.dtype:
        """What blocks are read and written in."""
        return self._kv[0].pages.dtype

    @property
    def adding(self) -> Adding:
        """What adapters may change of the model."""
        return self._model.adding

    @torch.inference_mode()
    def capture(self, rows_max: int, context_tokens: int) -> None:
        """Capture decodes of up to so many rows, where the device and the model allow it.

        Once all that hears or is added to the model is in place; again where KV is made anew.
        """
        why = why_not(
            device=self.device,
            kernels=self._kv[0].paged is not None,
            experts=self.shape.experts,
            heard=self.beside is not None,
        )
        if why:
            log.info("no graphs", extra={"fields": {"because": why}})
            return
        seen = min(context_tokens, self._window_tokens or context_tokens)
        blocks = min(seen // BLOCK_TOKENS + 2, self.blocks)
        enter(self.device)
        self._model.adding.current = ()
        capture = CudaCapture(self.device)
        self.graphs = Graphs(self._forward, capture, self.device, blocks, self._window_tokens)
        self.graphs.capture(rows_max)

    def begin(self, batch: Work) -> Callable[[], Tensor]:
        """Compute `batch`; what is returned has its logits."""
        logits = self.run(batch)
        return lambda: logits

    @torch.inference_mode()
    def run(self, batch: Work) -> Tensor:
        """Compute `batch`; return logits [rows, vocabulary], which hold until the next step.

        A row for each chunk that samples, and before it one for each of its drafts.
        """
        if self._kv[0].paged is not None:
            return self._run_paged(batch)
        tokens, positions, slots, rows = rows_of(batch)
        if self._kv[0].kernels is not None:
            layout = Layout(self._put(slots), self._listed(batch.chunks), ())
        else:
            layout = Layout(
                self._put(slots),
                tuple(self._decodes(batch.decodes)),
                tuple(self._segments(batch)),
            )
            # Torch's decodes read blocks whole, and what another left there may be no number.
            self.clear([block for chunk in batch.chunks for block in _begun(chunk)])
        self._model.adding.current = self._adapters(batch.chunks)
        logits = self._model.forward(
            self._put(tokens), self._put(positions), self._kv, layout, self._put(rows)
        )
        if self.beside is not None:
            self.beside.keep(layout.write_slots)
        return logits

    def _run_paged(self, batch: Work) -> Tensor:
        """Compute `batch` by kernels that read pages where they lie."""
        enter(self.device)
        self._model.adding.current = self._adapters(batch.chunks)
        logits = self.graphs.run(batch) if self.graphs is not None else None
        if logits is not None:
            return logits
        sizes = sizes_of(batch, self._window_tokens)
        pinned = self.device.startswith("cuda")
        numbers = host_numbers(sizes, batch, self._window_tokens, pinned)
        return self._forward(sizes, numbers.to(self.device, non_blocking=True))

    def _forward(self, sizes: Sizes, flat: Tensor) -> Tensor:
        """Run the model over a step whose numbers lie on the device."""
        numbers = sizes.split(flat)
        layout = Layout(numbers.slots, sizes.layout(numbers, self._window_tokens), ())
        logits = self._model.forward(
            numbers.tokens, numbers.positions, self._kv, layout, numbers.sampled
        )
        if self.beside is not None:
            self.beside.keep(numbers.slots)
        return logits

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """Zero `blocks`."""
        if blocks:
            indices = self._put(blocks)
            for kv in self._kv:
                kv.pages.index_fill_(0, indices, 0)

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each (from, to)."""
        sources = self._put([source for source, _ in pairs])
        blocks = self._put([block for _, block in pairs])
        for kv in self._kv:
            kv.pages[blocks] = kv.pages[sources]
        if self.beside is not None:
            self.beside.forget(blocks, BLOCK_TOKENS)

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Return what `blocks` hold: [blocks, layers, tokens, keys and values, head_dim]."""
        indices = self._put(blocks)
        return torch.stack([kv.pages[indices] for kv in self._kv], 1).cpu()

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Fill `blocks` with what `read_blocks` returned."""
        indices = self._put(blocks)
        contents = contents.to(self.device)
        for layer, kv in enumerate(self._kv):
            kv.pages[indices] = contents[:, layer]
        if self.beside is not None:
            self.beside.forget(indices, BLOCK_TOKENS)

    def _adapters(self, chunks: Sequence[Piece]) -> tuple[tuple[Adapter, Tensor], ...]:
        """Return the adapters of this step, each with the rows that it changes."""
        rows: dict[Adapter, list[int]] = {}
        start = 0
        for chunk in chunks:
            end = start + chunk.tokens
            adapter = chunk.adapter
            if isinstance(adapter, bytes):
                adapter = self.adapters[adapter]
            if isinstance(adapter, Adapter):
                rows.setdefault(adapter, []).extend(range(start, end))
            start = end
        return tuple((adapter, self._put(numbers)) for adapter, numbers in rows.items())

    def _listed(self, chunks: Sequence[Piece]) -> Listed:
        """Return all chunks for our own kernels."""
        pieces: list[tuple[int, int, int, int]] = []
        tables: list[list[int]] = []
        row = 0
        for chunk in chunks:
            first, blocks = self._seen(chunk)
            place = chunk.start - first // BLOCK_TOKENS * BLOCK_TOKENS
            for at in range(0, chunk.tokens, PIECE_TOKENS):
                tokens = min(PIECE_TOKENS, chunk.tokens - at)
                pieces.append((row + at, tokens, place + at, len(tables)))
            tables.append(blocks)
            row += chunk.tokens
        width = max(len(blocks) for blocks in tables)
        padded = [blocks + [0] * (width - len(blocks)) for blocks in tables]
        window = self._window_tokens or self.blocks * BLOCK_TOKENS
        return Listed(torch.tensor(padded), torch.tensor(pieces), window)

    def _decodes(self, chunks: Sequence[Piece]) -> Iterator[Decodes]:
        start = 0
        seen = [self._seen(chunk) for chunk in chunks]
        while start < len(chunks):
            shortest = longest = len(seen[start][1])
            end = start + 1
            while end < len(chunks):
                blocks = len(seen[end][1])
                low, high = min(shortest, blocks), max(longest, blocks)
                if high > max(_PADDING_MAX * low, _PADDED_BLOCKS_FREE):
                    break
                shortest, longest, end = low, high, end + 1
            yield self._group(start, chunks[start:end], seen[start:end], longest)
            start = end

    def _seen(self, chunk: Piece) -> tuple[int, list[int]]:
        """Return the first token that a chunk's first sees, and the blocks from that token's on."""
        first = first_seen(chunk, self._window_tokens)
        return first, chunk.blocks[first // BLOCK_TOKENS : blocks_of(chunk)]

    def _group(
        self, start: int, chunks: Sequence[Piece], seen: Sequence[tuple[int, list[int]]], width: int
    ) -> Decodes:
        table: list[int] = []
        for _, blocks in seen:
            table += blocks
            # Masked tokens are multiplied by nought, which NaN survives: pad with what is its own.
            table += blocks[:1] * (width - len(blocks))
        skipped = np.asarray([first // BLOCK_TOKENS * BLOCK_TOKENS for first, _ in seen])
        firsts = np.asarray([first for first, _ in seen]) - skipped
        ends = np.asarray([chunk.start + 1 for chunk in chunks]) - skipped
        context = int(ends.max())
        mask = None
        if firsts.any() or (ends < context).any():
            columns = np.arange(context)
            hidden = (columns < firsts[:, None]) | (columns >= ends[:, None])
            mask = self._added(hidden)[:, None, None, :]
        return Decodes(start, start + len(chunks), self._place(table), context, mask)

    def _added(self, hidden: np.ndarray) -> Tensor:
        """Return what is added to scores: 0, and -inf where `hidden`.

        Made once for all layers; a mask of truths would be made into this in each of them.
        """
        return torch.from_numpy(np.where(hidden, -np.inf, 0.0)).to(self.device, self.dtype)

    def _segments(self, batch: Work) -> Iterator[Segment]:
        start = len(batch.decodes)
        for chunk in batch.segments:
            end = start + chunk.tokens
            blocks = self._place(chunk.blocks[: blocks_of(chunk)])
            yield Segment(start, end, blocks, chunk.start + chunk.tokens, self._mask(chunk))
            start = end

    def _mask(self, chunk: Piece) -> Tensor | None:
        context, window = chunk.start + chunk.tokens, self._window_tokens
        if window is not None and window >= context:
            window = None
        if chunk.start == 0 and window is None:
            return None
        seen = torch.ones(chunk.tokens, context, dtype=torch.bool, device=self.device)
        seen = seen.tril(chunk.start)
        return seen if window is None else seen.triu(chunk.start - window + 1)

    def _place(self, blocks: list[int]) -> Run | Tensor:
        first = blocks[0]
        if blocks == list(range(first, first + len(blocks))):
            return Run(first, first + len(blocks))
        return self._put(blocks)

    def _put(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)


def _begun(chunk: Piece) -> list[int]:
    """Return the block that the chunk begins and does not fill, if there is one."""
    end = chunk.start + chunk.tokens
    begun = end // BLOCK_TOKENS * BLOCK_TOKENS
    return [chunk.blocks[end // BLOCK_TOKENS]] if chunk.start <= begun < end else []
