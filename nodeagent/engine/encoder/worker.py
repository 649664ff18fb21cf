"""The encoder's thread: reads batches of texts, carries their answers to the event loop.

Rule 1: only this thread runs the model; the queue is shared under one lock.
Rule 2: a request that is given up leaves the queue before the next step.
Rule 3: an error in a step is fatal to the process, as it is to an engine that generates.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.decide.texts import Texts
from nodeagent.engine.models.bert import Bert
from nodeagent.engine.rates import Rate

log = logging.getLogger(__name__)


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


class EncoderWorker:
    """Owns the thread and its queue."""

    def __init__(self, model: Bert, tokens_max: int, on_death: Callable[[], None]) -> None:
        self._model = model
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, _Asked] = {}
        self._texts = Texts(tokens_max)
        self._numbers = itertools.count(1)
        self._wake = threading.Condition()
        self._stopping = False
        self._rate = Rate()
        self._progress_s = time.monotonic()
        self.died = False
        self.steps_total = 0
        self.tokens_total = 0
        self.texts_total = 0
        self._thread = threading.Thread(target=self._run, name="encode", daemon=True)

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def texts_waiting(self) -> int:
        """Texts that no step has taken yet."""
        return len(self._texts)

    @property
    def tokens_waiting(self) -> int:
        """Tokens of those."""
        return self._texts.tokens

    @property
    def tokens_per_s(self) -> float:
        """The rate measured over recent steps."""
        return self._rate.per_s

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def encode(self, texts: list[Text]) -> np.ndarray:
        """Return the model's answers [texts, width]."""
        number = next(self._numbers)
        rows = np.empty((len(texts), self._model.shape.width), np.float32)
        done: asyncio.Future[np.ndarray] = self._loop.create_future()
        with self._wake:
            if not self._asked:
                # An idle engine has made no progress for long; the stall clock starts now.
                self._progress_s = time.monotonic()
            self._asked[number] = _Asked(texts, rows, len(texts), done)
            self._texts.add(number, [len(text.tokens) for text in texts])
            self._wake.notify()
        try:
            return await done
        finally:
            with self._wake:
                self._asked.pop(number, None)
                self._texts.remove(number)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; False where that takes longer than allowed."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fail_all(self, message: str) -> None:
        """End every open request with an error. Called on the event loop."""
        for asked in list(self._asked.values()):
            if not asked.done.done():
                asked.done.set_exception(ApiError(ErrorCode.INTERNAL, message))

    def idle_s(self) -> float:
        """Seconds since the last step ended, or since there last was nothing to do."""
        return time.monotonic() - self._progress_s

    def _run(self) -> None:
        try:
            while batch := self._next():
                started_s = time.monotonic()
                texts = [asked.texts[index] for asked, index in batch]
                rows = self._read(texts)
                self._progress_s = time.monotonic()
                tokens = sum(len(text.tokens) for text in texts)
                self._rate.note(tokens, self._progress_s - started_s)
                self.steps_total += 1
                self.tokens_total += tokens
                self.texts_total += len(texts)
                self._loop.call_soon_threadsafe(_deliver, batch, rows)
        # The thread's own edge: whatever a step raises ends here, is told, and ends the process.
        except Exception:
            log.exception("the encoder's thread died")
            self.died = True
            self._loop.call_soon_threadsafe(self.fail_all, "cannot answer: the engine failed")
            self._on_death()

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
