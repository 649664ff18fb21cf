"""The queue of texts for an encoder: fair between requests, with little padding.

Rule 1: a step takes at most `tokens_max` tokens, padding to the longest text included. A longer
text runs in a step of its own.
Rule 2: a step takes one text from each request in turn, so a request with thousands of texts does
not delay a request with one.
Rule 3: the longest texts of a request go first, so texts of one step have similar lengths.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class QueuedText(NamedTuple):
    """A text by its request's number and its index in the request."""

    request: int
    text_index: int


class _TextLength(NamedTuple):
    text_index: int
    tokens: int


@dataclass(slots=True)
class TextQueue:
    """The texts that no step has taken yet, by request."""

    tokens_max: int
    tokens: int = 0
    """Tokens in the queue."""
    texts: int = 0
    """Texts in the queue. Like `tokens` it may be read by any thread without a lock."""
    _order: deque[int] = field(default_factory=deque)
    """The requests, in the order of their turns."""
    _pending: dict[int, deque[_TextLength]] = field(default_factory=dict)

    def add(self, request: int, lengths: Sequence[int]) -> None:
        """Queue the texts of a request, given by their lengths in tokens."""
        if request in self._pending:
            raise ValueError(f"cannot add request {request} twice")
        longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        self._pending[request] = deque(
            _TextLength(index, lengths[index]) for index in longest_first
        )
        self._order.append(request)
        self.tokens += sum(lengths)
        self.texts += len(lengths)

    def remove(self, request: int) -> None:
        """Drop what is left of a request; no effect if nothing is."""
        texts = self._pending.pop(request, None)
        if texts is not None:
            self._order.remove(request)
            self.tokens -= sum(text.tokens for text in texts)
            self.texts -= len(texts)

    def next_batch(self) -> list[QueuedText]:
        """Take the texts of the next step; empty if the queue is."""
        batch: list[QueuedText] = []
        longest, skipped = 0, 0
        # A request whose next text does not fit is skipped; the batch is full once all were.
        while self._order and skipped < len(self._order):
            request = self._order[0]
            texts = self._pending[request]
            text = texts[0]
            if batch and max(longest, text.tokens) * (len(batch) + 1) > self.tokens_max:
                self._order.rotate(-1)
                skipped += 1
                continue
            texts.popleft()
            skipped = 0
            batch.append(QueuedText(request, text.text_index))
            longest = max(longest, text.tokens)
            self.tokens -= text.tokens
            self.texts -= 1
            self._order.popleft()
            if texts:
                self._order.append(request)
            else:
                del self._pending[request]
        return batch
