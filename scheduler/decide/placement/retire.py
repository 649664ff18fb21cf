"""What ends, and when: the forbidden, the failed, the drained, old versions, and spare seats; and
what starts so that another can end: a new version, or one that would not fail with its fellows.

Rule: residency is obeyed at once; everything else waits until what takes its place is warm.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from math import inf
from typing import Final

import numpy as np

from isochrone.wire.ids import NodeId
from isochrone.wire.model import Deployment
from isochrone.wire.report import ReplicaState
from scheduler.decide.capacity.start_times import COMING
from scheduler.decide.cluster import Placement
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.fleet.slots import residency_allows
from scheduler.decide.placement.score import START
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.greedy_search import Gain, GreedySearch
from scheduler.decide.placement.search.load_assignment import EPSILON

End = Callable[[Placement, str], None]
EndSeat = Callable[[PlannedReplica, str], None]

OVER = (ReplicaState.FAILED, ReplicaState.STOPPED)

KEPT: Final = 0.25
"""The share of its hold that a seat must save to stay: who leaves at night is wanted by day."""


def is_staying(ground: FleetCapacity, placement: Placement) -> bool:
    """Say whether a placement serves or will: on a node that stays, and not given up."""
    return (
        not placement.is_ending
        and not any(part.state in OVER for part in placement.parts)
        and ground.staying.issuperset(placement.node_ids)
    )


def end_forbidden(
    ground: FleetCapacity, deployment: Deployment, mine: Sequence[Placement], end: End
) -> list[Placement]:
    """End what residency forbids, and return the rest: data may not stay where it may not be."""
    kept = []
    for placement in mine:
        node = ground.nodes.get(placement.node_id)
        if node is not None and not residency_allows(deployment.policy, ground.pops[node.pop]):
            end(placement, f"residency no longer allows {node.pop}")
        else:
            kept.append(placement)
    return kept


def end_failed(
    ground: FleetCapacity, deployment: Deployment, mine: Sequence[Placement], end: End
) -> None:
    """End what has failed for good: a node tries no more, or a part of it is gone."""
    for placement in mine:
        over = next((part for part in placement.parts if part.state in OVER), None)
        whole = placement.version != deployment.version or (
            len(placement.parts) == deployment.engine.nodes
        )
        if over is not None:
            where = f" on {over.node_id}" if over is not placement else ""
            end(placement, f"it {over.state.value}{where}: {over.state_reason}"[:300])
        elif placement.followers and _shaken(ground, placement):
            # One node's loss frees nothing; a group's leaves the others' memory held for nothing.
            end(placement, f"it needs all of its nodes: {_shaken(ground, placement)}")
        elif not whole:
            parts = f"{len(placement.parts)} of {deployment.engine.nodes} parts"
            end(placement, f"the store knows {parts} of it")


def end_leaderless(placements: Sequence[Placement], end: End) -> None:
    """End parts of replicas over several nodes whose leader's part is gone."""
    for placement in placements:
        if placement.leader_id and not placement.is_ending:
            end(placement, f"its leader {placement.leader_id} is gone")


def _shaken(ground: FleetCapacity, placement: Placement) -> str:
    """Say which of its nodes counts no more; "" where all do."""
    for node_id in placement.node_ids:
        node = ground.nodes.get(node_id)
        if node is None or not ground.view.counts(node):
            return f"{node_id} is lost or revoked"
    return ""


def end_drained(ground: FleetCapacity, mine: Sequence[Placement], least: int, end: End) -> None:
    """End what is on a draining node, once `least` are warm on others and none is coming."""
    if not ground.is_draining:
        return
    standing = [p for p in mine if is_staying(ground, p)]
    warm = [p for p in standing if p.state is ReplicaState.WARM]
    if len(warm) < least or any(p.state in COMING for p in standing):
        return
    for placement in mine:
        nodes = [ground.nodes[node_id] for node_id in placement.node_ids if node_id in ground.nodes]
        draining = next((node for node in nodes if node.draining), None)
        if placement.state not in OVER and draining is not None:
            end(placement, f"node {draining.node_id} is draining, others are warm")


def replace_stale(
    search: GreedySearch,
    wish: DeploymentState,
    fresh: DeploymentState,
    surge_max: int,
    end_seat: EndSeat,
) -> bool:
    """End old ones that new ones have made spare; if there are none, start a new one.

    Where one more may not be, or would not pay even if no old one stood, old ones have better
    places than are left: once the new ones can do without, the one missed least makes room. False
    where there is no new one, and no seat for one.
    """
    version = wish.deployment.version
    coming = sum(1 for s in fresh.seats if s.placement and s.placement.state in COMING)
    coming += sum(1 for s in wish.seats if s.seat)
    if coming >= surge_max:
        return True
    stale = [s for s in wish.seats if s.placement and s.placement.version != version]
    ended = 0
    for seated in stale:
        if _may_be_replaced(wish, fresh, seated) and wish.loss(seated) < wish.hold + START:
            end_seat(seated, f"version {version} is warm in its place")
            wish.drop(seated)
            ended += 1
    if ended:
        return True
    best = _best_of(search, fresh, fresh.nodes_of)
    is_full = len(wish.seats) > wish.most
    if best and (not fresh.seats or (best.net > 0 and not is_full)):
        if search.has_starts_left:
            search.take(wish, best, reason=f"version {version} replaces the one before")
    elif is_full or fresh.flow.unserved() <= EPSILON:
        among = [s for s in may_go(wish, 0.0) if s in stale and _may_be_replaced(wish, fresh, s)]
        missed = least_missed(wish, among)
        if missed:
            end_seat(missed[1], f"version {version} is warm, and finds no better place beside it")
    return bool(best or fresh.seats)


def _may_be_replaced(wish: DeploymentState, fresh: DeploymentState, seated: PlannedReplica) -> bool:
    """Say whether enough stand, and enough of them warm, for an old one to go."""
    serves = seated.placement and seated.placement.state is ReplicaState.WARM
    if serves and len(wish.warm_pops()) <= max(1, wish.least):
        return False
    return bool(fresh.seats) and len(wish.seats) > wish.least


def separate_failure_domains(search: GreedySearch, wish: DeploymentState, settle_s: float) -> None:
    """Where two are asked for and all would fail together, start one in their PoP that would not.

    A spare one ends then. Of what nobody asks for twice, and of other PoPs, the sum of score.py
    decides alone.
    """
    ground, pops = search.ground, set(wish.pops())
    asked = wish.least >= 2 and len(wish.seats) >= 2 and len(pops) == 1
    has_settled = len(may_go(wish, settle_s)) == len(wish.seats)
    if not (asked and has_settled and search.has_starts_left):
        return
    domains = [_domains(ground, s.placement.node_ids) for s in wish.seats if s.placement]
    shared = frozenset.intersection(*domains)
    if shared:
        here = [site for site in wish.nodes_of if ground.sites[site].pop in pops]
        best = _best_of(search, wish, here, shared)
        if best:
            search.take(wish, best, reason=f"the others would all fail with {min(shared)}")


def _best_of(
    search: GreedySearch, wish: DeploymentState, sites: Iterable[int], but: Set[str] = frozenset()
) -> Gain | None:
    """Return the best free seat at some sites, paid for or not, outside of some failure domains."""
    best: Gain | None = None
    for site in sites:
        worth = search.worth_to(wish, site)
        seat = worth.offered.seat if worth.offered else None
        if seat is None or but & _domains(search.ground, [p.node.node_id for p in seat.parts]):
            continue
        if best is None or worth.net > best.net:
            best = worth
    return best


def _domains(ground: FleetCapacity, node_ids: Iterable[NodeId]) -> frozenset[str]:
    return frozenset(ground.domain_of(node_id) for node_id in node_ids)


def end_spare(wish: DeploymentState, settle_s: float, end_seat: EndSeat) -> bool:
    """End the seat that is missed least, if it is over the maximum or hardly earns its hold."""
    over = len(wish.seats) > wish.most
    if not over and len(wish.seats) <= wish.least:
        return False
    if over:
        spare = least_missed(wish, [s for s in wish.seats if s.placement])
    else:
        spare = least_missed(wish, may_go(wish, settle_s), below=KEPT * wish.hold)
    if spare is None:
        return False
    lost, seated = spare
    too_many = f"{len(wish.seats)} replicas, the policy allows {wish.most}"
    too_little = f"demand has moved: it saves {lost / wish.weight:.0f} ms x requests/s"
    end_seat(seated, too_many if over else too_little)
    return True


def least_missed(
    wish: DeploymentState, among: Sequence[PlannedReplica], below: float = inf
) -> tuple[float, PlannedReplica] | None:
    """Return the seat that stands whose loss costs least, and what: if it is less than `below`."""
    guesses = [wish.loss_at_least(seated) for seated in among]
    best: tuple[float, int, float, str] | None = None
    chosen = None
    for number in np.argsort(guesses, kind="stable"):
        # No later one can cost less than its guess.
        if guesses[number] >= below or (best and guesses[number] > best[0]):
            break
        seated = among[number]
        assert seated.placement is not None
        placement, loss = seated.placement, wish.loss(seated)
        # Of equals the one with most of its fellows beside it, then the youngest.
        crowd = wish.ground.crowd(wish.name, placement.node_id)
        entry = (loss, -crowd, placement.age_s, str(placement.replica_id))
        if best is None or entry < best:
            best, chosen = entry, seated
    return (best[0], chosen) if best and chosen and best[0] < below else None


def may_go(wish: DeploymentState, settle_s: float) -> list[PlannedReplica]:
    """Return the standing seats that have settled and are no PoP's only one to be kept warm."""
    pops = wish.pops()
    kept = {pop for pop in wish.deployment.policy.keep_warm if pops.count(pop) == 1}
    return [
        seated
        for seated in wish.seats
        if seated.placement and seated.placement.age_s >= settle_s and seated.pop not in kept
    ]
