"""Devices on which over-committed replicas take turns: each of them must fit beside the others.

The plan counts a part of an over-committed replica's memory. So that it can wake, all of its memory
must be free beside the replicas of the device that never sleep.
"""

from collections import Counter, defaultdict
from math import ceil

from isochrone.wire.ids import DeviceId, NodeId
from scheduler.decide.cluster import ClusterState, Placement

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
                for device_id in part.device_ids:
                    self.book_part(part, device_id, 1)

    def bytes_for(self, key: DeviceKey, overcommit: float) -> int:
        """Return the bytes that the plan may count for one more replica on a device, so that each
        over-committed replica could wake beside those that never sleep."""
        left = self._total[key] - self._fixed[key]
        if overcommit > 1:
            return ceil(left / overcommit)
        return left - max(self._sleeping.get(key, ()), default=0)

    def book_part(self, part: Placement, device_id: DeviceId, replicas: int) -> None:
        """Add `replicas` (1 or -1) of a placement's part on one node to one of its devices."""
        awake_bytes = int(part.memory_bytes * part.overcommit)
        self.book((part.node_id, device_id), awake_bytes, part.overcommit, replicas)

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
