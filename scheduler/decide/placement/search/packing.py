"""Says whether new replicas of several deployments fit together on the devices of one site.

A replica takes equal memory of several devices of one node. Memory in total does not decide this:
three replicas of 30 GiB do not fit on two devices of 48 GiB. So replicas are placed one by one,
those on most devices first, and another choice is tried where one does not fit.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import comb
from typing import Final, NamedTuple

from isochrone.wire.ids import DeviceId
from scheduler.decide.cluster import FleetNode

CHOICES_MAX: Final = 500
"""How many choices of devices are tried before replicas count as not fitting."""

DEVICE_CHOICES_MAX: Final = 200
"""How many choices of a replica's devices on one node are compared. Of eight devices there are at
most 70, but 12,870 of eight among sixteen, and half a million of eight among 23."""


class ReplicaSize(NamedTuple):
    """How many devices of one node a replica takes, and how much of each."""

    devices: int
    memory_bytes: int


class NodeMemory(NamedTuple):
    """A node, its devices of one site, and the free bytes of each."""

    node: FleetNode
    device_ids: tuple[DeviceId, ...]
    free_bytes: tuple[int, ...]


class PackedReplica(NamedTuple):
    """The devices that a replica of a deployment gets; `deployment` is its place in the counts."""

    deployment: int
    node: FleetNode
    device_ids: tuple[DeviceId, ...]


class SitePacking:
    """The free devices of one site. `sizes` are those of each deployment's replicas, `eligible` the
    numbers of the nodes that may take them."""

    def __init__(
        self,
        nodes: Sequence[NodeMemory],
        sizes: Sequence[ReplicaSize],
        eligible: Sequence[frozenset[int]],
    ) -> None:
        self._nodes = nodes
        self._sizes = sizes
        self._eligible = eligible
        # Nodes with equal free memory are alike only if the same deployments may use them.
        self._node_kinds = [
            tuple(number in numbers for numbers in eligible) for number in range(len(nodes))
        ]
        self._order = sorted(
            range(len(sizes)), key=lambda d: (-sizes[d].devices, -sizes[d].memory_bytes)
        )
        self._known: dict[tuple[int, ...], list[PackedReplica] | None] = {}
        self._choices_left = 0

    @property
    def free_bytes(self) -> int:
        """The free memory of all devices."""
        return sum(max(0, free) for node in self._nodes for free in node.free_bytes)

    @property
    def device_bytes(self) -> int:
        """The free memory of the device that has most."""
        return max((free for node in self._nodes for free in node.free_bytes), default=0)

    def devices_above(self, memory_bytes: int) -> int:
        """Count the devices that have more than some memory free."""
        return sum(free > memory_bytes for node in self._nodes for free in node.free_bytes)

    def most(self, deployment: int, replicas_max: int) -> int:
        """Return how many replicas of one deployment fit if there are no others, at most
        `replicas_max`."""
        devices, memory_bytes = self._sizes[deployment]
        count = 0
        for number in self._eligible[deployment]:
            layers = [max(0, free) // memory_bytes for free in self._nodes[number].free_bytes]
            fitting = 0
            # A replica may be so small that millions fit.
            while count + fitting < replicas_max and (
                sum(min(layer, fitting + 1) for layer in layers) >= devices * (fitting + 1)
            ):
                fitting += 1
            count += fitting
        return count

    def pack(self, counts: tuple[int, ...]) -> list[PackedReplica] | None:
        """Return the devices for `counts` replicas of the deployments, or None if they do not
        fit."""
        if counts not in self._known:
            items = [number for number in self._order for _ in range(counts[number])]
            free = [list(node.free_bytes) for node in self._nodes]
            packed: list[PackedReplica] = []
            self._choices_left = CHOICES_MAX
            self._known[counts] = packed if self._place(items, free, packed) else None
        return self._known[counts]

    def _place(
        self, items: Sequence[int], free: list[list[int]], packed: list[PackedReplica]
    ) -> bool:
        """Place the items after those in `packed`; return whether all of them fit."""
        if len(packed) == len(items):
            return True
        deployment = items[len(packed)]
        memory_bytes = self._sizes[deployment].memory_bytes
        for number, devices in self._choices(deployment, free):
            if self._choices_left <= 0:
                return False
            self._choices_left -= 1
            node = self._nodes[number]
            for device in devices:
                free[number][device] -= memory_bytes
            device_ids = tuple(node.device_ids[device] for device in devices)
            packed.append(PackedReplica(deployment, node.node, device_ids))
            if self._place(items, free, packed):
                return True
            packed.pop()
            for device in devices:
                free[number][device] += memory_bytes
        return False

    def _choices(
        self, deployment: int, free: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Return nodes and devices with memory for a replica, the tightest first; one of each that
        are alike."""
        devices, memory_bytes = self._sizes[deployment]
        found: dict[tuple[object, ...], tuple[int, tuple[int, ...]]] = {}
        for number in sorted(self._eligible[deployment]):
            fitting = [d for d, left in enumerate(free[number]) if left >= memory_bytes]
            others = tuple(sorted(free[number]))
            for chosen in _device_choices(fitting, devices, free[number]):
                left = tuple(sorted(free[number][device] for device in chosen))
                found.setdefault((left, others, self._node_kinds[number]), (number, chosen))
        for key in sorted(found, key=lambda key: key[:2]):
            yield found[key]


def _device_choices(
    fitting: Sequence[int], count: int, free: Sequence[int]
) -> Iterable[tuple[int, ...]]:
    """Return choices of `count` devices: all of them, or of very many those of devices that have
    the most similar free memory."""
    if comb(len(fitting), count) <= DEVICE_CHOICES_MAX:
        return combinations(fitting, count)
    ordered = sorted(fitting, key=lambda device: free[device])
    return (tuple(ordered[first : first + count]) for first in range(len(ordered) - count + 1))
