"""Decodes as captured graphs: the host says once what a step does, the device does it again.

Rule 1: a graph reads its numbers from one tensor of its own and leaves its logits in another; who
wants logits past the next step takes a copy.
Rule 2: what is in no graph runs step by step, and both compute the same.
Rule 3: graphs hold where the KV and the weights lie: who makes those anew captures anew.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nodeagent.engine.core.model_step import Work
from nodeagent.engine.kernels.cuda.batch_layout import Sizes, blocks_seen, host_numbers, wide
from nodeagent.engine.kernels.cuda.capture import bucket_of, buckets

log = logging.getLogger(__name__)

Forward = Callable[[Sizes, Tensor], Tensor]
"""Computes a step whose numbers lie on the device in one piece; returns its logits."""


class Capture(Protocol):
    """Captures what a call does on the device."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return how to do `work` again, and where its answer will lie."""
        ...


class CudaCapture:
    """CUDA's own graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Warm up, so that kernels are built and work space is taken; then capture."""
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        here = torch.cuda.current_stream(self._device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            work()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may read files into pinned memory meanwhile: that is none of this graph's.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            answer = work()
        self._pool = self._pool or graph.pool()
        return graph.replay, answer


@dataclass(frozen=True, slots=True)
class _Captured:
    sizes: Sizes
    numbers: Tensor
    replay: Callable[[], None]
    logits: Tensor


class Graphs:
    """The captured steps of one model over one KV."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        device: str,
        blocks_max: int,
        window_tokens: int | None,
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._device = device
        self._blocks_max = blocks_max
        self._window_tokens = window_tokens
        self._captured: dict[int, _Captured] = {}
        self.replayed_total = 0

    @property
    def rows(self) -> tuple[int, ...]:
        """For how many rows there are graphs."""
        return tuple(sorted(self._captured))

    def capture(self, rows_max: int) -> None:
        """Capture a graph for each bucket, the largest first: the others fit into its memory."""
        started_s = time.monotonic()
        self._captured.clear()
        for rows in reversed(buckets(rows_max)):
            self._captured[rows] = self._one(rows)
        took_s = round(time.monotonic() - started_s, 3)
        log.info("graphs", extra={"fields": {"rows": self.rows, "took_s": took_s}})

    def forget(self) -> None:
        """Let go of all graphs: what they read is not where it was."""
        self._captured.clear()

    def run(self, batch: Work) -> Tensor | None:
        """Return the logits of `batch`, valid until the next step; None where it is in no graph."""
        decodes = batch.decodes
        if batch.segments or any(one.adapter is not None for one in decodes):
            return None
        rows = bucket_of(len(decodes), self.rows)
        if rows is None or not all(one.samples for one in decodes):
            return None
        captured = self._captured[rows]
        if blocks_seen(decodes, self._window_tokens) > captured.sizes.decode_blocks:
            return None
        pinned = captured.numbers.is_cuda
        numbers = host_numbers(captured.sizes, batch, self._window_tokens, pinned)
        captured.numbers.copy_(numbers, non_blocking=True)
        captured.replay()
        self.replayed_total += 1
        return captured.logits[: len(decodes)]

    def _one(self, rows: int) -> _Captured:
        sizes = Sizes(rows=rows, sampled=rows, decodes=rows, decode_blocks=wide(self._blocks_max))
        numbers = host_numbers(sizes, _NOTHING, None, pinned=False).to(self._device)
        replay, logits = self._capture(lambda: self._forward(sizes, numbers))
        return _Captured(sizes, numbers, replay, logits)


class _Nothing:
    """A step of padding alone."""

    decodes = segments = chunks = ()


_NOTHING = _Nothing()
