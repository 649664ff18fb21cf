"""The life cycle of a rollout: its transitions, and the verdicts from attempts."""

import random
from math import log
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from isochrone.wire.ids import DeploymentId, ModelId, PopId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.rollout import (
    STEPS,
    RolloutBody,
    RolloutBounds,
    RolloutSpec,
    RolloutState,
    RolloutStep,
)
from isochrone.wire.peers.usage import Moments
from scheduler.decide.rollout import Arm, Stratum, compare_arms
from scheduler.decide.rollout.lifecycle import (
    IN_PROGRESS,
    TRANSITIONS,
    InvalidRolloutEvent,
    Rollout,
    RolloutEvent,
    StartCounts,
    apply_event,
    compared_steps,
    judge_rollout,
    steps_problem,
)

WARM = StartCounts(warm=1)


def a_rollout(**fields: Any) -> Rollout:
    spec = fields.pop("spec", RolloutSpec(model_id=ModelId("m"), engine=EngineSettings()))
    return Rollout(
        rollout_id="d.1",
        deployment_id=DeploymentId("d"),
        from_version=1,
        to_version=2,
        spec=spec,
        **fields,
    )


def test_a_newer_rollout_row_is_read_and_a_misspelt_request_refused() -> None:
    newer = {"steps": [{"share": 0.5, "new": 1}], "bounds": {"attempts_min": 50, "new": 1}}
    row = msgspec.json.encode({"model_id": "m", "engine": {"new": 1}, **newer})
    spec = msgspec.json.decode(row, type=RolloutSpec)
    assert (spec.steps, spec.bounds.attempts_min) == ((RolloutStep(share=0.5),), 50)
    for misspelt in ("steps", "bounds"):
        with pytest.raises(msgspec.ValidationError, match="unknown field `new`"):
            msgspec.json.decode(msgspec.json.encode({misspelt: newer[misspelt]}), type=RolloutBody)


def moments(count: int, ms: float, spread: float = 0.5) -> Moments:
    """Return the moments of `count` lognormal times around `ms`."""
    mean = log(ms)
    return Moments(count=count, total=count * mean, squares=count * (mean**2 + spread**2))


def an_arm(attempts: int, failures: int = 0, ttft_ms: float = 200.0, itl_ms: float = 20.0) -> Arm:
    answered = attempts - failures
    return Arm(
        attempts=attempts,
        failures=failures,
        ttft=moments(answered, ttft_ms),
        itl=moments(answered, itl_ms),
    )


def seen(old: Arm, new: Arm, pop: str = "ams") -> tuple[Stratum, ...]:
    return (Stratum(pop=PopId(pop), asked_pop=PopId(pop), old=old, new=new),)


ALIKE = seen(an_arm(100_000, 100), an_arm(4_000, 4))


def test_a_rollout_advances_step_by_step_to_all_requests() -> None:
    rollout = a_rollout()
    for step in range(3):
        assert rollout.step == step
        assert rollout.current.share == STEPS[step].share
        verdict = judge_rollout(msgspec.structs.replace(rollout, step_age_s=600.0), ALIKE, WARM)
        assert verdict is not None
        rollout = apply_event(rollout, verdict.event, verdict.reason)
    assert rollout.state is RolloutState.DONE
    assert judge_rollout(rollout, ALIKE, WARM) is None


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (an_arm(200, 30), "errors"),
        (an_arm(2_000, 2, ttft_ms=300), "TTFT"),
        (an_arm(2_000, 2, itl_ms=30), "ITL"),
        (an_arm(25, 25), "errors"),
    ],
)
@pytest.mark.parametrize("state", IN_PROGRESS)
def test_harm_reverts_a_running_and_a_paused_rollout(
    new: Arm, words: str, state: RolloutState
) -> None:
    verdict = judge_rollout(a_rollout(state=state), seen(an_arm(50_000, 50), new), WARM)
    assert verdict is not None
    assert verdict.event is RolloutEvent.HARM_SHOWN
    assert words in verdict.reason
    assert apply_event(a_rollout(state=state), verdict.event).state is RolloutState.REVERTED


def test_too_few_attempts_or_too_little_time_decide_nothing() -> None:
    few = seen(an_arm(50_000, 50), an_arm(150, 0))
    assert judge_rollout(a_rollout(step_age_s=600.0), few, WARM) is None
    assert judge_rollout(a_rollout(step_age_s=10.0), ALIKE, WARM) is None
    three_failures = seen(an_arm(50_000, 0), an_arm(3, 3))
    assert judge_rollout(a_rollout(step_age_s=600.0), three_failures, WARM) is None


def test_without_the_old_version_nothing_is_compared() -> None:
    alone = seen(Arm(), an_arm(10_000, 0))
    assert judge_rollout(a_rollout(step_age_s=600.0), alone, WARM) is None
    elsewhere = (*alone, *seen(an_arm(10_000, 0), Arm(), "sin"))
    assert judge_rollout(a_rollout(step_age_s=600.0), elsewhere, WARM) is None
    waited = judge_rollout(a_rollout(step_age_s=7 * 3600.0), elsewhere, WARM)
    assert waited is not None
    assert waited.event is RolloutEvent.NOTHING_SHOWN
    assert apply_event(a_rollout(), waited.event, waited.reason).state is RolloutState.PAUSED


def test_a_distant_city_does_not_make_a_version_look_slow() -> None:
    """The new version serves mostly a distant city; within each city both are equal."""
    strata = (
        Stratum(
            pop=PopId("ams"), asked_pop=PopId("ams"),
            old=an_arm(9_000, ttft_ms=50), new=an_arm(500, ttft_ms=50),
        ),
        Stratum(
            pop=PopId("ams"), asked_pop=PopId("sin"),
            old=an_arm(1_000, ttft_ms=500), new=an_arm(4_000, ttft_ms=500),
        ),
    )  # fmt: skip
    verdict = judge_rollout(a_rollout(step_age_s=600.0), strata, WARM)
    assert verdict is not None
    assert verdict.event is RolloutEvent.STEP_PASSED


def test_a_version_without_a_slot_is_distinguished_from_one_that_fails_to_start() -> None:
    late = a_rollout(step_age_s=1801.0)
    for starts, words in ((StartCounts(), "none found a free slot"), (StartCounts(placed=1), "")):
        verdict = judge_rollout(late, (), starts)
        assert verdict is not None
        assert verdict.reason.removeprefix("no replica is warm after 1801 s").strip(": ") == words


@pytest.mark.parametrize(
    ("starts", "age_s", "event"),
    [
        (StartCounts(failed=2), 10.0, RolloutEvent.COULD_NOT_START),
        (StartCounts(failed=1), 10.0, None),
        (StartCounts(warm=1, failed=5), 10.0, None),
        (StartCounts(), 1801.0, RolloutEvent.COULD_NOT_START),
        (StartCounts(), 1700.0, None),
    ],
)
def test_a_version_that_cannot_start_is_reverted(
    starts: StartCounts, age_s: float, event: RolloutEvent | None
) -> None:
    verdict = judge_rollout(a_rollout(step_age_s=age_s), (), starts)
    assert (verdict.event if verdict else None) is event


def test_a_rollout_is_not_given_up_for_the_time_without_a_scheduler() -> None:
    """Its replica may be warm by now, and its node has not reported yet."""
    for age_s, strata, starts, event in (
        (1801.0, (), StartCounts(placed=1), RolloutEvent.COULD_NOT_START),
        (7 * 3600.0, (), WARM, RolloutEvent.NOTHING_SHOWN),
    ):
        rollout = a_rollout(step_age_s=age_s)
        assert judge_rollout(rollout, strata, starts, acting_for_s=60.0) is None
        verdict = judge_rollout(rollout, strata, starts, acting_for_s=age_s)
        assert verdict is not None
        assert verdict.event is event


def test_frequent_looks_rarely_revert_an_equal_version() -> None:
    """Three hundred rollouts of equal versions, with a hundred looks each."""
    chance = random.Random(11)
    bounds = RolloutBounds()
    alarms = passes = 0
    for _ in range(300):
        failures = [0, 0]
        for look in range(1, 101):
            failures[0] += sum(chance.random() < 0.02 for _ in range(20))
            failures[1] += chance.random() < 0.02 if look % 2 else 0
            old, new = an_arm(20 * look, failures[0]), an_arm(look, min(look, failures[1]))
            shown = compare_arms(seen(old, new), bounds)
            if any(difference.is_harm for difference in shown):
                alarms += 1
                break
        passes += all(d.is_fine for d in compare_arms(ALIKE, bounds))
    assert alarms <= 3
    assert passes == 300


@settings(max_examples=50, deadline=None)
@given(
    attempts=st.integers(0, 10**6),
    failed=st.floats(0, 1),
    old=st.integers(0, 10**6),
    ms=st.floats(0.01, 1e6),
    age_s=st.floats(0, 1e7),
    state=st.sampled_from(list(RolloutState)),
)
def test_every_verdict_is_a_valid_transition(
    attempts: int, failed: float, old: int, ms: float, age_s: float, state: RolloutState
) -> None:
    rollout = a_rollout(state=state, step_age_s=age_s)
    strata = seen(an_arm(old), an_arm(attempts, int(attempts * failed), ttft_ms=ms))
    verdict = judge_rollout(rollout, strata, WARM)
    if verdict is not None:
        assert (state, verdict.event) in TRANSITIONS
        assert verdict.reason
    assert all(difference.words() for difference in compare_arms(strata, rollout.spec.bounds))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((RolloutStep(share=1.0),), "nothing is left to compare"),
        ((RolloutStep(share=0.5), RolloutStep(share=0.1)), "smaller share"),
        ((RolloutStep(share=1.0), RolloutStep(share=1.0)), "only the last step"),
        ((RolloutStep(share=0.1), RolloutStep(share=1.0, pops=(PopId("ams"),))), "only the last"),
        (STEPS, ""),
        ((RolloutStep(share=0.5, pops=(PopId("ams"),)), RolloutStep(share=0.1)), ""),
    ],
)
def test_invalid_steps_are_refused_with_a_reason(
    steps: tuple[RolloutStep, ...], words: str
) -> None:
    assert words in steps_problem(steps)
    assert bool(words) == bool(steps_problem(steps))


class Life(RuleBasedStateMachine):
    """Any events in any order: states follow the table, and final states are final."""

    @initialize(steps=st.integers(1, 5))
    def begin(self, steps: int) -> None:
        shares = tuple(RolloutStep(share=(n + 1) / 10) for n in range(steps))
        spec = RolloutSpec(model_id=ModelId("m"), engine=EngineSettings(), steps=shares)
        self.rollout = a_rollout(spec=spec)

    @rule(event=st.sampled_from(list(RolloutEvent)), age_s=st.floats(0, 1e6))
    def happens(self, event: RolloutEvent, age_s: float) -> None:
        before = msgspec.structs.replace(self.rollout, step_age_s=age_s)
        is_last = before.step + 1 >= compared_steps(before.spec.steps)
        if event in (RolloutEvent.STEP_PASSED, RolloutEvent.LAST_STEP_PASSED):
            event = RolloutEvent.LAST_STEP_PASSED if is_last else RolloutEvent.STEP_PASSED
        if (before.state, event) not in TRANSITIONS:
            with pytest.raises(InvalidRolloutEvent, match="cannot"):
                apply_event(before, event)
            return
        self.rollout = apply_event(before, event, "because")
        assert self.rollout.etag == before.etag + 1
        assert self.rollout.step - before.step == (event is RolloutEvent.STEP_PASSED)
        restarts = event in (RolloutEvent.STEP_PASSED, RolloutEvent.RESUME)
        assert self.rollout.step_age_s == (0.0 if restarts else age_s)

    @invariant()
    def what_serves_is_a_step(self) -> None:
        assert 0 <= self.rollout.step < len(self.rollout.spec.steps)
        ends = self.rollout.state not in IN_PROGRESS
        assert ends == (not any(state is self.rollout.state for state, _ in TRANSITIONS))


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)


def test_a_difference_without_attempts_shows_no_number() -> None:
    said = [difference.words() for difference in compare_arms((), RolloutBounds())]
    assert said == [f"{name}: too few attempts to tell" for name in ("errors", "TTFT", "ITL")]
