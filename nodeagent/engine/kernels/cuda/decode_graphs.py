"""Decode steps as CUDA graphs: the host describes a step once, the device replays it.

Rule 1: a graph reads its numbers from one buffer of its own and leaves its logits in another.
Code that needs logits after the next step copies them.
Rule 2: a step that fits no graph runs kernel by kernel; both compute the same.
Rule 3: graphs contain the addresses of the KV cache and the weights. If these are reallocated,
capture the graphs again.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nodeagent.engine.kernels.attention_backend import StepInputs
from nodeagent.engine.kernels.cuda.batch_layout import (
    StepSizes,
    max_visible_blocks,
    table_width,
    write_step,
)
from nodeagent.engine.kernels.cuda.graph_buckets import bucket_of, graph_buckets
from nodeagent.engine.scheduler.forward_batch import ForwardBatch

log = logging.getLogger(__name__)


class GraphCapture(Protocol):
    """Captures what a call does on the device."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return how to replay `work`, and the tensor in which its result will lie."""
        ...


class CudaGraphCapture:
    """CUDA graphs that share one memory pool, since only one of them runs at a time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run `work` once, so that kernels are compiled and workspaces allocated; then capture."""
        warm_up = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):
            work()
        current.wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy weights to the device meanwhile; they do not belong to the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        self._pool = self._pool or graph.pool()
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    sizes: StepSizes
    numbers: Tensor
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """The captured decode steps of one model over one KV cache."""

    def __init__(
        self,
        forward: Callable[[StepInputs], Tensor],
        capture: GraphCapture,
        device: str,
        blocks_max: int,
        window_tokens: int | None,
    ) -> None:
        """`forward` computes a step and returns its logits; rows see up to `blocks_max` blocks."""
        self._forward = forward
        self._capture = capture
        self._device = device
        self._blocks_max = blocks_max
        self._window_tokens = window_tokens
        self._captured: dict[int, _CapturedGraph] = {}

    @property
    def rows(self) -> tuple[int, ...]:
        """The row counts that are captured."""
        return tuple(sorted(self._captured))

    def capture(self, rows_max: int) -> None:
        """Capture a graph for each bucket, the largest first: the others fit into its memory."""
        started_s = time.monotonic()
        self._captured.clear()
        for rows in reversed(graph_buckets(rows_max)):
            self._captured[rows] = self._capture_bucket(rows)
        took_s = round(time.monotonic() - started_s, 3)
        log.info("decode graphs", extra={"fields": {"rows": self.rows, "took_s": took_s}})

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """Return the logits of `batch`, valid until the next step; None where no graph fits it."""
        decodes = batch.decodes
        if batch.segments or any(decode.adapter is not None for decode in decodes):
            return None
        rows = bucket_of(len(decodes), self.rows)
        if rows is None or not all(decode.samples for decode in decodes):
            return None
        captured = self._captured[rows]
        if max_visible_blocks(decodes, self._window_tokens) > captured.sizes.decode_blocks:
            return None
        pinned = captured.numbers.is_cuda
        numbers = write_step(captured.sizes, batch, self._window_tokens, pinned)
        captured.numbers.copy_(numbers, non_blocking=True)
        captured.replay()
        return captured.logits[: len(decodes)]

    def _capture_bucket(self, rows: int) -> _CapturedGraph:
        blocks = table_width(self._blocks_max)
        sizes = StepSizes(rows=rows, sampled=rows, decodes=rows, decode_blocks=blocks)
        numbers = write_step(sizes, _PADDING_STEP, None, pinned=False).to(self._device)
        replay, logits = self._capture(
            lambda: self._forward(sizes.inputs(numbers, self._window_tokens))
        )
        return _CapturedGraph(sizes, numbers, replay, logits)


class _PaddingStep:
    """A step of padding rows only."""

    decodes = segments = chunks = ()


_PADDING_STEP = _PaddingStep()
