"""Nodes and routers: how they join, what they report, what is assigned to them."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from isochrone.service.identity import Certificate
from isochrone.wire.assignment import Assignment, ReplicaSpec, Tombstone
from isochrone.wire.control import PeerRole
from isochrone.wire.ids import (
    BootId,
    ClusterId,
    Epoch,
    Generation,
    NodeId,
    ReplicaId,
)
from isochrone.wire.report import Device, Pulse, ReplicaReport, ReplicaState, Report
from scheduler.store.adoption import SealCheck, adopt
from scheduler.store.holders import read_holders, record_artifacts
from scheduler.store.identities import PEER_TABLES, REVOKED, newest_revocations
from scheduler.store.lease import assert_epoch
from scheduler.store.node_reports import decode_report
from scheduler.store.pool import Connection, affected_rows, columns, fetch_one, storable_text
from scheduler.store.prefetch import read_node_prefetches

BIGINT_MAX: Final = 2**63 - 1
MAY_FETCH: Final = ("wanted", "fetching", "failed")


class ReportEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What a report changed, in counts. `stale` means that it was older than one already held."""

    stale: bool = False
    changed: int = 0
    adopted: int = 0
    released: int = 0


class UnknownPeer(Exception):
    """No such node or router, or it is revoked."""


async def record_registration(
    connection: Connection,
    role: PeerRole,
    name: str,
    boot_id: BootId,
    generation: Generation,
    certificate: Certificate,
) -> None:
    """Note that a peer is connected, or raise UnknownPeer."""
    table, column = PEER_TABLES[role]
    done = await connection.execute(
        f"""
        UPDATE {table} SET boot_id = $2, generation = $3, last_seen_at = clock_timestamp(),
            certificate_serial = $4, certificate_expires_at = $5
            {", report_seq = 0" if role is PeerRole.AGENT else ""}
        WHERE {column} = $1 AND NOT revoked AND NOT EXISTS ({REVOKED})
        """,  # noqa: S608
        name,
        boot_id,
        generation,
        certificate.serial,
        certificate.expires_at,
        role.value,
        certificate.issued_at,
    )
    if not affected_rows(done):
        raise UnknownPeer(f"cannot register {name}: unknown here or revoked; join again")


async def read_node_ids(connection: Connection) -> list[NodeId]:
    """Return the names of all nodes that may report."""
    rows = await connection.fetch("SELECT node_id FROM node WHERE NOT revoked")
    return [NodeId(row["node_id"]) for row in rows]


async def lock_nodes(connection: Connection, node_ids: Sequence[NodeId]) -> None:
    """Lock many nodes' rows until the transaction ends, always in the same order.

    An UPDATE of many rows locks them as it meets them: two of them could wait for one another.
    """
    await connection.execute(
        "SELECT FROM node WHERE node_id = ANY($1::text[]) ORDER BY node_id FOR NO KEY UPDATE",
        node_ids,
    )


async def record_pulses(connection: Connection, pulses: Sequence[Pulse]) -> None:
    """Write many signs of life, in the caller's transaction; no number can spoil the others'."""
    ordered = sorted(pulses, key=lambda pulse: pulse.node_id)
    await lock_nodes(connection, [pulse.node_id for pulse in ordered])
    await connection.execute(
        """
        UPDATE node SET last_seen_at = clock_timestamp(), generation = pulse.generation
        FROM unnest($1::text[], $2::bigint[]) AS pulse (node_id, generation)
        WHERE node.node_id = pulse.node_id
        """,
        [pulse.node_id for pulse in ordered],
        [min(pulse.generation, BIGINT_MAX) for pulse in ordered],
    )


async def record_routers_seen(
    connection: Connection, seen: Sequence[tuple[str, Generation]]
) -> None:
    """Write many routers' signs of life, and the table each has, in one statement."""
    ordered = sorted(seen)
    await connection.execute(
        """
        UPDATE router SET last_seen_at = clock_timestamp(), generation = seen.generation
        FROM unnest($1::text[], $2::bigint[]) AS seen (router_id, generation)
        WHERE router.router_id = seen.router_id
        """,
        [name for name, _ in ordered],
        [generation for _, generation in ordered],
    )


async def record_report(
    connection: Connection, epoch: Epoch, report: Report, believes: SealCheck
) -> ReportEffect:
    """Take a node's whole word for what it is: devices, replicas, what is gone, what is unknown."""
    await assert_epoch(connection, epoch)
    row = await connection.fetchrow(
        """
        WITH before AS (SELECT report FROM node WHERE node_id = $1 FOR NO KEY UPDATE)
        UPDATE node SET report = $4, report_seq = $3, address = $5, generation = $6,
                        reported_at = clock_timestamp(), last_seen_at = clock_timestamp()
        FROM before WHERE node_id = $1 AND boot_id = $2 AND report_seq < $3
        RETURNING before.report
        """,
        report.node_id,
        report.boot_id,
        report.seq,
        msgspec.msgpack.encode(report),
        report.address,
        report.generation,
    )
    if row is None:
        return ReportEffect(stale=True)
    before = decode_report(row["report"])
    changed = adopted = 0
    # What only reports write, in the same transaction as the report itself, is as it was told.
    if before is None or _columns(before.devices) != _columns(report.devices):
        changed += await _record_devices(connection, report.node_id, report.devices)
    seated = []
    for replica in _in_one_order(report):
        known = await _record_replica(connection, report.node_id, replica)
        taken_in = 0
        if known is None:
            taken_in = await adopt(connection, report.node_id, replica, believes)
        changed, adopted = changed + (known or 0), adopted + taken_in
        if known is not None or taken_in:
            seated.append(replica)
    changed += await _record_refusals(connection, report)
    released = await _release_ended(connection, report)
    if before is None or before.artifacts != report.artifacts:
        await record_artifacts(connection, report.node_id, report.artifacts)
    await _record_profiles(connection, report.devices, seated)
    if changed or adopted or released:
        await connection.execute("UPDATE cluster SET generation = generation + 1")
    return ReportEffect(changed=changed, adopted=adopted, released=released)


def _in_one_order(report: Report) -> list[ReplicaReport]:
    """Return replicas as every report takes them: two of the same models would wait in a ring."""
    return sorted(report.replicas, key=lambda one: (one.spec.model_id, one.spec.deployment_id))


async def read_assignment(
    connection: Connection, node_id: NodeId, *, cluster_id: ClusterId, epoch: Epoch
) -> Assignment:
    """Return everything that `node_id` should run, at the cluster's generation."""
    row = await fetch_one(
        connection,
        """
        SELECT generation, EXISTS (SELECT FROM prefetch WHERE node_id = $1) AS has_prefetches
        FROM cluster
        """,
        node_id,
    )
    rows = await connection.fetch(
        """
        SELECT replica_id, spec, state, ended_generation, ended_reason, drain_timeout_s
        FROM placement
        WHERE node_id = $1 AND released_at IS NULL ORDER BY replica_id
        """,
        node_id,
    )
    specs = tuple(
        (msgspec.json.decode(row["spec"], type=ReplicaSpec), row["state"])
        for row in rows
        if row["ended_generation"] is None
    )
    # Only one that may still have to fetch needs to know from whom.
    prefetches = await read_node_prefetches(connection, node_id) if row["has_prefetches"] else ()
    fetching = [spec.artifact.digest for spec, state in specs if state in MAY_FETCH]
    fetching += [wished.artifact.digest for wished in prefetches]
    return Assignment(
        cluster_id=cluster_id,
        node_id=node_id,
        generation=Generation(row["generation"]),
        epoch=epoch,
        replicas=tuple(spec for spec, _ in specs),
        holders=await read_holders(connection, node_id, fetching) if fetching else (),
        prefetches=prefetches,
        revoked=await newest_revocations(connection),
        tombstones=tuple(
            Tombstone(
                replica_id=ReplicaId(row["replica_id"]),
                generation=Generation(row["ended_generation"]),
                reason=row["ended_reason"] or "",
                drain_timeout_s=row["drain_timeout_s"],
            )
            for row in rows
            if row["ended_generation"] is not None
        ),
    )


async def _record_devices(
    connection: Connection, node_id: NodeId, devices: Sequence[Device]
) -> int:
    changed = await connection.execute(
        """
        INSERT INTO device AS d (node_id, device_id, device_class, memory_bytes, healthy, reason)
        SELECT $1, row.*
        FROM unnest($2::text[], $3::text[], $4::bigint[], $5::boolean[], $6::text[])
            AS row (device_id, device_class, memory_bytes, healthy, reason)
        ON CONFLICT (node_id, device_id) DO UPDATE SET
            device_class = excluded.device_class, memory_bytes = excluded.memory_bytes,
            healthy = excluded.healthy, reason = excluded.reason
            WHERE (d.device_class, d.memory_bytes, d.healthy, d.reason)
                <> (excluded.device_class, excluded.memory_bytes, excluded.healthy, excluded.reason)
        """,
        node_id,
        *_columns(devices),
    )
    gone = await connection.execute(
        """
        UPDATE device SET healthy = false, reason = 'the node no longer reports it'
        WHERE node_id = $1 AND healthy AND device_id <> ALL($2::text[])
        """,
        node_id,
        [device.device_id for device in devices],
    )
    return affected_rows(changed) + affected_rows(gone)


def _columns(devices: Sequence[Device]) -> list[list[Any]]:
    """Return the devices column by column; of two of one name, the last said."""
    named = {device.device_id: device for device in devices}.values()
    told = columns(named, "device_id", "device_class", "memory_bytes", "healthy")
    return [*told, [storable_text(device.reason) for device in named]]


async def _record_replica(
    connection: Connection, node_id: NodeId, replica: ReplicaReport
) -> int | None:
    """Note one replica's state; None where the store knows no such replica on this node."""
    alive = replica.state not in (ReplicaState.STOPPED, ReplicaState.FAILED)
    row = await connection.fetchrow(
        """
        WITH before AS (
            SELECT replica_id, state, released_at FROM placement
            WHERE replica_id = $1 AND node_id = $7 FOR UPDATE
        ), told AS (
            -- What was given up stays so to its end: it is held against the next try.
            SELECT CASE WHEN state = 'failed' AND $2 IN ('draining', 'stopped') THEN state
                        ELSE $2 END AS state FROM before
        )
        UPDATE placement p SET
            state_since = CASE WHEN p.state = told.state THEN state_since
                               ELSE clock_timestamp() END,
            state = told.state, restarts = $4, fetched_bytes = $5,
            state_reason = CASE WHEN told.state = $2 THEN $3 ELSE state_reason END,
            -- Given back on paper but running in fact: its tombstone is sent again.
            released_at = CASE WHEN $6 THEN NULL ELSE p.released_at END
        FROM before, told WHERE p.replica_id = before.replica_id
        RETURNING p.state <> before.state AS has_moved, before.released_at
        """,
        replica.spec.replica_id,
        replica.state.value,
        storable_text(replica.reason),
        replica.restarts,
        replica.fetched_bytes,
        alive,
        node_id,
    )
    if row is None:
        return None
    return int(row["has_moved"] or (alive and row["released_at"] is not None))


async def _record_refusals(connection: Connection, report: Report) -> int:
    """Take what a node will not do for failed: who else is part of it need not wait."""
    if not report.refusals:
        return 0
    done = await connection.execute(
        """
        UPDATE placement SET state = 'failed', state_reason = refused.reason,
            state_since = clock_timestamp()
        FROM unnest($2::text[], $3::text[]) AS refused (replica_id, reason)
        WHERE placement.replica_id = refused.replica_id AND node_id = $1
          AND ended_at IS NULL AND state <> 'failed'
        """,
        report.node_id,
        [refusal.replica_id for refusal in report.refusals],
        [storable_text(refusal.reason) for refusal in report.refusals],
    )
    return affected_rows(done)


async def _release_ended(connection: Connection, report: Report) -> int:
    """Give back the seats of replicas that were ended and that the node no longer has."""
    alive = [
        replica.spec.replica_id
        for replica in report.replicas
        if replica.state is not ReplicaState.STOPPED
    ]
    done = await connection.execute(
        """
        UPDATE placement SET released_at = clock_timestamp(),
            state = CASE state WHEN 'failed' THEN state ELSE 'stopped' END
        WHERE node_id = $1 AND released_at IS NULL
          AND ended_generation <= $2 AND replica_id <> ALL($3::text[])
        """,
        report.node_id,
        report.generation,
        alive,
    )
    return affected_rows(done)


async def _record_profiles(
    connection: Connection, devices: Sequence[Device], replicas: Sequence[ReplicaReport]
) -> None:
    classes = {device.device_id: device.device_class for device in devices}
    for replica in replicas:
        measured = replica.profile
        if replica.state is not ReplicaState.WARM or measured.decode_tokens_per_s <= 0:
            continue
        device_class = classes.get(replica.spec.device_ids[0]) if replica.spec.device_ids else None
        if device_class is None:
            continue
        # A model may have left the catalogue while a replica of it still runs, and what drifts by
        # less than a tenth is not written for every node that has the same.
        await connection.execute(
            """
            INSERT INTO profile AS p (model_id, device_class, load_s, memory_bytes,
                                      prefill_tokens_per_s, decode_tokens_per_s)
            SELECT model_id, $2, $3, $4, $5, $6 FROM model WHERE model_id = $1
            ON CONFLICT (model_id, device_class) DO UPDATE SET
                load_s = $3, memory_bytes = $4, decode_tokens_per_s = $6,
                -- 0 where no prompt was long enough to measure by.
                prefill_tokens_per_s = coalesce(nullif($5, 0), p.prefill_tokens_per_s),
                updated_at = clock_timestamp()
            WHERE abs(p.load_s - $3) > 0.1 * p.load_s OR p.memory_bytes <> $4
                OR ($5 > 0 AND abs(p.prefill_tokens_per_s - $5) > 0.1 * p.prefill_tokens_per_s)
                OR abs(p.decode_tokens_per_s - $6) > 0.1 * p.decode_tokens_per_s
            """,
            replica.spec.model_id,
            device_class,
            measured.load_s,
            measured.memory_bytes,
            measured.prefill_tokens_per_s,
            measured.decode_tokens_per_s,
        )
