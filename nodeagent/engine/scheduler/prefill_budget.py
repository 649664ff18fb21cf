"""How many prompt tokens a step may take beside decodes, so that the next token comes in time.

The bound: a step that decodes takes at most `interval_s`, as long as the machine's last measured
speed holds and the decodes alone leave room for one block of prompt. That block is always granted:
a prompt moves in every step.
"""

from typing import Final

from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS

_KEPT: Final = 0.8
"""A measure is forgotten slowly when steps get faster, and at once when they get slower."""


class Pace:
    """What steps have cost of late, and what fits into the next."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._prompt_token_s = 0.0
        self._decodes_s = 0.0

    def __repr__(self) -> str:
        return f"Pace({self._prompt_token_s * 1e3:.2f} ms a token, {self._decodes_s * 1e3:.1f} ms)"

    @property
    def prompt_token_s(self) -> float:
        """What a prompt token takes; 0 before it was measured."""
        return self._prompt_token_s

    def note(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Learn from a step."""
        if not prefill_tokens:
            self._decodes_s = _follow(self._decodes_s, seconds)
        elif decode_tokens and seconds <= self._decodes_s:
            # With prompt tokens beside them, and sooner than was thought of them alone.
            self._decodes_s = seconds
        elif prefill_tokens >= BLOCK_TOKENS:
            decodes_s = self._decodes_s if decode_tokens else 0.0
            each_s = (seconds - decodes_s) / prefill_tokens
            self._prompt_token_s = _follow(self._prompt_token_s, each_s)

    def prompt_tokens(self, decodes: int, budget: int) -> int:
        """Return how many of `budget` prompt tokens a step with `decodes` may take."""
        if not decodes or not self._prompt_token_s:
            return budget
        room = max((self.interval_s - self._decodes_s) / self._prompt_token_s, BLOCK_TOKENS)
        return budget if room >= budget else int(room)


def _follow(known: float, seen: float) -> float:
    return max(seen, _KEPT * known + (1 - _KEPT) * seen)
