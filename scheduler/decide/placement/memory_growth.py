"""Gives new replicas without a KV size the memory that a plan leaves free on their devices.

The search for slots counts such a replica with the least it can start with. Once it is placed, the
memory left on its devices becomes its KV cache. New replicas on the same device get equal parts. A
running replica never grows: its engine cannot.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from isochrone.wire.ids import DeviceId, NodeId
from scheduler.decide.capacity.default_sizes import derives_kv, replica_sizes
from scheduler.decide.placement.fleet.slots import Slot
from scheduler.decide.placement.search.deployment_state import PlannedReplica

DeviceKey = tuple[NodeId, DeviceId]


def grow_into_free_memory(
    new: Sequence[PlannedReplica], free: Mapping[DeviceKey, int]
) -> list[int]:
    """Return the memory of each new replica on each of its devices.

    `free` is the memory that the plan leaves free on each device, with these replicas counted at
    least.
    """
    left = dict(free)
    growing: Counter[DeviceKey] = Counter()
    for replica in new:
        if replica.slot is not None and _grows(replica):
            growing.update(_devices_of(replica.slot))
    memory_bytes = []
    for replica in new:
        slot = replica.slot
        assert slot is not None
        if not _grows(replica):
            memory_bytes.append(slot.awake_bytes)
            continue
        devices = _devices_of(slot)
        share = min(max(0, left[device]) // growing[device] for device in devices)
        needs = replica.state.needs
        sizes = replica_sizes(
            needs.model,
            needs.deployment.engine,
            slot.device_class,
            slot.memory_bytes + share,
        )
        taken = min(max(sizes.memory_bytes, slot.memory_bytes), slot.memory_bytes + share)
        for device in devices:
            left[device] -= taken - slot.memory_bytes
            growing[device] -= 1
        memory_bytes.append(taken)
    return memory_bytes


def _grows(replica: PlannedReplica) -> bool:
    needs = replica.state.needs
    shares = needs.deployment.policy.overcommit > 1
    return not shares and derives_kv(needs.model, needs.deployment.engine)


def _devices_of(slot: Slot) -> list[DeviceKey]:
    return [(part.node.node_id, device) for part in slot.parts for device in part.device_ids]
