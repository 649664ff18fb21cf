"""Whether KV that lies below the device is brought back or computed again: whichever is faster.

Both are measured: what copying a block took, and what a prompt token takes. This is how a sequence
that gave way comes back: its whole blocks went below as others took their places (those that nobody
took are still there), and what is brought back need not be computed. The few tokens of its last
block are computed with the next token in any case.
"""

from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS

_KEPT = 0.8
_FADES = 0.98
"""A measure that made us refuse fades with every refusal, so that copying is tried again."""


class Trade:
    """What a block costs to copy."""

    def __init__(self) -> None:
        self._block_s = 0.0

    def __repr__(self) -> str:
        return f"Trade({self._block_s * 1e3:.2f} ms a block)"

    def note(self, blocks: int, seconds: float) -> None:
        """Learn from one move of `blocks`."""
        each_s = seconds / blocks
        known = self._block_s
        self._block_s = _KEPT * known + (1 - _KEPT) * each_s if known else each_s

    def pays(self, prompt_token_s: float) -> bool:
        """Say whether a block is brought back sooner than computed; yes where either is unknown."""
        if not prompt_token_s or self._block_s <= BLOCK_TOKENS * prompt_token_s:
            return True
        self._block_s *= _FADES
        return False
