"""Paged attention: the interface of the backends that store keys and values, and compute with them.

The model runner asks the backend for the inputs of a step; layers call `LayerKV.attend`. The
layout between the two is the backend's own.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nodeagent.engine.kernels.huge_pages import PAGE_BYTES, huge_page_bytes
from nodeagent.engine.kvcache.kv_format import KvFormat
from nodeagent.engine.scheduler.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The KV cache of one model on one device."""

    blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None
    """Sliding window: a token attends to this many tokens, itself included. None: to all."""
    device: str
    dtype: torch.dtype
    """The dtype of queries and outputs."""
    kv_format: KvFormat

    @property
    def pages_shape(self) -> tuple[int, int, int, int]:
        """[blocks, block_tokens, keys then values of each KV head, width of a head]."""
        width = self.kv_format.width(self.head_dim)
        return (self.blocks, self.block_tokens, 2 * self.kv_heads, width)


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The places of a step's tokens in the KV cache, and the positions that each row attends to."""

    write_slots: Tensor
    """[rows], the KV slot (block * block_tokens + offset) that each row of the batch fills."""
    plan: object
    """The positions that each row attends to, in the form that the backend reads."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step, on the device."""

    tokens: Tensor
    positions: Tensor
    sampled: Tensor
    """The rows whose logits are needed."""
    layout: AttentionLayout
    blocks_to_clear: Sequence[int] = ()
    """Blocks to zero before the step."""


class AttentionBackend(ABC):
    """Stores keys and values in pages, and attends to them."""

    captures_graphs: bool = False
    """Whether decode steps can be captured as CUDA graphs."""

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config

    def allocate_pages(self, layers: int) -> list[Tensor]:
        """Return the zeroed pages of each layer.

        Zeroed, because masked slots are multiplied by zero, and zero times NaN is NaN. Values lie
        beside their keys, so that one gather reads both. On a CPU all layers lie in one mapping at
        equal distances, so that one copy moves a block of all of them (`ModelRunner`).
        """
        shape, dtype = self.config.pages_shape, self.config.kv_format.dtype
        if self.config.device != "cpu":
            return [
                torch.zeros(shape, device=self.config.device, dtype=dtype) for _ in range(layers)
            ]
        # The system zeroes these when they are first touched; torch would before the first request.
        size_bytes = math.prod(shape) * dtype.itemsize
        stride_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        flat = huge_page_bytes(layers * stride_bytes)
        starts = range(0, layers * stride_bytes, stride_bytes)
        return [flat[start : start + size_bytes].view(dtype).view(shape) for start in starts]

    @abstractmethod
    def prepare(self, batch: ForwardBatch) -> StepInputs:
        """Build the tensors of a step. Rows lie in the order of `batch.chunks`."""

    @abstractmethod
    def attend(self, mixed: Tensor, heads: int, pages: Tensor, layout: AttentionLayout) -> Tensor:
        """Store the step's keys and values in `pages`, then attend: [rows, heads, head_dim].

        `mixed` is [rows, heads + 2 * kv_heads, head_dim]: queries, keys, values.
        """


class LayerKV:
    """The pages of one layer, with the backend that reads and writes them."""

    def __init__(self, backend: AttentionBackend, pages: Tensor) -> None:
        self.pages = pages
        self._attend = backend.attend

    def attend(self, mixed: Tensor, heads: int, layout: AttentionLayout) -> Tensor:
        """Store the step's keys and values, then attend: [rows, heads, head_dim]."""
        return self._attend(mixed, heads, self.pages, layout)
