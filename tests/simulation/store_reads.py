"""Reads of the fleet for decisions, as `scheduler/store` has them in SQL."""

from collections.abc import Sequence
from typing import Any

import msgspec

from isochrone.wire.ids import Epoch, Generation, NodeId, ReplicaId
from isochrone.wire.peers.assignment import Assignment, Tombstone
from isochrone.wire.peers.report import ReplicaProfile, ReplicaState, Report
from scheduler.decide.cluster import (
    ClusterState,
    FleetNode,
    MeasuredProfile,
    NodeRefusal,
    Placement,
    StartFailures,
)
from scheduler.decide.membership import NodeContact
from scheduler.store.cluster import GIVEN_UP_FOR_S
from scheduler.store.fleet.node_reports import NodeReportCache, decode_report
from tests.simulation.store import NodeRow, PlacementRow, SimDbConnection, Tables

replace = msgspec.structs.replace


async def read_assignment(
    connection: SimDbConnection, node_id: NodeId, *, cluster_id: Any, epoch: Epoch
) -> Assignment:
    await connection.round_trip()
    tables = connection.tables
    await connection.round_trip()
    rows = [
        row
        for row in sorted(connection.tables.placements.values(), key=lambda row: row.replica_id)
        if row.node_id == node_id and row.released_at is None
    ]
    return Assignment(
        cluster_id=cluster_id,
        node_id=node_id,
        generation=Generation(tables.generation),
        epoch=epoch,
        replicas=tuple(row.spec for row in rows if row.ended_generation is None),
        tombstones=tuple(
            Tombstone(
                replica_id=ReplicaId(row.replica_id),
                generation=Generation(row.ended_generation),
                reason=row.ended_reason,
                drain_timeout_s=row.drain_timeout_s,
            )
            for row in rows
            if row.ended_generation is not None
        ),
    )


async def read_nodes(
    connection: SimDbConnection,
    heard: NodeContact,
    cache: NodeReportCache,
    node_ids: Sequence[NodeId] | None = None,
) -> tuple[dict[NodeId, Report], tuple[FleetNode, ...]]:
    await connection.round_trip()
    tables, now = connection.tables, connection.now
    rows = [
        row for name, row in sorted(tables.nodes.items()) if node_ids is None or name in node_ids
    ]
    reports = {NodeId(row.node_id): decode_report(row.report) for row in rows}
    nodes = tuple(
        _fleet_node(tables, row, reports[NodeId(row.node_id)], heard, now) for row in rows
    )
    return {name: report for name, report in reports.items() if report is not None}, nodes


def _fleet_node(
    tables: Tables, row: NodeRow, report: Report | None, heard: NodeContact, now: float
) -> FleetNode:
    node_id = NodeId(row.node_id)
    seen_at = row.created_at if row.last_seen_at is None else row.last_seen_at
    refused = (
        ()
        if report is None
        else tuple(
            NodeRefusal(refusal.deployment_id, refusal.reason, refusal.version)
            for refusal in report.refusals
            if refusal.deployment_id
        )
    )
    return FleetNode(
        node_id=node_id,
        pop=row.pop,  # type: ignore[arg-type]
        address=row.address,
        devices=tables.devices.get(row.node_id, ()),
        draining=row.draining,
        revoked=row.revoked,
        silent_s=heard.silent_s.get(node_id, abs(now - seen_at)),
        has_connected=row.last_seen_at is not None or node_id in heard.silent_s,
        back_s=heard.back_s.get(node_id),
        generation=Generation(row.generation),
        artifacts=() if report is None else report.artifacts,
        disk_free_bytes=0 if report is None else report.disk_free_bytes,
        refused=refused,
        lacking_engines={} if report is None else report.lacking_engines,
    )


async def read_cluster(
    connection: SimDbConnection, heard: NodeContact, reports: NodeReportCache | None = None
) -> ClusterState:
    fleet = await read_fleet(connection, heard, reports)
    tables, now = connection.tables, connection.now
    return replace(fleet, given_up=_given_up(tables, now))


def _given_up(tables: Tables, now: float) -> tuple[StartFailures, ...]:
    by_version: dict[tuple[str, int], list[PlacementRow]] = {}
    for row in tables.placements.values():
        if row.state == "failed" and row.restarts > 0 and row.state_since > now - GIVEN_UP_FOR_S:
            by_version.setdefault((row.spec.deployment_id, row.spec.version), []).append(row)
    found = []
    for (deployment_id, version), rows in sorted(by_version.items()):
        rows.sort(key=lambda row: -row.state_since)
        found.append(
            StartFailures(
                deployment_id=deployment_id,  # type: ignore[arg-type]
                version=version,
                times=len(rows),
                ago_s=abs(now - rows[0].state_since),
                node_ids=tuple(NodeId(row.node_id) for row in rows),
                reason=rows[0].state_reason,
            )
        )
    return tuple(found)


async def read_fleet(
    connection: SimDbConnection, heard: NodeContact, reports: NodeReportCache | None = None
) -> ClusterState:
    by_node, nodes = await read_nodes(connection, heard, reports or NodeReportCache())
    tables = connection.tables
    return ClusterState(
        cluster_id=connection.store.cluster_id,
        generation=Generation(tables.generation),
        acting_for_s=heard.acting_for_s,
        pops=tuple(pop for _, pop in sorted(tables.pops.items())),
        nodes=nodes,
        models=tuple(model for _, model in sorted(tables.models.items())),
        deployments=tuple(
            deployment
            for name, deployment in sorted(tables.deployments.items())
            if name not in tables.deleted
        ),
        deleted=tuple(sorted(tables.deleted)),  # type: ignore[arg-type]
        placements=_placements(tables, by_node, connection.now),
        profiles=tuple(
            MeasuredProfile(model_id=model_id, device_class=device_class, profile=profile)
            for (model_id, device_class), profile in sorted(tables.profiles.items())
        ),
    )


async def read_fleet_nodes(
    connection: SimDbConnection,
    fleet: ClusterState,
    node_ids: Sequence[NodeId],
    heard: NodeContact,
    reports: NodeReportCache,
) -> ClusterState:
    by_node, nodes = await read_nodes(connection, heard, reports, node_ids)
    placements = _placements(connection.tables, by_node, connection.now, set(node_ids))
    return replace(fleet, acting_for_s=heard.acting_for_s, nodes=nodes, placements=placements)


def _placements(
    tables: Tables,
    reports: dict[NodeId, Report],
    now: float,
    node_ids: set[NodeId] | None = None,
) -> tuple[Placement, ...]:
    profiles = {
        replica.spec.replica_id: replica.profile
        for report in reports.values()
        for replica in report.replicas
    }
    return tuple(
        Placement(
            replica_id=row.spec.replica_id,
            deployment_id=row.spec.deployment_id,
            version=row.spec.version,
            node_id=NodeId(row.node_id),
            device_ids=row.spec.device_ids,
            memory_bytes=row.spec.memory_bytes,
            role=row.spec.role,
            state=ReplicaState(row.state),
            state_reason=row.state_reason,
            state_age_s=max(0.0, now - row.state_since),
            age_s=max(0.0, now - row.placed_at),
            restarts=row.restarts,
            is_ending=row.ended_at is not None,
            reason=row.reason,
            profile=profiles.get(row.spec.replica_id, ReplicaProfile()),
        )
        for _, row in sorted(tables.placements.items())
        if row.released_at is None and (node_ids is None or row.node_id in node_ids)
    )
