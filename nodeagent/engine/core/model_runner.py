"""Runs a model on one device: builds the tensors of a step, and moves KV blocks.

Rule 1: nothing here decides what to compute; `scheduler` chooses the batch and its KV blocks.
Rule 2: the rows of the flat batch lie in the order of `ForwardBatch.chunks`, decodes first.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.kernels.attention_backend import (
    AttentionConfig,
    AttentionLayout,
    LayerKV,
    StepInputs,
)
from nodeagent.engine.kernels.cuda.decode_graphs import CudaGraphCapture, DecodeGraphs
from nodeagent.engine.kernels.cuda.graph_buckets import why_no_graphs
from nodeagent.engine.kernels.cuda.triton_kernels import select_device
from nodeagent.engine.kernels.selection import choose_attention
from nodeagent.engine.kernels.step_interrupt import StepInterrupt
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.kvcache.kv_format import KvFormat
from nodeagent.engine.model.lora import ActiveAdapters
from nodeagent.engine.scheduler.forward_batch import ForwardBatch, ForwardChunk
from nodeagent.engine.weights.lora_adapter import LoraAdapter

log = logging.getLogger(__name__)


class DecoderModel(Protocol):
    """A model, as the runner uses it."""

    shape: DecoderShape
    adapters: ActiveAdapters
    interrupt: StepInterrupt | None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: list[LayerKV],
        layout: AttentionLayout,
        rows: Tensor,
    ) -> Tensor:
        """Run a flat batch; return the logits of `rows`."""
        ...


class TokenStateStore(Protocol):
    """Stores something of each token beside its KV, recorded while the model ran."""

    def store(self, slots: Tensor) -> None:
        """Store what was recorded in this step, row by row in `slots`."""
        ...

    def clear_blocks(self, blocks: Tensor, block_tokens: int) -> None:
        """Forget what `blocks` held: their KV was copied from elsewhere."""
        ...


class ModelRunner:
    """A model with its KV cache on one device."""

    def __init__(
        self,
        model: DecoderModel,
        blocks: int,
        device: str,
        dtype: torch.dtype,
        kv_format: KvFormat | None = None,
    ) -> None:
        self._model = model
        self.device = device
        self.dtype = dtype
        self.adapters: dict[bytes, LoraAdapter] = {}
        """Shards of the adapters that commands name by digest, on ranks other than rank 0."""
        shape = self.shape = model.shape
        self.blocks = blocks
        self.token_states: TokenStateStore | None = None
        self.graphs: DecodeGraphs | None = None
        self._attention = choose_attention(
            AttentionConfig(
                blocks=blocks,
                block_tokens=BLOCK_TOKENS,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                window_tokens=shape.window_tokens,
                device=device,
                dtype=dtype,
                kv_format=kv_format or KvFormat(dtype),
            )
        )
        pages = self._attention.allocate_pages(shape.layers)
        self._kv = [LayerKV(self._attention, of_layer) for of_layer in pages]
        self._on_host = _all_layers(pages) if device == "cpu" else None

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype in which blocks are read and written."""
        return self._attention.config.kv_format.dtype

    @property
    def can_copy_beside_steps(self) -> bool:
        """Whether any thread may read and write blocks that no step uses: a GPU orders it after the
        step."""
        return self.device == "cpu"

    @property
    def active_adapters(self) -> ActiveAdapters:
        """The modules of the model that adapters can change."""
        return self._model.adapters

    @torch.inference_mode()
    def capture(self, rows_max: int, context_tokens: int) -> None:
        """Capture decode steps of up to `rows_max` rows as graphs, where that is possible.

        Call it after everything that records or adapts the model is in place, and again after the
        KV cache is reallocated.
        """
        reason = why_no_graphs(
            device=self.device,
            paged_kernels=self._attention.captures_graphs,
            experts=self.shape.experts,
            records_states=self.token_states is not None,
        )
        if reason:
            log.info("no decode graphs", extra={"fields": {"because": reason}})
            return
        window_tokens = self.shape.window_tokens
        visible_tokens = min(context_tokens, window_tokens or context_tokens)
        blocks = min(visible_tokens // BLOCK_TOKENS + 2, self.blocks)
        select_device(self.device)
        self._model.adapters.current = ()
        capture = CudaGraphCapture(self.device)
        self.graphs = DecodeGraphs(self._forward, capture, self.device, blocks, window_tokens)
        self.graphs.capture(rows_max)

    def begin(
        self, batch: ForwardBatch, interrupt: StepInterrupt | None = None
    ) -> Callable[[], Tensor]:
        """Compute `batch`; the returned function returns its logits.

        Raises StepInterrupted if `interrupt` is set meanwhile. Only what `batch` writes has changed
        then. A step of a captured graph is never interrupted.
        """
        self._model.interrupt = interrupt
        try:
            logits = self.run(batch)
        finally:
            self._model.interrupt = None
        return lambda: logits

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> Tensor:
        """Compute `batch`; return logits [rows, vocabulary], valid until the next step.

        There is a row for each chunk that samples, preceded by one for each of its drafts.
        """
        select_device(self.device)
        self._model.adapters.current = self._adapters_of(batch.chunks)
        logits = self.graphs.run(batch) if self.graphs is not None else None
        if logits is not None:
            return logits
        inputs = self._attention.prepare(batch)
        self.clear(inputs.blocks_to_clear)
        return self._forward(inputs)

    def _forward(self, inputs: StepInputs) -> Tensor:
        layout = inputs.layout
        logits = self._model.forward(
            inputs.tokens, inputs.positions, self._kv, layout, inputs.sampled
        )
        if self.token_states is not None:
            self.token_states.store(layout.write_slots)
        return logits

    def kv_pages(self) -> list[Tensor]:
        """Return the memory of keys and values, layer by layer."""
        return [kv.pages for kv in self._kv]

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """Zero `blocks`."""
        if blocks:
            indices = self._index(blocks)
            for kv in self._kv:
                kv.pages.index_fill_(0, indices, 0)

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each pair (from, to)."""
        sources = self._index([source for source, _ in pairs])
        targets = self._index([target for _, target in pairs])
        for kv in self._kv:
            kv.pages[targets] = kv.pages[sources]
        if self.token_states is not None:
            self.token_states.clear_blocks(targets, BLOCK_TOKENS)

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the contents of `blocks`: [blocks, layers, tokens, keys and values, width].

        They are copied to `out`, which has this form, if it is given.
        """
        if (on_host := self._on_host) is not None:
            contents = self._new_contents(len(blocks)) if out is None else out
            rows = _rows(contents, 2)
            for row, block in enumerate(blocks):
                rows[row] = on_host[:, block]
            return contents
        indices = self._index(blocks)
        stacked = torch.stack([kv.pages[indices] for kv in self._kv], 1)
        return stacked.cpu() if out is None else out.copy_(stacked)

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Fill `blocks` with what `read_blocks` returned."""
        if (on_host := self._on_host) is not None:
            rows = _rows(contents.contiguous(), 2)
            for row, block in enumerate(blocks):
                on_host[:, block] = rows[row]
        else:
            indices, contents = self._index(blocks), contents.to(self.device)
            for layer, kv in enumerate(self._kv):
                kv.pages[indices] = contents[:, layer]
        if self.token_states is not None:
            self.token_states.clear_blocks(self._index(blocks), BLOCK_TOKENS)

    def _new_contents(self, blocks: int) -> Tensor:
        """Return host memory for `blocks`.

        By numpy: torch's allocator returns large memory to the system each time, and to get its
        pages again takes several times as long as to fill them.
        """
        pages = self._kv[0].pages
        size_bytes = blocks * len(self._kv) * pages[0].nbytes
        flat = torch.from_numpy(np.empty(size_bytes, np.uint8))
        return flat.view(pages.dtype).view(blocks, len(self._kv), *pages.shape[1:])

    def _adapters_of(
        self, chunks: Sequence[ForwardChunk]
    ) -> tuple[tuple[LoraAdapter, Tensor], ...]:
        """Return the adapters of a step, each with the rows that it changes."""
        rows: dict[LoraAdapter, list[int]] = {}
        start = 0
        for chunk in chunks:
            end = start + chunk.tokens
            adapter = chunk.adapter
            if isinstance(adapter, bytes):
                adapter = self.adapters[adapter]
            if isinstance(adapter, LoraAdapter):
                rows.setdefault(adapter, []).extend(range(start, end))
            start = end
        return tuple((adapter, self._index(numbers)) for adapter, numbers in rows.items())

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)


def _all_layers(pages: Sequence[Tensor]) -> np.ndarray:
    """Return the pages of all layers on the host as bytes [layers, blocks, bytes of one block].

    They lie at equal distances in one mapping, which each of them keeps.
    """
    first = _rows(pages[0], 1)
    distance = pages[1].data_ptr() - pages[0].data_ptr() if len(pages) > 1 else 0
    return np.lib.stride_tricks.as_strided(
        first, (len(pages), *first.shape), (distance, *first.strides)
    )


def _rows(blocks: Tensor, leading: int) -> np.ndarray:
    """Return blocks on the host as bytes, with `leading` dimensions before those of one block.

    numpy copies them four times as fast as torch, which copies number by number.
    """
    flat: np.ndarray = blocks.view(torch.uint8).numpy()
    return flat.reshape(*blocks.shape[:leading], -1)
