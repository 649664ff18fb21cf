"""What a node's report changes, as `scheduler/store` has it in SQL."""

import msgspec

from isochrone.wire.ids import Epoch, NodeId
from isochrone.wire.models.model import CatalogModel, Deployment
from isochrone.wire.peers.assignment import ReplicaSpec
from isochrone.wire.peers.report import ReplicaReport, ReplicaState, Report
from scheduler.store.fleet.adoption import NOT_RUNNING, SealCheck
from scheduler.store.fleet.nodes import ReportEffect
from tests.simulation.store import NodeRow, PlacementRow, SimDbConnection, Tables
from tests.simulation.store_lease import assert_epoch

replace = msgspec.structs.replace


async def record_report(
    connection: SimDbConnection, epoch: Epoch, report: Report, has_valid_seal: SealCheck
) -> ReportEffect:
    await assert_epoch(connection, epoch)
    await connection.round_trip()
    tables, now = await connection.write(), connection.now
    node = tables.nodes.get(report.node_id)
    if node is None or node.boot_id != report.boot_id or node.report_seq >= report.seq:
        is_known = node is not None and node.boot_id == report.boot_id
        return ReportEffect(stale=True, is_boot_unknown=not is_known)
    tables.nodes[node.node_id] = replace(
        node,
        report=msgspec.msgpack.encode(report),
        report_seq=report.seq,
        address=report.address,
        generation=report.generation,
        last_seen_at=now,
    )
    changed = adopted = 0
    if tables.devices.get(node.node_id) != report.devices:
        tables.devices[node.node_id] = report.devices
        changed += 1
    released = _release_ended(tables, report, now)
    for replica in sorted(
        report.replicas, key=lambda each: (each.spec.model_id, each.spec.deployment_id)
    ):
        moved = _record_replica(tables, node.node_id, replica, now)
        if moved is None:
            adopted += _adopt(tables, node, replica, report, has_valid_seal, now)
        else:
            changed += moved
    changed += _record_refusals(tables, report, now)
    _record_profiles(tables, report)
    if changed or adopted or released:
        tables.generation += 1
    return ReportEffect(changed=changed, adopted=adopted, released=released)


def _record_replica(tables: Tables, node_id: str, replica: ReplicaReport, now: float) -> int | None:
    row = tables.placements.get(replica.spec.replica_id)
    if row is None or row.node_id != node_id:
        return None
    state = replica.state.value
    if row.state == "failed" and state in ("draining", "stopped"):
        state = "failed"
    is_alive = replica.state not in NOT_RUNNING
    tables.placements[row.replica_id] = replace(
        row,
        state=state,
        state_since=row.state_since if state == row.state else now,
        state_reason=replica.reason if state == replica.state.value else row.state_reason,
        restarts=replica.restarts,
        released_at=None if is_alive else row.released_at,
    )
    return int(state != row.state or (is_alive and row.released_at is not None))


def _adopt(
    tables: Tables,
    node: NodeRow,
    replica: ReplicaReport,
    report: Report,
    has_valid_seal: SealCheck,
    now: float,
) -> int:
    spec = replica.spec
    if replica.state in NOT_RUNNING:
        return 0
    if not has_valid_seal(NodeId(node.node_id), spec):
        tables.add_event(now, "replica.not_adopted", node.node_id)
        return 0
    is_taken = spec.replica_id in tables.placements
    if is_taken or not (
        fits(tables, node.node_id, spec) or _release_absent(tables, spec, report, now)
    ):
        tables.add_event(now, "replica.not_adopted", spec.replica_id)
        return 0
    _ensure_deployment(tables, spec, now)
    reason = "adopted: the node ran it and the store did not know it"
    add_placement(tables, node.node_id, spec, reason, now, replica.state.value, replica.reason)
    tables.add_event(now, "replica.adopted", spec.replica_id)
    return 1


def _release_absent(tables: Tables, spec: ReplicaSpec, report: Report, now: float) -> bool:
    """Release what the node does not have of a replica's devices, if the replica then fits."""
    before = dict(tables.placements)
    present = _present(report)
    reason = f"the node does not have it, and runs {spec.replica_id} in its memory"
    for row in before.values():
        is_here = row.node_id == report.node_id and set(row.spec.device_ids) & set(spec.device_ids)
        if is_here and row.released_at is None and row.replica_id not in present:
            tables.placements[row.replica_id] = replace(
                row,
                released_at=now,
                state="stopped",
                ended_at=row.ended_at or now,
                ended_generation=row.ended_generation or tables.generation,
                ended_reason=row.ended_reason or reason,
            )
    if fits(tables, report.node_id, spec):
        return True
    tables.placements.clear()
    tables.placements.update(before)
    return False


def _present(report: Report) -> set[str]:
    return {
        replica.spec.replica_id
        for replica in report.replicas
        if replica.state is not ReplicaState.STOPPED
    }


def _ensure_deployment(tables: Tables, spec: ReplicaSpec, now: float) -> None:
    tables.models.setdefault(
        spec.model_id,
        CatalogModel(
            model_id=spec.model_id,
            architecture="unknown",
            artifact=spec.artifact,
            context_tokens=spec.context_tokens,
            weights_bytes=max(0, spec.memory_bytes - spec.engine.kv_memory_bytes),
        ),
    )
    if spec.deployment_id not in tables.deployments:
        tables.deployments[spec.deployment_id] = Deployment(
            deployment_id=spec.deployment_id,
            name=spec.name,
            model_id=spec.model_id,
            version=spec.version,
            engine=spec.engine,
        )
        tables.add_event(now, "deployment.recreated", spec.deployment_id)


def fits(tables: Tables, node_id: str, spec: ReplicaSpec) -> bool:
    memory = {device.device_id: device.memory_bytes for device in tables.devices.get(node_id, ())}
    for device_id in spec.device_ids:
        taken = sum(
            row.spec.memory_bytes
            for row in tables.placements.values()
            if row.node_id == node_id and not row.released_at and device_id in row.spec.device_ids
        )
        if taken + spec.memory_bytes > memory.get(device_id, -1):
            return False
    return True


def add_placement(
    tables: Tables,
    node_id: str,
    spec: ReplicaSpec,
    reason: str,
    now: float,
    state: str = "wanted",
    state_reason: str = "",
) -> None:
    tables.placements[spec.replica_id] = PlacementRow(
        replica_id=spec.replica_id,
        node_id=node_id,
        spec=spec,
        reason=reason,
        placed_at=now,
        state=state,
        state_since=now,
        state_reason=state_reason,
    )


def _record_refusals(tables: Tables, report: Report, now: float) -> int:
    changed = 0
    for refusal in report.refusals:
        row = tables.placements.get(refusal.replica_id)
        if row is None or row.node_id != report.node_id:
            continue
        if row.ended_at is None and row.state != "failed":
            tables.placements[row.replica_id] = replace(
                row, state="failed", state_reason=refusal.reason, state_since=now
            )
            changed += 1
    return changed


def _release_ended(tables: Tables, report: Report, now: float) -> int:
    alive = _present(report)
    released = 0
    for row in list(tables.placements.values()):
        is_over = row.ended_generation is not None and row.ended_generation <= report.generation
        if row.node_id != report.node_id or row.released_at is not None or not is_over:
            continue
        if row.replica_id not in alive:
            state = "failed" if row.state == "failed" else "stopped"
            tables.placements[row.replica_id] = replace(row, released_at=now, state=state)
            released += 1
    return released


def _record_profiles(tables: Tables, report: Report) -> None:
    classes = {device.device_id: device.device_class for device in report.devices}
    for replica in report.replicas:
        measured, spec = replica.profile, replica.spec
        row = tables.placements.get(spec.replica_id)
        is_here = row is not None and row.node_id == report.node_id
        if not is_here or spec.model_id not in tables.models:
            continue
        if replica.state is not ReplicaState.WARM or not spec.device_ids:
            continue
        device_class = classes.get(spec.device_ids[0])
        if device_class is not None and measured.decode_tokens_per_s > 0:
            tables.profiles.setdefault((spec.model_id, device_class), measured)
