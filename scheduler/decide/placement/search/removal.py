"""Which running replica of a deployment is missed least, and which one must stay."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from isochrone.wire.ids import NodeId
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.slot_ledger import SlotLedger


class Removal(NamedTuple):
    """A running replica that could end, and the cost of its loss."""

    loss: float
    replica: PlannedReplica


def cheapest_removal(
    state: DeploymentState,
    among: Sequence[PlannedReplica],
    ledger: SlotLedger,
    below: float = inf,
) -> Removal | None:
    """Return the running replica of `among` whose loss costs least, if that is less than `below`.

    Among equals, the one with most replicas in its failure domain goes first, then the youngest.
    """
    bounds = [state.loss_lower_bound(replica) for replica in among]
    best: tuple[float, int, float, str] | None = None
    chosen = None
    for number in sorted(range(len(bounds)), key=bounds.__getitem__):
        # The bounds ascend, so no later replica can cost less than this one's bound.
        if bounds[number] >= below or (best and bounds[number] > best[0]):
            break
        replica = among[number]
        assert replica.placement is not None
        placement, loss = replica.placement, state.loss(replica)
        crowd = ledger.replicas_in_domain_of(placement.node_id, state.deployment_id)
        order = (loss, -crowd, placement.age_s, str(placement.replica_id))
        if best is None or order < best:
            best, chosen = order, replica
    return Removal(best[0], chosen) if best and chosen and best[0] < below else None


def removable_replicas(state: DeploymentState, settle_s: float) -> list[PlannedReplica]:
    """Return the running replicas that are at least `settle_s` old and not the only one of a
    keep_warm PoP."""
    pops = state.pops()
    kept = {pop for pop in state.needs.deployment.policy.keep_warm if pops.count(pop) == 1}
    return [
        replica
        for replica in state.replicas
        if replica.placement and replica.placement.age_s >= settle_s and replica.pop not in kept
    ]


def separate_replica(fleet: FleetCapacity, state: DeploymentState) -> PlannedReplica | None:
    """Return the replica without which the others of its PoP would all fail together, if any."""
    if len(set(state.pops())) > 1 or shared_domains(fleet, state, state.replicas):
        return None
    for replica in state.replicas:
        others = [other for other in state.replicas if other is not replica]
        if shared_domains(fleet, state, others):
            return replica
    return None


def shared_domains(
    fleet: FleetCapacity, state: DeploymentState, replicas: Sequence[PlannedReplica]
) -> frozenset[str]:
    """Return the failure domains that each take all of some replicas.

    Empty where replicas_min < 2, for fewer than two replicas, and for those of several PoPs.
    """
    if state.needs.replicas_min < 2 or len(replicas) < 2 or len({r.pop for r in replicas}) > 1:
        return frozenset()
    domains = [failure_domains(fleet, replica.node_ids) for replica in replicas]
    return frozenset.intersection(*domains)


def failure_domains(fleet: FleetCapacity, node_ids: Iterable[NodeId]) -> frozenset[str]:
    """Return the failure domains of some nodes."""
    return frozenset(fleet.failure_domain(node_id) for node_id in node_ids)
