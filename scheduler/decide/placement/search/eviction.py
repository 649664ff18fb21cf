"""Which replicas could leave their slots for another, and which of them lose least."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isochrone.wire.ids import DeviceId, NodeId, PopId
from isochrone.wire.peers.report import ReplicaState
from scheduler.decide.placement.search.blocked_gains import BlockedGain
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import PlacementDraft

Holders = dict[NodeId, list[PlannedReplica]]
"""The replicas on each node that could leave it."""

Losses = dict[PlannedReplica, float]
"""The cost of removing each replica."""


class Eviction(NamedTuple):
    """Replicas whose removal would free a slot, and what that loses."""

    loss: float
    leaving: list[PlannedReplica]


def preemptable_holders(draft: PlacementDraft, settle_s: float) -> Holders:
    """Return the replicas on each node that could leave it: new ones, and running ones that may
    be preempted."""
    return _holders(draft, settle_s, [state.warm_pops() for state in draft.states])


def new_holders(draft: PlacementDraft) -> Holders:
    """Return the new replicas on each node."""
    return _holders(draft, np.inf, [[] for _ in draft.states])


def _holders(
    draft: PlacementDraft, settle_s: float, warm_pops: Sequence[Sequence[PopId]]
) -> Holders:
    holders: Holders = defaultdict(list)
    for state, warm in zip(draft.states, warm_pops, strict=True):
        for replica in state.replicas:
            is_new = replica.slot and not replica.waits
            if is_new or _may_preempt(replica, settle_s, warm):
                for node_id in _nodes_of(replica):
                    holders[node_id].append(replica)
    return holders


def _may_preempt(replica: PlannedReplica, settle_s: float, warm: Sequence[PopId]) -> bool:
    """Say whether a running replica may be preempted while its deployment is warm in `warm`.

    Replicas that are only starting do not count.
    """
    needs, placement = replica.state.needs, replica.placement
    keep_warm = needs.deployment.policy.keep_warm
    return (
        placement is not None
        and placement.state is ReplicaState.WARM
        and placement.age_s >= settle_s
        and len(warm) > needs.replicas_min
        and not (replica.pop in keep_warm and warm.count(replica.pop) == 1)
    )


def may_preempt_together(leaving: Sequence[PlannedReplica]) -> bool:
    """Say whether replicas that may each be preempted may be together."""
    pops_lost: dict[DeploymentState, list[PopId]] = defaultdict(list)
    for replica in leaving:
        if replica.placement:
            pops_lost[replica.state].append(replica.pop)
    for state, pops in pops_lost.items():
        left = Counter(state.warm_pops()) - Counter(pops)
        kept = set(state.needs.deployment.policy.keep_warm) & set(pops)
        if left.total() < state.needs.replicas_min or not kept <= left.keys():
            return False
    return True


def cheapest_evictions(
    draft: PlacementDraft, blocked: BlockedGain, holders: Holders
) -> list[list[PlannedReplica]]:
    """Return sets of replicas whose removal would free a slot at a site, cheapest first."""
    state = blocked.state
    evictions: list[Eviction] = []
    node_count = state.needs.deployment.engine.nodes
    for node in state.needs.eligible_nodes[blocked.site]:
        others = [r for r in holders.get(node.node_id, []) if r.state is not state]
        losses = {replica: _loss_for(blocked, replica) for replica in others}
        on_node = _evictions_on_node(draft, blocked, node.node_id, others, losses)
        for eviction in on_node if node_count == 1 else on_node[:1]:
            has_running = any(replica.placement for replica in eviction.leaving)
            if eviction.loss <= blocked.net or not has_running:
                evictions.append(eviction)
    evictions.sort(key=lambda eviction: eviction.loss)
    if node_count == 1:
        # Two evictions from the same deployments are alike: keep the cheaper one.
        distinct = {
            tuple(sorted(r.state.number for r in eviction.leaving)): eviction
            for eviction in reversed(evictions)
        }
        cheapest = sorted(distinct.values(), key=lambda eviction: eviction.loss)[:2]
        return [eviction.leaving for eviction in cheapest]
    together = dict.fromkeys(
        replica for eviction in evictions[:node_count] for replica in eviction.leaving
    )
    return [list(together)] if len(evictions) >= node_count else []


def _evictions_on_node(
    draft: PlacementDraft,
    blocked: BlockedGain,
    node_id: NodeId,
    others: list[PlannedReplica],
    losses: Losses,
) -> list[Eviction]:
    """Return which replicas could leave a node: on each device those that lose least for the
    memory they free."""
    fleet, needs = draft.fleet, blocked.state.needs
    needed = needs.memory_bytes // needs.deployment.engine.devices
    device_class = fleet.sites[blocked.site].device_class
    evictions: list[Eviction] = []
    for device in fleet.nodes[node_id].devices:
        if device.device_class != device_class or not device.healthy:
            continue
        if device.memory_bytes < needed:
            continue
        evictions.append(
            _eviction_on_device(draft, node_id, device.device_id, needed, others, losses)
        )
    evictions = sorted(
        (e for e in evictions if e.loss < np.inf), key=lambda eviction: eviction.loss
    )
    count = needs.deployment.engine.devices_per_node
    if count == 1 or len(evictions) < count:
        return evictions if count == 1 else []
    leaving = dict.fromkeys(r for eviction in evictions[:count] for r in eviction.leaving)
    return [Eviction(sum(losses[replica] for replica in leaving), list(leaving))]


def _eviction_on_device(
    draft: PlacementDraft,
    node_id: NodeId,
    device_id: DeviceId,
    needed: int,
    others: list[PlannedReplica],
    losses: Losses,
) -> Eviction:
    short = needed - draft.ledger.free[node_id, device_id]
    if short <= 0:
        return Eviction(0.0, [])
    on_device = [replica for replica in others if device_id in _devices_of(replica, node_id)]
    large_enough = [replica for replica in on_device if _memory_of(replica) >= short]
    best = Eviction(np.inf, [])
    if large_enough:
        cheapest = min(large_enough, key=losses.__getitem__)
        best = Eviction(losses[cheapest], [cheapest])
    leaving: list[PlannedReplica] = []
    for replica in sorted(on_device, key=lambda r: losses[r] / _memory_of(r)):
        if short <= 0:
            break
        leaving.append(replica)
        short -= _memory_of(replica)
    loss = sum(losses[replica] for replica in leaving)
    return Eviction(loss, leaving) if short <= 0 and loss < best.loss else best


def net_loss(replica: PlannedReplica) -> float:
    """Return what removing a replica costs, less its own cost."""
    return replica.state.loss(replica) - replica.hold_cost - replica.start_cost


def _loss_for(blocked: BlockedGain, replica: PlannedReplica) -> float:
    """Return what removing a replica costs; inf if it runs and is surely worth more than
    `blocked`."""
    paid = replica.hold_cost + replica.start_cost
    if replica.placement and replica.state.loss_lower_bound(replica) - paid > blocked.net:
        return np.inf
    return net_loss(replica)


def _nodes_of(replica: PlannedReplica) -> Sequence[NodeId]:
    if replica.slot:
        return [part.node.node_id for part in replica.slot.parts]
    return replica.placement.node_ids if replica.placement else ()


def _devices_of(replica: PlannedReplica, node_id: NodeId) -> tuple[DeviceId, ...]:
    if replica.slot:
        return next(p.device_ids for p in replica.slot.parts if p.node.node_id == node_id)
    parts = replica.placement.parts if replica.placement else ()
    return next((part.device_ids for part in parts if part.node_id == node_id), ())


def _memory_of(replica: PlannedReplica) -> int:
    """Return the bytes that a replica takes of each device, at least 1."""
    holder = replica.slot or replica.placement
    return max(1, holder.memory_bytes) if holder else 1
