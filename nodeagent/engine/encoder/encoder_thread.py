"""The encoder's step thread: runs batches of texts and carries the rows to the event loop.

Rule 1: only this thread runs the model. The queue is shared under one lock.
Rule 2: a cancelled request leaves the queue before the next step.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.core.generation import StepOutput
from nodeagent.engine.core.step_thread import StepThread
from nodeagent.engine.core.token_rates import StepRates
from nodeagent.engine.encoder.text_queue import TextQueue
from nodeagent.engine.model.bert import Bert


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of one text with the segment id of each; no `segments` means all are 0."""

    tokens: list[int]
    segments: list[int]


@dataclass(slots=True, eq=False)
class _EncodeRequest:
    """The texts of one request, and the rows that the model has computed for them."""

    texts: list[TokenizedText]
    rows: np.ndarray
    rows_left: int
    done: asyncio.Future[np.ndarray]


class _TextInBatch(NamedTuple):
    request: _EncodeRequest
    text_index: int


class EncoderThread(StepThread):
    """Owns the thread and its queue."""

    def __init__(self, model: Bert, tokens_max: int, on_death: Callable[[], None]) -> None:
        super().__init__(on_death)
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._requests: dict[int, _EncodeRequest] = {}
        self._queue = TextQueue(tokens_max)
        self._numbers = itertools.count(1)
        self._rates = StepRates()
        self._tokens_total = 0
        self._texts_total = 0

    def has_work(self) -> bool:
        """True if a step is due or running."""
        return bool(self._requests)

    def counts(self) -> Mapping[str, float]:
        """Return the counts of the queue and the steps, by their names in EngineStats.

        Reads single numbers only, because the event loop calls it while a step changes the queue.
        """
        return {
            "waiting": self._queue.texts,
            "prefill_tokens_in_flight": self._queue.tokens,
            "prefill_tokens_per_s": (
                self._rates.prefill.per_s if self._rates.are_known(time.monotonic()) else 0.0
            ),
            "prompt_tokens_total": self._tokens_total,
            "texts_total": self._texts_total,
            "steps_total": self._rates.steps,
        }

    async def encode(self, texts: list[TokenizedText]) -> np.ndarray:
        """Return the model's output for `texts` [texts, width]."""
        number = next(self._numbers)
        rows = np.empty((len(texts), self._model.shape.width), np.float32)
        done: asyncio.Future[np.ndarray] = self._loop.create_future()
        with self._wake:
            self._expect_progress()
            self._requests[number] = _EncodeRequest(texts, rows, len(texts), done)
            self._queue.add(number, [len(text.tokens) for text in texts])
            self._wake.notify()
        try:
            return await done
        finally:
            with self._wake:
                self._requests.pop(number, None)
                self._queue.remove(number)

    def fail_all(self, message: str) -> None:
        """End every open request with an error. Called on the event loop."""
        for request in list(self._requests.values()):
            if not request.done.done():
                request.done.set_exception(ApiError(ErrorCode.INTERNAL, message))

    def _run(self) -> None:
        while batch := self._next_batch():
            started_s = time.monotonic()
            texts = [request.texts[index] for request, index in batch]
            rows = self._compute(texts)
            self._progress_s = time.monotonic()
            tokens = sum(len(text.tokens) for text in texts)
            step_s = self._progress_s - started_s
            self._rates.record_step(StepOutput([], tokens, 0, len(texts)), step_s, self._progress_s)
            self._tokens_total += tokens
            self._texts_total += len(texts)
            self._loop.call_soon_threadsafe(_deliver, batch, rows)

    def _next_batch(self) -> list[_TextInBatch]:
        """Wait for texts and take a batch of them; empty if the thread is to stop."""
        with self._wake:
            while not self._stopping:
                batch = self._queue.next_batch()
                if batch:
                    return [
                        _TextInBatch(self._requests[text.request], text.text_index)
                        for text in batch
                    ]
                self._wake.wait()
            return []

    def _compute(self, texts: list[TokenizedText]) -> np.ndarray:
        """Run the model on `texts`, padded to the longest; return [texts, width]."""
        longest = max(len(text.tokens) for text in texts)
        tokens = np.zeros((len(texts), longest), np.int64)
        segments = np.zeros((len(texts), longest), np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)] = text.tokens
            segments[row, : len(text.segments)] = text.segments
        lengths = np.asarray([len(text.tokens) for text in texts])
        output = self._model.run(
            self._to_device(tokens), self._to_device(segments), self._to_device(lengths)
        )
        rows: np.ndarray = output.cpu().numpy()
        return rows

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._model.device)


def _deliver(batch: list[_TextInBatch], rows: np.ndarray) -> None:
    """Store the rows, on the event loop, and wake each request that now has all of its rows."""
    for (request, index), row in zip(batch, rows, strict=True):
        request.rows[index] = row
        request.rows_left -= 1
        if request.rows_left == 0 and not request.done.done():
            request.done.set_result(request.rows)
