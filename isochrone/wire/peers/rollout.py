"""Rollouts of a new version: the request body, the stored spec and the current state."""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from isochrone.wire.ids import DeploymentId, ModelId, PopId
from isochrone.wire.models.model import EngineSettings, ModelName

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class RolloutState(StrEnum):
    """The state of a rollout. The last three are final."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    REVERTED = "reverted"
    ABORTED = "aborted"


class RolloutStep(msgspec.Struct, frozen=True, kw_only=True):
    """The share of requests that the new version gets, in these PoPs (none named: in all)."""

    share: Share
    pops: tuple[PopId, ...] = ()


STEPS: Final = (
    RolloutStep(share=0.01),
    RolloutStep(share=0.05),
    RolloutStep(share=0.25),
    RolloutStep(share=1.0),
)


class RolloutBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on how much worse the new version may be, and the evidence that each step needs.

    `error_ratio` is the added failures per attempt; the other ratios are of medians. A step lasts
    at least `step_min_s` and `attempts_min` attempts of the new version. A step without a decision
    after `step_max_s` waits for an operator.
    """

    error_ratio: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.01
    ttft_ratio: Annotated[float, msgspec.Meta(gt=1, le=10)] = 1.15
    itl_ratio: Annotated[float, msgspec.Meta(gt=1, le=10)] = 1.15
    attempts_min: Annotated[int, msgspec.Meta(ge=20, le=10**6)] = 200
    step_min_s: Annotated[float, msgspec.Meta(ge=0, le=7 * 86_400)] = 120.0
    step_max_s: Annotated[float, msgspec.Meta(gt=0, le=30 * 86_400)] = 6 * 3600.0
    start_max_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 1800.0


class StepBody(RolloutStep, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for a step. A misspelt field is refused, not ignored."""


class BoundsBody(RolloutBounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for bounds."""


class RolloutBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request body for a rollout. Omitted fields keep the deployment's values."""

    model_id: ModelName | None = None
    engine: EngineSettings | None = None
    steps: Annotated[tuple[StepBody, ...], msgspec.Meta(min_length=1, max_length=20)] = tuple(
        StepBody(share=step.share) for step in STEPS
    )
    bounds: BoundsBody = BoundsBody()


class RolloutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with all values filled in, as it is stored."""

    model_id: ModelId
    engine: EngineSettings
    steps: Annotated[tuple[RolloutStep, ...], msgspec.Meta(min_length=1)] = STEPS
    bounds: RolloutBounds = RolloutBounds()


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a rollout. `seen` describes the result of each test in this step."""

    rollout_id: str
    deployment_id: DeploymentId
    from_version: int
    to_version: int
    spec: RolloutSpec
    state: RolloutState
    step: int
    step_age_s: float
    reason: str
    seen: tuple[str, ...]
    etag: int
