"""Token rates, measured over recent steps."""

from dataclasses import dataclass, field
from typing import Final

from nodeagent.engine.step import Stepped

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

    def note(self, stepped: Stepped, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.seconds += seconds
        self.rows += stepped.rows
        if stepped.prefill_tokens > _PREFILL_DOMINATES * stepped.decode_tokens:
            # The few tokens after a cached prefix take a step's overhead, which is no rate.
            if stepped.prefill_tokens >= _PREFILL_TOKENS_MIN:
                self.prefill.note(stepped.prefill_tokens, seconds)
        elif stepped.prefill_tokens == 0:
            self.decode.note(stepped.decode_tokens, seconds)
