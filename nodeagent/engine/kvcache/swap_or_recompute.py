"""Decides whether KV below the device is copied back or computed again: whichever is faster.

Both costs are measured: copying a block, and computing a prompt token. A preempted sequence resumes
this way too. Its full blocks moved to the tiers below as others were allocated in their place, and
are still cached where they were not. Restored blocks need not be computed; the tokens of the last,
partial block are always computed.
"""

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS

_DECAY = 0.8
"""Weight of the old estimate when a copy is measured."""
_REFUSAL_DECAY = 0.98
"""The estimate shrinks with every refusal, so that copying is tried again in time."""


class SwapOrRecompute:
    """The measured cost of copying a block, and the decision from it."""

    def __init__(self) -> None:
        self._block_s = 0.0

    def __repr__(self) -> str:
        return f"SwapOrRecompute({self._block_s * 1e3:.2f} ms a block)"

    def record_swap(self, blocks: int, seconds: float) -> None:
        """Update the estimate from a copy of `blocks` blocks."""
        block_s = seconds / blocks
        known = self._block_s
        self._block_s = _DECAY * known + (1 - _DECAY) * block_s if known else block_s

    def should_swap_in(self, prefill_token_s: float) -> bool:
        """Return whether copying is faster than computing; True while either is unmeasured."""
        if not prefill_token_s or self._block_s <= BLOCK_TOKENS * prefill_token_s:
            return True
        self._block_s *= _REFUSAL_DECAY
        return False
