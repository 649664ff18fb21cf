"""The life cycle of a rollout: step by step to all requests, or back.

Rule 1: every change of state is in TRANSITIONS; nothing else assigns `state`.
Rule 2: an event that is not in the table for a state is invalid.
Rule 3: harm also reverts a paused rollout, because its share is still being served.
"""

from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import Annotated, Final, NamedTuple

import msgspec

from isochrone.wire.ids import DeploymentId
from isochrone.wire.peers.rollout import RolloutSpec, RolloutState, RolloutStep
from scheduler.decide.rollout.sequential_test import Stratum, compare_arms

HARM_ATTEMPTS_MIN: Final = 20
"""Attempts from which harm is believed; with fewer, the test may be wrong by chance."""

FAILED_STARTS_MAX: Final = 2


class RolloutEvent(StrEnum):
    """Events in the life of a rollout."""

    STEP_PASSED = "step_passed"
    LAST_STEP_PASSED = "last_step_passed"
    HARM_SHOWN = "harm_shown"
    COULD_NOT_START = "could_not_start"
    NOTHING_SHOWN = "nothing_shown"
    PAUSE = "pause"
    RESUME = "resume"
    ABORT = "abort"


RUNNING, PAUSED = RolloutState.RUNNING, RolloutState.PAUSED
IN_PROGRESS: Final = (RUNNING, PAUSED)

TRANSITIONS: Final = {
    (RUNNING, RolloutEvent.STEP_PASSED): RUNNING,
    (RUNNING, RolloutEvent.LAST_STEP_PASSED): RolloutState.DONE,
    (RUNNING, RolloutEvent.HARM_SHOWN): RolloutState.REVERTED,
    (RUNNING, RolloutEvent.COULD_NOT_START): RolloutState.REVERTED,
    (RUNNING, RolloutEvent.NOTHING_SHOWN): PAUSED,
    (RUNNING, RolloutEvent.PAUSE): PAUSED,
    (RUNNING, RolloutEvent.ABORT): RolloutState.ABORTED,
    (PAUSED, RolloutEvent.HARM_SHOWN): RolloutState.REVERTED,
    (PAUSED, RolloutEvent.COULD_NOT_START): RolloutState.REVERTED,
    (PAUSED, RolloutEvent.RESUME): RUNNING,
    (PAUSED, RolloutEvent.ABORT): RolloutState.ABORTED,
}


class InvalidRolloutEvent(Exception):
    """An event is not possible in the rollout's state."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. `etag` is the version of its row, for conditional updates."""

    rollout_id: str
    deployment_id: DeploymentId
    from_version: int
    to_version: int
    spec: RolloutSpec
    state: RolloutState = RUNNING
    step: Annotated[int, msgspec.Meta(ge=0)] = 0
    step_age_s: float = 0.0
    reason: str = ""
    etag: int = 1

    @property
    def current(self) -> RolloutStep:
        """The step that is served now."""
        return self.spec.steps[min(self.step, len(self.spec.steps) - 1)]


class StartCounts(NamedTuple):
    """How many replicas of the new version are warm, failed, and placed."""

    warm: int = 0
    failed: int = 0
    placed: int = 0


class RolloutVerdict(NamedTuple):
    """An event of a rollout, and its reason in words."""

    event: RolloutEvent
    reason: str


def apply_event(rollout: Rollout, event: RolloutEvent, reason: str = "") -> Rollout:
    """Return the rollout after an event; raise InvalidRolloutEvent if its state forbids it."""
    state = TRANSITIONS.get((rollout.state, event))
    if state is None:
        action = event.value.replace("_", " ")
        raise InvalidRolloutEvent(
            f"cannot {action} rollout {rollout.rollout_id}: it is {rollout.state.value}"
        )
    advances = event is RolloutEvent.STEP_PASSED
    restarts = advances or event is RolloutEvent.RESUME
    return msgspec.structs.replace(
        rollout,
        state=state,
        step=rollout.step + advances,
        step_age_s=0.0 if restarts else rollout.step_age_s,
        reason=reason,
        etag=rollout.etag + 1,
    )


def compared_steps(steps: tuple[RolloutStep, ...]) -> int:
    """Count the steps in which both versions are compared: not one with all requests."""
    is_all = steps[-1].share >= 1 and not steps[-1].pops
    return len(steps) - is_all


def steps_problem(steps: tuple[RolloutStep, ...]) -> str:
    """Return why these steps are invalid, or ""."""
    compared = steps[: compared_steps(steps)]
    if not compared:
        return "the first step takes every request, so that nothing is left to compare with"
    if any(step.share >= 1 for step in compared):
        return "only the last step may have share 1, and it for all PoPs"
    pairs = [(step, later) for step, later in pairwise(steps) if step.pops == later.pops]
    if any(later.share < step.share for step, later in pairs):
        return "a step has a smaller share than the one before it in the same PoPs"
    return ""


def judge_rollout(
    rollout: Rollout,
    strata: tuple[Stratum, ...],
    starts: StartCounts,
    acting_for_s: float = inf,
) -> RolloutVerdict | None:
    """Return the event that is due for a rollout; None if it continues as it is.

    A rollout is given up only for what was missing while this scheduler acted, for `acting_for_s`:
    without a scheduler nothing starts and nothing is counted.
    """
    if rollout.state not in IN_PROGRESS:
        return None
    bounds = rollout.spec.bounds
    waited_s = min(rollout.step_age_s, acting_for_s)
    attempts = sum(stratum.new.attempts for stratum in strata)
    differences = compare_arms(strata, bounds)
    harms = [difference.words() for difference in differences if difference.is_harm]
    if harms and attempts >= HARM_ATTEMPTS_MIN:
        return RolloutVerdict(
            RolloutEvent.HARM_SHOWN, f"{attempts} attempts show: " + "; ".join(harms)
        )
    if not starts.warm and starts.failed >= FAILED_STARTS_MAX:
        return RolloutVerdict(
            RolloutEvent.COULD_NOT_START, f"{starts.failed} replicas failed, none is warm"
        )
    if not starts.warm and not attempts and waited_s > bounds.start_max_s:
        why = "" if starts.placed else ": none found a free slot"
        reason = f"no replica is warm after {waited_s:.0f} s{why}"
        return RolloutVerdict(RolloutEvent.COULD_NOT_START, reason)
    if rollout.state is PAUSED:
        return None
    # Attempts may lack measurements of the old version to compare them with.
    measured = [difference for difference in differences if difference.low > float("-inf")]
    has_enough = attempts >= bounds.attempts_min and rollout.step_age_s >= bounds.step_min_s
    if (
        has_enough
        and differences[0] in measured
        and all(difference.is_fine for difference in measured)
    ):
        words = "; ".join(difference.words() for difference in differences)
        return RolloutVerdict(_passed(rollout), f"{attempts} attempts show: {words}")
    if waited_s > bounds.step_max_s:
        words = "; ".join(difference.words() for difference in differences)
        reason = f"cannot tell after {rollout.step_age_s:.0f} s and {attempts} attempts: {words}"
        return RolloutVerdict(RolloutEvent.NOTHING_SHOWN, reason)
    return None


def _passed(rollout: Rollout) -> RolloutEvent:
    is_last = rollout.step + 1 >= compared_steps(rollout.spec.steps)
    return RolloutEvent.LAST_STEP_PASSED if is_last else RolloutEvent.STEP_PASSED
