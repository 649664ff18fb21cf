"""How far a node is and how soon it would answer.

A round trip is the least of a short window, smoothed: queues on the way only ever add to it.
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


def prefill_ms(tokens: int, tokens_per_s: float) -> float:
    """Return how long `tokens` of prompt take at a replica."""
    rate = tokens_per_s if tokens_per_s > 0 else PREFILL_TOKENS_PER_S_UNKNOWN
    return 1000.0 * tokens / rate


def smoothed(old: float | None, sample: float, weight: float = PREDICTION_SMOOTHING) -> float:
    """Return the moving average after one more sample."""
    return sample if old is None else old + weight * (sample - old)
