"""Which node and devices could hold a replica. Every no carries its reason and its numbers."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from isochrone.wire.ids import DeviceId, NodeId
from isochrone.wire.model import Deployment, EngineSettings, Model, Policy
from isochrone.wire.report import Device
from isochrone.wire.routes import Pop
from scheduler.decide.capacity import overhead_bytes
from scheduler.decide.cluster import Liveness, Node, Placement

DISK_MARGIN_BYTES: Final = 1024**3

FreeMemory = Mapping[tuple[NodeId, DeviceId], int]


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A place that could hold a replica."""

    node: Node
    device_ids: tuple[DeviceId, ...]
    memory_bytes: int


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A node that cannot hold it, and why not."""

    node: Node
    reason: str


def replica_memory_bytes(model: Model, engine: EngineSettings) -> int:
    """Return what a replica takes of each of its devices: weights are split, the rest is not."""
    if engine.memory_bytes:
        return engine.memory_bytes
    return model.weights_bytes // engine.devices + engine.kv_memory_bytes + overhead_bytes(model)


def free_memory(nodes: Iterable[Node], placements: Iterable[Placement]) -> FreeMemory:
    """Return the bytes left on each device after every seat not yet given back, ending or not."""
    taken: dict[tuple[NodeId, DeviceId], int] = defaultdict(int)
    for placement in placements:
        for device_id in placement.device_ids:
            taken[placement.node_id, device_id] += placement.memory_bytes
    return {
        (node.node_id, device.device_id): device.memory_bytes
        - taken[node.node_id, device.device_id]
        for node in nodes
        for device in node.devices
    }


def allowed(policy: Policy, pop: Pop) -> bool:
    """Say whether residency lets a replica live in `pop`; a denial beats an allowance."""
    names = {str(pop.pop), pop.country}
    if names & set(policy.deny):
        return False
    return not policy.allow or bool(names & set(policy.allow))


def seat_on(
    node: Node,
    *,
    pop: Pop,
    verdict: Liveness,
    deployment: Deployment,
    model: Model,
    free: FreeMemory,
) -> Seat | Refused:
    """Return the devices of `node` that would hold one replica, or why none would."""
    reason = unfit(node, pop=pop, verdict=verdict, deployment=deployment, model=model)
    if reason:
        return Refused(node=node, reason=reason)
    needed = replica_memory_bytes(model, deployment.engine)
    healthy = [device for device in node.devices if device.healthy]
    fitting = sorted(
        (device for device in healthy if free[node.node_id, device.device_id] >= needed),
        # The tightest fit first: large holes stay whole for large models.
        key=lambda device: (free[node.node_id, device.device_id], device.device_id),
    )
    chosen = _same_class(fitting, deployment.engine.devices)
    if not chosen:
        return Refused(
            node=node, reason=_no_room(node, healthy, needed, deployment.engine.devices, free)
        )
    return Seat(
        node=node,
        device_ids=tuple(device.device_id for device in chosen),
        memory_bytes=needed,
    )


def unfit(node: Node, *, pop: Pop, verdict: Liveness, deployment: Deployment, model: Model) -> str:
    """Say why a node may take no replica, whatever its devices hold; "" if it may."""
    if not allowed(deployment.policy, pop):
        return f"residency does not allow {pop.pop} ({pop.country})"
    if node.revoked:
        return "the node is revoked"
    if node.draining:
        return "the node is draining"
    if verdict is not Liveness.READY:
        return f"the node is {verdict.value}: silent for {node.silent_s:.0f} s"
    if model.artifact.digest not in node.artifacts and node.disk_free_bytes:
        wanted = model.artifact.size_bytes + DISK_MARGIN_BYTES
        if node.disk_free_bytes < wanted:
            return f"the disk has {_gib(node.disk_free_bytes)} free, {_gib(wanted)} needed"
    return ""


def _same_class(fitting: list[Device], count: int) -> list[Device]:
    by_class: dict[str, list[Device]] = defaultdict(list)
    for device in fitting:
        by_class[device.device_class].append(device)
        if len(by_class[device.device_class]) == count:
            return by_class[device.device_class]
    return []


def _no_room(node: Node, healthy: list[Device], needed: int, count: int, free: FreeMemory) -> str:
    if not node.devices:
        return "the node reports no device"
    if not healthy:
        return f"no healthy device: {node.devices[0].reason or 'reported unhealthy'}"
    alike = Counter(device.device_class for device in healthy)
    if max(alike.values()) < count:
        name, most_alike = alike.most_common(1)[0]
        return f"needs {count} devices of one class, it has {most_alike} x {name}"
    most = max(free[node.node_id, device.device_id] for device in healthy)
    wanted = _gib(needed) if count == 1 else f"{_gib(needed)} on each of {count} devices"
    return f"needs {wanted}, the most free on one device is {_gib(max(0, most))}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.2f} GiB"
