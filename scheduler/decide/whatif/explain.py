"""Why a deployment is where it is, why it is nowhere else, and what would help."""

from collections import Counter, defaultdict
from collections.abc import Set

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from scheduler.decide.capacity.start_times import MB
from scheduler.decide.cluster import ClusterState, FleetNode, PlacementPlan
from scheduler.decide.membership.liveness import LivenessLimits, judge_liveness
from scheduler.decide.placement.planner import DraftPlan, PlanLimits
from scheduler.decide.placement.rollout_split import plan_fleet
from scheduler.decide.placement.search.deployment_state import DeploymentState
from scheduler.decide.placement.search.greedy_search import GreedySearch
from scheduler.decide.placement.unmet import slot_refusals


class ReplicaReason(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's seat, why it was placed there, and what its node last said of it."""

    replica_id: ReplicaId
    node_id: NodeId
    pop: PopId
    state: str
    state_reason: str
    reason: str


class NodeReason(msgspec.Struct, frozen=True, kw_only=True):
    """One node without a replica: it cannot hold one, or one there would save too little."""

    node_id: NodeId
    pop: PopId
    feasible: bool
    reason: str


class CityDemand(msgspec.Struct, frozen=True, kw_only=True):
    """What a city asks now, and its nearest replica."""

    pop: PopId
    requests_per_s: float
    load: float
    nearest_pop: PopId | None
    rtt_ms: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to "why here, why not there, what would help"."""

    deployment_id: DeploymentId
    frozen: str
    here: tuple[ReplicaReason, ...]
    elsewhere: tuple[NodeReason, ...]
    cities: tuple[CityDemand, ...]
    next_moves: tuple[str, ...]
    prefetches: tuple[str, ...]
    unmet: tuple[str, ...]


def explain_placement(
    cluster: ClusterState,
    deployment_id: DeploymentId,
    liveness_limits: LivenessLimits | None = None,
) -> Explanation | None:
    """Return the explanation of one deployment; None where there is no such deployment."""
    deployment = next((d for d in cluster.deployments if d.deployment_id == deployment_id), None)
    if deployment is None:
        return None
    # A version on its way is planned beside the one before; told of are both as one.
    decided = plan_fleet(cluster, liveness_limits)
    draft = DraftPlan(
        cluster, judge_liveness(cluster.nodes, cluster.acting_for_s, liveness_limits), PlanLimits()
    )
    model = next((m for m in cluster.models if m.model_id == deployment.model_id), None)
    wish = draft.wish_of(deployment, model) if model else None
    nodes = {node.node_id: node for node in cluster.nodes}
    mine = [p for p in cluster.placements if p.deployment_id == deployment_id]
    my_ids = {p.replica_id for p in mine}
    here = tuple(
        ReplicaReason(
            replica_id=part.replica_id,
            node_id=part.node_id,
            pop=nodes[part.node_id].pop,
            state="draining" if part.is_ending else part.state.value,
            state_reason=part.state_reason,
            reason=part.reason,
        )
        for p in mine
        for part in p.parts
        if part.node_id in nodes
    )
    return Explanation(
        deployment_id=deployment_id,
        frozen=decided.frozen,
        here=here,
        elsewhere=_elsewhere(cluster, draft, wish, here) if wish else (),
        cities=_cities(wish, here) if wish else (),
        next_moves=_moves(decided, deployment_id, my_ids),
        prefetches=_prefetches(cluster, deployment_id),
        unmet=tuple(u.reason for u in decided.unmet if u.deployment_id == deployment_id),
    )


def _elsewhere(
    cluster: ClusterState, draft: DraftPlan, wish: DeploymentState, here: tuple[ReplicaReason, ...]
) -> tuple[NodeReason, ...]:
    ground = draft.ground
    search = GreedySearch(ground, [wish], 0)
    held, whose = {row.node_id for row in here}, _held(cluster)
    answers = []
    refused = slot_refusals(ground, wish, cluster.nodes)
    for node in cluster.nodes:
        if node.node_id in held:
            continue
        cannot = refused[node.node_id]
        if cannot:
            reason = cannot + (f"; on it: {on_it}" if (on_it := whose.get(node.node_id)) else "")
        elif len(wish.seats) >= wish.most:
            reason = f"the policy allows {wish.most} replicas"
        else:
            reason = _what_it_would_save(search, wish, node)
        answers.append(
            NodeReason(
                node_id=node.node_id,
                pop=node.pop,
                feasible=not cannot,
                reason=reason,
            )
        )
    return tuple(answers)


def _held(cluster: ClusterState) -> dict[NodeId, str]:
    """Say of each node whose replicas are on it: what is full, is full of these."""
    priorities = {d.deployment_id: d.policy.priority for d in cluster.deployments}
    held: defaultdict[NodeId, Counter[DeploymentId]] = defaultdict(Counter)
    for part in (part for placement in cluster.placements for part in placement.parts):
        held[part.node_id][part.deployment_id] += part.deployment_id in priorities
    return {
        node_id: ", ".join(
            f"{count} of {name} (priority {priorities[name]})"
            for name, count in sorted(on_it.items())
            if count
        )
        for node_id, on_it in held.items()
    }


def _what_it_would_save(search: GreedySearch, wish: DeploymentState, node: FleetNode) -> str:
    sites = (search.ground.site_of[node.pop, device.device_class] for device in node.devices)
    site = next((site for site in sites if site in wish.nodes_of), None)
    if site is None:
        return "its devices are too few or too small for this deployment"
    worth = search.worth_to(wish, site)
    saves = worth.saves + worth.need.worth
    needed = wish.hold + (worth.offered.cost if worth.offered else 0.0)
    start_s = worth.offered.start_s if worth.offered else 0.0
    broke = search.ground.broke_on(wish.name, node.node_id)
    if broke:
        return f"{broke} of it broke here of late: it is tried where fewer did"
    return (
        f"one here would save {saves / wish.weight:.0f} ms x requests/s, "
        f"{needed / wish.weight:.0f} needed; warm in {start_s:.0f} s. "
        f"It would pay if more were asked for near {node.pop}, or with a higher priority"
    )


def _cities(wish: DeploymentState, here: tuple[ReplicaReason, ...]) -> tuple[CityDemand, ...]:
    far = wish.ground.far
    names = list(far.index)
    answers = []
    for number in np.argsort(-wish.flow.load, kind="stable"):
        city = names[int(wish.cities[number])]
        reachable = sorted(
            (far.between(city, row.pop), row.pop) for row in here if row.state == "warm"
        )
        answers.append(
            CityDemand(
                pop=city,
                requests_per_s=round(float(wish.asked[number]), 4),
                load=round(float(wish.flow.load[number]), 4),
                nearest_pop=reachable[0][1] if reachable else None,
                rtt_ms=round(reachable[0][0], 2) if reachable else 0.0,
            )
        )
    return tuple(answers)


def _moves(
    decided: PlacementPlan, deployment_id: DeploymentId, my_ids: Set[ReplicaId]
) -> tuple[str, ...]:
    starts = [
        f"start {s.spec.replica_id} on {s.node_id}: {s.reason}"
        for s in decided.starts
        if s.spec.deployment_id == deployment_id
    ]
    ends = [
        f"end {e.replica_id} on {e.node_id}: {e.reason}"
        for e in decided.endings
        if e.replica_id in my_ids
    ]
    return tuple(starts + ends)


def _prefetches(cluster: ClusterState, deployment_id: DeploymentId) -> tuple[str, ...]:
    """Say which nodes have or fetch this deployment's weights before they run them, and why."""
    digests = {model.model_id: model.artifact.digest for model in cluster.models}
    nodes = {node.node_id: node for node in cluster.nodes}
    lines = []
    for wish in cluster.prefetches:
        if wish.deployment_id != deployment_id or wish.node_id not in nodes:
            continue
        rate = f" at {wish.bytes_per_s / MB:.0f} MB/s at most" if wish.bytes_per_s else ""
        is_held = digests.get(wish.model_id) in nodes[wish.node_id].artifacts
        state = "has its weights on disk" if is_held else f"fetches its weights{rate}"
        due = f"for {wish.due_s / 3600:.1f} h from now" if wish.due_s > 0 else "its time has come"
        lines.append(f"{wish.node_id} {state}, {due}: {wish.reason}")
    return tuple(lines)
