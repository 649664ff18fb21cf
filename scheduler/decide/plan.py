"""plan(cluster) -> Plan: the one door of placement. Which replicas start, which end, and why.

Rule 1: the same picture gives the same plan, and a plan carried out gives an empty one.
Rule 2: endings wait for what replaces them to be warm; failing to start never ends anything.
Rule 3: residency and memory are never traded for anything.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.ids import DeploymentId, DeviceId, ModelId, NodeId, PopId, ReplicaId
from isochrone.wire.model import Deployment, Model
from isochrone.wire.report import ReplicaState
from isochrone.wire.routes import Pop
from scheduler.decide.cluster import (
    ClusterState,
    DemandRate,
    Ending,
    Liveness,
    Node,
    Placement,
    Plan,
    Start,
    Unmet,
)
from scheduler.decide.demand import CityDemand, demand_of
from scheduler.decide.feasible import Refused, Seat, allowed, free_memory, seat_on
from scheduler.decide.liveness import LivenessLimits, LivenessView, liveness
from scheduler.decide.score import REPLICA_COST, Distances, distances, gain, loss

COMING: Final = (ReplicaState.WANTED, ReplicaState.FETCHING, ReplicaState.LOADING)


class PlanLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may move in one plan, and how long a replica stays before it may be surplus."""

    starts_max: int = 8
    endings_max: int = 8
    settle_s: float = 300.0
    surge_max: int = 1


def plan(
    cluster: ClusterState,
    limits: PlanLimits | None = None,
    liveness_limits: LivenessLimits | None = None,
) -> Plan:
    """Return the moves that bring the fleet nearer to what is wished of it."""
    limits = limits or PlanLimits()
    view = liveness(cluster.nodes, cluster.acting_for_s, liveness_limits)
    if view.frozen:
        return Plan(based_on=cluster.generation, frozen=view.frozen)
    draft = Draft(cluster, view, limits)
    for deployment in sorted(
        cluster.deployments, key=lambda d: (-d.policy.priority, d.deployment_id)
    ):
        draft.plan_deployment(deployment)
    draft.end_deleted()
    return draft.plan()


class Draft:
    """A plan being made: the picture, and what is already decided on top of it."""

    def __init__(self, cluster: ClusterState, view: LivenessView, limits: PlanLimits) -> None:
        self._cluster = cluster
        self._view = view
        self._limits = limits
        self.pops: Mapping[PopId, Pop] = {pop.pop: pop for pop in cluster.pops}
        self.nodes: Mapping[NodeId, Node] = {node.node_id: node for node in cluster.nodes}
        self.models: Mapping[str, Model] = {model.model_id: model for model in cluster.models}
        self.far: Distances = distances(cluster.pops, cluster.distances)
        self._placements: dict[DeploymentId, list[Placement]] = defaultdict(list)
        for placement in cluster.placements:
            self._placements[placement.deployment_id].append(placement)
        self._demand: dict[DeploymentId, list[DemandRate]] = defaultdict(list)
        for row in cluster.demand:
            self._demand[row.deployment_id].append(row)
        self._free: dict[tuple[NodeId, DeviceId], int] = dict(
            free_memory(cluster.nodes, cluster.placements)
        )
        self._starts: list[Start] = []
        self._endings: list[Ending] = []
        self._unmet: list[Unmet] = []

    def plan(self) -> Plan:
        """Return what was decided."""
        return Plan(
            based_on=self._cluster.generation,
            starts=tuple(self._starts),
            endings=tuple(self._endings),
            unmet=tuple(self._unmet),
        )

    def plan_deployment(self, deployment: Deployment) -> None:
        """Decide one deployment: what must end, is missing, is asked by demand, is spare."""
        model = self.models.get(deployment.model_id)
        if model is None:
            self._refuse(deployment, f"the catalogue has no model {deployment.model_id}")
            return
        mine = [p for p in self._placements[deployment.deployment_id] if not p.is_ending]
        mine = self._end_forbidden(deployment, mine)
        standing = [p for p in mine if self._stands(p)]
        rows = self._demand[deployment.deployment_id]
        cities = demand_of(deployment, rows, self._cluster.profiles)
        wish = _Wish(self, deployment, model, standing, cities)
        wish.fill()
        self._end_replaced(deployment, mine, standing, cities)
        if not wish.added:
            self._end_surplus(deployment, standing, cities)

    def end_deleted(self) -> None:
        """End every replica of a deployment that is no more."""
        for deployment_id in self._cluster.deleted:
            for placement in self._placements[deployment_id]:
                if not placement.is_ending:
                    self._end(placement, "the deployment was deleted")

    def pop_of(self, placement: Placement) -> PopId:
        """Return the PoP that a placement is in."""
        return self.nodes[placement.node_id].pop

    def seats(
        self, deployment: Deployment, model: Model, pops: Sequence[PopId] | None = None
    ) -> Iterator[Seat | Refused]:
        """Try every node, or those of `pops`, for one replica more."""
        for node in self._cluster.nodes:
            if pops is None or node.pop in pops:
                yield seat_on(
                    node,
                    pop=self.pops[node.pop],
                    verdict=self._view.by_node[node.node_id],
                    deployment=deployment,
                    model=model,
                    free=self._free,
                )

    def failed_on(self, deployment: Deployment, node_id: NodeId) -> bool:
        """Say whether this deployment already failed on this node."""
        return any(
            p.node_id == node_id and p.state is ReplicaState.FAILED
            for p in self._placements[deployment.deployment_id]
        )

    def taken_on(self, deployment: Deployment, node_id: NodeId) -> int:
        """Count the replicas of this deployment that a node holds or is about to."""
        held = sum(p.node_id == node_id for p in self._placements[deployment.deployment_id])
        return held + sum(
            s.node_id == node_id and s.spec.deployment_id == deployment.deployment_id
            for s in self._starts
        )

    def may_start(self) -> bool:
        """Say whether this plan has a start left."""
        return len(self._starts) < self._limits.starts_max

    @property
    def surge_max(self) -> int:
        """How many replicas of a new version may be coming up at once."""
        return self._limits.surge_max

    def start(self, deployment: Deployment, model: Model, seat: Seat, reason: str) -> None:
        """Take a seat."""
        number = len(self._starts) + 1
        replica_id = f"{deployment.deployment_id}-{self._cluster.generation}-{number}"
        for device_id in seat.device_ids:
            self._free[seat.node.node_id, device_id] -= seat.memory_bytes
        spec = ReplicaSpec(
            replica_id=ReplicaId(replica_id),
            deployment_id=deployment.deployment_id,
            version=deployment.version,
            name=deployment.name,
            model_id=ModelId(model.model_id),
            artifact=model.artifact,
            context_tokens=min(deployment.engine.context_tokens_max, model.context_tokens),
            engine=deployment.engine,
            device_ids=seat.device_ids,
            memory_bytes=seat.memory_bytes,
        )
        self._starts.append(Start(node_id=seat.node.node_id, spec=spec, reason=reason))

    def refuse(self, deployment: Deployment, wish: str, refusals: Sequence[Refused]) -> None:
        """Note a wish that no node can meet, with what each said."""
        said = "; ".join(f"{r.node.node_id}: {r.reason}" for r in refusals[:6])
        more = f"; and {len(refusals) - 6} more" if len(refusals) > 6 else ""
        self._refuse(deployment, f"cannot place {wish}: {said or 'there is no node'}{more}")

    def _refuse(self, deployment: Deployment, reason: str) -> None:
        self._unmet.append(Unmet(deployment_id=deployment.deployment_id, reason=reason))

    def _end(self, placement: Placement, reason: str) -> None:
        if len(self._endings) < self._limits.endings_max:
            self._endings.append(
                Ending(replica_id=placement.replica_id, node_id=placement.node_id, reason=reason)
            )

    def _stands(self, placement: Placement) -> bool:
        """Say whether a placement serves or will: on a node that stays, and not given up."""
        node = self.nodes.get(placement.node_id)
        return (
            node is not None
            and not node.draining
            and not node.revoked
            and self._view.by_node[node.node_id] is not Liveness.LOST
            and placement.state not in (ReplicaState.FAILED, ReplicaState.STOPPED)
        )

    def _end_forbidden(self, deployment: Deployment, mine: list[Placement]) -> list[Placement]:
        """End what residency forbids at once: data may not stay where it may not be."""
        kept = []
        for placement in mine:
            node = self.nodes.get(placement.node_id)
            if node is not None and not allowed(deployment.policy, self.pops[node.pop]):
                self._end(placement, f"residency no longer allows {node.pop}")
            else:
                kept.append(placement)
        return kept

    def _end_replaced(
        self,
        deployment: Deployment,
        mine: Sequence[Placement],
        standing: Sequence[Placement],
        cities: Sequence[CityDemand],
    ) -> None:
        """End what failed, and what drains or is of an old version once its place is taken."""
        for placement in mine:
            if placement.state in (ReplicaState.FAILED, ReplicaState.STOPPED):
                self._end(placement, f"it {placement.state.value}: {placement.state_reason}"[:300])
        warm = [
            p for p in standing if p.state is ReplicaState.WARM and p.version == deployment.version
        ]
        coming = [p for p in standing if p.state in COMING]
        needed = deployment.policy.replicas_min or int(bool(cities))
        if coming or len(warm) < min(deployment.policy.replicas_max, needed):
            return
        for placement in mine:
            node = self.nodes.get(placement.node_id)
            if placement.state is not ReplicaState.FAILED and node is not None and node.draining:
                self._end(placement, f"node {node.node_id} is draining, others are warm")
            elif placement in standing and placement.version != deployment.version:
                self._end(placement, f"version {deployment.version} is warm in its place")

    def _end_surplus(
        self,
        deployment: Deployment,
        standing: Sequence[Placement],
        cities: Sequence[CityDemand],
    ) -> None:
        """End one replica that is over the maximum, or that demand no longer pays for."""
        policy = deployment.policy
        current = [p for p in standing if p.version == deployment.version]
        if len(current) < len(standing) or any(p.state in COMING for p in current):
            return
        over = len(current) > policy.replicas_max
        spare = [p for p in current if over or self._may_go(deployment, p, current)]
        if not spare:
            return
        seats = [self.pop_of(p) for p in current]
        worth, cheapest = min(
            ((loss(cities, seats, self.pop_of(p), self.far), p) for p in spare),
            key=lambda pair: (pair[0], pair[1].age_s, pair[1].replica_id),
        )
        if over:
            self._end(cheapest, f"{len(current)} replicas, the policy allows {policy.replicas_max}")
        elif worth < REPLICA_COST / 2:
            # Half of what it takes to add one: what was just added is not at once taken away.
            self._end(cheapest, f"demand has moved: it saves {worth:.0f} ms x requests/s")

    def _may_go(
        self, deployment: Deployment, placement: Placement, current: Sequence[Placement]
    ) -> bool:
        policy = deployment.policy
        pop = self.pop_of(placement)
        last_there = sum(self.pop_of(p) == pop for p in current) == 1
        return (
            len(current) > policy.replicas_min
            and placement.age_s >= self._limits.settle_s
            and not (pop in policy.keep_warm and last_there)
        )


class _Wish:
    """One deployment's wishes, met in order: kept warm, the minimum, replacement, demand."""

    def __init__(
        self,
        draft: Draft,
        deployment: Deployment,
        model: Model,
        standing: Sequence[Placement],
        cities: Sequence[CityDemand],
    ) -> None:
        self.added = 0
        self._draft = draft
        self._deployment = deployment
        self._model = model
        self._cities = cities
        fresh = [p for p in standing if p.version == deployment.version]
        self._stale = len(standing) - len(fresh)
        self._coming = sum(p.state in COMING for p in fresh)
        self._seats = [draft.pop_of(p) for p in fresh]

    def fill(self) -> None:
        """Start what is missing, as far as the maximum, the churn and the fleet allow."""
        policy = self._deployment.policy
        for pop in sorted(set(policy.keep_warm)):
            if pop not in self._seats:
                self._place([pop], f"{pop} is kept warm")
        while len(self._seats) < policy.replicas_min:
            if not self._place(None, f"at least {policy.replicas_min} replicas are asked for"):
                break
        if self._stale and not self._coming and not self.added:
            self._place(None, f"version {self._deployment.version} replaces the one before")
        if not self.added and not self._coming:
            self._follow_demand()

    def _follow_demand(self) -> None:
        """Add the one replica that demand pays for most, if it pays for any."""
        if not self._cities or not self._may_grow():
            return
        best = self._best_seat(None)
        if best is None:
            return
        seat, _ = best
        worth = gain(self._cities, self._seats, seat.node.pop, self._draft.far)
        if worth >= REPLICA_COST:
            reason = f"demand: saves {worth:.0f} ms x requests/s in {seat.node.pop}"
            self._take(seat, reason)

    def _may_grow(self) -> bool:
        if not self._draft.may_start():
            return False
        if self._stale and self._coming + self.added >= self._draft.surge_max:
            return False
        return len(self._seats) < self._deployment.policy.replicas_max

    def _place(self, pops: Sequence[PopId] | None, reason: str) -> bool:
        if not self._may_grow():
            return False
        best = self._best_seat(pops)
        if best is None:
            refusals = [
                seat
                for seat in self._draft.seats(self._deployment, self._model, pops)
                if isinstance(seat, Refused)
            ]
            self._draft.refuse(self._deployment, f"a replica ({reason})", refusals)
            return False
        self._take(best[0], reason)
        return True

    def _take(self, seat: Seat, reason: str) -> None:
        self._draft.start(self._deployment, self._model, seat, reason)
        self._seats.append(seat.node.pop)
        self.added += 1

    def _best_seat(self, pops: Sequence[PopId] | None) -> tuple[Seat, tuple[float, ...]] | None:
        """Return the feasible seat that saves most; then the least crowded, the readiest."""
        tried = self._draft.seats(self._deployment, self._model, pops)
        seats = [seat for seat in tried if isinstance(seat, Seat)]
        worth = {
            pop: gain(self._cities, self._seats, pop, self._draft.far)
            for pop in {seat.node.pop for seat in seats}
        }

        def order(seat: Seat) -> tuple[float, ...]:
            node = seat.node
            return (
                float(self._draft.failed_on(self._deployment, node.node_id)),
                # Rounded, so that noise in demand does not decide where nothing else does.
                -round(worth[node.pop]),
                float(self._seats.count(node.pop)),
                float(self._draft.taken_on(self._deployment, node.node_id)),
                float(self._model.artifact.digest not in node.artifacts),
            )

        ranked = sorted(seats, key=lambda seat: (order(seat), seat.node.node_id))
        return (ranked[0], order(ranked[0])) if ranked else None
