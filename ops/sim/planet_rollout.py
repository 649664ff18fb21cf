"""A rollout in the planet's week: the production steps and verdicts over simulated attempts.

Both versions fail and answer alike, drawn by seed: one attempt in a thousand fails, times to first
token and between tokens are lognormal. A stratum is a city with both versions; the twelve that ask
most are drawn.
"""

from math import log
from typing import Final

import msgspec
import numpy as np

from isochrone.wire.model import Deployment
from isochrone.wire.rollout import RolloutSpec, RolloutState
from isochrone.wire.routes import Pop
from isochrone.wire.usage import Moments
from scheduler.decide.placement.search.load_assignment import Floats
from scheduler.decide.rollout.lifecycle import Rollout, StartCounts, apply_event, judge_rollout
from scheduler.decide.rollout.sequential_test import Arm, Stratum

FAILURES: Final = 0.001
TTFT_MS: Final = (200.0, 0.5)
ITL_MS: Final = (25.0, 0.3)
STRATA: Final = 12


class PlanetRollout:
    """One rollout on its way, judged each minute by what its users saw in this step."""

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
        """Say whether the new version has everybody."""
        return self.rollout.state is RolloutState.DONE

    def minute(self, asked: Floats, pops: tuple[Pop, ...], starts: StartCounts) -> str:
        """See what one minute shows; return what happened, in words, if something did."""
        self.rollout = msgspec.structs.replace(
            self.rollout, step_age_s=self.rollout.step_age_s + 60.0
        )
        if starts.warm:
            share = self.rollout.current.share
            for city in np.argsort(-asked, kind="stable")[:STRATA]:
                attempts = float(asked[city]) * 60
                was = self._strata.get(
                    int(city), Stratum(pop=pops[city].pop, asked_pop=pops[city].pop)
                )
                self._strata[int(city)] = msgspec.structs.replace(
                    was,
                    old=self._more(was.old, attempts * (1 - share)),
                    new=self._more(was.new, attempts * share),
                )
        verdict = judge_rollout(self.rollout, tuple(self._strata.values()), starts)
        if verdict is None:
            return ""
        self.rollout = apply_event(self.rollout, verdict.event, verdict.reason)
        self._strata.clear()
        return f"{verdict.event.value}: {verdict.reason}"

    def _more(self, arm: Arm, attempts: float) -> Arm:
        count = int(self._rng.poisson(attempts))
        failures = int(self._rng.binomial(count, FAILURES))
        return Arm(
            attempts=arm.attempts + count,
            failures=arm.failures + failures,
            ttft=self._times(arm.ttft, count - failures, *TTFT_MS),
            itl=self._times(arm.itl, count - failures, *ITL_MS),
        )

    def _times(self, was: Moments, count: int, median_ms: float, sigma: float) -> Moments:
        times = self._rng.normal(log(median_ms), sigma, count)
        return Moments(
            count=was.count + count,
            total=was.total + float(times.sum()),
            squares=was.squares + float(times @ times),
        )
