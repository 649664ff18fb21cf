"""plan(cluster) -> Plan: the one door of placement. Which replicas start, which end, and why.

How, and where each step is:

 1. End what may not be: the forbidden, the failed, the deleted (`endings.py`).
 2. Read each deployment's wish: what its cities ask, what stands for it (`wish.py`), and which
    load each seat serves (`flow.py`). Everything below lowers one sum (`score.py`).
 3. Fill: seats that pay, the one worth most for its bytes first (`search.py`), each on the tightest
    devices of its site (`ground.py`).
 4. Improve while effort is left (`improve.py`; each change is kept or undone whole, `attempt.py`):
    new seats that do not pay go, others move; what wants a full place takes it from what is worth
    less there (`exchange.py`); sites are filled anew in other orders; and seats are forced
    elsewhere to see what follows (`shift.py`). Where a policy allows no seat more, one that stands
    is started anew where it is worth more.
 5. End what that makes needless: who yields its place, who is drained, of an old version, or spare;
    part those who would all fail together (`endings.py`); and say what could not be met
    (`refusals.py`).

Rule 1: the same picture gives the same plan, and a plan carried out gives an empty one.
Rule 2: endings wait for what replaces them to be warm; failing to start never ends anything.
Rule 3: residency and memory are never traded for anything.
"""

from collections import defaultdict

import msgspec

from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.ids import DeploymentId, ModelId, ReplicaId
from isochrone.wire.model import Deployment, Model
from scheduler.decide.capacity.replica_capacity import Profiles
from scheduler.decide.cluster import (
    ClusterState,
    Placement,
    PlacementPlan,
    ReplicaEnding,
    ReplicaStart,
    UnmetRequirement,
)
from scheduler.decide.demand.demand_rates import demand_by_deployment
from scheduler.decide.membership.liveness import LivenessLimits, LivenessView, judge_liveness
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.multi_node import RankPorts, spread_over_nodes
from scheduler.decide.placement.retire import (
    end_drained,
    end_failed,
    end_forbidden,
    end_leaderless,
    end_spare,
    is_staying,
    replace_stale,
    separate_failure_domains,
)
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.greedy_search import GreedySearch
from scheduler.decide.placement.search.local_search import LocalSearch
from scheduler.decide.placement.unmet import (
    impossible_policy,
    no_slot_for_version,
    unmet_requirements,
)


class PlanLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may move in one plan, and how long a replica stays before it may be surplus.

    A large fleet may move more at once: `moves_share` of its placements. `effort` bounds the
    exchanges tried: each costs about a millisecond.
    """

    starts_max: int = 8
    endings_max: int = 8
    moves_share: float = 0.01
    settle_s: float = 300.0
    surge_max: int = 1
    effort: int = 60


def plan_deployments(
    cluster: ClusterState,
    limits: PlanLimits | None = None,
    liveness_limits: LivenessLimits | None = None,
) -> PlacementPlan:
    """Return the moves that bring the fleet nearer to what is wished of it."""
    limits = limits or PlanLimits()
    view = judge_liveness(cluster.nodes, cluster.acting_for_s, liveness_limits)
    if view.frozen:
        return PlacementPlan(based_on=cluster.generation, frozen=view.frozen)
    draft = DraftPlan(cluster, view, limits)
    draft.end_what_may_not_be()
    search = draft.sought()
    improve = LocalSearch(search, limits.settle_s, limits.effort)
    improve.fill()
    improve.run()
    improve.relocate()
    for yielding in improve.yielding():
        draft.end_seat(yielding.seated, yielding.reason)
    for wish in search.wishes:
        draft.settle(search, wish)
    return draft.plan(search)


class DraftPlan:
    """A plan being made: the picture, and what is already decided on top of it."""

    def __init__(self, cluster: ClusterState, view: LivenessView, limits: PlanLimits) -> None:
        self.ground = FleetCapacity(cluster, view)
        self._cluster = cluster
        self._limits = limits
        share = int(limits.moves_share * len(cluster.placements))
        self._starts_max = max(limits.starts_max, share)
        self._endings_max = max(limits.endings_max, share)
        self._models = {model.model_id: model for model in cluster.models}
        self._profiles: Profiles = cluster.measured()
        self._mine: dict[DeploymentId, list[Placement]] = defaultdict(list)
        for placement in cluster.placements:
            if not placement.is_ending and not placement.leader_id:
                self._mine[placement.deployment_id].append(placement)
        self._asked = demand_by_deployment(cluster.demand, self.ground.far.index)
        self._endings: dict[ReplicaId, ReplicaEnding] = {}
        self._unmet: list[UnmetRequirement] = []

    def end_what_may_not_be(self) -> None:
        """End what residency forbids, what failed, and what belongs to no deployment any more."""
        end_leaderless(self._cluster.placements, self.end)
        for deployment_id in self._cluster.deleted:
            for placement in self._mine.pop(deployment_id, []):
                self.end(placement, "the deployment was deleted")
        for deployment in self._cluster.deployments:
            mine = self._mine[deployment.deployment_id]
            if deployment.model_id in self._models:
                mine = end_forbidden(self.ground, deployment, mine, self.end)
                end_failed(self.ground, deployment, mine, self.end)
            self._mine[deployment.deployment_id] = mine

    def sought(self) -> GreedySearch:
        """Return the search over every deployment whose wish makes sense."""
        wishes = []
        for deployment in sorted(self._cluster.deployments, key=lambda d: d.deployment_id):
            model = self._models.get(deployment.model_id)
            if model is None:
                self._refuse(deployment, f"the catalogue has no model {deployment.model_id}")
                continue
            wrong = impossible_policy(self.ground, deployment)
            if wrong:
                self._refuse(deployment, wrong)
            wishes.append(self.wish_of(deployment, model))
        return GreedySearch(self.ground, wishes, self._starts_max)

    def wish_of(self, deployment: Deployment, model: Model, version: int = 0) -> DeploymentState:
        """Return a deployment's wish with all that stands for it, or what stands of one version."""
        mine = [p for p in self._mine[deployment.deployment_id] if is_staying(self.ground, p)]
        return DeploymentState(
            self.ground,
            deployment,
            model,
            self._asked[deployment.deployment_id],
            self._profiles,
            [p for p in mine if version in (0, p.version)],
        )

    def settle(self, search: GreedySearch, wish: DeploymentState) -> None:
        """Replace old versions, leave draining nodes, end what is spare, part those who would fail
        together, say what is lacking."""
        mine = [p for p in self._mine[wish.name] if p.replica_id not in self._endings]
        # Of what may have no replica at all, none is replaced.
        stale = wish.most > 0 and any(
            s.placement and s.placement.version != wish.deployment.version for s in wish.seats
        )
        if stale:
            fresh = self.wish_of(wish.deployment, wish.model, wish.deployment.version)
            if not replace_stale(search, wish, fresh, self._limits.surge_max, self.end_seat):
                self._unmet.append(no_slot_for_version(self.ground, wish))
        is_moving = any(seated.seat for seated in wish.seats)
        if not is_moving:
            least = min(wish.most, wish.deployment.policy.replicas_min or int(wish.is_asked_for))
            end_drained(self.ground, mine, least, self.end)
        is_at_rest = not is_moving and not stale and not wish.is_coming()
        if is_at_rest and not end_spare(wish, self._limits.settle_s, self.end_seat):
            separate_failure_domains(search, wish, self._limits.settle_s)
        self._unmet.extend(unmet_requirements(self.ground, wish))

    def end_seat(self, seated: PlannedReplica, reason: str) -> None:
        """End the placement of a seat."""
        if seated.placement:
            self.end(seated.placement, reason)

    def end(self, placement: Placement, reason: str) -> None:
        """End a placement, as far as this plan may."""
        if len(self._endings) < self._endings_max:
            self._endings.setdefault(
                placement.replica_id,
                ReplicaEnding(
                    replica_id=placement.replica_id,
                    node_id=placement.node_id,
                    reason=reason,
                    follower_ids=placement.node_ids[1:],
                ),
            )

    def plan(self, search: GreedySearch) -> PlacementPlan:
        """Return what was decided."""
        new = [(wish, seated) for wish in search.wishes for seated in wish.new_seats()]
        ports = RankPorts(self._cluster)
        return PlacementPlan(
            based_on=self._cluster.generation,
            starts=tuple(
                self._start(number, wish, seated, ports)
                for number, (wish, seated) in enumerate(new, 1)
            ),
            endings=tuple(self._endings.values()),
            unmet=tuple(self._unmet),
        )

    def _start(
        self, number: int, wish: DeploymentState, seated: PlannedReplica, ports: RankPorts
    ) -> ReplicaStart:
        assert seated.seat is not None
        deployment, model, seat = wish.deployment, wish.model, seated.seat
        replica_id = ReplicaId(f"{wish.name}-{self._cluster.generation}-{number}")
        spec = ReplicaSpec(
            replica_id=replica_id,
            deployment_id=wish.name,
            version=deployment.version,
            name=deployment.name,
            model_id=ModelId(model.model_id),
            artifact=model.artifact,
            context_tokens=min(deployment.engine.context_tokens_max, model.context_tokens),
            engine=deployment.engine,
            device_ids=seat.parts[0].device_ids,
            memory_bytes=seat.memory_bytes,
            role=wish.role_in(seated.pop),
        )
        if len(seat.parts) == 1:
            return ReplicaStart(node_id=seat.node.node_id, spec=spec, reason=seated.reason)
        return spread_over_nodes(spec, seat, ports.take(seat.node), seated.reason)

    def _refuse(self, deployment: Deployment, reason: str) -> None:
        self._unmet.append(UnmetRequirement(deployment_id=deployment.deployment_id, reason=reason))
