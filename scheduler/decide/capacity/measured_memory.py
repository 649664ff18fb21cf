"""Corrects the memory model by the agents' measurements of running replicas.

An engine that takes more of its devices than was planned would not start beside others. The
measured excess of a model with an engine is added to each later replica of both, on any class of
device. The largest excess counts, up to a bound, because a leak must not fill the plan. An engine
that takes less changes nothing: its memory grows with its load.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from isochrone.wire.ids import DeploymentId
from isochrone.wire.models.model import CatalogModel, Deployment
from scheduler.decide.cluster import Placement

EXCESS_SHARE_MAX: Final = 0.25
EXCESS_BYTES_MIN: Final = 2 * 1024**3
"""The most that is added: this share of a replica's planned memory, or this if that is more."""

MEASURING_SHARE: Final = 0.02
"""An excess within this share of the planned memory is not one: shared pages are counted too."""

ExcessBytes = Mapping[tuple[str, str], int]
"""The bytes to add on each device, by model and driver."""


def measured_excess(
    placements: Iterable[Placement], deployments: Mapping[DeploymentId, Deployment]
) -> ExcessBytes:
    """Return what running replicas take beyond their plan."""
    excess: defaultdict[tuple[str, str], int] = defaultdict(int)
    for placement in placements:
        deployment = deployments.get(placement.deployment_id)
        used = placement.profile.used_bytes
        if deployment is None or placement.version != deployment.version or not used:
            continue
        # The plan of this replica may contain an excess that was measured before it started.
        planned = int(placement.memory_bytes * placement.overcommit) - placement.extra_bytes
        over = used - planned
        if over <= MEASURING_SHARE * planned:
            continue
        excess_max = max(EXCESS_BYTES_MIN, int(EXCESS_SHARE_MAX * planned))
        key = deployment.model_id, deployment.engine.driver
        excess[key] = max(excess[key], min(over, excess_max))
    return excess


def with_excess(model: CatalogModel, deployment: Deployment, excess: ExcessBytes) -> CatalogModel:
    """Return a model with the memory that a deployment's engine was measured to take beyond its
    plan."""
    extra = excess.get((model.model_id, deployment.engine.driver), 0)
    return msgspec.structs.replace(model, extra_bytes=model.extra_bytes + extra) if extra else model
