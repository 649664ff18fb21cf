"""What the engine tells of itself: counts after each step, and measured token rates."""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from nodeagent.engine.step import Stepped

_KEPT_PER_STEP: Final = 0.95
_PREFILL_DOMINATES: Final = 8
"""A step with this many times more prompt tokens than decodes measures prefill."""
_PREFILL_TOKENS_MIN: Final = 32


class Snapshot(msgspec.Struct, frozen=True):
    """The engine after one step; replaced whole, so that any thread may read it."""

    running: int
    waiting: int
    prefill_tokens_in_flight: int
    decode_tokens_in_flight: int
    """Tokens that may still be generated: every sequence up to its max_tokens."""
    kv_blocks_used: int
    kv_blocks_total: int
    preemptions_total: int
    steps_total: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    tokens_out_total: int
    prompt_tokens_total: int
    prefix_hit_tokens_total: int
    drafted_tokens_total: int = 0
    """Drafts that were verified."""
    accepted_tokens_total: int = 0
    """Drafts that held."""
    preempted_kept_tokens_total: int = 0
    """Tokens whose KV was still there, or brought back, when their sequence ran on."""
    preempted_lost_tokens_total: int = 0
    """Those that were computed again."""
    draft_acceptance: float = 0.0
    """Share of recent drafts that held."""
    step_seconds_total: float = 0.0
    step_rows_total: int = 0
    """Tokens that steps computed, drafts that did not hold included: by step, the batch."""


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
