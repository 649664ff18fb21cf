"""Plans with rollouts: both versions of a rollout are planned side by side.

The new version of a rollout is planned as a deployment of its own, with its share of the demand, in
the PoPs where the old version runs, so that both can be compared there. The planner itself knows
nothing of rollouts: `split_rollouts` makes the cluster state that it reads, `join_rollouts` returns
its plan in the deployment's own name.
"""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Final, TypeVar

import msgspec

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.models.model import AUTO_ROLES, UNIFIED_ROLES, Deployment, PlacementPolicy
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.report import ReplicaState
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
from scheduler.decide.placement.unreadable import (
    other_unreadable,
    unreadable_requirements,
    without_unreadable,
)
from scheduler.decide.rollout.lifecycle import IN_PROGRESS, Rollout

Versioned = TypeVar("Versioned", Placement, StartFailures)

MARK: Final = "~"
"""Separates a deployment's id from the number of its new version; no id may contain it."""


def plan_fleet(
    cluster: ClusterState,
    liveness_limits: LivenessLimits | None = None,
    limits: PlanLimits | None = None,
) -> PlacementPlan:
    """Return the plan of a cluster state, with the new version of each rollout planned apart."""
    planned = split_rollouts(without_unreadable(cluster))
    plan = join_rollouts(plan_deployments(planned, limits, liveness_limits))
    return msgspec.structs.replace(
        plan,
        unmet=(*plan.unmet, *unreadable_requirements(cluster)),
        unreadable=other_unreadable(cluster),
    )


def split_rollouts(cluster: ClusterState) -> ClusterState:
    """Return the cluster state with the new version of each rollout as its own deployment."""
    by_id = {deployment.deployment_id: deployment for deployment in cluster.deployments}
    rollouts = {
        rollout.deployment_id: rollout
        for rollout in cluster.rollouts
        if rollout.state in IN_PROGRESS and rollout.deployment_id in by_id
    }
    if not rollouts:
        return cluster
    new_versions = tuple(
        _new_version(by_id[deployment_id], rollout, cluster)
        for deployment_id, rollout in sorted(rollouts.items())
    )
    return msgspec.structs.replace(
        cluster,
        deployments=tuple(
            sorted((*cluster.deployments, *new_versions), key=lambda d: d.deployment_id)
        ),
        placements=tuple(_marked_if_new(placement, rollouts) for placement in cluster.placements),
        given_up=tuple(_marked_if_new(failures, rollouts) for failures in cluster.given_up),
        demand=tuple(part for row in cluster.demand for part in _split_demand(row, rollouts)),
        rollouts=(),
    )


def join_rollouts(plan: PlacementPlan) -> PlacementPlan:
    """Return the plan with every version under its deployment's own name."""
    return msgspec.structs.replace(
        plan,
        starts=tuple(_join_start(start) for start in plan.starts),
        unmet=tuple(_join_unmet(unmet) for unmet in plan.unmet),
    )


def _new_version(deployment: Deployment, rollout: Rollout, cluster: ClusterState) -> Deployment:
    """Return the new version as a deployment: the step's share of the old one's replicas, in the
    same PoPs."""
    policy, step = deployment.policy, rollout.current
    nodes = {node.node_id: node.pop for node in cluster.nodes}
    both = [
        placement
        for placement in cluster.placements
        if placement.deployment_id == deployment.deployment_id and placement.node_id in nodes
    ]
    old = [
        placement
        for placement in both
        if placement.version == rollout.from_version and placement.state is ReplicaState.WARM
    ]
    pops = {nodes[placement.node_id] for placement in old}
    if pops:
        # While the old version restarts in a PoP, the new one goes on serving there.
        staying = [placement for placement in both if not placement.is_ending]
        pops |= _pops_of(staying, rollout.from_version, nodes) & _pops_of(
            staying, rollout.to_version, nodes
        )
    pops = pops & set(step.pops) or pops
    has_prefill = any(placement.role is Role.PREFILL for placement in old)
    fewest = min(_fewest_replicas(policy, has_prefill), policy.replicas_max)
    replicas_min = max(fewest, ceil(step.share * policy.replicas_min))
    return msgspec.structs.replace(
        deployment,
        deployment_id=_marked(deployment.deployment_id, rollout.to_version),
        model_id=rollout.spec.model_id,
        engine=rollout.spec.engine,
        version=rollout.to_version,
        policy=msgspec.structs.replace(
            policy,
            replicas_min=replicas_min,
            replicas_max=max(replicas_min, ceil(step.share * policy.replicas_max)),
            keep_warm=(),
            allow=tuple(sorted(pops)) if pops else policy.allow,
            deny=_denied(policy, pops, cluster),
        ),
    )


def _pops_of(
    placements: Iterable[Placement], version: int, nodes: Mapping[NodeId, PopId]
) -> set[PopId]:
    return {nodes[p.node_id] for p in placements if p.version == version}


def _fewest_replicas(policy: PlacementPolicy, has_prefill: bool) -> int:
    """Return how many replicas a version needs, to be compared with the other one.

    With a ratio of roles it needs one of each: a lone replica is slower than a pair, and an engine
    that keeps its role does not answer without the other. With `auto` it does if the old version
    `has_prefill` replicas.
    """
    if policy.roles == AUTO_ROLES and not has_prefill:
        return 1
    has_ratio = policy.roles != UNIFIED_ROLES or policy.prefill_share > 0
    return 2 if has_ratio else 1


def _denied(policy: PlacementPolicy, pops: set[PopId], cluster: ClusterState) -> tuple[str, ...]:
    # Replacing `allow` by `pops` must not admit a PoP that the original `allow` excluded.
    if not policy.allow:
        return policy.deny
    allowed = set(policy.allow)
    excluded = {pop.pop for pop in cluster.pops if not allowed & {str(pop.pop), pop.country}}
    return (*policy.deny, *sorted(excluded & pops))


def _marked_if_new(row: Versioned, rollouts: Mapping[DeploymentId, Rollout]) -> Versioned:
    rollout = rollouts.get(row.deployment_id)
    if rollout is None or row.version != rollout.to_version:
        return row
    marked = _marked(row.deployment_id, rollout.to_version)
    return msgspec.structs.replace(row, deployment_id=marked)


def _split_demand(
    row: DemandRate, rollouts: Mapping[DeploymentId, Rollout]
) -> tuple[DemandRate, ...]:
    rollout = rollouts.get(row.deployment_id)
    if rollout is None:
        return (row,)
    step = rollout.current
    share = step.share if not step.pops or row.pop in step.pops else 0.0
    marked = _marked(row.deployment_id, rollout.to_version)
    new = msgspec.structs.replace(row, deployment_id=marked)
    parts = (row.times(1 - share), new.times(share))
    return tuple(part for part in parts if part.requests_per_s + part.refused_per_s > 0)


def _join_start(start: ReplicaStart) -> ReplicaStart:
    deployment_id, version = _unmarked(start.spec.deployment_id)
    if not version:
        return start
    _, _, rest = start.spec.replica_id.partition(f"{start.spec.deployment_id}-")
    return rename_start(start, ReplicaId(f"{deployment_id}-v{version}-{rest}"), deployment_id)


def _join_unmet(unmet: UnmetRequirement) -> UnmetRequirement:
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
