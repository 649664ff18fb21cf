"""Measures how often a sequence of an engine ends while the engine runs as many as it can.

The mean is taken over as many ends as the engine has sequences: answers that begin together also
end together, and the mean over one such cycle is right, while one over fewer ends is not.
"""

from collections import deque


class SequenceEnds:
    """The ends of the generations on one replica. Times are monotonic seconds of the node."""

    def __init__(self, sequences_max: int) -> None:
        """Measure an engine that runs `sequences_max` sequences at once; 0 if that is unknown."""
        self._sequences_max = sequences_max
        self._full_since_s: float | None = None
        """Since when all sequences are taken, or the time of the last end if that is later."""
        self._intervals_ms: deque[float] = deque(maxlen=max(1, sequences_max))

    def record_begin(self, generations: int, now_s: float) -> None:
        """Note that a generation was admitted; `generations` are here now."""
        if self._full_since_s is None and 0 < self._sequences_max <= generations:
            self._full_since_s = now_s

    def record_end(self, generations: int, now_s: float) -> None:
        """Note that a generation ended; `generations` are still here."""
        if self._full_since_s is None:
            return
        self._intervals_ms.append(1000 * max(0.0, now_s - self._full_since_s))
        self._full_since_s = now_s if generations >= self._sequences_max else None

    def record_preemption(self) -> None:
        """Note that a generation was ended for another one: no sequence has become free."""
        self._full_since_s = None

    @property
    def mean_ms(self) -> float | None:
        """Return the mean time from one end to the next; None before the first."""
        if not self._intervals_ms:
            return None
        return sum(self._intervals_ms) / len(self._intervals_ms)
