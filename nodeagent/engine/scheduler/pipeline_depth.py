"""How many batches of a model in stages are under way at once: one in each stage, or one in all.

One in each keeps every stage at work. But each is then of fewer rows, and where reading the weights
is what takes the time, fewer rows take no less. Which serves more tokens is measured, for so many
rows, with both; now and then the other is tried again.
"""

from typing import Final

_WINDOW_STEPS: Final = 16
_TRIED_EVERY: Final = 64
"""Windows between two tries of what was slower."""


class Underway:
    """What both ways have cost."""

    def __init__(self, most: int = 1) -> None:
        self.most = most
        self._token_s: dict[tuple[int, int], float] = {}
        """Seconds a token, by size of the whole (in powers of two) and batches under way."""
        self._now = (0, 0)
        self._steps = 0
        self._tokens = 0
        self._seconds = 0.0
        self._windows = 0

    def __repr__(self) -> str:
        known = {key: round(1 / seconds, 1) for key, seconds in sorted(self._token_s.items())}
        return f"Underway({self.most}, tokens/s by (size, batches): {known})"

    def choose(self, rows: int, *, prompts: bool) -> int:
        """Return how many batches so many rows are to be; what is not known yet is tried."""
        if self.most == 1 or rows < 2 or prompts:
            # Prompts are long enough to be cut without loss, and a single row cannot be.
            self._now = (0, 0)
            return self.most
        size = rows.bit_length()
        each_s = {count: self._token_s.get((size, count), 0.0) for count in (self.most, 1)}
        chosen = min(each_s, key=each_s.__getitem__)
        if (size, chosen) != self._now:
            self._now = (size, chosen)
            # What was under way before is not counted.
            self._steps, self._tokens, self._seconds = -2 * self.most, 0, 0.0
        return chosen

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a step in which so many tokens came."""
        size, count = self._now
        if not count:
            return
        self._steps += 1
        if self._steps <= 0:
            return
        self._tokens += tokens
        self._seconds += seconds
        if self._steps < _WINDOW_STEPS or not self._tokens:
            return
        self._token_s[self._now] = self._seconds / self._tokens
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._windows += 1
        if self._windows % _TRIED_EVERY == 0:
            self._token_s.pop((size, 1 if count == self.most else self.most), None)
