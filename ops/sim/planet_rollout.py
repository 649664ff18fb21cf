"""A rollout in the planet's week: the production rollout logic over simulated attempts.

Both versions behave alike, drawn by seed: one attempt in a thousand fails, TTFT and ITL are
lognormal. A stratum is a city with both versions; the twelve with most demand are simulated.
"""

from math import log
from typing import Final

import msgspec
import numpy as np

from isochrone.wire.models.model import Deployment
from isochrone.wire.peers.rollout import RolloutSpec, RolloutState
from isochrone.wire.peers.routes import Pop
from isochrone.wire.peers.usage import Moments
from scheduler.decide.arrays import Floats
from scheduler.decide.rollout import Arm, Rollout, StartCounts, Stratum, apply_event, judge_rollout

FAILURES: Final = 0.001
TTFT_MS: Final = (200.0, 0.5)
ITL_MS: Final = (25.0, 0.3)
STRATA: Final = 12


class PlanetRollout:
    """One rollout, judged each minute by the attempts of its current step."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.rollout = Rollout(
            rollout_id="week",
            deployment_id=deployment.deployment_id,
            from_version=deployment.version,
            to_version=deployment.version + 1,
            spec=RolloutSpec(model_id=deployment.model_id, engine=deployment.engine),
        )
        self._rng = np.random.default_rng(seed)
        self._strata: dict[int, Stratum] = {}

    def is_done(self) -> bool:
        """Return whether the new version serves all requests."""
        return self.rollout.state is RolloutState.DONE

    def advance_minute(self, demand: Floats, pops: tuple[Pop, ...], starts: StartCounts) -> str:
        """Simulate one minute of attempts; return what happened in words, or ""."""
        self.rollout = msgspec.structs.replace(
            self.rollout, step_age_s=self.rollout.step_age_s + 60.0
        )
        if starts.warm:
            share = self.rollout.current.share
            for city in np.argsort(-demand, kind="stable")[:STRATA]:
                attempts = float(demand[city]) * 60
                stratum = self._strata.get(
                    int(city), Stratum(pop=pops[city].pop, asked_pop=pops[city].pop)
                )
                self._strata[int(city)] = msgspec.structs.replace(
                    stratum,
                    old=self._add_attempts(stratum.old, attempts * (1 - share)),
                    new=self._add_attempts(stratum.new, attempts * share),
                )
        verdict = judge_rollout(self.rollout, tuple(self._strata.values()), starts)
        if verdict is None:
            return ""
        self.rollout = apply_event(self.rollout, verdict.event, verdict.reason)
        self._strata.clear()
        return f"{verdict.event.value}: {verdict.reason}"

    def _add_attempts(self, arm: Arm, attempts: float) -> Arm:
        count = int(self._rng.poisson(attempts))
        failures = int(self._rng.binomial(count, FAILURES))
        return Arm(
            attempts=arm.attempts + count,
            failures=arm.failures + failures,
            ttft=self._add_times(arm.ttft, count - failures, *TTFT_MS),
            itl=self._add_times(arm.itl, count - failures, *ITL_MS),
        )

    def _add_times(self, moments: Moments, count: int, median_ms: float, sigma: float) -> Moments:
        times = self._rng.normal(log(median_ms), sigma, count)
        return Moments(
            count=moments.count + count,
            total=moments.total + float(times.sum()),
            squares=moments.squares + float(times @ times),
        )
