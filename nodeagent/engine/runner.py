"""From a decided batch to logits: builds the tensors of one step and runs the model.

Rule 1: this file decides nothing; `decide.batching` says what runs and in which blocks.
Rule 2: rows of the flat batch lie in the order of `Batch.chunks`: decodes first.
"""

import numpy as np
import torch
from torch import Tensor

from nodeagent.engine.decide.batching import Batch, Chunk
from nodeagent.engine.decide.sequence import BLOCK_TOKENS
from nodeagent.engine.layers.attention import LayerKV, Layout, Segment
from nodeagent.engine.layers.lora import Adapter
from nodeagent.engine.models.llama import Llama


class Runner:
    """A model with its KV on a device."""

    def __init__(self, model: Llama, blocks: int, device: str, dtype: torch.dtype) -> None:
        self._model = model
        self._device = device
        shape = model.shape
        self._window_tokens = shape.window_tokens
        slots = blocks * BLOCK_TOKENS
        self._kv = [
            LayerKV(slots, shape.kv_heads, shape.head_dim, device, dtype)
            for _ in range(shape.layers)
        ]

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Compute `batch`; return logits [samples, vocabulary], a row per chunk that samples."""
        chunks = batch.chunks
        tokens = np.concatenate(
            [chunk.sequence.tokens[chunk.start : chunk.start + chunk.tokens] for chunk in chunks]
        )
        positions = np.concatenate(
            [np.arange(chunk.start, chunk.start + chunk.tokens) for chunk in chunks]
        )
        ends = np.cumsum([chunk.tokens for chunk in chunks])
        rows = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        self._model.adding.current = self._adapters(chunks, ends)
        return self._model.forward(
            self._put(tokens),
            self._put(positions),
            self._kv,
            self._layout(batch),
            self._put(np.asarray(rows, dtype=np.int64)),
        )

    def _adapters(
        self, chunks: tuple[Chunk, ...], ends: np.ndarray
    ) -> tuple[tuple[Adapter, Tensor], ...]:
        """Return the adapters of this step, each with the rows that it changes."""
        rows: dict[Adapter, list[np.ndarray]] = {}
        for chunk, end in zip(chunks, ends, strict=True):
            adapter = chunk.sequence.adapter
            if isinstance(adapter, Adapter):
                rows.setdefault(adapter, []).append(np.arange(end - chunk.tokens, end))
        return tuple((one, self._put(np.concatenate(parts))) for one, parts in rows.items())

    def _layout(self, batch: Batch) -> Layout:
        contexts = [_slots(chunk) for chunk in batch.chunks]
        written = [
            slots[chunk.start :] for slots, chunk in zip(contexts, batch.chunks, strict=True)
        ]
        decodes = len(batch.decodes)
        # What lies before its window, a decode need not even gather.
        seen = 0 if self._window_tokens is None else -self._window_tokens
        padded, mask = _pad([slots[seen:] for slots in contexts[:decodes]])
        segments: list[Segment] = []
        start = decodes
        for chunk, slots in zip(batch.prefills, contexts[decodes:], strict=True):
            end = start + chunk.tokens
            segments.append(Segment(start, end, self._put(slots), self._mask(chunk)))
            start = end
        return Layout(
            write_slots=self._put(np.concatenate(written)),
            decodes=decodes,
            decode_slots=self._put(padded),
            decode_mask=self._put(mask)[:, None, None, :],
            segments=tuple(segments),
        )

    def _mask(self, chunk: Chunk) -> Tensor | None:
        context, window = chunk.start + chunk.tokens, self._window_tokens
        if window is not None and window >= context:
            window = None
        if chunk.start == 0 and window is None:
            return None
        seen = torch.ones(chunk.tokens, context, dtype=torch.bool, device=self._device)
        seen = seen.tril(chunk.start)
        return seen if window is None else seen.triu(chunk.start - window + 1)

    def _put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _slots(chunk: Chunk) -> np.ndarray:
    """Return the KV slots of all tokens up to the chunk's last."""
    context = chunk.start + chunk.tokens
    blocks = np.asarray(chunk.sequence.blocks[: -(-context // BLOCK_TOKENS)], dtype=np.int64)
    slots = blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
    return slots.reshape(-1)[:context]


def _pad(contexts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    longest = max((len(slots) for slots in contexts), default=0)
    padded = np.zeros((len(contexts), longest), dtype=np.int64)
    mask = np.zeros((len(contexts), longest), dtype=np.bool_)
    for row, slots in enumerate(contexts):
        padded[row, : len(slots)] = slots
        # Masked slots are multiplied by nought, which NaN survives: pad with what is its own.
        padded[row, len(slots) :] = slots[0]
        mask[row, : len(slots)] = True
    return padded, mask
