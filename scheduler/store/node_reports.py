"""Nodes as they are and as they last reported, read again only where they reported anew."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import asyncpg
import msgspec

from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.report import Device, Report
from scheduler.decide.cluster import FleetNode
from scheduler.decide.membership.liveness import NodeContact
from scheduler.store.pool import Connection, as_struct

_report = msgspec.msgpack.Decoder(Report)


def decode_report(frame: bytes | None) -> Report | None:
    """Return a stored report; None where there is none, or none that this release can read."""
    try:
        return _report.decode(frame) if frame else None
    except msgspec.DecodeError:
        return None


class CachedNodeReport(NamedTuple):
    """What a node last reported, read once; `key` says which report that was."""

    key: tuple[str, int]
    report: Report | None
    devices: tuple[Device, ...]


class NodeReportCache:
    """Reports and devices as read before: a picture reads again only those that changed."""

    def __init__(self) -> None:
        self.by_node: dict[NodeId, CachedNodeReport] = {}


async def read_nodes(
    connection: Connection,
    heard: NodeContact,
    known: NodeReportCache,
    only: Sequence[NodeId] | None = None,
) -> tuple[dict[NodeId, Report], tuple[FleetNode, ...]]:
    """Return nodes and what they last reported: those named, or all there are."""
    rows = await connection.fetch(
        """
        SELECT node_id, pop, address, draining, revoked, generation, boot_id, report_seq,
               -- By a clock put back since it may have been seen in a time to come.
               abs(extract(epoch FROM clock_timestamp() - coalesce(last_seen_at, created_at)))
                   ::float8 AS silent_s
        FROM node WHERE $1::text[] IS NULL OR node_id = ANY($1) ORDER BY node_id
        """,
        only,
    )
    by_node = await _learn(connection, known, rows)
    # Replaced whole: another reading may be under way.
    known.by_node = by_node if only is None else {**known.by_node, **by_node}
    nodes = tuple(
        FleetNode(
            node_id=row["node_id"],
            pop=row["pop"],
            address=row["address"],
            devices=by_node[row["node_id"]].devices,
            draining=row["draining"],
            revoked=row["revoked"],
            silent_s=heard.silent_s.get(row["node_id"], row["silent_s"]),
            back_s=heard.back_s.get(row["node_id"]),
            generation=row["generation"],
            **_told_by(by_node[row["node_id"]].report, row["pop"]),
        )
        for row in rows
    )
    reports = {node_id: known.report for node_id, known in by_node.items() if known.report}
    return reports, nodes


def _told_by(report: Report | None, pop: PopId) -> dict[str, Any]:
    """Return what a node said of itself: the weights it has, how fast others come, its domain."""
    if report is None:
        return {}
    return {
        "artifacts": report.artifacts,
        "in_host_memory": report.in_host_memory,
        "disk_free_bytes": report.disk_free_bytes,
        "disk_bytes_per_s": report.disk_bytes_per_s,
        "fetch_bytes_per_s": report.fetch_bytes_per_s,
        "failure_domain": f"{pop}/{report.failure_domain}" if report.failure_domain else "",
        "rank_ports": report.rank_ports,
        "refused": tuple(
            (one.deployment_id, one.reason) for one in report.refusals if one.deployment_id
        ),
    }


async def _learn(
    connection: Connection, known: NodeReportCache, rows: Sequence[asyncpg.Record]
) -> dict[NodeId, CachedNodeReport]:
    """Return what each node reported, reading only those that have since they were read last."""
    keys = {NodeId(row["node_id"]): (row["boot_id"], row["report_seq"]) for row in rows}
    by_node = {
        node_id: held for node_id, held in known.by_node.items() if keys.get(node_id) == held.key
    }
    changed = [node_id for node_id in keys if node_id not in by_node]
    if changed:
        devices = await _read_devices(connection, changed)
        for row in await connection.fetch(
            "SELECT node_id, report FROM node WHERE node_id = ANY($1::text[])", changed
        ):
            node_id = NodeId(row["node_id"])
            report = decode_report(row["report"])
            by_node[node_id] = CachedNodeReport(
                keys[node_id], report, tuple(devices.get(node_id, ()))
            )
    return by_node


async def _read_devices(
    connection: Connection, node_ids: Sequence[NodeId]
) -> dict[str, list[Device]]:
    devices: dict[str, list[Device]] = {}
    for row in await connection.fetch(
        "SELECT * FROM device WHERE node_id = ANY($1::text[]) ORDER BY node_id, device_id", node_ids
    ):
        devices.setdefault(row["node_id"], []).append(as_struct(row, Device))
    return devices
