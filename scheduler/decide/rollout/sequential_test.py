"""Sequential test of whether the new version is worse than the old one.

Both versions are compared within strata (the city of the requests, the PoP that answered), because
routers choose the version at random within each. Strata are combined with Mantel-Haenszel weights.
The interval of the difference is the confidence sequence of the normal mixture (mixture sequential
probability ratio test). The interval is valid at all evaluations together, so the test may be
repeated as counts come in without more false alarms.
"""

from collections.abc import Callable, Sequence
from math import exp, inf, isfinite, log, sqrt
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.ids import PopId
from isochrone.wire.peers.rollout import RolloutBounds
from isochrone.wire.peers.usage import Moments

FALSE_ALARM: Final = 0.01
"""The probability, per test, that a version within its bound is ever found worse."""

ERROR_SCALE: Final = 5.0
TIME_SCALE: Final = 2.0
"""The differences that the tests detect soonest, in multiples of the bound: failures tend to be
many at once, slowness gradual."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts of one version in one stratum."""

    attempts: int = 0
    failures: int = 0
    ttft: Moments = Moments()
    itl: Moments = Moments()


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """Both versions in one PoP, for requests from one city."""

    pop: PopId
    asked_pop: PopId
    old: Arm = Arm()
    new: Arm = Arm()


class Difference(NamedTuple):
    """The confidence interval of new minus old, and the worst difference allowed."""

    name: str
    low: float
    high: float
    worst: float

    @property
    def is_harm(self) -> bool:
        """Return whether the new version is shown to be worse than allowed."""
        return self.low > self.worst

    @property
    def is_fine(self) -> bool:
        """Return whether it is shown to be no worse than allowed."""
        return self.high <= self.worst

    def words(self) -> str:
        """Return the difference as text for an operator."""
        if not (isfinite(self.low) and isfinite(self.high)):
            return f"{self.name}: too few attempts to tell"
        shown = (
            "worse than" if self.is_harm else "within" if self.is_fine else "not yet distinct from"
        )
        if self.name == "errors":
            interval = f"{self.low:+.2%} to {self.high:+.2%}, {shown} +{self.worst:.2%}"
        else:
            interval = (
                f"x{exp(self.low):.3g} to x{exp(self.high):.3g}, {shown} x{exp(self.worst):.3g}"
            )
        return f"{self.name}: {interval}"


class _Sample(NamedTuple):
    size: int
    mean: float
    variance: float


def compare_arms(strata: Sequence[Stratum], bounds: RolloutBounds) -> tuple[Difference, ...]:
    """Return the differences of failures, TTFT and ITL; unbounded without attempts."""
    return (
        _difference("errors", strata, _errors, bounds.error_ratio, ERROR_SCALE),
        _difference("TTFT", strata, lambda arm: _times(arm.ttft), log(bounds.ttft_ratio)),
        _difference("ITL", strata, lambda arm: _times(arm.itl), log(bounds.itl_ratio)),
    )


def _difference(
    name: str,
    strata: Sequence[Stratum],
    sample: Callable[[Arm], _Sample],
    worst: float,
    scale: float = TIME_SCALE,
) -> Difference:
    weights = difference = variance = 0.0
    for stratum in strata:
        old, new = sample(stratum.old), sample(stratum.new)
        if old.size < 2 or new.size < 2:
            continue
        weight = old.size * new.size / (old.size + new.size)
        weights += weight
        difference += weight * (new.mean - old.mean)
        variance += weight**2 * (old.variance / old.size + new.variance / new.size)
    if weights <= 0:
        return Difference(name, -inf, inf, worst)
    middle, spread = difference / weights, variance / weights**2
    radius = _radius(spread, scale * worst)
    return Difference(name, middle - radius, middle + radius, worst)


def _radius(variance: float, scale: float) -> float:
    """Return the half width at which the mixture's likelihood ratio reaches 1 / FALSE_ALARM."""
    variance = max(variance, 1e-12)
    mixed = variance + scale**2
    evidence = log(1 / FALSE_ALARM) + 0.5 * log(mixed / variance)
    return sqrt(2 * variance * mixed / scale**2 * evidence)


def _errors(arm: Arm) -> _Sample:
    if arm.attempts <= 0:
        return _Sample(0, 0.0, 0.0)
    # Half a failure is added for the variance: without any, a failure is still possible.
    smoothed = (arm.failures + 0.5) / (arm.attempts + 1)
    return _Sample(arm.attempts, arm.failures / arm.attempts, smoothed * (1 - smoothed))


def _times(moments: Moments) -> _Sample:
    if moments.count < 2:
        return _Sample(moments.count, 0.0, 0.0)
    mean = moments.total / moments.count
    spread = moments.squares - moments.count * mean**2
    # Never less than a thousandth squared: equal times show a coarse clock, not certainty.
    return _Sample(moments.count, mean, max(spread / (moments.count - 1), 1e-6))
