"""The load that other routers put on a replica, estimated from the replica's own reports.

A report reaches this router late. The older the report, the closer the estimate moves to the
average of past reports, as fast as past deviations from that average have faded.
"""

from typing import Final

from isochrone.native_class import mypyc_attr

LOAD_FRESH_S: Final = 10.0
"""A report counts in full for this long, then fades to nothing over the same time again."""

SMOOTHING: Final = 0.1
"""Weight of one report in the running averages."""


@mypyc_attr(acyclic=True, free_list_len=1)
class OtherTokens:
    """Tokens of other routers at one replica now.

    Their prompts are split in two: `reported_prefill` is what remains of the last report, and
    `assumed_prefill` is the average that stands in for the part of the report that has faded.
    """

    __slots__ = ("assumed_prefill", "decode", "reported_prefill")

    def __init__(self, reported_prefill: float, assumed_prefill: float, decode: float) -> None:
        self.reported_prefill = reported_prefill
        self.assumed_prefill = assumed_prefill
        self.decode = decode

    @property
    def prefill(self) -> float:
        """Return the prompt tokens, reported and assumed."""
        return self.reported_prefill + self.assumed_prefill


NO_TOKENS: Final = OtherTokens(0.0, 0.0, 0.0)


class OtherRoutersLoad:
    """Reports of one replica: the newest, their average, and how long deviations last."""

    def __init__(self) -> None:
        self.decode_tokens = 0
        self.reported_at_s = -1e18
        self._prefill_tokens = 0
        self._mean = 0.0
        self._deviation = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._gap_s = 1.0
        self._correlation = 1.0
        """Share of a deviation that is left after one usual gap between reports."""

    def record(self, prefill_tokens: int, decode_tokens: int, reported_at_s: float) -> bool:
        """Take one report; return False if a newer one is known."""
        gap_s = reported_at_s - self.reported_at_s
        if gap_s <= 0:
            return False
        self.reported_at_s = reported_at_s
        self._prefill_tokens, self.decode_tokens = prefill_tokens, decode_tokens
        if gap_s > LOAD_FRESH_S:
            self._mean, self._deviation = float(prefill_tokens), 0.0
            return True
        deviation = prefill_tokens - self._mean
        self._variance += SMOOTHING * (deviation * deviation - self._variance)
        self._covariance += SMOOTHING * (deviation * self._deviation - self._covariance)
        self._gap_s += SMOOTHING * (gap_s - self._gap_s)
        self._deviation = deviation
        self._mean += SMOOTHING * deviation
        if self._variance > 0:
            self._correlation = min(1.0, max(0.01, self._covariance / self._variance))
        return True

    def estimate(self, now_s: float) -> OtherTokens:
        """Return the tokens that other routers are likely to have there now."""
        age_s = now_s - self.reported_at_s
        fresh = min(1.0, 2.0 - age_s / LOAD_FRESH_S)
        if fresh <= 0.0:
            return NO_TOKENS
        lasting: float = self._correlation ** (max(0.0, age_s) / self._gap_s)
        assumed = fresh * (1.0 - lasting) * self._mean
        return OtherTokens(
            fresh * lasting * self._prefill_tokens, assumed, fresh * self.decode_tokens
        )
