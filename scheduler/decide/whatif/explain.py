"""Why a deployment runs where it does, why nowhere else, and what would change that."""

from collections import Counter, defaultdict
from collections.abc import Set

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.peers.assignment import Role
from scheduler.decide.capacity.default_sizes import ReplicaSizes, in_words, replica_sizes
from scheduler.decide.capacity.start_times import MB
from scheduler.decide.cluster import ClusterState, FleetNode, Liveness, Placement, PlacementPlan
from scheduler.decide.membership.liveness import LivenessLimits, judge_liveness
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.fleet.slots import awake_memory_bytes
from scheduler.decide.placement.planner import PlanBuilder, PlanLimits
from scheduler.decide.placement.rollout_split import plan_fleet
from scheduler.decide.placement.search.deployment_state import DeploymentState
from scheduler.decide.placement.search.draft import PlacementDraft
from scheduler.decide.placement.search.pop_roles import roles_by_pop
from scheduler.decide.placement.unmet import slot_refusals


class ReplicaReason(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, its role, why it was placed there, and what its node reported of it.

    `memory_bytes` is what it may take of each of its devices.
    """

    replica_id: ReplicaId
    node_id: NodeId
    pop: PopId
    state: str
    state_reason: str
    reason: str
    role: Role = Role.UNIFIED
    memory_bytes: int = 0


class NodeReason(msgspec.Struct, frozen=True, kw_only=True):
    """One node without a replica: it cannot hold one, or one there would save too little."""

    node_id: NodeId
    pop: PopId
    feasible: bool
    reason: str


class CityDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The demand of one city now, and its nearest warm replica."""

    pop: PopId
    requests_per_s: float
    load: float
    nearest_pop: PopId | None
    rtt_ms: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a deployment runs here, why not elsewhere, and what the next plan would do.

    `sizes` are those of a replica on an empty device of each class that could hold one. `roles` has
    for each PoP, in words, how many replicas have which role, and the load and capacity of each
    role; it is empty for a deployment without roles.
    """

    deployment_id: DeploymentId
    frozen: str
    here: tuple[ReplicaReason, ...]
    elsewhere: tuple[NodeReason, ...]
    cities: tuple[CityDemand, ...]
    next_moves: tuple[str, ...]
    prefetches: tuple[str, ...]
    unmet: tuple[str, ...]
    sizes: tuple[ReplicaSizes, ...] = ()
    sizes_in_words: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()


def explain_placement(
    cluster: ClusterState,
    deployment_id: DeploymentId,
    liveness_limits: LivenessLimits | None = None,
) -> Explanation | None:
    """Return the explanation of one deployment; None if there is no such deployment.

    The versions of a rollout are planned apart, but explained together.
    """
    deployment = next((d for d in cluster.deployments if d.deployment_id == deployment_id), None)
    is_unreadable = any(row.deployment_id == deployment_id for row in cluster.unreadable)
    if deployment is None and not is_unreadable:
        return None
    plan = plan_fleet(cluster, liveness_limits)
    view = judge_liveness(cluster.nodes, cluster.acting_for_s, liveness_limits)
    builder = PlanBuilder(cluster, view, PlanLimits())
    models = {model.model_id: model for model in cluster.models}
    model = models.get(deployment.model_id) if deployment else None
    state = builder.state_of(deployment, model) if deployment and model else None
    nodes = {node.node_id: node for node in cluster.nodes}
    placements = [p for p in cluster.placements if p.deployment_id == deployment_id]
    here = tuple(
        ReplicaReason(
            replica_id=part.replica_id,
            node_id=part.node_id,
            pop=nodes[part.node_id].pop,
            state="draining" if part.is_ending else part.state.value,
            state_reason=_state_reason(part, nodes[part.node_id], view.by_node[part.node_id]),
            reason=part.reason,
            role=placement.role,
            memory_bytes=placement.memory_bytes,
        )
        for placement in placements
        for part in placement.parts
        if part.node_id in nodes
    )
    sizes = _sizes(builder.fleet, state) if state else ()
    overcommit = deployment.policy.overcommit if deployment else 1.0
    return Explanation(
        deployment_id=deployment_id,
        frozen=plan.frozen,
        here=here,
        elsewhere=_elsewhere(cluster, builder.draft_of([state]), state, here) if state else (),
        cities=_cities(builder.fleet, state, here) if state else (),
        next_moves=_moves(plan, deployment_id, {p.replica_id for p in placements}),
        prefetches=_prefetches(cluster, deployment_id),
        unmet=tuple(u.reason for u in plan.unmet if u.deployment_id == deployment_id),
        sizes=sizes,
        sizes_in_words=tuple(in_words(of_class, overcommit) for of_class in sizes),
        roles=tuple(roles.words() for roles in roles_by_pop(state)) if state else (),
    )


def _state_reason(part: Placement, node: FleetNode, liveness: Liveness) -> str:
    """Return what keeps a replica from its work, or will end it; "" if nothing is known to."""
    if node.has_connected and liveness is not Liveness.READY:
        lost = ", which counts as lost" if liveness is Liveness.LOST else ""
        return f"nothing was heard from {node.node_id} for {node.silent_s:.0f} s{lost}"
    if node.draining and not part.state_reason:
        return f"{node.node_id} is draining: the replica ends once others are warm"
    return part.state_reason


def _sizes(fleet: FleetCapacity, state: DeploymentState) -> tuple[ReplicaSizes, ...]:
    """Return the sizes of a replica on the largest device of each class that could hold one."""
    needs = state.needs
    largest: dict[str, int] = {}
    for site, nodes in needs.eligible_nodes.items():
        name = fleet.sites[site].device_class
        for device in (device for node in nodes for device in node.devices):
            if device.device_class == name:
                largest[name] = max(largest.get(name, 0), device.memory_bytes)
    deployment = needs.deployment
    if deployment.policy.overcommit > 1:
        # It shares its device, and does not get the rest of it.
        most = awake_memory_bytes(needs.model, deployment)
        largest = {name: min(size, most) for name, size in largest.items()}
    return tuple(
        replica_sizes(needs.model, deployment.engine, name, size)
        for name, size in sorted(largest.items())
    )


def _elsewhere(
    cluster: ClusterState,
    draft: PlacementDraft,
    state: DeploymentState,
    here: tuple[ReplicaReason, ...],
) -> tuple[NodeReason, ...]:
    occupied, contents = {row.node_id for row in here}, _node_contents(cluster)
    free = draft.ledger.all_free_for(state.needs.deployment.policy.overcommit)
    refusals = slot_refusals(draft.fleet, state.needs, cluster.nodes, free)
    reasons = []
    for node in cluster.nodes:
        if node.node_id in occupied:
            continue
        refusal = refusals[node.node_id]
        if refusal:
            on_node = contents.get(node.node_id)
            reason = refusal + (f"; on it: {on_node}" if on_node else "")
        elif state.is_full:
            reason = f"the policy allows {state.needs.replicas_max} replicas"
        else:
            reason = _what_it_would_save(draft, state, node)
        reasons.append(
            NodeReason(
                node_id=node.node_id,
                pop=node.pop,
                feasible=not refusal,
                reason=reason,
            )
        )
    return tuple(reasons)


def _node_contents(cluster: ClusterState) -> dict[NodeId, str]:
    """Return what runs on each node, in words: what fills a full node."""
    priorities = {d.deployment_id: d.policy.priority for d in cluster.deployments}
    counts: defaultdict[NodeId, Counter[DeploymentId]] = defaultdict(Counter)
    for part in (part for placement in cluster.placements for part in placement.parts):
        counts[part.node_id][part.deployment_id] += part.deployment_id in priorities
    return {
        node_id: ", ".join(
            f"{count} of {name} (priority {priorities[name]})"
            for name, count in sorted(on_node.items())
            if count
        )
        for node_id, on_node in counts.items()
    }


def _what_it_would_save(draft: PlacementDraft, state: DeploymentState, node: FleetNode) -> str:
    fleet, needs = draft.fleet, state.needs
    sites = (fleet.table.index[node.pop, device.device_class] for device in node.devices)
    site = next((site for site in sites if site in needs.eligible_nodes), None)
    if site is None:
        return "its devices are too few or too small for this deployment"
    failures = fleet.start_history.failures_on(needs.deployment_id, node.node_id)
    if failures:
        return f"{failures} of its replicas failed here recently: nodes with fewer are tried first"
    gain = draft.gain_at(state, site)
    saves = gain.saves + gain.need.worth
    needed = needs.hold_cost + (gain.candidate.start_cost if gain.candidate else 0.0)
    start_s = gain.candidate.start_s if gain.candidate else 0.0
    return (
        f"one here would save {saves / needs.weight:.0f} ms of waiting per second, "
        f"{needed / needs.weight:.0f} needed; warm in {start_s:.0f} s. "
        f"It would pay with more demand near {node.pop}, or with a higher priority"
    )


def _cities(
    fleet: FleetCapacity, state: DeploymentState, here: tuple[ReplicaReason, ...]
) -> tuple[CityDemand, ...]:
    """Return the demand of each city, the largest first."""
    needs, load = state.needs, state.assignment.load
    names = list(fleet.distances.index)
    cities = []
    for number in np.argsort(-load, kind="stable"):
        city = names[int(needs.cities[number])]
        reachable = sorted(
            (fleet.distances.between(city, row.pop), row.pop) for row in here if row.state == "warm"
        )
        cities.append(
            CityDemand(
                pop=city,
                requests_per_s=round(float(needs.requests_per_s[number]), 4),
                load=round(float(load[number]), 4),
                nearest_pop=reachable[0][1] if reachable else None,
                rtt_ms=round(reachable[0][0], 2) if reachable else 0.0,
            )
        )
    return tuple(cities)


def _moves(
    plan: PlacementPlan, deployment_id: DeploymentId, replica_ids: Set[ReplicaId]
) -> tuple[str, ...]:
    starts = [
        f"start {s.spec.replica_id} on {s.node_id}{_as_role(s.spec.role)}: {s.reason}"
        for s in plan.starts
        if s.spec.deployment_id == deployment_id
    ]
    ends = [
        f"end {e.replica_id} on {e.node_id}: {e.reason}"
        for e in plan.endings
        if e.replica_id in replica_ids
    ]
    changes = [
        f"change {c.replica_id} on {c.node_id} to {c.role.value}: {c.reason}"
        for c in plan.role_changes
        if c.replica_id in replica_ids
    ]
    return tuple(starts + ends + changes)


def _as_role(role: Role) -> str:
    return "" if role is Role.UNIFIED else f" as {role.value}"


def _prefetches(cluster: ClusterState, deployment_id: DeploymentId) -> tuple[str, ...]:
    """Return which nodes hold or fetch the deployment's weights in advance, and why."""
    digests = {model.model_id: model.artifact.digest for model in cluster.models}
    nodes = {node.node_id: node for node in cluster.nodes}
    lines = []
    for target in cluster.prefetches:
        if target.deployment_id != deployment_id or target.node_id not in nodes:
            continue
        rate = f" at {target.bytes_per_s / MB:.0f} MB/s at most" if target.bytes_per_s else ""
        has_weights = digests.get(target.model_id) in nodes[target.node_id].artifacts
        state = "has its weights on disk" if has_weights else f"fetches its weights{rate}"
        due = (
            f"for {target.due_s / 3600:.1f} h from now" if target.due_s > 0 else "its time has come"
        )
        lines.append(f"{target.node_id} {state}, {due}: {target.reason}")
    return tuple(lines)
