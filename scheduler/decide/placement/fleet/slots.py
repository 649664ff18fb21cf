"""Which nodes and devices could hold a replica, and why others cannot, with the numbers."""

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping
from math import ceil
from typing import Final

import msgspec

from isochrone.wire.engines.engine_capabilities import sleep_problem_on
from isochrone.wire.ids import DeviceId, NodeId, PopId
from isochrone.wire.models.model import CatalogModel, Deployment, EngineSettings, PlacementPolicy
from isochrone.wire.peers.routes import Pop
from scheduler.decide.capacity.default_sizes import derives_kv
from scheduler.decide.capacity.replica_capacity import (
    gib,
    kv_minimum_bytes,
    overhead_bytes,
    weights_bytes_per_device,
)
from scheduler.decide.cluster import FleetNode, Liveness, Placement

DISK_MARGIN_BYTES: Final = 1024**3
"""Space that must stay free on a disk after weights were fetched to it."""

OVERCOMMITTED_CONTEXTS: Final = 4
"""The KV cache, in whole contexts, of an over-committed replica without a KV size."""

FreeMemory = Mapping[tuple[NodeId, DeviceId], int]
"""Bytes free on each device."""


class SlotPart(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one node that a slot takes."""

    node: FleetNode
    device_ids: tuple[DeviceId, ...]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that could hold a replica, on one node or on several with the leader's part first.

    `memory_bytes` is taken of each device. An over-committed replica takes `awake_bytes` while it
    is awake, and `overcommit` times less in the plan.
    """

    parts: tuple[SlotPart, ...]
    memory_bytes: int
    awake_bytes: int
    overcommit: float = 1.0

    @property
    def leader(self) -> FleetNode:
        """The node whose engine accepts requests."""
        return self.parts[0].node

    @property
    def device_class(self) -> str:
        """The class of its devices, which are all of one."""
        first = self.parts[0].device_ids[0]
        return next(d.device_class for d in self.leader.devices if d.device_id == first)


def replica_memory_bytes(model: CatalogModel, engine: EngineSettings) -> int:
    """Return the bytes that a replica takes of each of its devices.

    Weights are split over the devices; KV cache and overhead are needed on each. Without a KV size
    this is the least that the replica can start with; `grow_into_free_memory` adds to it.
    """
    if engine.memory_bytes:
        return engine.memory_bytes
    kv_bytes = engine.kv_memory_bytes or kv_minimum_bytes(model, engine)
    return weights_bytes_per_device(model, engine) + kv_bytes + overhead_bytes(model, engine)


def awake_memory_bytes(model: CatalogModel, deployment: Deployment) -> int:
    """Return the bytes that an awake replica takes of each of its devices."""
    engine = deployment.engine
    if deployment.policy.overcommit > 1 and derives_kv(model, engine):
        # It cannot have the rest of the device, because it shares the device.
        kv_bytes = OVERCOMMITTED_CONTEXTS * kv_minimum_bytes(model, engine)
        engine = msgspec.structs.replace(engine, kv_memory_bytes=kv_bytes)
    return replica_memory_bytes(model, engine)


def planned_memory_bytes(model: CatalogModel, deployment: Deployment) -> int:
    """Return the bytes that the plan counts for a replica, on each of its devices."""
    return ceil(awake_memory_bytes(model, deployment) / deployment.policy.overcommit)


def awake_minimum(policy: PlacementPolicy, pop: PopId) -> int:
    """Return how many replicas of a deployment never sleep in a PoP."""
    return max(policy.awake_min, int(pop in policy.keep_warm))


def free_memory(nodes: Iterable[FleetNode], placements: Iterable[Placement]) -> FreeMemory:
    """Return the bytes free on each device. Replicas that are ending still count."""
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


def residency_allows(policy: PlacementPolicy, pop: Pop) -> bool:
    """Say whether a policy lets a replica run in `pop`; `deny` overrides `allow`."""
    names = {str(pop.pop), pop.country}
    if names & set(policy.deny):
        return False
    return not policy.allow or bool(names & set(policy.allow))


def policy_contradiction(
    policy: PlacementPolicy, pops: Container[PopId], allowed_pops: Collection[PopId]
) -> str:
    """Return the part of a policy that no fleet could meet, or "".

    `pops` are all PoPs, `allowed_pops` those that the policy allows.
    """
    if policy.replicas_min > policy.replicas_max:
        return (
            f"replicas_min {policy.replicas_min} is over replicas_max {policy.replicas_max}; raise "
            "replicas_max or lower replicas_min"
        )
    if pops and not allowed_pops:
        lists = f"allow {list(policy.allow)} and deny {list(policy.deny)}"
        return f"{lists} together leave no PoP: a denial overrides an allowance"
    for warm in policy.keep_warm:
        if warm not in pops:
            return f"keep_warm names {warm!r}, which is not a PoP"
        if warm not in allowed_pops:
            return f"keep_warm names {warm!r}, where allow and deny permit no replica"
    return ""


def why_no_slot(
    node: FleetNode,
    *,
    pop: Pop,
    liveness: Liveness,
    deployment: Deployment,
    model: CatalogModel,
    free: FreeMemory,
) -> str:
    """Return why `node` can hold no replica, or no part of one over several nodes; "" if it can."""
    reason = why_ineligible(node, pop=pop, liveness=liveness, deployment=deployment, model=model)
    if reason or classes_with_space(node, deployment, model, free):
        return reason
    return _why_too_full(node, deployment.engine, planned_memory_bytes(model, deployment), free)


def class_refusal(deployment: Deployment, device_class: str) -> str:
    """Return why no replica of a deployment can be on a device class, or ""."""
    if deployment.policy.overcommit <= 1:
        return ""
    return sleep_problem_on(deployment.engine, device_class)


def classes_with_space(
    node: FleetNode, deployment: Deployment, model: CatalogModel, free: FreeMemory
) -> set[str]:
    """Return the device classes of which a node has enough free devices for a replica, or for its
    part of one."""
    needed = planned_memory_bytes(model, deployment)
    fitting = Counter(
        device.device_class
        for device in node.devices
        if device.healthy and free[node.node_id, device.device_id] >= needed
    )
    return {
        name
        for name, count in fitting.items()
        if count >= deployment.engine.devices_per_node and not class_refusal(deployment, name)
    }


def why_ineligible(
    node: FleetNode, *, pop: Pop, liveness: Liveness, deployment: Deployment, model: CatalogModel
) -> str:
    """Return why a node may take no replica, even with empty devices; "" if it may."""
    if not residency_allows(deployment.policy, pop):
        return f"residency does not allow {pop.pop} ({pop.country})"
    if node.revoked:
        return "the node is revoked"
    if node.draining:
        return "the node is draining"
    if not node.has_connected:
        return "the node has joined and never connected"
    if liveness is not Liveness.READY:
        return f"the node is {liveness.value}: silent for {node.silent_s:.0f} s"
    if deployment.engine.nodes > 1 and node.rank_ports is None:
        return "it takes no part of a replica over several nodes: plaintext_rank_ports is not set"
    if lacking := node.lacking_engines.get(deployment.engine.driver):
        return lacking
    refusals = [class_refusal(deployment, device.device_class) for device in node.devices]
    if refusals and all(refusals):
        return refusals[0]
    refused = node.refusal_of(deployment.deployment_id, deployment.version)
    if refused is not None:
        return f"it refused a replica of this deployment: {refused}"
    if model.artifact.digest not in node.artifacts and node.disk_free_bytes:
        needed = model.artifact.size_bytes + DISK_MARGIN_BYTES
        if node.disk_free_bytes < needed:
            return f"the disk has {gib(node.disk_free_bytes)} free, {gib(needed)} needed"
    return ""


def _why_too_full(node: FleetNode, engine: EngineSettings, needed: int, free: FreeMemory) -> str:
    healthy = [device for device in node.devices if device.healthy]
    count = engine.devices_per_node
    if not node.devices:
        return "the node reports no device"
    if not healthy:
        return f"no healthy device: {node.devices[0].reason or 'reported unhealthy'}"
    by_class = Counter(device.device_class for device in healthy)
    if max(by_class.values()) < count:
        name, available = by_class.most_common(1)[0]
        return f"needs {count} devices of one class, it has {available} x {name}"
    most_free = max(0, *(free[node.node_id, device.device_id] for device in healthy))
    needs = gib(needed) if count == 1 else f"{gib(needed)} on each of {count} devices"
    # Sizes that look the same when they are rounded would contradict the refusal.
    lacking = f": {gib(needed - most_free)} too little" if gib(needed) == gib(most_free) else ""
    return f"needs {needs}, the most free on one device is {gib(most_free)}{lacking}"
