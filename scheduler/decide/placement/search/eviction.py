"""Which replicas could leave their slots for another, and which of them lose least."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isochrone.wire.ids import DeviceId, NodeId, PopId
from isochrone.wire.peers.report import ReplicaState
from scheduler.decide.cluster import FleetNode
from scheduler.decide.placement.search.blocked_gains import BlockedGain
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import PlacementDraft

Holders = dict[NodeId, list[PlannedReplica]]
"""The replicas on each node that could leave it."""

Losses = dict[PlannedReplica, float]
"""The cost of removing each replica."""


class Eviction(NamedTuple):
    """Replicas whose removal would free a slot, and the loss."""

    loss: float
    leaving: list[PlannedReplica]


class _FullDevice(NamedTuple):
    """How much memory a blocked replica lacks on a device, and the replicas there that could leave
    it.

    With `is_awake_short` the plan has memory for it, but not while those awake that may sleep.
    """

    short_bytes: int
    replicas: list[PlannedReplica]
    is_awake_short: bool


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
        # Replicas that are only starting do not count.
        may_lose = len(warm) > state.needs.replicas_min
        for replica in state.replicas:
            is_new = replica.slot and not replica.waits
            if is_new or (may_lose and _may_preempt(replica, settle_s, warm)):
                for node_id in replica.node_ids:
                    holders[node_id].append(replica)
    return holders


def _may_preempt(replica: PlannedReplica, settle_s: float, warm: Sequence[PopId]) -> bool:
    """Say whether a replica of a deployment that is warm in `warm`, and may lose one, may be
    preempted."""
    placement = replica.placement
    keep_warm = replica.state.needs.deployment.policy.keep_warm
    return (
        placement is not None
        and placement.state is ReplicaState.WARM
        and placement.age_s >= settle_s
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
        on_node = _evictions_on_node(draft, blocked, node, others)
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
    draft: PlacementDraft, blocked: BlockedGain, node: FleetNode, others: Sequence[PlannedReplica]
) -> list[Eviction]:
    """Return which replicas could leave a node: on each device those that lose least for the
    memory they free."""
    needs = blocked.state.needs
    device_class = draft.fleet.sites[blocked.site].device_class
    by_device: dict[DeviceId, list[PlannedReplica]] = defaultdict(list)
    for replica in others:
        for device_id in _devices_of(replica, node.node_id):
            by_device[device_id].append(replica)
    devices: list[_FullDevice] = []
    overcommit = needs.deployment.policy.overcommit
    for device in node.devices:
        if device.device_class != device_class or not device.healthy:
            continue
        if device.memory_bytes < needs.device_bytes:
            continue
        key = node.node_id, device.device_id
        short_bytes = needs.device_bytes - draft.ledger.free[key]
        is_awake_short = short_bytes <= 0
        if is_awake_short:
            short_bytes = needs.device_bytes - draft.ledger.free_for(key, overcommit)
        replicas = by_device[device.device_id] if short_bytes > 0 else []
        full = _FullDevice(short_bytes, replicas, is_awake_short)
        if short_bytes <= sum(_freed_by(replica, full) for replica in replicas):
            devices.append(full)
    count = needs.deployment.engine.devices_per_node
    # Most nodes cannot be freed, whatever their replicas lose: that takes longest to find out.
    if len(devices) < count:
        return []
    could_leave = dict.fromkeys(r for device in devices for r in device.replicas)
    losses = {replica: _loss_for(blocked, replica) for replica in could_leave}
    found = (_cheapest_eviction(device, losses) for device in devices)
    evictions = sorted((e for e in found if e.loss < np.inf), key=lambda eviction: eviction.loss)
    if count == 1 or len(evictions) < count:
        return evictions if count == 1 else []
    leaving = dict.fromkeys(r for eviction in evictions[:count] for r in eviction.leaving)
    return [Eviction(sum(losses[replica] for replica in leaving), list(leaving))]


def _cheapest_eviction(device: _FullDevice, losses: Losses) -> Eviction:
    """Return the replicas that lose least of those whose removal frees enough of a device."""
    short_bytes = device.short_bytes
    if short_bytes <= 0:
        return Eviction(0.0, [])
    large_enough = [r for r in device.replicas if _freed_by(r, device) >= short_bytes]
    best = Eviction(np.inf, [])
    if large_enough:
        cheapest = min(large_enough, key=losses.__getitem__)
        best = Eviction(losses[cheapest], [cheapest])
    leaving: list[PlannedReplica] = []
    for replica in sorted(device.replicas, key=lambda r: losses[r] / _freed_by(r, device)):
        if short_bytes <= 0:
            break
        leaving.append(replica)
        short_bytes -= _freed_by(replica, device)
    loss = sum(losses[replica] for replica in leaving)
    return Eviction(loss, leaving) if short_bytes <= 0 and loss < best.loss else best


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


def _devices_of(replica: PlannedReplica, node_id: NodeId) -> tuple[DeviceId, ...]:
    if replica.slot:
        return next(p.device_ids for p in replica.slot.parts if p.node.node_id == node_id)
    parts = replica.placement.parts if replica.placement else ()
    return next((part.device_ids for part in parts if part.node_id == node_id), ())


def _freed_by(replica: PlannedReplica, device: _FullDevice) -> int:
    """Return the bytes of a device that a replica frees by leaving it, at least 1."""
    holder = replica.slot or replica.placement
    if holder is None:
        return 1
    return max(1, int(holder.memory_bytes * (holder.overcommit if device.is_awake_short else 1)))
