"""Decides which replicas end, and when, and which start so that another can end.

Rule: residency is obeyed at once. Every other end waits until its replacement is warm.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from math import inf
from typing import Final

from isochrone.wire.models.model import Deployment
from isochrone.wire.peers.report import ReplicaState
from scheduler.decide.capacity.start_times import COMING
from scheduler.decide.cluster import Placement
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.score import START
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import Gain, PlacementDraft
from scheduler.decide.placement.search.load_assignment import EPSILON
from scheduler.decide.placement.search.removal import (
    cheapest_removal,
    failure_domains,
    removable_replicas,
    separate_replica,
    shared_domains,
)

EndPlacement = Callable[[Placement, str], None]
EndReplica = Callable[[PlannedReplica, str], None]
"""Ends a placement, or a planned replica's placement, for a reason."""

TERMINAL_STATES = (ReplicaState.FAILED, ReplicaState.STOPPED)
"""The states of a replica that will not serve again."""

RESTARTS_OF_BROKEN: Final = 2
"""A replica that is not warm after this many restarts is broken. With fewer it may just start."""

KEPT: Final = 0.25
"""A replica ends for lack of demand once it saves less than this share of its hold cost. The share
is well below 1 because demand that leaves at night comes back by day."""


def has_failed(placement: Placement) -> bool:
    """Say whether a part of a placement will not serve again."""
    return placement.state in TERMINAL_STATES or any(
        part.state in TERMINAL_STATES for part in placement.followers
    )


def is_staying(fleet: FleetCapacity, placement: Placement) -> bool:
    """Say whether a placement serves or will serve, on nodes and devices that stay."""
    return not placement.is_ending and not has_failed(placement) and fleet.stays(placement)


def end_forbidden(
    fleet: FleetCapacity, deployment: Deployment, running: Sequence[Placement], end: EndPlacement
) -> list[Placement]:
    """End the placements that residency forbids, and return the others."""
    kept = []
    allowed = fleet.allowed_pops(deployment.policy)
    for placement in running:
        node = fleet.nodes.get(placement.node_id)
        if node is not None and node.pop not in allowed:
            end(placement, f"residency no longer allows {node.pop}")
        else:
            kept.append(placement)
    return kept


def end_failed(
    fleet: FleetCapacity, deployment: Deployment, running: Sequence[Placement], end: EndPlacement
) -> None:
    """End placements that failed for good, and replicas over several nodes that lost a part."""
    for placement in running:
        ended_part = next((part for part in placement.parts if part.state in TERMINAL_STATES), None)
        is_complete = placement.version != deployment.version or (
            len(placement.parts) == deployment.engine.nodes
        )
        if ended_part is not None:
            where = f" on {ended_part.node_id}" if ended_part is not placement else ""
            end(placement, f"it {ended_part.state.value}{where}: {ended_part.state_reason}"[:300])
        elif placement.followers and (lost := _lost_node(fleet, placement)):
            # A lost node frees nothing, but the other nodes hold memory for this replica.
            end(placement, f"it needs all of its nodes: {lost} is lost or revoked")
        elif not is_complete:
            parts = f"{len(placement.parts)} of {deployment.engine.nodes} parts"
            end(placement, f"the store knows only {parts} of it")


def end_leaderless(placements: Sequence[Placement], end: EndPlacement) -> None:
    """End parts of replicas over several nodes whose leader part is gone."""
    for placement in placements:
        if placement.leader_id and not placement.is_ending:
            end(placement, f"its leader {placement.leader_id} is gone")


def end_drained(
    fleet: FleetCapacity, running: Sequence[Placement], replicas_min: int, end: EndPlacement
) -> None:
    """End what runs on draining nodes or unhealthy devices, once `replicas_min` replicas are warm
    on others and none is coming."""
    if not fleet.may_leave:
        return
    staying = [p for p in running if is_staying(fleet, p)]
    warm = [p for p in staying if p.state is ReplicaState.WARM]
    if len(warm) < replicas_min or any(p.state in COMING for p in staying):
        return
    for placement in running:
        reason = fleet.leaving_reason(placement)
        if placement.state not in TERMINAL_STATES and reason:
            end(placement, f"{reason}, others are warm")


def replace_old_version(
    draft: PlacementDraft,
    state: DeploymentState,
    current: DeploymentState,
    surge_max: int,
    end_replica: EndReplica,
) -> bool:
    """End old replicas that new ones replace; if there is none to end, start a new one.

    `state` has the replicas of all versions, `current` only those of the current one. If one more
    replica is not allowed, or would not pay even without the old ones, then the old ones hold
    better slots than are free: the one missed least ends as soon as the others suffice. Old
    replicas that only restart end at once, because they take memory and time from the new ones.
    Return False where there is no slot for a new replica, and none runs or no old one may end.
    """
    needs = state.needs
    version = needs.deployment.version
    for replica in state.replicas if current.replicas else []:
        if replica.placement and _is_broken(replica.placement, version):
            restarts = replica.placement.restarts
            reason = f"version {version} follows, and it is not warm after {restarts} restarts"
            end_replica(replica, reason)
    coming = sum(1 for r in current.replicas if r.placement and r.placement.state in COMING)
    coming += sum(1 for r in state.replicas if r.slot)
    if coming >= surge_max:
        return True
    old = [r for r in state.replicas if r.placement and r.placement.version != version]
    ended = 0
    for replica in old:
        if not _may_be_replaced(state, current, replica):
            continue
        if state.loss(replica) < needs.hold_cost + START:
            end_replica(replica, f"version {version} is warm in its place")
            state.remove(replica)
            ended += 1
    if ended:
        return True
    best = _best_gain(draft, current, current.needs.eligible_nodes)
    exceeds_max = len(state.replicas) > needs.replicas_max
    if best and (not current.replicas or (best.net > 0 and not exceeds_max)):
        if draft.has_starts_left:
            draft.take(state, best, reason=f"version {version} replaces the one before")
    elif exceeds_max or current.assignment.unserved() <= EPSILON:
        replaceable = [
            replica
            for replica in removable_replicas(state, 0.0)
            if replica in old and _may_be_replaced(state, current, replica)
        ]
        removal = cheapest_removal(state, replaceable, draft.ledger)
        if removal:
            reason = f"version {version} is warm, and finds no better place beside it"
            end_replica(removal.replica, reason)
            return True
    is_at_minimum = bool(old) and len(state.replicas) <= needs.replicas_min
    return bool(best or (current.replicas and not is_at_minimum))


def separate_failure_domains(
    draft: PlacementDraft, state: DeploymentState, settle_s: float
) -> None:
    """If all replicas of a deployment would fail together, start one in their PoP that would not.

    A superfluous one ends later. Applies where replicas_min >= 2 and all replicas are in one PoP;
    otherwise, and for other PoPs, the sum of score.py decides alone.
    """
    fleet, pops = draft.fleet, set(state.pops())
    shared = shared_domains(fleet, state, state.replicas)
    if not (shared and draft.has_starts_left):
        return
    if len(removable_replicas(state, settle_s)) == len(state.replicas):
        sites = [site for site in state.needs.eligible_nodes if fleet.sites[site].pop in pops]
        best = _best_gain(draft, state, sites, shared)
        if best:
            draft.take(state, best, reason=f"the others would all fail with {min(shared)}")


def end_surplus(
    draft: PlacementDraft, state: DeploymentState, settle_s: float, end_replica: EndReplica
) -> bool:
    """End the replica that is missed least, if replicas_max is exceeded or it saves too little.

    A replica without which all others would fail together stays. Return whether one was ended.
    """
    needs = state.needs
    exceeds_max = len(state.replicas) > needs.replicas_max
    if not exceeds_max and len(state.replicas) <= needs.replicas_min:
        return False
    running, below = [replica for replica in state.replicas if replica.placement], inf
    if not exceeds_max:
        running, below = removable_replicas(state, settle_s), KEPT * needs.hold_cost
    kept = separate_replica(draft.fleet, state)
    among = [replica for replica in running if replica is not kept]
    removal = cheapest_removal(state, among, draft.ledger, below)
    if removal is None:
        return False
    too_many = f"{len(state.replicas)} replicas, the policy allows {needs.replicas_max}"
    saved = removal.loss / needs.weight
    too_little = f"demand has moved: it saves {saved:.0f} ms of waiting per second"
    # The loss is negative only for a replica that worsens the ratio of pinned roles.
    if removal.loss < 0:
        too_little = f"the prefill replicas of {removal.replica.pop} have too little to read"
    end_replica(removal.replica, too_many if exceeds_max else too_little)
    return True


def _lost_node(fleet: FleetCapacity, placement: Placement) -> str:
    """Return the first node of a placement that is lost or revoked, or ""."""
    for node_id in placement.node_ids:
        node = fleet.nodes.get(node_id)
        if node is None or not fleet.liveness.is_in_fleet(node):
            return node_id
    return ""


def _is_broken(placement: Placement, version: int) -> bool:
    """Say whether a placement of a version before `version` restarts and does not become warm."""
    is_restarting = placement.state in COMING and placement.restarts >= RESTARTS_OF_BROKEN
    return placement.version != version and is_restarting


def _may_be_replaced(
    state: DeploymentState, current: DeploymentState, replica: PlannedReplica
) -> bool:
    """Say whether enough other replicas exist, and enough of them are warm, to end an old one."""
    needs = state.needs
    is_warm = replica.placement and replica.placement.state is ReplicaState.WARM
    if is_warm and len(state.warm_pops()) <= max(1, needs.replicas_min):
        return False
    return bool(current.replicas) and len(state.replicas) > needs.replicas_min


def _best_gain(
    draft: PlacementDraft,
    state: DeploymentState,
    sites: Iterable[int],
    excluded_domains: Set[str] = frozenset(),
) -> Gain | None:
    """Return the largest gain with a free slot at `sites`, even a negative one, on nodes outside of
    some failure domains."""
    best: Gain | None = None
    for site in sites:
        gain = draft.gain_at(state, site)
        if gain.candidate is None:
            continue
        node_ids = [part.node.node_id for part in gain.candidate.slot.parts]
        if excluded_domains & failure_domains(draft.fleet, node_ids):
            continue
        if best is None or gain.net > best.net:
            best = gain
    return best
