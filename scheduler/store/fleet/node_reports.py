"""Reads nodes and their last reports; unchanged reports come from a cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import asyncpg
import msgspec

from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.peers.report import NodeDevice, Report
from scheduler.decide.cluster import FleetNode, NodeRefusal
from scheduler.decide.membership import NodeContact
from scheduler.store.pool import Connection, as_struct
from scheduler.store.readable_rows import LastReadableRows, RowReader

_report = msgspec.msgpack.Decoder(Report)


def decode_report(frame: bytes | None) -> Report | None:
    """Decode a stored report; None if there is none, or if this release cannot decode it."""
    try:
        return _report.decode(frame) if frame else None
    except msgspec.DecodeError:
        return None


class CachedNodeReport(NamedTuple):
    """A node's last report and devices; `key` is the boot id and sequence number of the report."""

    key: tuple[str, int]
    report: Report | None
    devices: tuple[NodeDevice, ...]
    is_unreadable: bool = False


class NodeReportCache:
    """Reports and devices as read before. Only nodes that reported since are read again."""

    def __init__(self) -> None:
        self.by_node: dict[NodeId, CachedNodeReport] = {}
        self.last_readable = LastReadableRows()
        """The last readable values of other rows of the fleet."""

    def note_unreadable(self, reader: RowReader) -> None:
        """Add the nodes whose last report cannot be read to those of `reader`."""
        for node_id, cached in self.by_node.items():
            if cached.is_unreadable:
                reader.note("node", node_id, "its last report is of another form")


async def read_nodes(
    connection: Connection,
    contact: NodeContact,
    cache: NodeReportCache,
    node_ids: Sequence[NodeId] | None = None,
) -> tuple[dict[NodeId, Report], tuple[FleetNode, ...]]:
    """Return the last reports by node, and the nodes: those of `node_ids`, or all."""
    rows = await connection.fetch(
        """
        SELECT node_id, pop, address, draining, revoked, generation, boot_id, report_seq,
               -- abs(): last_seen_at is in the future if the clock was set back since.
               abs(extract(epoch FROM clock_timestamp() - coalesce(last_seen_at, created_at)))
                   ::float8 AS silent_s,
               last_seen_at IS NOT NULL AS has_connected
        FROM node WHERE $1::text[] IS NULL OR node_id = ANY($1) ORDER BY node_id
        """,
        node_ids,
    )
    by_node = await _read_reports(connection, cache, rows)
    # Replaced and not changed: another read may be using the dictionary.
    cache.by_node = by_node if node_ids is None else {**cache.by_node, **by_node}
    nodes = tuple(
        FleetNode(
            node_id=row["node_id"],
            pop=row["pop"],
            address=row["address"],
            devices=by_node[row["node_id"]].devices,
            draining=row["draining"],
            revoked=row["revoked"],
            silent_s=contact.silent_s.get(row["node_id"], row["silent_s"]),
            # A registration that this process heard may not be stored yet.
            has_connected=row["has_connected"] or row["node_id"] in contact.silent_s,
            back_s=contact.back_s.get(row["node_id"]),
            generation=row["generation"],
            **_reported_fields(by_node[row["node_id"]].report, row["pop"]),
        )
        for row in rows
    )
    reports = {node_id: cached.report for node_id, cached in by_node.items() if cached.report}
    return reports, nodes


def _reported_fields(report: Report | None, pop: PopId) -> dict[str, Any]:
    """Return the fields of FleetNode that a report tells; empty without a report."""
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
        "lacking_engines": report.lacking_engines,
        "refused": tuple(
            NodeRefusal(refusal.deployment_id, refusal.reason, refusal.version)
            for refusal in report.refusals
            if refusal.deployment_id
        ),
    }


async def _read_reports(
    connection: Connection, cache: NodeReportCache, rows: Sequence[asyncpg.Record]
) -> dict[NodeId, CachedNodeReport]:
    """Return each node's report, from the cache unless the node has reported since."""
    keys = {NodeId(row["node_id"]): (row["boot_id"], row["report_seq"]) for row in rows}
    by_node = {
        node_id: cached
        for node_id, cached in cache.by_node.items()
        if keys.get(node_id) == cached.key
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
                keys[node_id],
                report,
                tuple(devices.get(node_id, ())),
                is_unreadable=report is None and bool(row["report"]),
            )
    return by_node


async def _read_devices(
    connection: Connection, node_ids: Sequence[NodeId]
) -> dict[str, list[NodeDevice]]:
    devices: dict[str, list[NodeDevice]] = {}
    for row in await connection.fetch(
        "SELECT * FROM device WHERE node_id = ANY($1::text[]) ORDER BY node_id, device_id", node_ids
    ):
        devices.setdefault(row["node_id"], []).append(as_struct(row, NodeDevice))
    return devices
