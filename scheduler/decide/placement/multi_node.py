"""Replicas over several nodes of one PoP: the spec of each part, and the port of their rendezvous.

Rule: such a replica is one slot. All of its parts start together and end together.
"""

from urllib.parse import urlsplit

import msgspec

from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.peers.assignment import ReplicaGroup, ReplicaSpec
from scheduler.decide.cluster import ClusterState, FleetNode, ReplicaStart
from scheduler.decide.placement.fleet.slots import Slot


class RankPorts:
    """Hands out the ports on which the parts of replicas meet, within one plan."""

    def __init__(self, cluster: ClusterState) -> None:
        self._taken: set[tuple[NodeId, int]] = {
            (placement.node_id, placement.rank_port) for placement in cluster.placements
        }
        # The first port tried moves with the generation: a port that another process uses must not
        # fail every attempt.
        self._generation = cluster.generation

    def take(self, node: FleetNode) -> int:
        """Return a port of `node` that no other replica uses.

        Raises ValueError if none is left; the slot ledger checks that before.
        """
        first, last = node.rank_ports or (0, 0)
        count = last - first + 1
        for number in range(count):
            port = first + (self._generation + number) % count
            if (node.node_id, port) not in self._taken:
                self._taken.add((node.node_id, port))
                return port
        raise ValueError(
            f"cannot start a replica led by {node.node_id}: all of its {count} rank ports are taken"
        )


def spread_over_nodes(spec: ReplicaSpec, slot: Slot, port: int, reason: str) -> ReplicaStart:
    """Return the start of a replica on all nodes of `slot`, made from the `spec` of its leader."""
    host = urlsplit(slot.leader.address).hostname or ""
    names = ", ".join(part.node.node_id for part in slot.parts)
    starts = []
    for place, part in enumerate(slot.parts):
        group = ReplicaGroup(
            leader_id=spec.replica_id, place=place, nodes=len(slot.parts), host=host, port=port
        )
        part_spec = msgspec.structs.replace(
            spec,
            replica_id=_part_id(spec.replica_id, place),
            device_ids=part.device_ids,
            group=group,
        )
        why = f"{reason}; over {names}" if place == 0 else f"part {place} of {spec.replica_id}"
        starts.append(ReplicaStart(node_id=part.node.node_id, spec=part_spec, reason=why))
    return msgspec.structs.replace(starts[0], followers=tuple(starts[1:]))


def rename_start(
    start: ReplicaStart, leader_id: ReplicaId, deployment_id: DeploymentId
) -> ReplicaStart:
    """Return a start with other ids, in all of its parts."""

    def change(part: ReplicaStart) -> ReplicaStart:
        group = part.spec.group
        if group is not None:
            group = msgspec.structs.replace(group, leader_id=leader_id)
        replica_id = _part_id(leader_id, group.place if group else 0)
        return part.with_spec(replica_id=replica_id, deployment_id=deployment_id, group=group)

    return start.map_parts(change)


def with_secret(start: ReplicaStart, secret: str) -> ReplicaStart:
    """Return a start whose parts share `secret`. A start on a single node is unchanged."""

    def change(part: ReplicaStart) -> ReplicaStart:
        group = part.spec.group
        return part.with_spec(group=group and msgspec.structs.replace(group, secret=secret))

    return start.map_parts(change)


def _part_id(leader_id: ReplicaId, place: int) -> ReplicaId:
    return ReplicaId(f"{leader_id}.{place}") if place else leader_id
