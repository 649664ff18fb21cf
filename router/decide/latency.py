"""How far a replica is and how soon it would answer, from what was measured and observed.

A round trip is the least of a short window, smoothed: queues on the way only ever add to it. How
fast a replica reads prompts begins as the table's rate and is corrected by every first token.
"""

from collections import deque
from typing import Final

from isochrone.wire.geo import round_trip_ms
from isochrone.wire.routes import Pop

WINDOW: Final = 8
SMOOTHING: Final = 0.3
PREFILL_TOKENS_PER_S_UNKNOWN: Final = 2000.0
"""Stands in for a rate not measured yet: slow enough that a measured GPU is preferred."""

RTT_MS_UNKNOWN: Final = 150.0
"""Between PoPs whose coordinates the table lacks."""

PREDICTION_SMOOTHING: Final = 0.2

UNUSED_REPLICA_MS: Final = 5.0
"""A replica that has answered nobody here yet may have its first, slower step before it. Handshakes
are not counted: probes keep a connection to every node."""

CORRECTION_STEP: Final = 0.1
"""How far one observation moves the correction."""

KNEE_MS: Final = 200.0
"""Below this much predicted work an error is taken for overhead, above it for a wrong rate."""

GAIN_MIN: Final = 0.25
GAIN_MAX: Final = 4.0
OVERHEAD_MS_MAX: Final = 2000.0
SPREAD_MS_DEFAULT: Final = 10.0
SPREADS_MAX: Final = 4.0
"""An error of more spreads than this counts as this many: one stalled answer is no new truth."""

DEPTH_COST_MAX: Final = 2e-3
DEPTH_COST_STEP: Final = 0.05
"""How far one prompt moves it; the first few move it further, each by its share of all so far."""

DEPTH_COST_PREFILL_MS_MIN: Final = 200.0
"""What is read sooner tells nothing of depth."""

DEPTH_COST_ERROR_MAX: Final = 0.5
"""An error counts for no more than this share of the time that a prompt takes."""

CORRECTION_HALF_LIFE_S: Final = 45.0
"""Unheard of for this long, a correction has lost half of itself: else nobody would try again."""


class RoundTripFilter:
    """The round trip to one node from samples: EWMA of the least of the last few."""

    def __init__(self) -> None:
        """Start unmeasured."""
        self._last: deque[float] = deque(maxlen=WINDOW)
        self.rtt_ms: float | None = None

    def measured(self, sample_ms: float) -> float:
        """Take one sample and return the new estimate."""
        self._last.append(sample_ms)
        least = min(self._last)
        if self.rtt_ms is None:
            self.rtt_ms = least
        else:
            self.rtt_ms += SMOOTHING * (least - self.rtt_ms)
        return self.rtt_ms


def expected_rtt_ms(here: Pop | None, there: Pop | None) -> float:
    """Return the round trip to expect by distance, for as long as none is measured."""
    if here is None or there is None:
        return RTT_MS_UNKNOWN
    return round_trip_ms(here.latitude, here.longitude, there.latitude, there.longitude)


def prefill_ms(tokens: float, tokens_per_s: float) -> float:
    """Return how long `tokens` of prompt take at a replica."""
    rate = tokens_per_s if tokens_per_s > 0 else PREFILL_TOKENS_PER_S_UNKNOWN
    return 1000.0 * tokens / rate


def moving_average(old: float | None, sample: float, weight: float = PREDICTION_SMOOTHING) -> float:
    """Return the moving average after one more sample."""
    return sample if old is None else old + weight * (sample - old)


class DepthCost:
    """How much more a token deep in a prompt costs than one at its beginning, for one model.

    Attention makes reading grow faster than the prompt: a token at depth d takes 1 + d * per_token
    times as long. That is the model's nature, not the replica's, so all its replicas teach it.
    """

    def __init__(self) -> None:
        """Begin with straight growth, believed as much as one prompt would be."""
        self.per_token = 0.0
        self._depth = 0.0
        self._prompts = 1

    def observed(self, ms: float, depth: float, error_ms: float) -> None:
        """Learn from one prompt that hardly waited: at mean `depth` it took `ms` + error.

        By least mean squares: one deeper than usual teaches more than a shallow one.
        """
        straight_ms = ms / (1.0 + depth * self.per_token)
        if straight_ms < DEPTH_COST_PREFILL_MS_MIN:
            return
        self._prompts += 1
        step = max(DEPTH_COST_STEP, 1.0 / self._prompts)
        self._depth += step * (depth - self._depth)
        share = max(-DEPTH_COST_ERROR_MAX, min(DEPTH_COST_ERROR_MAX, error_ms / straight_ms))
        learned = step * share * 2.0 * depth / (depth * depth + self._depth * self._depth)
        self.per_token = max(0.0, min(DEPTH_COST_MAX, self.per_token + learned))


def prefill_work(tokens: float, cached: float, per_token: float) -> float:
    """Return the work of reading what is not cached, in tokens at a prompt's beginning."""
    return (tokens - cached) * (1.0 + per_token * (tokens + cached) / 2)


class LatencyCorrection:
    """One replica's correction: time observed = overhead + gain * time predicted, give or take.

    Both are learned by normalised least mean squares. An error counts for at most SPREADS_MAX times
    the usual one, so a stalled answer moves little and a true change moves all within some dozens.
    """

    def __init__(self) -> None:
        """Believe the table's rate until observed otherwise."""
        self._gain = 1.0
        self._overhead_ms = 0.0
        self._at_s = 0.0
        self.spread_ms = SPREAD_MS_DEFAULT
        self.answers = 0

    def __repr__(self) -> str:
        return (
            f"Pace({self._overhead_ms:.0f} ms + {self._gain:.2f} x, "
            f"spread {self.spread_ms:.0f} ms, {self.answers} answers)"
        )

    def at(self, now_s: float) -> tuple[float, float]:
        """Return how much slower it is than its rate says, and what first tokens take besides."""
        kept = self._kept(now_s)
        return 1.0 + (self._gain - 1.0) * kept, self._overhead_ms * kept

    def observed(
        self, predicted_ms: float, took_ms: float, now_s: float, certainty: float = 1.0
    ) -> float:
        """Learn from one first token; return the error in ms as it was before learning.

        `predicted_ms` is queue and prefill by the rate alone, uncorrected; `took_ms` is without the
        round trip. `certainty` is the share of the prediction that was no guess about others: an
        error of the queue says little about the replica.
        """
        self._gain, self._overhead_ms = self.at(now_s)
        self._at_s = now_s
        error_ms = took_ms - (self._overhead_ms + self._gain * predicted_ms)
        bound_ms = SPREADS_MAX * self.spread_ms
        held_ms = max(-bound_ms, min(bound_ms, error_ms))
        size = predicted_ms / KNEE_MS
        step_ms = CORRECTION_STEP * certainty * held_ms / (1.0 + size * size)
        overhead_ms = self._overhead_ms + step_ms
        self._overhead_ms = max(-OVERHEAD_MS_MAX / 10, min(OVERHEAD_MS_MAX, overhead_ms))
        self._gain = max(GAIN_MIN, min(GAIN_MAX, self._gain + step_ms * size / KNEE_MS))
        self.spread_ms += CORRECTION_STEP * (abs(held_ms) - self.spread_ms)
        self.spread_ms = max(1.0, self.spread_ms)
        self.answers += 1
        return error_ms

    def _kept(self, now_s: float) -> float:
        silent_s = now_s - self._at_s
        return (
            1.0
            if silent_s < CORRECTION_HALF_LIFE_S / 8
            else 0.5 ** (silent_s / CORRECTION_HALF_LIFE_S)
        )
