"""What `scheduler/store` does in SQL, on the simulated store. Same names, same arguments.

`test_store_conformance` compares each with the real one. Left out is what the simulation does not
use: replicas over several nodes, prefetches, demand, usage, rollouts and certificates.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import asyncpg
import msgspec

from isochrone.wire.ids import Epoch, Generation, KeyId, NodeId
from isochrone.wire.peers.routes import KeyEntry
from scheduler.store.accounts.keys import ROWS_PER_PAGE, TOMBSTONE_DAYS, KeyPage
from scheduler.store.history_clock import HistoryClock
from scheduler.store.lease import EpochLost
from scheduler.store.retention import DAY_S, RetentionRule
from tests.simulation.store import SimDbConnection, Tables
from tests.simulation.store_lease import (
    acquire_or_renew_lease,
    are_routes_after_loss,
    assert_epoch,
    count_peers,
    raise_epoch_and_generation,
    read_cluster_row,
    read_lease_remaining_s,
    read_node_ids,
    record_pulses,
    record_registration,
    record_routers_seen,
    release_lease,
    renew_lease,
)
from tests.simulation.store_reads import (
    read_assignment,
    read_cluster,
    read_fleet,
    read_fleet_nodes,
    read_nodes,
)
from tests.simulation.store_reports import add_placement, fits, record_report

replace = msgspec.structs.replace


async def commit_plan(connection: SimDbConnection, plan: Any, epoch: Epoch) -> bool:
    await assert_epoch(connection, epoch)
    await connection.round_trip()
    tables, now = await connection.write(), connection.now
    if tables.generation != plan.based_on:
        return False
    tables.generation += 1
    for start in plan.starts:
        spec = start.spec
        if spec.replica_id in tables.placements or not fits(tables, start.node_id, spec):
            raise asyncpg.CheckViolationError(
                f"cannot place {spec.replica_id}: taken, or too large"
            )
        add_placement(tables, start.node_id, spec, start.reason, now)
        tables.add_event(now, "replica.placed", spec.replica_id)
    for ending in plan.endings:
        row = tables.placements.get(ending.replica_id)
        if row is not None and row.released_at is None and row.ended_at is None:
            tables.placements[row.replica_id] = replace(
                row,
                ended_at=now,
                ended_generation=tables.generation,
                ended_reason=ending.reason,
                drain_timeout_s=ending.drain_timeout_s,
            )
        tables.add_event(now, "replica.ended", ending.replica_id)
    await connection.round_trip()
    return True


async def read_lost_nodes(connection: SimDbConnection) -> dict[NodeId, float]:
    await connection.round_trip()
    return {
        NodeId(node.node_id): connection.now - node.lost_at
        for node in connection.tables.nodes.values()
        if node.lost_at is not None
    }


async def record_node_losses(
    connection: SimDbConnection, epoch: Epoch, lost: Sequence[Any], back: Sequence[Any]
) -> None:
    await assert_epoch(connection, epoch)
    await connection.round_trip()
    tables, now = await connection.write(), connection.now
    changes: list[tuple[Any, float | None, str]] = [(node, now, "node.lost") for node in lost]
    changes += [(node, None, "node.back") for node, _ in back]
    for node, lost_at, kind in changes:
        tables.nodes[node.node_id] = replace(tables.nodes[node.node_id], lost_at=lost_at)
        tables.add_event(now, kind, node.node_id)


async def record_event(
    connection: SimDbConnection, *, actor: str, kind: str, subject: str, **fields: Any
) -> None:
    await connection.round_trip()
    tables = await connection.write()
    tables.add_event(connection.now, kind, subject, actor)


async def delete_expired(
    connection: SimDbConnection, rule: RetentionRule, now: datetime, batch: int
) -> int:
    await connection.round_trip()
    before = min(connection.now, now.timestamp(), connection.tables.history_at) - rule.keep_s
    expired = [
        key
        for key, row in connection.tables.rows_of(rule.table).items()
        if (getattr(row, rule.age_column) or before) < before
    ]
    if expired:
        rows = (await connection.write()).rows_of(rule.table)
        for key in expired[:batch]:
            rows.pop(key, None)
    return len(expired[:batch])


async def read_history_clock(connection: SimDbConnection) -> HistoryClock:
    await connection.round_trip()
    return HistoryClock(connection.tables.history_at, connection.now)


async def write_history_clock(connection: SimDbConnection, epoch: Epoch, at_s: float) -> None:
    await assert_epoch(connection, epoch)
    await connection.round_trip()
    tables = await connection.write()
    tables.history_at = max(tables.history_at, at_s)


async def live_keys(connection: SimDbConnection, key_ids: Sequence[KeyId]) -> tuple[Any, ...]:
    await connection.round_trip()
    return tuple(key for key in _live(connection.tables) if key.key_id in key_ids)


async def read_key_page(connection: SimDbConnection, after: KeyId) -> KeyPage:
    await connection.round_trip()
    later = [key for key in _live(connection.tables) if key.key_id > after]
    page = tuple(later[:ROWS_PER_PAGE])
    return KeyPage(page, page[-1].key_id if len(page) == ROWS_PER_PAGE else None)


def _live(tables: Tables) -> list[KeyEntry]:
    return [key for name, key in sorted(tables.keys.items()) if name not in tables.revoked_keys]


async def revoked_among(connection: SimDbConnection, key_ids: Sequence[KeyId]) -> set[KeyId]:
    await connection.round_trip()
    return {key_id for key_id in key_ids if key_id in connection.tables.revoked_keys}


async def revoked_keys(connection: SimDbConnection) -> tuple[KeyId, ...]:
    await connection.round_trip()
    since = connection.now - TOMBSTONE_DAYS * DAY_S
    revoked = connection.tables.revoked_keys
    return tuple(sorted(KeyId(key_id) for key_id, at in revoked.items() if at > since))


async def read_adapter_entries(connection: SimDbConnection) -> tuple[Any, ...]:
    await connection.round_trip()
    return ()


async def next_route_generation(
    connection: SimDbConnection, epoch: Epoch, above: Generation, *, keys_only: bool = False
) -> Generation:
    await assert_epoch(connection, epoch)
    await connection.round_trip()
    tables = await connection.write()
    if tables.route_generation < above:
        raise EpochLost(f"cannot publish routes: the database is older than generation {above}")
    if keys_only and tables.lost_generation == tables.route_generation:
        tables.lost_generation += 1
    tables.route_generation += 1
    return Generation(tables.route_generation)


async def revoked_since(connection: SimDbConnection, since_s: float) -> list[Any]:
    await connection.round_trip()
    return []


async def recent_key_changes(connection: SimDbConnection, limit: int) -> list[Any]:
    await connection.round_trip()
    return []


FUNCTIONS = (
    *(acquire_or_renew_lease, renew_lease, release_lease, assert_epoch, read_cluster_row),
    *(are_routes_after_loss,),
    *(raise_epoch_and_generation, read_lease_remaining_s, count_peers, record_registration),
    *(read_node_ids, record_pulses, record_routers_seen, record_report, read_assignment),
    *(read_nodes, read_cluster, read_fleet, read_fleet_nodes, commit_plan, read_lost_nodes),
    *(
        record_node_losses,
        record_event,
        delete_expired,
        live_keys,
        read_key_page,
        revoked_among,
        revoked_keys,
        read_adapter_entries,
    ),
    *(next_route_generation, revoked_since, read_history_clock, write_history_clock),
    *(recent_key_changes,),
)
"""What replaces the functions of the same names."""
