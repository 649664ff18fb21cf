"""Which texts an encoder reads in its next step: requests take turns, and padding is bounded.

Rule 1: a step takes at most `tokens_max` tokens, padding to the longest included; a text longer
than that goes alone.
Rule 2: each step takes one text of each request in turn, so that a request of thousands does not
keep one of a single text waiting.
Rule 3: a request's longest texts go first; what is read together is of like length.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Texts:
    """The texts still to be read, by request."""

    tokens_max: int
    _turns: deque[int] = field(default_factory=deque)
    _left: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    tokens: int = 0
    """Tokens waiting."""

    def __len__(self) -> int:
        return sum(len(texts) for texts in self._left.values())

    def add(self, request: int, lengths: Sequence[int]) -> None:
        """Queue the texts of a request, by their lengths in tokens."""
        if request in self._left:
            raise ValueError(f"cannot add request {request} twice")
        order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
        self._left[request] = deque((at, lengths[at]) for at in order)
        self._turns.append(request)
        self.tokens += sum(lengths)

    def remove(self, request: int) -> None:
        """Forget what is left of a request; one that has ended already is no mistake."""
        texts = self._left.pop(request, None)
        if texts is not None:
            self._turns.remove(request)
            self.tokens -= sum(length for _, length in texts)

    def next_batch(self) -> list[tuple[int, int]]:
        """Take the next step's texts as (request, index)."""
        batch: list[tuple[int, int]] = []
        longest, passed = 0, 0
        # A request whose next text does not fit is passed over; when all were, the step is full.
        while self._turns and passed < len(self._turns):
            request = self._turns[0]
            texts = self._left[request]
            index, length = texts[0]
            if batch and max(longest, length) * (len(batch) + 1) > self.tokens_max:
                self._turns.rotate(-1)
                passed += 1
                continue
            texts.popleft()
            passed = 0
            batch.append((request, index))
            longest = max(longest, length)
            self.tokens -= length
            self._turns.popleft()
            if texts:
                self._turns.append(request)
            else:
                del self._left[request]
        return batch
