"""What must change so that what runs becomes what is assigned.

Rule 1: only a tombstone ends a replica. One that the assignment does not name goes on.
Rule 2: an assignment of another cluster, or older than the one held, changes nothing.
"""

from collections.abc import Collection, Mapping

import msgspec

from isochrone.wire.assignment import Assignment, ReplicaSpec, Tombstone
from isochrone.wire.ids import ClusterId, DeviceId, NodeId, ReplicaId
from isochrone.wire.report import Refusal, ReplicaState


class ReconcileSteps(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now: endings first, then beginnings; and what will not be done, with reasons."""

    endings: tuple[Tombstone, ...] = ()
    beginnings: tuple[ReplicaSpec, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def assignment_problem(
    offered: Assignment, held: Assignment | None, node_id: NodeId, cluster_id: ClusterId
) -> str:
    """Say in words why an assignment is not taken; "" if it is."""
    if offered.cluster_id != cluster_id:
        return f"cannot take an assignment of cluster {offered.cluster_id}: this is {cluster_id}'s"
    if offered.node_id != node_id:
        return f"cannot take the assignment of node {offered.node_id}"
    if held is None:
        return ""
    if offered.epoch < held.epoch:
        return f"cannot take epoch {offered.epoch}: {held.epoch} was seen, an old scheduler speaks"
    if offered.generation < held.generation:
        return f"cannot take generation {offered.generation}: {held.generation} is held"
    return ""


def reconcile(
    assignment: Assignment,
    replicas: Mapping[ReplicaId, ReplicaState],
    devices: Collection[DeviceId],
    lacks: Mapping[str, str],
    rank_ports: tuple[int, int] | None = None,
) -> ReconcileSteps:
    """Return the steps of this turn. Taken, they leave none for the next.

    `lacks` says of each driver without what its engine cannot start here; "" where it can.
    """
    ending = {tombstone.replica_id for tombstone in assignment.tombstones}
    endings = tuple(
        tombstone
        for tombstone in assignment.tombstones
        if replicas.get(tombstone.replica_id, ReplicaState.STOPPED)
        not in (ReplicaState.DRAINING, ReplicaState.STOPPED)
    )
    beginnings = []
    refusals = []
    for spec in assignment.replicas:
        if spec.replica_id in replicas or spec.replica_id in ending:
            continue
        reason = _unable(spec, devices, lacks, rank_ports)
        if reason:
            refusals.append(
                Refusal(replica_id=spec.replica_id, reason=reason, deployment_id=spec.deployment_id)
            )
        else:
            beginnings.append(spec)
    return ReconcileSteps(endings=endings, beginnings=tuple(beginnings), refusals=tuple(refusals))


def _unable(
    spec: ReplicaSpec,
    devices: Collection[DeviceId],
    lacks: Mapping[str, str],
    rank_ports: tuple[int, int] | None,
) -> str:
    """Say why this node does not take a replica, or its part of one; "" if it does."""
    missing = [device for device in spec.device_ids if device not in devices]
    if missing:
        return f"cannot seat {spec.replica_id}: no device {', '.join(missing)} here"
    without = lacks.get(spec.engine.driver, f"no driver {spec.engine.driver!r} here")
    if without:
        return f"cannot run {spec.replica_id}: {without}"
    if spec.group is None:
        return ""
    if rank_ports is None:
        return f"cannot hold a part of {spec.group.leader_id}: plaintext_rank_ports is not set here"
    first, last = rank_ports
    if spec.group.place == 0 and not first <= spec.group.port <= last:
        return (
            f"cannot lead {spec.replica_id} at port {spec.group.port}: plaintext_rank_ports are "
            f"{first} to {last} here"
        )
    return ""
