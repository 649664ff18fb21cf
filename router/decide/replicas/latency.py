"""Measures a replica's round trip and its prefill rate.

A round trip is the smoothed minimum of a short window, because queues on the path only add to it.
The prefill rate starts as the route table's rate and is corrected by every first token.
"""

from collections import deque
from typing import Final

from isochrone.wire.geo import round_trip_ms
from isochrone.wire.peers.routes import Pop

RTT_SAMPLES: Final = 8
"""Samples of which the minimum is taken."""

RTT_SMOOTHING: Final = 0.3
PREFILL_TOKENS_PER_S_UNKNOWN: Final = 2000.0
"""Assumed rate before it is measured: slow enough that a measured GPU is preferred."""

RTT_MS_UNKNOWN: Final = 150.0
"""Assumed round trip between PoPs whose coordinates the route table lacks."""

PREDICTION_SMOOTHING: Final = 0.2

UNUSED_REPLICA_MS: Final = 5.0
"""Added for a replica that has not answered this router yet: its first step may be slower. TLS
handshakes are not counted, because probes keep a connection to every node."""

CORRECTION_STEP: Final = 0.1
"""How far one first token moves a correction, as a share of its error."""

KNEE_MS: Final = 200.0
"""With less predicted work an error counts mostly as overhead, with more mostly as a wrong rate."""

GAIN_MIN: Final = 0.25
GAIN_MAX: Final = 4.0
OVERHEAD_MS_MAX: Final = 2000.0
SPREAD_MS_DEFAULT: Final = 10.0
SPREADS_MAX: Final = 4.0
"""An error counts for at most this many usual errors, so that one stalled answer moves little."""

DEPTH_COST_MAX: Final = 2e-3
DEPTH_COST_STEP: Final = 0.05
"""How far one prompt moves the depth cost. The first prompts move it further: by 1/n each."""

DEPTH_COST_PREFILL_MS_MIN: Final = 200.0
"""A prompt with a shorter prefill teaches nothing about depth."""

DEPTH_COST_ERROR_MAX: Final = 0.5
"""An error counts for at most this share of the prompt's prefill time."""

REPORTED_GAIN_MIN: Final = 1.25
"""A node's measurement counts if its replica is at least this many times slower than the table
says. Less may be answers that the replica generates meanwhile, or prompts that other routers took
to be cached."""

REPORTED_CHANGE_MIN: Final = 0.05
"""A measurement that differs by a smaller share changes nothing."""

CORRECTION_HALF_LIFE_S: Final = 45.0
"""A replica that does not answer for this long loses half of its correction. Without this, a
replica that was slow once would never be tried again."""


class RoundTripFilter:
    """The round trip to one node: moving average of the minimum of the last samples."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=RTT_SAMPLES)
        self.rtt_ms: float | None = None

    def add(self, sample_ms: float) -> float:
        """Take one sample and return the new estimate."""
        self._samples.append(sample_ms)
        minimum_ms = min(self._samples)
        if self.rtt_ms is None:
            self.rtt_ms = minimum_ms
        else:
            self.rtt_ms += RTT_SMOOTHING * (minimum_ms - self.rtt_ms)
        return self.rtt_ms


def expected_rtt_ms(here: Pop | None, there: Pop | None) -> float:
    """Return the round trip to expect from the distance, for use until one is measured."""
    if here is None or there is None:
        return RTT_MS_UNKNOWN
    return round_trip_ms(here.latitude, here.longitude, there.latitude, there.longitude)


def prompt_token_ms(tokens_per_s: float) -> float:
    """Return how long a replica takes to read a token of a prompt."""
    return 1000.0 / (tokens_per_s if tokens_per_s > 0 else PREFILL_TOKENS_PER_S_UNKNOWN)


def moving_average(old: float | None, sample: float, weight: float = PREDICTION_SMOOTHING) -> float:
    """Return the exponentially weighted average after one more sample."""
    return sample if old is None else old + weight * (sample - old)


class DepthCost:
    """How much more a token deep in a prompt costs than one at its beginning, for one model.

    Because of attention, a token at depth d takes 1 + d * per_token times as long. That depends on
    the model, not on the replica, so all replicas of a deployment teach the same value. It starts
    from the model's dimensions (`model_shape.depth_cost_per_token`), if they are known.
    """

    def __init__(self) -> None:
        """Start at 0, weighted as one prompt."""
        self._computed = 0.0
        self.per_token = 0.0
        self._mean_depth = 0.0
        self._prompts = 1

    def expect(self, computed: float) -> None:
        """Start from the cost that the model's dimensions give; 0 if they are unknown.

        No single prompt moves that far. A cost that was expected before changes nothing.
        """
        if computed != self._computed:
            self._computed = computed
            self.per_token = max(0.0, min(DEPTH_COST_MAX, computed))
            self._prompts = round(1 / DEPTH_COST_STEP)
            self._mean_depth = 1.0 / computed if computed > 0 else 0.0

    def learn(self, predicted_ms: float, depth: float, error_ms: float) -> None:
        """Learn from a prompt that hardly queued: at mean `depth` it took prediction + error.

        Normalised least mean squares: a prompt deeper than usual teaches more than a shallow one.
        """
        flat_ms = predicted_ms / (1.0 + depth * self.per_token)
        if flat_ms < DEPTH_COST_PREFILL_MS_MIN:
            return
        self._prompts += 1
        step = max(DEPTH_COST_STEP, 1.0 / self._prompts)
        self._mean_depth += step * (depth - self._mean_depth)
        error = max(-DEPTH_COST_ERROR_MAX, min(DEPTH_COST_ERROR_MAX, error_ms / flat_ms))
        change = step * error * 2.0 * depth / (depth * depth + self._mean_depth * self._mean_depth)
        self.per_token = max(0.0, min(DEPTH_COST_MAX, self.per_token + change))


def prefill_work(prompt_tokens: float, cached_tokens: float, depth_cost_per_token: float) -> float:
    """Return the work of reading the uncached tokens, in tokens at the beginning of a prompt."""
    return (prompt_tokens - cached_tokens) * (
        1.0 + depth_cost_per_token * (prompt_tokens + cached_tokens) / 2
    )


class LatencyCorrection:
    """One replica's correction: observed time = overhead + gain * predicted time.

    Overhead and gain are learned by normalised least mean squares. An error counts for at most
    SPREADS_MAX usual errors, so a stalled answer moves little, while a lasting change is learned in
    a few dozen answers.
    """

    def __init__(self) -> None:
        """Start with the route table's rate."""
        self.gain = 1.0
        """How many times slower the replica is than its rate says, before it fades."""
        self.reported_gain = 1.0
        """The gain by the node's measurement, over the requests of all routers: what the own gain
        begins with, and fades to."""
        self.overhead_ms = 0.0
        """The time of a first token besides queue and prefill, before it fades."""
        self._learned_at_s = 0.0
        self.spread_ms = SPREAD_MS_DEFAULT
        """The usual error of a prediction."""
        self.answers = 0

    def __repr__(self) -> str:
        return (
            f"LatencyCorrection({self.overhead_ms:.0f} ms + {self.gain:.2f} x, "
            f"spread {self.spread_ms:.0f} ms, {self.answers} answers)"
        )

    def record_reported(self, gain: float) -> bool:
        """Take the gain that the replica's node has measured; return whether it has changed.

        The own gain changes as much, but no further than the measured one, and not at all if it
        had left the old one in that direction, because it has learned of the change already.
        """
        gain = 1.0 if gain < REPORTED_GAIN_MIN else min(GAIN_MAX, gain)
        if abs(gain - self.reported_gain) < REPORTED_CHANGE_MIN * self.reported_gain:
            return False
        changed_as_much = self.gain * gain / self.reported_gain
        self.gain = sorted((self.gain, gain, changed_as_much))[1]
        self.reported_gain = gain
        return True

    def gain_at(self, now_s: float) -> float:
        """Return the gain, faded by the time since the last answer."""
        return self.reported_gain + (self.gain - self.reported_gain) * self.retained(now_s)

    def overhead_ms_at(self, now_s: float) -> float:
        """Return the overhead, faded by the time since the last answer."""
        return self.overhead_ms * self.retained(now_s)

    def retained(self, now_s: float) -> float:
        """Return the share of the correction that still counts."""
        idle_s = now_s - self._learned_at_s
        if idle_s < CORRECTION_HALF_LIFE_S / 8:
            return 1.0
        retained: float = 0.5 ** (idle_s / CORRECTION_HALF_LIFE_S)
        return retained

    def learn(
        self, predicted_ms: float, took_ms: float, now_s: float, certainty: float = 1.0
    ) -> float:
        """Learn from one first token; return the error in ms of the prediction before learning.

        `predicted_ms` is queue and prefill by the rate alone, uncorrected. `took_ms` excludes the
        round trip. `certainty` in [0, 1] weights the error: a prediction that is mostly the queue
        of other requests says little about the replica.
        """
        self.gain, self.overhead_ms = self.gain_at(now_s), self.overhead_ms_at(now_s)
        self._learned_at_s = now_s
        error_ms = took_ms - (self.overhead_ms + self.gain * predicted_ms)
        limit_ms = SPREADS_MAX * self.spread_ms
        bounded_ms = max(-limit_ms, min(limit_ms, error_ms))
        size = predicted_ms / KNEE_MS
        step_ms = CORRECTION_STEP * certainty * bounded_ms / (1.0 + size * size)
        overhead_ms = self.overhead_ms + step_ms
        self.overhead_ms = max(-OVERHEAD_MS_MAX / 10, min(OVERHEAD_MS_MAX, overhead_ms))
        self.gain = max(GAIN_MIN, min(GAIN_MAX, self.gain + step_ms * size / KNEE_MS))
        self.spread_ms += CORRECTION_STEP * (abs(bounded_ms) - self.spread_ms)
        self.spread_ms = max(1.0, self.spread_ms)
        self.answers += 1
        return error_ms
