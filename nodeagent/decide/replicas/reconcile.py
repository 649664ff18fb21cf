"""Compares the assignment with the running replicas; returns the replicas to start and stop.

Rule 1: only a tombstone ends a replica. A replica that the assignment does not name keeps running.
Rule 2: an assignment of another cluster, or older than the current one, is refused.
Rule 3: a replica is refused where it would take memory that a replica which the assignment does not
name still uses. The scheduler knows nothing of that one after a backup was restored, until it has
adopted it, which it can do once the refused replica is gone.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec.structs import FieldInfo

from isochrone.wire.engines.command_engine import COMMAND_DRIVER, NAME_OPTION
from isochrone.wire.ids import ClusterId, DeviceId, NodeId, ReplicaId
from isochrone.wire.kv.kv_store import uses_kv_store
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Assignment, ReplicaSpec, Tombstone
from isochrone.wire.peers.report import Refusal, ReplicaState


class LackingParts(NamedTuple):
    """What a node lacks to start engines, each in words, or "" if it lacks nothing.

    `by_command` is of the operator's own servers. `store` is what it lacks for a store of KV, and
    `store_client` what the engine of a driver lacks to join one.
    """

    by_driver: Mapping[str, str]
    by_command: Mapping[str, str] = MappingProxyType({})
    store: str = ""
    store_client: Mapping[str, str] = MappingProxyType({})

    def problem(self, engine: EngineSettings) -> str:
        """Return why the node cannot start such an engine, or ""."""
        driver = engine.driver
        if driver == COMMAND_DRIVER:
            name = engine.options.get(NAME_OPTION, "")
            problem = self.by_command.get(name, f"this node has no [commands.{name}]")
        else:
            problem = self.by_driver.get(driver, f"this node has no driver {driver!r}")
        if not problem and uses_kv_store(engine):
            problem = self.store or self.store_client.get(driver, "")
        return problem


class ReconcileSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one turn: replicas to stop, then to start, and those refused with a reason."""

    stops: tuple[Tombstone, ...] = ()
    starts: tuple[ReplicaSpec, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def assignment_problem(
    offered: Assignment, current: Assignment | None, node_id: NodeId, cluster_id: ClusterId
) -> str:
    """Return why an assignment is refused, or "" if it is accepted."""
    if offered.cluster_id != cluster_id:
        return (
            f"cannot accept an assignment of cluster {offered.cluster_id}: this node belongs to "
            f"cluster {cluster_id}"
        )
    if offered.node_id != node_id:
        return f"cannot accept the assignment of node {offered.node_id}: this node is {node_id}"
    if current is None:
        return ""
    if offered.epoch < current.epoch:
        return (
            f"cannot accept epoch {offered.epoch}: it is older than epoch {current.epoch}, so a "
            "scheduler that lost its lease sent it"
        )
    if offered.generation < current.generation:
        return (
            f"cannot accept generation {offered.generation}: it is older than the current "
            f"generation {current.generation}"
        )
    return ""


def reconcile(
    assignment: Assignment,
    replicas: Mapping[ReplicaId, ReplicaState],
    devices: Mapping[DeviceId, int],
    lacking: LackingParts,
    rank_ports: tuple[int, int] | None = None,
    running: Collection[ReplicaSpec] = (),
) -> ReconcileSteps:
    """Return the steps of this turn. Once they are applied, the next turn has none.

    `devices` are the healthy ones, with the bytes that replicas may take of each. `running` are the
    specs of the replicas that take memory, or will.
    """
    ending = {tombstone.replica_id for tombstone in assignment.tombstones}
    stops = tuple(
        tombstone
        for tombstone in assignment.tombstones
        if replicas.get(tombstone.replica_id, ReplicaState.STOPPED)
        not in (ReplicaState.DRAINING, ReplicaState.STOPPED)
    )
    starts: list[ReplicaSpec] = []
    refusals = []
    named = ending | {spec.replica_id for spec in assignment.replicas}
    unknown = [spec for spec in running if spec.replica_id not in named]
    for spec in assignment.replicas:
        if spec.replica_id in replicas or spec.replica_id in ending:
            continue
        reason = _refusal_reason(spec, devices, lacking, rank_ports)
        reason = reason or _memory_conflict(spec, unknown, (*running, *starts), devices)
        if reason:
            refusals.append(
                Refusal(
                    replica_id=spec.replica_id,
                    reason=reason,
                    deployment_id=spec.deployment_id,
                    version=spec.version,
                )
            )
        else:
            starts.append(spec)
    return ReconcileSteps(stops=stops, starts=tuple(starts), refusals=tuple(refusals))


def is_same_spec(first: object, second: object) -> bool:
    """Return whether two specs of a replica agree in all fields that both have.

    A field that has its default in either counts as equal: the release that wrote that spec may not
    have known the field.
    """
    if not isinstance(first, msgspec.Struct) or type(first) is not type(second):
        return first == second
    for field in msgspec.structs.fields(first):
        values = getattr(first, field.name), getattr(second, field.name)
        is_unknown = not field.required and default_of(field) in values
        if not is_unknown and not is_same_spec(*values):
            return False
    return True


def default_of(field: FieldInfo) -> object:
    """Return the default of a field that has one."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _memory_conflict(
    spec: ReplicaSpec,
    unknown: Collection[ReplicaSpec],
    taking: Collection[ReplicaSpec],
    devices: Mapping[DeviceId, int],
) -> str:
    """Return why a replica does not fit beside those that the assignment does not name, or ""."""
    for device_id in spec.device_ids:
        others = [other.replica_id for other in unknown if device_id in other.device_ids]
        taken = sum(other.planned_bytes for other in taking if device_id in other.device_ids)
        if others and taken + spec.planned_bytes > devices[device_id]:
            return (
                f"cannot run {spec.replica_id}: the scheduler does not know of "
                f"{', '.join(others)}, which runs here and takes its memory of {device_id}"
            )
    return ""


def _refusal_reason(
    spec: ReplicaSpec,
    devices: Collection[DeviceId],
    lacking: LackingParts,
    rank_ports: tuple[int, int] | None,
) -> str:
    """Return why this node cannot run a replica or its part of one, or "" if it can."""
    missing_devices = [device for device in spec.device_ids if device not in devices]
    if missing_devices:
        names = ", ".join(missing_devices)
        return f"cannot run {spec.replica_id}: no healthy device {names} on this node"
    if problem := lacking.problem(spec.engine):
        return f"cannot run {spec.replica_id}: {problem}"
    if spec.group is None:
        return ""
    if rank_ports is None:
        return (
            f"cannot run a part of {spec.group.leader_id}: plaintext_rank_ports is not set on this "
            "node"
        )
    first, last = rank_ports
    if spec.group.place == 0 and not first <= spec.group.port <= last:
        return (
            f"cannot lead {spec.replica_id} at port {spec.group.port}: plaintext_rank_ports is "
            f"{first} to {last} on this node"
        )
    return ""
