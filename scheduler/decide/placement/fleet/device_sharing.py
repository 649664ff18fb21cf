"""Devices on which over-committed replicas take turns: each of them must fit beside the others.

The plan counts a part of an over-committed replica's memory. So that it can wake, all of its memory
must be free beside the replicas of the device that never sleep.
"""

from collections import Counter, defaultdict

from isochrone.wire.ids import DeviceId, NodeId
from scheduler.decide.cluster import ClusterState

DeviceKey = tuple[NodeId, DeviceId]


class DeviceSharing:
    """The memory of each device taken by replicas that never sleep, and by the largest that may."""

    def __init__(self, cluster: ClusterState) -> None:
        self._fixed: defaultdict[DeviceKey, int] = defaultdict(int)
        self._sleeping: defaultdict[DeviceKey, Counter[int]] = defaultdict(Counter)
        self.is_used = any(d.policy.overcommit > 1 for d in cluster.deployments) or any(
            part.overcommit > 1 for p in cluster.placements for part in p.parts
        )
        """Whether any replica is or may be over-committed; otherwise nothing is booked."""
        self._total = {
            (node.node_id, device.device_id): device.memory_bytes
            for node in (cluster.nodes if self.is_used else ())
            for device in node.devices
        }
        for placement in cluster.placements if self.is_used else ():
            for part in placement.parts:
                awake_bytes = int(part.memory_bytes * part.overcommit)
                for device_id in part.device_ids:
                    self.book((part.node_id, device_id), awake_bytes, part.overcommit, 1)

    def can_all_wake(
        self, key: DeviceKey, awake_bytes: int, overcommit: float, releasing_bytes: int = 0
    ) -> bool:
        """Say whether all over-committed replicas of a device could wake beside a new one.

        `releasing_bytes` are of replicas that are about to end.
        """
        if not self.is_used:
            return True
        largest = max(self._sleeping.get(key, ()), default=0)
        if overcommit <= 1 and not largest:
            return True  # the plan counts all memory of this device
        largest = 0 if overcommit > 1 else largest
        fixed = self._fixed[key] - releasing_bytes
        return fixed + awake_bytes + largest <= self._total[key]

    def book(self, key: DeviceKey, awake_bytes: int, overcommit: float, replicas: int) -> None:
        """Add `replicas` (1 or -1) to a device."""
        if not self.is_used:
            return
        if overcommit <= 1:
            self._fixed[key] += replicas * awake_bytes
            return
        sleeping = self._sleeping[key]
        sleeping[awake_bytes] += replicas
        if not sleeping[awake_bytes]:
            del sleeping[awake_bytes]
