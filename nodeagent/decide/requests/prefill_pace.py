"""Measures how long a replica takes to read a token of a prompt."""

from collections import deque
from typing import Final, NamedTuple

PROMPTS_MAX: Final = 16
"""The newest prompts count."""

PROMPTS_MIN: Final = 3
"""Fewer say nothing: one of them may have met something unusual."""

AGE_S_MAX: Final = 60.0
"""When no prompt has ended for this long, the replica may have become another one."""

TOGETHER_S: Final = 0.002
"""Prompts that end within this time were read in one step, which counts once."""

SPREAD_MIN: Final = 0.1
"""If lengths differ by a smaller share (standard deviation over mean), the constant is unknown."""

ALIKE_S_MIN: Final = 0.5
"""Prompts of one length that take less time on average say nothing: much of it may be constant."""


class ReadPrompt(NamedTuple):
    """Prompts that were read at once: their uncached tokens, and how long that took."""

    tokens: int
    took_s: float


class PrefillPace:
    """The time per token over a replica's last prompts, without what each prompt takes anyway.

    A straight line (ordinary least squares) through tokens and times has the engine's constant
    time per prompt as its intercept. Noise may make that negative, or longer than a whole prompt
    took, which is not possible; so it is bounded by both.
    """

    def __init__(self) -> None:
        self._prompts: deque[ReadPrompt] = deque(maxlen=PROMPTS_MAX)
        self._ended_s = 0.0
        self._ns_per_token = 0

    def ns_per_token(self, now_s: float) -> int:
        """Return the time per token in nanoseconds, 0 if it is unknown."""
        return self._ns_per_token if now_s - self._ended_s < AGE_S_MAX else 0

    def record(self, tokens: int, took_s: float, now_s: float) -> None:
        """Take the uncached tokens of a prompt that has been read, and how long that took."""
        if tokens <= 0:
            return
        if now_s - took_s - self._ended_s >= AGE_S_MAX:
            self._prompts.clear()
        elif self._prompts and now_s - self._ended_s < TOGETHER_S:
            together = self._prompts.pop()
            tokens, took_s = tokens + together.tokens, took_s + together.took_s
        self._ended_s = now_s
        self._prompts.append(ReadPrompt(tokens, took_s))
        is_known = len(self._prompts) >= PROMPTS_MIN
        self._ns_per_token = round(1e9 * self._s_per_token()) if is_known else 0

    def _s_per_token(self) -> float:
        """Return the time per token, 0 if unknown."""
        count = len(self._prompts)
        mean_tokens = sum(p.tokens for p in self._prompts) / count
        mean_s = sum(p.took_s for p in self._prompts) / count
        variance = sum((p.tokens - mean_tokens) ** 2 for p in self._prompts) / count
        if variance < (SPREAD_MIN * mean_tokens) ** 2:
            return mean_s / mean_tokens if mean_s >= ALIKE_S_MIN else 0.0
        slope = sum((p.tokens - mean_tokens) * p.took_s for p in self._prompts) / count / variance
        shortest_s = min(p.took_s for p in self._prompts)
        constant_s = max(0.0, min(shortest_s, mean_s - slope * mean_tokens))
        return (mean_s - constant_s) / mean_tokens
