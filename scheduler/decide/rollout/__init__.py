"""Rollouts of a new version: their life cycle, and the comparison of both versions.

`judge_rollout` says what has happened to a rollout; `apply_event` moves its state.
"""

from scheduler.decide.rollout.lifecycle import (
    IN_PROGRESS,
    InvalidRolloutEvent,
    Rollout,
    RolloutEvent,
    RolloutVerdict,
    StartCounts,
    apply_event,
    judge_rollout,
    steps_problem,
)
from scheduler.decide.rollout.sequential_test import Arm, Difference, Stratum, compare_arms

__all__ = (
    "IN_PROGRESS",
    "Arm",
    "Difference",
    "InvalidRolloutEvent",
    "Rollout",
    "RolloutEvent",
    "RolloutVerdict",
    "StartCounts",
    "Stratum",
    "apply_event",
    "compare_arms",
    "judge_rollout",
    "steps_problem",
)
