"""Why a deployment is where it is, why it is nowhere else, and what would help."""

import msgspec

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.model import Deployment
from scheduler.decide.cluster import ClusterState, Plan
from scheduler.decide.demand import demand_of
from scheduler.decide.feasible import Refused, free_memory, seat_on
from scheduler.decide.liveness import LivenessLimits, liveness
from scheduler.decide.plan import plan
from scheduler.decide.score import REPLICA_COST, distances, gain


class HereBecause(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's seat and the reason it was given when it was placed."""

    replica_id: ReplicaId
    node_id: NodeId
    pop: PopId
    state: str
    reason: str


class NotHereBecause(msgspec.Struct, frozen=True, kw_only=True):
    """One node without a replica: it cannot hold one, or one there would save too little."""

    node_id: NodeId
    pop: PopId
    feasible: bool
    reason: str


class CityAsks(msgspec.Struct, frozen=True, kw_only=True):
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
    here: tuple[HereBecause, ...]
    elsewhere: tuple[NotHereBecause, ...]
    cities: tuple[CityAsks, ...]
    next_moves: tuple[str, ...]
    unmet: tuple[str, ...]


def explain(
    cluster: ClusterState,
    deployment_id: DeploymentId,
    liveness_limits: LivenessLimits | None = None,
) -> Explanation | None:
    """Return the explanation of one deployment; None where there is no such deployment."""
    deployment = next((d for d in cluster.deployments if d.deployment_id == deployment_id), None)
    if deployment is None:
        return None
    decided = plan(cluster, liveness_limits=liveness_limits)
    nodes = {node.node_id: node for node in cluster.nodes}
    mine = [p for p in cluster.placements if p.deployment_id == deployment_id]
    here = tuple(
        HereBecause(
            replica_id=p.replica_id,
            node_id=p.node_id,
            pop=nodes[p.node_id].pop,
            state="draining" if p.is_ending else p.state.value,
            reason=p.reason,
        )
        for p in mine
        if p.node_id in nodes
    )
    return Explanation(
        deployment_id=deployment_id,
        frozen=decided.frozen,
        here=here,
        elsewhere=_elsewhere(cluster, deployment, here, liveness_limits),
        cities=_cities(cluster, deployment, here),
        next_moves=_moves(decided, deployment_id),
        unmet=tuple(u.reason for u in decided.unmet if u.deployment_id == deployment_id),
    )


def _elsewhere(
    cluster: ClusterState,
    deployment: Deployment,
    here: tuple[HereBecause, ...],
    limits: LivenessLimits | None,
) -> tuple[NotHereBecause, ...]:
    model = next((m for m in cluster.models if m.model_id == deployment.model_id), None)
    if model is None:
        return ()
    pops = {pop.pop: pop for pop in cluster.pops}
    view = liveness(cluster.nodes, cluster.acting_for_s, limits)
    free = free_memory(cluster.nodes, cluster.placements)
    far = distances(cluster.pops, cluster.distances)
    cities = demand_of(deployment, cluster.demand_of(deployment), cluster.profiles)
    seats = [row.pop for row in here]
    held = {row.node_id for row in here}
    answers = []
    for node in cluster.nodes:
        if node.node_id in held:
            continue
        seat = seat_on(
            node,
            pop=pops[node.pop],
            verdict=view.by_node[node.node_id],
            deployment=deployment,
            model=model,
            free=free,
        )
        if isinstance(seat, Refused):
            reason = seat.reason
        elif len(seats) >= deployment.policy.replicas_max:
            reason = f"the policy allows {deployment.policy.replicas_max} replicas"
        else:
            worth = gain(cities, seats, node.pop, far)
            reason = f"one here would save {worth:.0f} ms x requests/s, {REPLICA_COST:.0f} needed"
        answers.append(
            NotHereBecause(
                node_id=node.node_id,
                pop=node.pop,
                feasible=not isinstance(seat, Refused),
                reason=reason,
            )
        )
    return tuple(answers)


def _cities(
    cluster: ClusterState, deployment: Deployment, here: tuple[HereBecause, ...]
) -> tuple[CityAsks, ...]:
    far = distances(cluster.pops, cluster.distances)
    rows = demand_of(deployment, cluster.demand_of(deployment), cluster.profiles)
    answers = []
    for city in rows:
        reachable = sorted(
            (far.get((city.pop, row.pop), float("inf")), row.pop)
            for row in here
            if row.state == "warm"
        )
        answers.append(
            CityAsks(
                pop=city.pop,
                requests_per_s=round(city.requests_per_s, 4),
                load=round(city.load, 4),
                nearest_pop=reachable[0][1] if reachable else None,
                rtt_ms=round(reachable[0][0], 2) if reachable else 0.0,
            )
        )
    return tuple(answers)


def _moves(decided: Plan, deployment_id: DeploymentId) -> tuple[str, ...]:
    prefix = f"{deployment_id}-"
    starts = [
        f"start {s.spec.replica_id} on {s.node_id}: {s.reason}"
        for s in decided.starts
        if s.spec.deployment_id == deployment_id
    ]
    ends = [
        f"end {e.replica_id} on {e.node_id}: {e.reason}"
        for e in decided.endings
        if e.replica_id.startswith(prefix)
    ]
    return tuple(starts + ends)
