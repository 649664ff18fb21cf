"""Token rates, measured over recent steps.

A rate that was not measured for FORGET_S is reported as unknown. Otherwise a replica that was once
measured as slow would get no requests, and so never show that it is fast again. While its rate is
unknown a replica is assumed to be as fast as others of its kind.
"""

from dataclasses import dataclass, field
from typing import Final

from nodeagent.engine.core.generation import StepOutput

FORGET_S: Final = 120.0
_DECAY_PER_STEP: Final = 0.95
_PREFILL_DOMINATES: Final = 8
"""A step with more than this many times as many prompt tokens as decodes measures prefill."""
_PREFILL_TOKENS_MIN: Final = 32


@dataclass(slots=True)
class TokenRate:
    """Tokens per second over recent steps, exponentially weighted. Ignores the first, cold step."""

    _tokens: float = 0.0
    _seconds: float = 0.0
    _is_cold: bool = True

    def record_step(self, tokens: int, seconds: float) -> None:
        """Add the tokens of one step."""
        if self._is_cold:
            self._is_cold = False
            return
        self._tokens = self._tokens * _DECAY_PER_STEP + tokens
        self._seconds = self._seconds * _DECAY_PER_STEP + seconds

    def reset(self) -> None:
        """Discard what was measured. The next step is measured: only the first ever is cold."""
        self._tokens = self._seconds = 0.0

    @property
    def per_s(self) -> float:
        """The rate; 0 before the first measurement."""
        return round(self._tokens / self._seconds, 1) if self._seconds > 0 else 0.0


@dataclass(slots=True)
class StepRates:
    """The rates of prefill and decode, each measured over the steps that it dominates."""

    prefill: TokenRate = field(default_factory=TokenRate)
    decode: TokenRate = field(default_factory=TokenRate)
    steps: int = 0
    seconds: float = 0.0
    rows: int = 0
    _measured_s: float = 0.0

    def record_step(self, output: StepOutput, seconds: float, now_s: float) -> None:
        """Add one step."""
        self.steps += 1
        self.seconds += seconds
        self.rows += output.rows
        if output.prefill_tokens > _PREFILL_DOMINATES * output.decode_tokens:
            # A few tokens after a cached prefix measure the overhead of a step, not a rate.
            if output.prefill_tokens >= _PREFILL_TOKENS_MIN:
                self._start_measurement(now_s)
                self.prefill.record_step(output.prefill_tokens, seconds)
        elif output.prefill_tokens == 0:
            self._start_measurement(now_s)
            self.decode.record_step(output.decode_tokens, seconds)

    def are_known(self, now_s: float) -> bool:
        """Return whether any rate was measured recently. Safe to call from any thread."""
        return now_s - self._measured_s <= FORGET_S

    def _start_measurement(self, now_s: float) -> None:
        """Discard rates that are too old before the next one is added."""
        if not self.are_known(now_s):
            self.prefill.reset()
            self.decode.reset()
        self._measured_s = now_s
