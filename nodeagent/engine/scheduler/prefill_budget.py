"""Decides how many prompt tokens a step may compute beside decodes, without delaying these.

A step with decodes takes at most `interval_s`, as long as the last measured speed holds. One block
of prompt tokens is always allowed, so that every step makes progress on a prompt.

A step without decodes takes at most STEP_S_MAX as measured: cancelled requests, new prompts and
copies of KV wait for the end of a step.

A step that ends a prompt begins no other one after it if its prompts take much longer than decodes:
their first tokens would wait for the others'. Prompts that end in the same step also make answers
that begin together, and those of one length end together, so that the next prompts come together.

The next prompt of a small tenant may have to wait for the current step. A short step, for its sake,
computes only a share of the pending prompt tokens. So short prompts are cut into pieces that take
no longer than half of the decodes, and many long prompts are hardly slowed down.
"""

from typing import Final

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS

_DECAY: Final = 0.8
"""Weight of the old estimate when steps get faster."""

_GROWTH_MAX: Final = 2.0
"""The most by which an estimate grows at once when steps get slower. One step that the machine held
up must not make the next prompts look many times as long: they would be cut into small pieces."""

SHORT_STEP_SHARE: Final = 0.2
"""The share of the interval that the prompts of a short step may take, and the share of the pending
prompt tokens that it computes."""

_SHORT_STEP_DECODES_SHARE: Final = 0.5
"""The prompts of a short step may take this share of its decodes' time, if little is pending."""

PROMPTS_PER_DECODES_S: Final = 2.0
"""A step begins no further prompt once its prompts take this many times as long as its decodes:
steps of single prompts then compute all of them at two thirds of the rate of long steps at least.
With less, requests that come faster than they are served wait longer for short steps."""

STEP_S_MAX: Final = 2.0
"""Shorter steps would make slow devices read their weights too often: 5 GB take 0.25 s on a CPU."""

UNMEASURED_TOKENS_MAX: Final = 256
"""The prompt tokens of a step before the first measurement."""


class PrefillBudget:
    """Estimates of what recent steps cost, and the prompt tokens that fit into the next one."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._prefill_token_s = 0.0
        self._decodes_s = 0.0
        self._decodes = 1
        """Of the step in which `_decodes_s` was measured last."""

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
            self._decodes = max(1, decode_tokens)
        elif decode_tokens and seconds <= self._decodes_s:
            # Decodes and prompt tokens together took less than the estimate for decodes alone.
            self._decodes_s, self._decodes = seconds, decode_tokens
        elif prefill_tokens >= BLOCK_TOKENS:
            decodes_s = self._decodes_s if decode_tokens else 0.0
            token_s = (seconds - decodes_s) / prefill_tokens
            self._prefill_token_s = _updated(self._prefill_token_s, token_s)

    def prompt_tokens_allowed(
        self, decodes: int, tokens_max: int, *, short_step_of: int | None = None
    ) -> int:
        """Return how many prompt tokens, at most `tokens_max`, fit beside `decodes` decodes.

        `short_step_of` is the number of pending prompt tokens if the step is to be short.
        """
        if not self._prefill_token_s:
            return min(tokens_max, UNMEASURED_TOKENS_MAX)
        if not decodes:
            fitting = max(STEP_S_MAX / self._prefill_token_s, BLOCK_TOKENS)
            return tokens_max if fitting >= tokens_max else int(fitting)
        left_s = self.interval_s - self._decodes_s
        if short_step_of is not None:
            pending_s = min(short_step_of * self._prefill_token_s, self.interval_s)
            short_s = max(
                SHORT_STEP_SHARE * pending_s,
                min(
                    _SHORT_STEP_DECODES_SHARE * self._decodes_s, SHORT_STEP_SHARE * self.interval_s
                ),
            )
            left_s = min(left_s, short_s)
        fitting = max(left_s / self._prefill_token_s, BLOCK_TOKENS)
        return tokens_max if fitting >= tokens_max else int(fitting)

    def may_end_step(self, prompt_tokens: int, decodes: int) -> bool:
        """Return whether a step that ends a prompt need not begin another one.

        `prompt_tokens` is what it computes of prompts. More decodes than were measured count as if
        each took as long: while prompts keep coming, no step measures decodes alone.
        """
        prompts_s = prompt_tokens * self._prefill_token_s
        decodes_s = self._decodes_s * max(1.0, decodes / self._decodes)
        return prompts_s > PROMPTS_PER_DECODES_S * decodes_s

    def prompt_tokens_alone(self, tokens_max: int, share: float = 1.0) -> int:
        """Return how many prompt tokens, at most `tokens_max`, a step without decodes may have.

        The step takes at most this share of the interval.
        """
        if not self._prefill_token_s:
            return tokens_max
        fitting = share * self.interval_s / self._prefill_token_s
        return int(min(tokens_max, max(fitting, BLOCK_TOKENS)))


def _updated(estimate: float, measured: float) -> float:
    if not estimate:
        return measured
    if measured > estimate:
        return min(measured, _GROWTH_MAX * estimate)
    return _DECAY * estimate + (1 - _DECAY) * measured
