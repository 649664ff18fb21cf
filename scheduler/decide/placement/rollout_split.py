"""Two versions side by side, as the planner sees them: each a deployment of its own.

A rollout's new version is planned beside the old one with its share of the demand, in the PoPs
where the old one stands, so that both can be compared there. The planner knows nothing of rollouts:
`split` makes the picture that it reads, `joined` gives its plan back in the deployment's own name.
"""

from collections.abc import Mapping
from math import ceil
from typing import Final, TypeVar

import msgspec

from isochrone.wire.ids import DeploymentId, PopId, ReplicaId
from isochrone.wire.model import Deployment, Policy
from isochrone.wire.report import ReplicaState
from scheduler.decide.cluster import (
    ClusterState,
    DemandRate,
    Placement,
    PlacementPlan,
    ReplicaStart,
    StartFailures,
    UnmetRequirement,
)
from scheduler.decide.membership.liveness import LivenessLimits
from scheduler.decide.placement.multi_node import rename_start
from scheduler.decide.placement.planner import PlanLimits, plan_deployments
from scheduler.decide.rollout.lifecycle import IN_PROGRESS, Rollout

V = TypeVar("V", Placement, StartFailures)

MARK: Final = "~"
"""Between a deployment's id and its new version's number; no id may hold it."""


def plan_fleet(
    cluster: ClusterState,
    liveness_limits: LivenessLimits | None = None,
    limits: PlanLimits | None = None,
) -> PlacementPlan:
    """Return the plan of a picture, as placement makes it: what is on its way planned apart."""
    return join_rollouts(plan_deployments(split_rollouts(cluster), limits, liveness_limits))


def split_rollouts(cluster: ClusterState) -> ClusterState:
    """Return the picture with each version on its way as a deployment of its own."""
    by_id = {deployment.deployment_id: deployment for deployment in cluster.deployments}
    rollouts = {
        rollout.deployment_id: rollout
        for rollout in cluster.rollouts
        if rollout.state in IN_PROGRESS and rollout.deployment_id in by_id
    }
    if not rollouts:
        return cluster
    beside = tuple(
        _beside(by_id[deployment_id], rollout, cluster)
        for deployment_id, rollout in sorted(rollouts.items())
    )
    return msgspec.structs.replace(
        cluster,
        deployments=tuple(
            sorted((*cluster.deployments, *beside), key=lambda one: one.deployment_id)
        ),
        placements=tuple(_of_version(one, rollouts) for one in cluster.placements),
        given_up=tuple(_of_version(one, rollouts) for one in cluster.given_up),
        demand=tuple(row for one in cluster.demand for row in _shares(one, rollouts)),
        rollouts=(),
    )


def join_rollouts(plan: PlacementPlan) -> PlacementPlan:
    """Return the plan with every version in its deployment's own name."""
    return msgspec.structs.replace(
        plan,
        starts=tuple(_joined_start(start) for start in plan.starts),
        unmet=tuple(_joined_unmet(unmet) for unmet in plan.unmet),
    )


def _beside(deployment: Deployment, rollout: Rollout, cluster: ClusterState) -> Deployment:
    """Return the new version's wish: so much of the old one's as its share, in the same PoPs."""
    policy, step = deployment.policy, rollout.current
    nodes = {node.node_id: node.pop for node in cluster.nodes}
    standing = {
        nodes[placement.node_id]
        for placement in cluster.placements
        if placement.deployment_id == deployment.deployment_id
        and placement.version == rollout.from_version
        and placement.state is ReplicaState.WARM
        and placement.node_id in nodes
    }
    where = standing & set(step.pops) or standing
    least = max(1, ceil(step.share * policy.replicas_min))
    return msgspec.structs.replace(
        deployment,
        deployment_id=_marked(deployment.deployment_id, rollout.to_version),
        model_id=rollout.spec.model_id,
        engine=rollout.spec.engine,
        version=rollout.to_version,
        policy=msgspec.structs.replace(
            policy,
            replicas_min=least,
            replicas_max=max(least, ceil(step.share * policy.replicas_max)),
            keep_warm=(),
            allow=tuple(sorted(where)) if where else policy.allow,
            deny=_denied(policy, where, cluster),
        ),
    )


def _denied(policy: Policy, where: set[PopId], cluster: ClusterState) -> tuple[str, ...]:
    # Narrowing `allow` to PoPs must not let in one that only the wider list kept out.
    if not policy.allow:
        return policy.deny
    allowed = set(policy.allow)
    out = {pop.pop for pop in cluster.pops if not allowed & {str(pop.pop), pop.country}}
    return (*policy.deny, *sorted(out & where))


def _of_version(one: V, rollouts: Mapping[DeploymentId, Rollout]) -> V:
    rollout = rollouts.get(one.deployment_id)
    if rollout is None or one.version != rollout.to_version:
        return one
    marked = _marked(one.deployment_id, rollout.to_version)
    return msgspec.structs.replace(one, deployment_id=marked)


def _shares(row: DemandRate, rollouts: Mapping[DeploymentId, Rollout]) -> tuple[DemandRate, ...]:
    rollout = rollouts.get(row.deployment_id)
    if rollout is None:
        return (row,)
    step = rollout.current
    share = step.share if not step.pops or row.pop in step.pops else 0.0
    marked = _marked(row.deployment_id, rollout.to_version)
    new = msgspec.structs.replace(row, deployment_id=marked)
    both = (row.times(1 - share), new.times(share))
    return tuple(part for part in both if part.requests_per_s + part.refused_per_s > 0)


def _joined_start(start: ReplicaStart) -> ReplicaStart:
    deployment_id, version = _unmarked(start.spec.deployment_id)
    if not version:
        return start
    _, _, rest = start.spec.replica_id.partition(f"{start.spec.deployment_id}-")
    return rename_start(start, ReplicaId(f"{deployment_id}-v{version}-{rest}"), deployment_id)


def _joined_unmet(unmet: UnmetRequirement) -> UnmetRequirement:
    deployment_id, version = _unmarked(unmet.deployment_id)
    if not version:
        return unmet
    return UnmetRequirement(
        deployment_id=deployment_id, reason=f"version {version}: {unmet.reason}"
    )


def _marked(deployment_id: DeploymentId, version: int) -> DeploymentId:
    return DeploymentId(f"{deployment_id}{MARK}{version}")


def _unmarked(deployment_id: DeploymentId) -> tuple[DeploymentId, str]:
    plain, _, version = deployment_id.partition(MARK)
    return DeploymentId(plain), version
