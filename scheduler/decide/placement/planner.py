"""plan_deployments(cluster) -> PlacementPlan: which replicas start, which end, and why.

Steps, and where each of them is:

 1. End replicas that must not run: forbidden, failed, or of a deleted deployment (`retire.py`).
 2. Read the needs of each deployment (`search/deployment_needs.py`), what it already has
    (`search/deployment_state.py`), and which load each replica serves
    (`search/load_assignment.py`). All later steps lower one sum (`score.py`).
 3. Fill: add replicas that pay, best per byte first (`search/greedy_fill.py`), each on the tightest
    devices of its site (`search/slot_ledger.py`).
 4. Improve while effort is left (`search/local_search.py`), each change kept or rolled back as a
    whole: drop new replicas that do not pay, move others, take full slots from replicas that are
    worth less (`search/swap.py`), lay out all new replicas of a small fleet again together
    (`search/recombine.py`), exchange the contents of two nodes or the sites of two replicas
    (`search/exchange.py`), refill sites in other orders, and force replicas elsewhere to leave
    local minima (`search/perturb.py`). A small fleet that starts several replicas gets more effort,
    for all that it lacks; what is too much for one plan is left to the next. New deployments of a
    large fleet start also replicas that would follow when demand grows. Where a policy allows
    no more replicas, start one where it is worth more, so that another can end.
 5. End what is no longer needed: preempted, drained, old versions, surplus; separate replicas that
    would all fail together (`retire.py`); and report what could not be met (`unmet.py`).

Rule 1: the same cluster state gives the same plan, and a plan that was carried out gives an empty
one.
Rule 2: a replica ends only when its replacement is warm; a failed start never ends another replica.
Rule 3: residency and memory are hard limits.
Rule 4: while many nodes are silent, only certain losses are replaced: replicas that nodes in
contact report as failed are replaced on nodes in contact.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf

import msgspec

from isochrone.wire.ids import DeploymentId, ModelId, PopId, ReplicaId
from isochrone.wire.models.model import CatalogModel, Deployment
from isochrone.wire.peers.assignment import ReplicaSpec, Role
from scheduler.decide.capacity.default_sizes import replica_sizes, with_sizes
from scheduler.decide.capacity.measured_memory import measured_excess, with_excess
from scheduler.decide.capacity.measured_rates import measured_rates
from scheduler.decide.capacity.replica_capacity import Profiles, context_tokens_of
from scheduler.decide.cluster import (
    ClusterState,
    Placement,
    PlacementPlan,
    ReplicaEnding,
    ReplicaRoleChange,
    ReplicaStart,
    UnmetRequirement,
)
from scheduler.decide.demand.demand_rates import demand_by_deployment
from scheduler.decide.membership.liveness import LivenessLimits, LivenessView, judge_liveness
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.memory_growth import grow_into_free_memory
from scheduler.decide.placement.multi_node import RankPorts, spread_over_nodes
from scheduler.decide.placement.retire import (
    end_drained,
    end_failed,
    end_forbidden,
    end_leaderless,
    end_surplus,
    has_failed,
    is_staying,
    replace_old_version,
    separate_failure_domains,
)
from scheduler.decide.placement.search.deployment_needs import DeploymentNeeds
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import PlacementDraft
from scheduler.decide.placement.search.greedy_fill import fill, keep_first
from scheduler.decide.placement.search.local_search import LocalSearch
from scheduler.decide.placement.search.pop_roles import due_role_changes, role_of_start
from scheduler.decide.placement.search.recombine import LAID_OUT_PER_DEVICE_MAX, is_small
from scheduler.decide.placement.search.slot_ledger import SlotLedger
from scheduler.decide.placement.unmet import (
    impossible_policy,
    kv_types_differ,
    no_slot_for_version,
    unmet_requirements,
)


class PlanLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one plan may change, and how old a replica must be to end as surplus.

    A large fleet may change more at once: `moves_share` of its placements. `effort` limits the
    attempts to improve the plan, of about a millisecond each. The plan of a small fleet that starts
    several replicas gets `thorough_effort` attempts in addition.
    """

    starts_max: int = 8
    endings_max: int = 8
    moves_share: float = 0.01
    settle_s: float = 300.0
    surge_max: int = 1
    effort: int = 60
    thorough_effort: int = 1_200


def plan_deployments(
    cluster: ClusterState,
    limits: PlanLimits | None = None,
    liveness_limits: LivenessLimits | None = None,
) -> PlacementPlan:
    """Return the starts and ends that bring the fleet closer to its desired state."""
    limits = limits or PlanLimits()
    view = judge_liveness(cluster.nodes, cluster.acting_for_s, liveness_limits)
    if view.frozen:
        return replace_failed(PlanBuilder(cluster, view, limits), cluster.deployments)
    builder = PlanBuilder(cluster, view, limits)
    builder.end_invalid()
    draft = builder.new_draft()
    search = LocalSearch(draft, limits.settle_s, limits.effort)
    is_small_fleet = is_small(draft)
    is_whole = limits.thorough_effort > 0 and is_small_fleet
    if is_whole:
        # Later plans make the starts that are too many for this one: all have to fit together.
        laid_out = LAID_OUT_PER_DEVICE_MAX * len(draft.ledger.free)
        draft.limit_starts(max(builder.starts_max, laid_out))
    search.fill()
    search.run()
    if is_whole:
        search.run_thoroughly(limits.thorough_effort)
        keep_first(draft, builder.starts_max)
    search.relocate_running()
    if not is_small_fleet:
        search.lay_out()
    # A deployment whose demand is not known would seem to lose nothing.
    for preemption in search.swap.preemptions() if cluster.is_demand_known else ():
        builder.end_replica(preemption.replica, preemption.reason)
    for state in draft.states:
        builder.retire(draft, state)
    return builder.build(draft)


def replace_failed(builder: "PlanBuilder", deployments: Sequence[Deployment]) -> PlacementPlan:
    """Return the plan of a frozen fleet: only failed replicas on nodes in contact are replaced."""
    states = [
        state
        for deployment in sorted(deployments, key=lambda d: d.deployment_id)
        if (state := builder.end_failed_of(deployment)) is not None
    ]
    draft = builder.draft_of(states)
    fill(draft)
    for state in states:
        builder.note_unmet(draft, state)
    return builder.build(draft)


class PlanBuilder:
    """Builds one plan: reads the cluster state, and collects ended replicas and unmet needs."""

    def __init__(self, cluster: ClusterState, view: LivenessView, limits: PlanLimits) -> None:
        self.fleet = FleetCapacity(cluster, view)
        self._cluster = cluster
        self._limits = limits
        share = int(limits.moves_share * len(cluster.placements))
        self.starts_max = max(limits.starts_max, share)
        self._endings_max = max(limits.endings_max, share)
        self._models = {model.model_id: model for model in cluster.models}
        self._profiles: Profiles = measured_rates(cluster)
        self._running: dict[DeploymentId, list[Placement]] = defaultdict(list)
        for placement in cluster.placements:
            if not placement.is_ending and not placement.leader_id:
                self._running[placement.deployment_id].append(placement)
        self._demand = demand_by_deployment(cluster.demand, self.fleet.distances.index)
        self._excess = measured_excess(
            cluster.placements, {d.deployment_id: d for d in cluster.deployments}
        )
        self._endings: dict[ReplicaId, ReplicaEnding] = {}
        self._unmet: list[UnmetRequirement] = []

    def end_invalid(self) -> None:
        """End replicas that residency forbids, that failed, or whose deployment was deleted."""
        end_leaderless(self._cluster.placements, self.end)
        for deployment_id in self._cluster.deleted:
            for placement in self._running.pop(deployment_id, []):
                self.end(placement, "the deployment was deleted")
        for deployment in self._cluster.deployments:
            running = self._running[deployment.deployment_id]
            if deployment.model_id in self._models:
                running = end_forbidden(self.fleet, deployment, running, self.end)
                end_failed(self.fleet, deployment, running, self.end)
            self._running[deployment.deployment_id] = running

    def end_failed_of(self, deployment: Deployment) -> DeploymentState | None:
        """End a deployment's failed replicas on nodes in contact.

        Return its state, with a maximum that allows no more than to replace them, or None if there
        is nothing to replace. Replicas that ended before and wait for another start are replaced
        up to the minimum.
        """
        running = self._running[deployment.deployment_id]
        failed = [p for p in running if has_failed(p) and self.fleet.is_heard(p)]
        end_failed(self.fleet, deployment, failed, self.end)
        staying = sum(is_staying(self.fleet, placement) for placement in running)
        policy = deployment.policy
        missing = len(failed)
        if self.fleet.start_history.has_failed_recently(deployment.deployment_id):
            missing = max(missing, policy.replicas_min - staying)
        model = self._models.get(deployment.model_id)
        if model is None or not missing:
            return None
        replicas_max = min(policy.replicas_max, staying + missing)
        limited = msgspec.structs.replace(policy, replicas_max=replicas_max)
        return self.state_of(msgspec.structs.replace(deployment, policy=limited), model)

    def note_unmet(self, draft: PlacementDraft, state: DeploymentState) -> None:
        """Note a deployment's unmet requirements."""
        self._unmet.extend(unmet_requirements(draft, state))

    def new_draft(self) -> PlacementDraft:
        """Return a draft of every deployment that has a model, with its running replicas."""
        states = []
        for deployment in sorted(self._cluster.deployments, key=lambda d: d.deployment_id):
            model = self._models.get(deployment.model_id)
            if model is None:
                self._refuse(deployment, f"the catalogue has no model {deployment.model_id}")
                continue
            impossible = impossible_policy(self.fleet, deployment) or kv_types_differ(
                self.fleet, deployment, model
            )
            if impossible:
                self._refuse(deployment, impossible)
            states.append(self.state_of(deployment, model))
        return self.draft_of(states)

    def draft_of(self, states: list[DeploymentState]) -> PlacementDraft:
        """Return a draft of some deployments."""
        ledger = SlotLedger(self.fleet, self._cluster)
        return PlacementDraft(self.fleet, ledger, states, self.starts_max)

    def state_of(self, deployment: Deployment, model: CatalogModel) -> DeploymentState:
        """Return a deployment's needs and all of its running replicas that stay."""
        needs = DeploymentNeeds(
            self.fleet,
            deployment,
            with_excess(model, deployment, self._excess),
            self._demand[deployment.deployment_id],
            self._profiles,
        )
        running = [p for p in self._running[deployment.deployment_id] if is_staying(self.fleet, p)]
        return DeploymentState(self.fleet, needs, running)

    def retire(self, draft: PlacementDraft, state: DeploymentState) -> None:
        """Replace old versions, leave draining nodes, end surplus, separate failure domains, and
        note what is unmet."""
        needs = state.needs
        has_old = any(
            r.placement and r.placement.version != needs.deployment.version for r in state.replicas
        )
        # With replicas_max = 0 nothing is replaced.
        is_replacing = needs.replicas_max > 0 and has_old
        running = [
            p for p in self._running[state.deployment_id] if p.replica_id not in self._endings
        ]
        if is_replacing and self._cluster.is_demand_known:
            current = self._current_version_of(needs)
            if not replace_old_version(
                draft, state, current, self._limits.surge_max, self.end_replica
            ):
                self._unmet.append(no_slot_for_version(draft, state))
        is_starting = any(replica.slot for replica in state.replicas)
        if not is_starting:
            may_have_demand = needs.has_demand or not self._cluster.is_demand_known
            minimum = needs.deployment.policy.replicas_min or int(may_have_demand)
            end_drained(self.fleet, running, min(needs.replicas_max, minimum), self.end)
        is_stable = not is_starting and not is_replacing and not state.has_replica_coming()
        settle_s = self._limits.settle_s
        is_known = self._cluster.is_demand_known and self._cluster.is_forecast_known
        # Without a known demand, only what the policy does not allow is surplus.
        unneeded_s = settle_s if is_known else inf
        if is_stable and not end_surplus(draft, state, unneeded_s, self.end_replica):
            separate_failure_domains(draft, state, settle_s)
        self.note_unmet(draft, state)

    def end_replica(self, replica: PlannedReplica, reason: str) -> None:
        """End the placement of a planned replica."""
        if replica.placement:
            self.end(replica.placement, reason)

    def end(self, placement: Placement, reason: str) -> None:
        """End a placement, unless this plan has ended as many as it may."""
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

    def build(self, draft: PlacementDraft) -> PlacementPlan:
        """Return the plan."""
        new = [replica for state in draft.states for replica in state.new_replicas()]
        grown = grow_into_free_memory(new, draft.ledger.all_free_for(1.0))
        ports = RankPorts(self._cluster)
        return PlacementPlan(
            based_on=self._cluster.generation,
            starts=tuple(
                self._start(number, replica, memory_bytes, ports, role)
                for number, (replica, memory_bytes, role) in enumerate(
                    zip(new, grown, _roles_of(new), strict=True), 1
                )
            ),
            endings=tuple(self._endings.values()),
            unmet=tuple(self._unmet),
            frozen=self.fleet.liveness.frozen,
            role_changes=self._role_changes(draft.states),
        )

    def _role_changes(self, states: Sequence[DeploymentState]) -> tuple[ReplicaRoleChange, ...]:
        """Return the changes of roles among running replicas, one in each PoP at most.

        None in a PoP where a replica of the deployment starts or ends.
        """
        changes: list[ReplicaRoleChange] = []
        for state in states if not self.fleet.liveness.frozen else ():
            due = due_role_changes(state)
            running = self._running[state.deployment_id] if due else []
            nodes = {placement.replica_id: placement.node_id for placement in running}
            ending = {
                self.fleet.nodes[p.node_id].pop for p in running if p.replica_id in self._endings
            }
            for change in due:
                node_id = nodes[change.replica_id]
                if self.fleet.nodes[node_id].pop not in ending:
                    changes.append(
                        ReplicaRoleChange(
                            replica_id=change.replica_id,
                            node_id=node_id,
                            role=change.role,
                            reason=change.reason,
                        )
                    )
        return tuple(changes)

    def _current_version_of(self, needs: DeploymentNeeds) -> DeploymentState:
        """Return a deployment's state with the replicas of its current version only."""
        running = [
            p
            for p in self._running[needs.deployment_id]
            if is_staying(self.fleet, p) and p.version == needs.deployment.version
        ]
        return DeploymentState(self.fleet, needs, running)

    def _start(
        self,
        number: int,
        replica: PlannedReplica,
        memory_bytes: int,
        ports: RankPorts,
        role: Role,
    ) -> ReplicaStart:
        assert replica.slot is not None
        needs, slot = replica.state.needs, replica.slot
        deployment, model = needs.deployment, needs.model
        engine = deployment.engine
        sizes = replica_sizes(model, engine, slot.device_class, memory_bytes)
        spec = ReplicaSpec(
            replica_id=ReplicaId(f"{needs.deployment_id}-{self._cluster.generation}-{number}"),
            deployment_id=needs.deployment_id,
            version=deployment.version,
            name=deployment.name,
            model_id=ModelId(model.model_id),
            artifact=model.artifact,
            context_tokens=context_tokens_of(model, engine),
            engine=with_sizes(engine, sizes),
            device_ids=slot.parts[0].device_ids,
            memory_bytes=memory_bytes,
            role=role,
            overcommit=slot.overcommit,
            extra_bytes=model.extra_bytes - self._models[model.model_id].extra_bytes,
            kind=model.kind,
        )
        if len(slot.parts) == 1:
            return ReplicaStart(node_id=slot.leader.node_id, spec=spec, reason=replica.reason)
        return spread_over_nodes(spec, slot, ports.take(slot.leader), replica.reason)

    def _refuse(self, deployment: Deployment, reason: str) -> None:
        self._unmet.append(UnmetRequirement(deployment_id=deployment.deployment_id, reason=reason))


def _roles_of(starts: Sequence[PlannedReplica]) -> list[Role]:
    """Return the role of each replica to start, in order."""
    started: dict[tuple[DeploymentId, PopId], list[Role]] = defaultdict(list)
    roles: list[Role] = []
    for replica in starts:
        in_pop = started[replica.state.deployment_id, replica.pop]
        role = role_of_start(replica.state, replica, in_pop)
        in_pop.append(role)
        roles.append(role)
    return roles
