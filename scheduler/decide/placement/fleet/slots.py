"""Which node and devices could hold a replica. Every no carries its reason and its numbers."""

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Final

import msgspec

from isochrone.wire.ids import DeviceId, NodeId, PopId
from isochrone.wire.model import Deployment, EngineSettings, Model, Policy
from isochrone.wire.routes import Pop
from scheduler.decide.capacity.replica_capacity import gib, overhead_bytes
from scheduler.decide.cluster import FleetNode, Liveness, Placement

DISK_MARGIN_BYTES: Final = 1024**3

FreeMemory = Mapping[tuple[NodeId, DeviceId], int]


class SlotPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a seat takes of one node."""

    node: FleetNode
    device_ids: tuple[DeviceId, ...]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A place that could hold a replica: on one node, or over several with the leader first.

    `memory_bytes` is what it takes of each device.
    """

    parts: tuple[SlotPart, ...]
    memory_bytes: int

    @property
    def node(self) -> FleetNode:
        """The node whose engine has the door."""
        return self.parts[0].node


def replica_memory_bytes(model: Model, engine: EngineSettings) -> int:
    """Return what a replica takes of each of its devices: weights are split, the rest is not."""
    if engine.memory_bytes:
        return engine.memory_bytes
    return model.weights_bytes // engine.devices + engine.kv_memory_bytes + overhead_bytes(model)


def free_memory(nodes: Iterable[FleetNode], placements: Iterable[Placement]) -> FreeMemory:
    """Return the bytes left on each device after every seat not yet given back, ending or not."""
    taken: dict[tuple[NodeId, DeviceId], int] = defaultdict(int)
    for placement in placements:
        for part in placement.parts:
            for device_id in part.device_ids:
                taken[part.node_id, device_id] += part.memory_bytes
    return {
        (node.node_id, device.device_id): device.memory_bytes
        - taken[node.node_id, device.device_id]
        for node in nodes
        for device in node.devices
    }


def residency_allows(policy: Policy, pop: Pop) -> bool:
    """Say whether residency lets a replica live in `pop`; a denial beats an allowance."""
    names = {str(pop.pop), pop.country}
    if names & set(policy.deny):
        return False
    return not policy.allow or bool(names & set(policy.allow))


def policy_contradiction(
    policy: Policy, pops: Container[PopId], residents: Collection[PopId]
) -> str:
    """Say what in a policy cannot be met in any fleet; "" if nothing. `residents` are the PoPs that
    it allows of those there are."""
    if policy.replicas_min > policy.replicas_max:
        return (
            f"replicas_min {policy.replicas_min} is over replicas_max {policy.replicas_max}; raise "
            "this or lower that"
        )
    if pops and not residents:
        given = f"allow {list(policy.allow)} and deny {list(policy.deny)}"
        return f"{given} together leave no PoP: a denial beats an allowance"
    for warm in policy.keep_warm:
        if warm not in pops:
            return f"keep_warm names {warm!r}, which is no PoP"
        if warm not in residents:
            return f"keep_warm names {warm!r}, where allow and deny let nothing live"
    return ""


def why_no_slot(
    node: FleetNode,
    *,
    pop: Pop,
    verdict: Liveness,
    deployment: Deployment,
    model: Model,
    free: FreeMemory,
) -> str:
    """Say why `node` can hold no replica, or no part of one over several nodes; "" if it can."""
    reason = why_ineligible(node, pop=pop, verdict=verdict, deployment=deployment, model=model)
    if reason or classes_with_room(node, deployment.engine, model, free):
        return reason
    return _no_room(node, deployment.engine, replica_memory_bytes(model, deployment.engine), free)


def classes_with_room(
    node: FleetNode, engine: EngineSettings, model: Model, free: FreeMemory
) -> set[str]:
    """Return the classes of which a node has devices enough with room for a replica, or part."""
    needed = replica_memory_bytes(model, engine)
    roomy = Counter(
        device.device_class
        for device in node.devices
        if device.healthy and free[node.node_id, device.device_id] >= needed
    )
    return {name for name, count in roomy.items() if count >= engine.devices_per_node}


def why_ineligible(
    node: FleetNode, *, pop: Pop, verdict: Liveness, deployment: Deployment, model: Model
) -> str:
    """Say why a node may take no replica, whatever its devices hold; "" if it may."""
    if not residency_allows(deployment.policy, pop):
        return f"residency does not allow {pop.pop} ({pop.country})"
    if node.revoked:
        return "the node is revoked"
    if node.draining:
        return "the node is draining"
    if verdict is not Liveness.READY:
        return f"the node is {verdict.value}: silent for {node.silent_s:.0f} s"
    if deployment.engine.nodes > 1 and node.rank_ports is None:
        return "it has part in no replica over several nodes: its plaintext_rank_ports is not set"
    refused = dict(node.refused).get(deployment.deployment_id)
    if refused is not None:
        return f"it refused one of this deployment: {refused}"
    if model.artifact.digest not in node.artifacts and node.disk_free_bytes:
        wanted = model.artifact.size_bytes + DISK_MARGIN_BYTES
        if node.disk_free_bytes < wanted:
            return f"the disk has {gib(node.disk_free_bytes)} free, {gib(wanted)} needed"
    return ""


def _no_room(node: FleetNode, engine: EngineSettings, needed: int, free: FreeMemory) -> str:
    healthy = [device for device in node.devices if device.healthy]
    count = engine.devices_per_node
    if not node.devices:
        return "the node reports no device"
    if not healthy:
        return f"no healthy device: {node.devices[0].reason or 'reported unhealthy'}"
    alike = Counter(device.device_class for device in healthy)
    if max(alike.values()) < count:
        name, most_alike = alike.most_common(1)[0]
        return f"needs {count} devices of one class, it has {most_alike} x {name}"
    most = max(free[node.node_id, device.device_id] for device in healthy)
    wanted = gib(needed) if count == 1 else f"{gib(needed)} on each of {count} devices"
    return f"needs {wanted}, the most free on one device is {gib(max(0, most))}"
