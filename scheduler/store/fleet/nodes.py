"""Nodes and routers: registrations, signs of life, reports and assignments."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from isochrone.service.trust.identity import Certificate
from isochrone.wire.ids import (
    BootId,
    ClusterId,
    Epoch,
    Generation,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.peers.assignment import Assignment, ReplicaSpec, StoreMasterPlace, Tombstone
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import NodeDevice, Pulse, ReplicaReport, ReplicaState, Report
from scheduler.decide.membership import store_masters
from scheduler.store.catalogue import bump_generation
from scheduler.store.fleet.adoption import SealCheck, adopt
from scheduler.store.fleet.holders import read_holders, record_artifacts
from scheduler.store.fleet.identities import PEER_TABLES, REVOKED_QUERY, newest_revocations
from scheduler.store.fleet.node_reports import decode_report
from scheduler.store.fleet.prefetch import read_node_prefetches
from scheduler.store.fleet.store_members import read_store_members
from scheduler.store.lease import assert_epoch
from scheduler.store.pool import Connection, affected_rows, columns, fetch_one, storable_text
from scheduler.store.readable_rows import RowReader

BIGINT_MAX: Final = 2**63 - 1

GONE_DEVICES_MAX: Final = 64
"""How many devices are kept of a node that no longer reports them, so that operators see them. A
node that invents a device for each report must not fill the table."""

CLASSES_MAX: Final = 64
"""How many classes of devices have measured rates of one model."""

MAY_FETCH: Final = ("wanted", "fetching", "failed")
"""The states in which a replica's node may still have to fetch its weights."""


class ReportEffect(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows a report changed.

    A `stale` report is older than the stored one, or of a boot whose registration is not stored.
    """

    stale: bool = False
    is_boot_unknown: bool = False
    changed: int = 0
    adopted: int = 0
    released: int = 0


class UnknownPeer(Exception):
    """The node or router does not exist or is revoked."""


async def record_registration(
    connection: Connection,
    role: PeerRole,
    name: str,
    boot_id: BootId,
    generation: Generation,
    certificate: Certificate,
    release: str,
) -> None:
    """Record that a peer of this release has registered; raises UnknownPeer."""
    table, column = PEER_TABLES[role]
    done = await connection.execute(
        f"""
        UPDATE {table} SET boot_id = $2, generation = $3, last_seen_at = clock_timestamp(),
            certificate_serial = $4, certificate_expires_at = $5, release = $8
            {", report_seq = 0" if role is PeerRole.AGENT else ""}
        WHERE {column} = $1 AND NOT revoked AND NOT EXISTS ({REVOKED_QUERY})
        """,  # noqa: S608
        name,
        boot_id,
        generation,
        certificate.serial,
        certificate.expires_at,
        role.value,
        certificate.issued_at,
        release,
    )
    if not affected_rows(done):
        raise UnknownPeer(f"cannot register {name}: unknown here or revoked; join again")


async def read_node_ids(connection: Connection) -> list[NodeId]:
    """Return the ids of all nodes that have connected before and are not revoked."""
    rows = await connection.fetch(
        "SELECT node_id FROM node WHERE NOT revoked AND last_seen_at IS NOT NULL"
    )
    return [NodeId(row["node_id"]) for row in rows]


async def read_device_classes(connection: Connection) -> dict[PopId, list[str]]:
    """Return the classes of the devices in each PoP's nodes, which have reported and are not
    revoked."""
    rows = await connection.fetch(
        "SELECT pop, array_agg(DISTINCT device_class ORDER BY device_class) AS classes"
        " FROM node JOIN device USING (node_id) WHERE NOT revoked GROUP BY pop"
    )
    return {PopId(row["pop"]): row["classes"] for row in rows}


async def lock_nodes(connection: Connection, node_ids: Sequence[NodeId]) -> None:
    """Lock nodes' rows until the transaction ends, always in the same order.

    An UPDATE of many rows locks them in the order of a scan, so two of them could deadlock.
    """
    await connection.execute(
        "SELECT FROM node WHERE node_id = ANY($1::text[]) ORDER BY node_id FOR NO KEY UPDATE",
        node_ids,
    )


async def record_pulses(connection: Connection, pulses: Sequence[Pulse]) -> None:
    """Store many nodes' pulses, in the caller's transaction.

    A generation over BIGINT_MAX is clamped, so that it cannot fail the batch.
    """
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
    """Store that routers are alive, and the generation of the route table that each has."""
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
    connection: Connection, epoch: Epoch, report: Report, has_valid_seal: SealCheck
) -> ReportEffect:
    """Store a node's report: its devices, replicas, refusals, artifacts and measured profiles.

    Unknown replicas are adopted, and ended replicas that the node no longer has are released.
    """
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
        is_known = await connection.fetchval(
            "SELECT boot_id = $2 FROM node WHERE node_id = $1", report.node_id, report.boot_id
        )
        return ReportEffect(stale=True, is_boot_unknown=not is_known)
    before = decode_report(row["report"])
    changed = adopted = 0
    # Only reports write devices, in the same transaction: an unchanged list needs no writing.
    if before is None or _columns(before.devices) != _columns(report.devices):
        changed += await _record_devices(connection, report.node_id, report.devices)
    # First: an unknown replica may still use what an ended one has left.
    released = await _release_ended(connection, report)
    known_replicas = []
    # In the order of the rows that they lock, so that two reports do not deadlock.
    for replica in sorted(report.replicas, key=lambda r: (r.spec.model_id, r.spec.deployment_id)):
        moved = await _record_replica(connection, report.node_id, replica)
        is_adopted = 0
        if moved is None:
            is_adopted = await adopt(
                connection, report.node_id, replica, _present(report), has_valid_seal
            )
        changed, adopted = changed + (moved or 0), adopted + is_adopted
        if moved is not None or is_adopted:
            known_replicas.append(replica)
    changed += await _record_refusals(connection, report)
    if before is None or before.artifacts != report.artifacts:
        await record_artifacts(connection, report.node_id, report.artifacts)
    await _record_profiles(connection, report.devices, known_replicas)
    if changed or adopted or released:
        await bump_generation(connection)
    return ReportEffect(changed=changed, adopted=adopted, released=released)


async def read_assignment(
    connection: Connection, node_id: NodeId, *, cluster_id: ClusterId, epoch: Epoch
) -> Assignment:
    """Return a node's whole assignment at the cluster's current generation."""
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
    # A node goes on with a replica that is missing here: only a tombstone ends one.
    specs = RowReader().read_each(
        "placement",
        (row for row in rows if row["ended_generation"] is None),
        lambda row: (msgspec.json.decode(row["spec"], type=ReplicaSpec), row["state"]),
        name="replica_id",
    )
    # Holders are read only for weights that the node may still have to fetch.
    prefetches = await read_node_prefetches(connection, node_id) if row["has_prefetches"] else ()
    fetching = [spec.artifact.digest for spec, state in specs if state in MAY_FETCH]
    fetching += [prefetch.artifact.digest for prefetch in prefetches]
    return Assignment(
        cluster_id=cluster_id,
        node_id=node_id,
        generation=Generation(row["generation"]),
        epoch=epoch,
        replicas=tuple(spec for spec, _ in specs),
        holders=await read_holders(connection, node_id, fetching) if fetching else (),
        prefetches=prefetches,
        revoked=await newest_revocations(connection),
        store_master=await _read_store_master(connection, node_id),
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


async def _read_store_master(connection: Connection, node_id: NodeId) -> StoreMasterPlace | None:
    """Return where the master of the store of KV runs in a node's PoP; None if it has none."""
    places = store_masters(await read_store_members(connection, pop_of=node_id))
    return next(iter(places.values()), None)


async def _record_devices(
    connection: Connection, node_id: NodeId, devices: Sequence[NodeDevice]
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
    if affected_rows(gone):
        # No placement can be added to such a device meanwhile: the node's row is locked.
        await connection.execute(
            """
            DELETE FROM device USING (
                SELECT device_id FROM device d
                WHERE node_id = $1 AND device_id <> ALL($2::text[]) AND NOT EXISTS (
                    SELECT FROM placement_device p
                    WHERE p.node_id = d.node_id AND p.device_id = d.device_id)
                ORDER BY device_id OFFSET $3) AS surplus
            WHERE node_id = $1 AND device.device_id = surplus.device_id
            """,
            node_id,
            [device.device_id for device in devices],
            GONE_DEVICES_MAX,
        )
    return affected_rows(changed) + affected_rows(gone)


def _columns(devices: Sequence[NodeDevice]) -> list[list[Any]]:
    """Return the devices as columns for unnest(); of two with one id, the later one."""
    unique = {device.device_id: device for device in devices}.values()
    values = columns(unique, "device_id", "device_class", "memory_bytes", "healthy")
    return [*values, [storable_text(device.reason) for device in unique]]


async def _record_replica(
    connection: Connection, node_id: NodeId, replica: ReplicaReport
) -> int | None:
    """Store one replica's state; return 1 if it changed, None if the store does not know it."""
    alive = replica.state not in (ReplicaState.STOPPED, ReplicaState.FAILED)
    row = await connection.fetchrow(
        """
        WITH before AS (
            SELECT replica_id, state, released_at FROM placement
            WHERE replica_id = $1 AND node_id = $7 FOR UPDATE
        ), reported AS (
            -- A failed replica stays failed while it drains: failures count against its version.
            SELECT CASE WHEN state = 'failed' AND $2 IN ('draining', 'stopped') THEN state
                        ELSE $2 END AS state FROM before
        )
        UPDATE placement p SET
            state_since = CASE WHEN p.state = reported.state THEN state_since
                               ELSE clock_timestamp() END,
            state = reported.state, restarts = $4, fetched_bytes = $5,
            state_reason = CASE WHEN reported.state = $2 THEN $3 ELSE state_reason END,
            -- Released but still running: occupy its devices again, and resend the tombstone.
            released_at = CASE WHEN $6 THEN NULL ELSE p.released_at END
        FROM before, reported WHERE p.replica_id = before.replica_id
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
    """Mark replicas that a node refuses as failed, so that their other parts need not wait."""
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
    """Release the devices of ended replicas that the node no longer has; return how many."""
    done = await connection.execute(
        """
        UPDATE placement SET released_at = clock_timestamp(),
            state = CASE state WHEN 'failed' THEN state ELSE 'stopped' END
        WHERE node_id = $1 AND released_at IS NULL
          AND ended_generation <= $2 AND replica_id <> ALL($3::text[])
        """,
        report.node_id,
        report.generation,
        _present(report),
    )
    return affected_rows(done)


def _present(report: Report) -> list[ReplicaId]:
    """Return the replicas that a node has, whether or not they serve."""
    stopped = ReplicaState.STOPPED
    return [replica.spec.replica_id for replica in report.replicas if replica.state is not stopped]


async def _record_profiles(
    connection: Connection, devices: Sequence[NodeDevice], replicas: Sequence[ReplicaReport]
) -> None:
    classes = {device.device_id: device.device_class for device in devices}
    for replica in replicas:
        measured = replica.profile
        if replica.state is not ReplicaState.WARM or measured.decode_tokens_per_s <= 0:
            continue
        device_class = classes.get(replica.spec.device_ids[0]) if replica.spec.device_ids else None
        if device_class is None:
            continue
        # Inserts nothing if the model has been deleted while a replica of it still runs. Changes of
        # less than a tenth are not written: many nodes report the same profile.
        await connection.execute(
            """
            INSERT INTO profile AS p (model_id, device_class, load_s, memory_bytes,
                                      prefill_tokens_per_s, decode_tokens_per_s)
            SELECT model_id, $2, $3, $4, $5, $6 FROM model m WHERE model_id = $1
                AND (SELECT count(*) FROM profile o
                     WHERE o.model_id = m.model_id AND o.device_class <> $2) < $7
            ON CONFLICT (model_id, device_class) DO UPDATE SET
                load_s = $3, memory_bytes = $4, decode_tokens_per_s = $6,
                -- 0 if no prompt was long enough to measure.
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
            CLASSES_MAX,
        )
