"""How many prompt tokens a step may compute beside decodes without delaying the next tokens.

A step with decodes takes at most `interval_s`, as long as the last measured speed holds. One block
of prompt tokens is always allowed, so that every step makes progress on a prompt.
"""

from typing import Final

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS

_DECAY: Final = 0.8
"""Weight of the old estimate when steps get faster. When they get slower it is replaced at once."""

SHORT_STEP_SHARE: Final = 0.2
"""The share of the interval that the prompts of a short step may take."""


class PrefillBudget:
    """Estimates of what recent steps cost, and the prompt tokens that fit into the next one."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._prefill_token_s = 0.0
        self._decodes_s = 0.0

    def __repr__(self) -> str:
        token_ms, decodes_ms = self._prefill_token_s * 1e3, self._decodes_s * 1e3
        return f"PrefillBudget({token_ms:.2f} ms a token, {decodes_ms:.1f} ms of decodes)"

    @property
    def prefill_token_s(self) -> float:
        """Seconds per prompt token; 0 before the first measurement."""
        return self._prefill_token_s

    def record_step(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Update the estimates from a finished step."""
        if not prefill_tokens:
            self._decodes_s = _updated(self._decodes_s, seconds)
        elif decode_tokens and seconds <= self._decodes_s:
            # Decodes and prompt tokens together took less than the estimate for decodes alone.
            self._decodes_s = seconds
        elif prefill_tokens >= BLOCK_TOKENS:
            decodes_s = self._decodes_s if decode_tokens else 0.0
            token_s = (seconds - decodes_s) / prefill_tokens
            self._prefill_token_s = _updated(self._prefill_token_s, token_s)

    def prompt_tokens_allowed(
        self, decodes: int, tokens_max: int, *, may_delay_others: bool = True
    ) -> int:
        """Return how many prompt tokens, at most `tokens_max`, fit beside `decodes` decodes.

        Unless the step `may_delay_others`, tenants with their first prompt, it is kept short.
        """
        if not decodes or not self._prefill_token_s:
            return tokens_max
        left_s = self.interval_s - self._decodes_s
        if not may_delay_others:
            left_s = min(left_s, SHORT_STEP_SHARE * self.interval_s)
        fitting = max(left_s / self._prefill_token_s, BLOCK_TOKENS)
        return tokens_max if fitting >= tokens_max else int(fitting)

    def prompt_tokens_alone(self, tokens_max: int) -> int:
        """Return how many prompt tokens, at most `tokens_max`, a step without decodes may have."""
        if not self._prefill_token_s:
            return tokens_max
        return int(min(tokens_max, max(self.interval_s / self._prefill_token_s, BLOCK_TOKENS)))


def _updated(estimate: float, measured: float) -> float:
    return max(measured, _DECAY * estimate + (1 - _DECAY) * measured)
