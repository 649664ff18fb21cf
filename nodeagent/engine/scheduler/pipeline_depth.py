"""Decides how many batches of a pipeline-parallel model are in flight: one per stage, or only one.

One per stage keeps every stage busy. But each batch then has fewer rows, and where reading the
weights dominates a step, fewer rows take no less time. The tokens per second of both choices are
measured for each number of rows, and the slower choice is tried again now and then.
"""

from typing import Final, NamedTuple

_WINDOW_STEPS: Final = 16
_RETRY_WINDOWS: Final = 64
"""Windows between two trials of the slower choice."""


class _Choice(NamedTuple):
    """A number of batches in flight for batches of similar size."""

    rows_log2: int
    batches: int


_UNMEASURED: Final = _Choice(0, 0)


class PipelineDepth:
    """Chooses the number of batches in flight from the measured cost of both choices."""

    def __init__(self, stages: int = 1) -> None:
        self.stages = stages
        self._token_s: dict[_Choice, float] = {}
        self._current = _UNMEASURED
        self._steps = 0
        self._tokens = 0
        self._seconds = 0.0
        self._windows = 0

    def __repr__(self) -> str:
        rates = {tuple(key): round(1 / s, 1) for key, s in sorted(self._token_s.items())}
        return f"PipelineDepth({self.stages}, tokens/s by (log2 rows, batches): {rates})"

    def choose(self, rows: int, *, has_prompts: bool) -> int:
        """Return into how many batches `rows` rows are divided; an unmeasured choice goes first."""
        if self.stages == 1 or rows < 2 or has_prompts:
            # Prompts are long enough to be divided at no cost, and a single row cannot be divided.
            self._current = _UNMEASURED
            return self.stages
        size = rows.bit_length()
        cost = {
            batches: self._token_s.get(_Choice(size, batches), 0.0) for batches in (self.stages, 1)
        }
        chosen = _Choice(size, min(cost, key=cost.__getitem__))
        if chosen != self._current:
            self._current = chosen
            # Batches that were in flight before the change are not measured.
            self._steps, self._tokens, self._seconds = -2 * self.stages, 0, 0.0
        return chosen.batches

    def record_step(self, tokens: int, seconds: float) -> None:
        """Update the measurement from a finished step that produced `tokens` tokens."""
        size, batches = self._current
        if not batches:
            return
        self._steps += 1
        if self._steps <= 0:
            return
        self._tokens += tokens
        self._seconds += seconds
        if self._steps < _WINDOW_STEPS or not self._tokens:
            return
        self._token_s[self._current] = self._seconds / self._tokens
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._windows += 1
        if self._windows % _RETRY_WINDOWS == 0:
            other = 1 if batches == self.stages else self.stages
            self._token_s.pop(_Choice(size, other), None)
