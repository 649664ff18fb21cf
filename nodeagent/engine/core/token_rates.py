"""Token rates, measured over recent steps.

Where none was measured for FORGET_S nothing is known any more: a replica that is thought slow is
not asked, so that nothing would ever show that it is fast again. Unmeasured, it is as fast as its
like.
"""

from dataclasses import dataclass, field
from typing import Final

from nodeagent.engine.core.step import Stepped

FORGET_S: Final = 120.0
_KEPT_PER_STEP: Final = 0.95
_PREFILL_DOMINATES: Final = 8
"""A step with this many times more prompt tokens than decodes measures prefill."""
_PREFILL_TOKENS_MIN: Final = 32


@dataclass(slots=True)
class Rate:
    """Tokens a second, over recent steps weighted exponentially, all but the first: it is cold."""

    _tokens: float = 0.0
    _seconds: float = 0.0
    _is_cold: bool = True

    def note(self, tokens: int, seconds: float) -> None:
        """Count one step's tokens."""
        if self._is_cold:
            self._is_cold = False
            return
        self._tokens = self._tokens * _KEPT_PER_STEP + tokens
        self._seconds = self._seconds * _KEPT_PER_STEP + seconds

    def forget(self) -> None:
        """Begin to measure anew; what is warm stays so."""
        self._tokens = self._seconds = 0.0

    @property
    def per_s(self) -> float:
        """The rate; 0 where nothing was measured yet."""
        return round(self._tokens / self._seconds, 1) if self._seconds > 0 else 0.0


@dataclass(slots=True)
class StepRates:
    """Rates of prefill and decode, each measured over the steps that it dominates."""

    prefill: Rate = field(default_factory=Rate)
    decode: Rate = field(default_factory=Rate)
    steps: int = 0
    seconds: float = 0.0
    rows: int = 0
    _measured_s: float = 0.0

    def note(self, stepped: Stepped, seconds: float, now_s: float) -> None:
        """Count one step."""
        self.steps += 1
        self.seconds += seconds
        self.rows += stepped.rows
        if stepped.prefill_tokens > _PREFILL_DOMINATES * stepped.decode_tokens:
            # The few tokens after a cached prefix take a step's overhead, which is no rate.
            if stepped.prefill_tokens >= _PREFILL_TOKENS_MIN:
                self._measuring(now_s)
                self.prefill.note(stepped.prefill_tokens, seconds)
        elif stepped.prefill_tokens == 0:
            self._measuring(now_s)
            self.decode.note(stepped.decode_tokens, seconds)

    def are_known(self, now_s: float) -> bool:
        """Say whether anything was measured of late; from any thread."""
        return now_s - self._measured_s <= FORGET_S

    def _measuring(self, now_s: float) -> None:
        if not self.are_known(now_s):
            self.prefill.forget()
            self.decode.forget()
        self._measured_s = now_s
