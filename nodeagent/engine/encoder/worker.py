"""The encoder's thread: reads batches of texts, carries their answers to the event loop.

Rule 1: only this thread runs the model; the queue is shared under one lock.
Rule 2: a request that is given up leaves the queue before the next step.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.core.step import Stepped
from nodeagent.engine.core.step_thread import StepThread
from nodeagent.engine.core.token_rates import StepRates
from nodeagent.engine.encoder.batching import Texts
from nodeagent.engine.model.bert import Bert


@dataclass(frozen=True, slots=True)
class Text:
    """One text as tokens, with the kind of segment of each; `kinds` may be empty: all first."""

    tokens: list[int]
    kinds: list[int]


@dataclass(slots=True, eq=False)
class _Asked:
    texts: list[Text]
    rows: np.ndarray
    left: int
    done: asyncio.Future[np.ndarray]


class EncoderWorker(StepThread):
    """Owns the thread and its queue."""

    def __init__(self, model: Bert, tokens_max: int, on_death: Callable[[], None]) -> None:
        super().__init__(on_death)
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, _Asked] = {}
        self._texts = Texts(tokens_max)
        self._numbers = itertools.count(1)
        self._rates = StepRates()
        self._tokens_total = 0
        self._texts_total = 0

    def has_work(self) -> bool:
        """True where a step is due or under way."""
        return bool(self._asked)

    def counts(self) -> Mapping[str, float]:
        """Return what is reported of the queue and of the steps."""
        return {
            "waiting": len(self._texts),
            "prefill_tokens_in_flight": self._texts.tokens,
            "prefill_tokens_per_s": (
                self._rates.prefill.per_s if self._rates.are_known(time.monotonic()) else 0.0
            ),
            "prompt_tokens_total": self._tokens_total,
            "texts_total": self._texts_total,
            "steps_total": self._rates.steps,
        }

    async def encode(self, texts: list[Text]) -> np.ndarray:
        """Return the model's answers [texts, width]."""
        number = next(self._numbers)
        rows = np.empty((len(texts), self._model.shape.width), np.float32)
        done: asyncio.Future[np.ndarray] = self._loop.create_future()
        with self._wake:
            self._expect_progress()
            self._asked[number] = _Asked(texts, rows, len(texts), done)
            self._texts.add(number, [len(text.tokens) for text in texts])
            self._wake.notify()
        try:
            return await done
        finally:
            with self._wake:
                self._asked.pop(number, None)
                self._texts.remove(number)

    def fail_all(self, message: str) -> None:
        """End every open request with an error. Called on the event loop."""
        for asked in list(self._asked.values()):
            if not asked.done.done():
                asked.done.set_exception(ApiError(ErrorCode.INTERNAL, message))

    def _run(self) -> None:
        while batch := self._next():
            started_s = time.monotonic()
            texts = [asked.texts[index] for asked, index in batch]
            rows = self._read(texts)
            self._progress_s = time.monotonic()
            tokens = sum(len(text.tokens) for text in texts)
            took_s = self._progress_s - started_s
            self._rates.note(Stepped([], tokens, 0, len(texts)), took_s, self._progress_s)
            self._tokens_total += tokens
            self._texts_total += len(texts)
            self._loop.call_soon_threadsafe(_deliver, batch, rows)

    def _next(self) -> list[tuple[_Asked, int]]:
        """Wait for texts and take a batch of them; empty where it is time to stop."""
        with self._wake:
            while not self._stopping:
                batch = self._texts.next_batch()
                if batch:
                    return [(self._asked[number], index) for number, index in batch]
                self._wake.wait()
            return []

    def _read(self, texts: list[Text]) -> np.ndarray:
        longest = max(len(text.tokens) for text in texts)
        tokens = np.zeros((len(texts), longest), np.int64)
        kinds = np.zeros((len(texts), longest), np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)] = text.tokens
            kinds[row, : len(text.kinds)] = text.kinds
        lengths = np.asarray([len(text.tokens) for text in texts])
        answer = self._model.answer(self._put(tokens), self._put(kinds), self._put(lengths))
        rows: np.ndarray = answer.cpu().numpy()
        return rows

    def _put(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._model.device)


def _deliver(batch: list[tuple[_Asked, int]], rows: np.ndarray) -> None:
    """Book the rows, on the event loop; who has all of them is woken."""
    for (asked, index), row in zip(batch, rows, strict=True):
        asked.rows[index] = row
        asked.left -= 1
        if asked.left == 0 and not asked.done.done():
            asked.done.set_result(asked.rows)
