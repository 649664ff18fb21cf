"""The lease, registrations and signs of life, as `scheduler/store` has them in SQL."""

from collections.abc import Sequence
from typing import Any

import msgspec

from isochrone.wire.ids import Epoch, Generation, NodeId
from isochrone.wire.peers.control import PeerRole
from scheduler.store.fleet.nodes import UnknownPeer
from scheduler.store.lease import TTL_RATIO_MAX, TTL_S, ClusterRow, EpochLost, Lease
from tests.simulation.store import SimDbConnection, SimStore

replace = msgspec.structs.replace


async def acquire_or_renew_lease(
    connection: SimDbConnection, holder: str, ttl_s: float = TTL_S
) -> Lease | None:
    if (renewed := await renew_lease(connection, holder, ttl_s)) is not None:
        return renewed
    await connection.round_trip()
    store = connection.store
    if not may_take(store, ttl_s):
        return None
    await store.lock_writers(connection)
    try:
        connection.check()
        now = store.now()
        if not may_take(store, ttl_s):
            return None
        tables = store.tables.copy()
        tables.epoch += 1
        if tables.epoch > 1 and tables.server != store.server:
            tables.lost_generation = tables.route_generation
        tables.server = store.server
        store.publish(tables, is_async=False)
        store.lease.holder, store.lease.expires_at = holder, now + ttl_s
        store.lease.acting_since = now
        return Lease(epoch=Epoch(tables.epoch), acting_for_s=0.0)
    finally:
        store.release(connection)


def may_take(store: SimStore, ttl_s: float) -> bool:
    """Return whether the lease has expired, and the server has run for a TTL."""
    now = store.now()
    is_held = now < store.lease.expires_at <= now + ttl_s * TTL_RATIO_MAX
    has_just_started = store.tables.epoch > 0 and 0 <= now - store.started_at <= ttl_s
    return not is_held and not has_just_started


async def renew_lease(
    connection: SimDbConnection, holder: str, ttl_s: float = TTL_S
) -> Lease | None:
    await connection.round_trip()
    store = connection.store
    now = store.now()
    if store.lease.holder != holder or store.lease.expires_at <= now:
        return None
    store.lease.expires_at = now + ttl_s
    epoch = Epoch(connection.tables.epoch)
    return Lease(epoch=epoch, acting_for_s=now - store.lease.acting_since)


async def release_lease(connection: SimDbConnection, holder: str) -> None:
    await connection.round_trip()
    if connection.store.lease.holder == holder:
        connection.store.lease.expires_at = float("-inf")


async def assert_epoch(connection: SimDbConnection, epoch: Epoch) -> None:
    await connection.round_trip()
    tables = await connection.write()
    if tables.epoch != epoch:
        raise EpochLost(f"cannot write with epoch {epoch}: another scheduler has a newer one")
    connection.wrote_with(epoch, connection.host)


async def read_cluster_row(connection: SimDbConnection) -> ClusterRow:
    await connection.round_trip()
    tables = connection.tables
    return ClusterRow(
        cluster_id=connection.store.cluster_id,
        generation=Generation(tables.generation),
        route_generation=Generation(tables.route_generation),
        cache_salt_version=1,
    )


async def raise_epoch_and_generation(
    connection: SimDbConnection, *, holder: str, generation: Generation, epoch: Epoch
) -> bool:
    await connection.round_trip()
    tables = await connection.write()
    is_raised = False
    if connection.store.lease.holder == holder and tables.epoch < epoch:
        tables.epoch, is_raised = epoch + 1, True
        connection.store.lease.acting_since = connection.now
    if tables.generation < generation or tables.route_generation < generation:
        tables.generation = max(tables.generation, generation + 1)
        tables.route_generation = max(tables.route_generation, generation + 1)
        is_raised = True
    if is_raised:
        tables.lost_generation = tables.route_generation
    return is_raised


async def are_routes_after_loss(connection: SimDbConnection) -> bool:
    await connection.round_trip()
    tables = connection.tables
    return bool(tables.route_generation == tables.lost_generation)


async def read_lease_remaining_s(connection: SimDbConnection) -> float:
    await connection.round_trip()
    return max(0.0, connection.store.lease.expires_at - connection.now)


async def count_peers(connection: SimDbConnection) -> int:
    await connection.round_trip()
    tables = connection.tables
    return sum(not node.revoked for node in tables.nodes.values()) + len(tables.routers)


async def record_registration(
    connection: SimDbConnection,
    role: PeerRole,
    name: str,
    boot_id: str,
    generation: Generation,
    certificate: object,
    release: str,
) -> None:
    await connection.round_trip()
    tables = await connection.write()
    if role is PeerRole.ROUTER:
        if name not in tables.routers:
            raise UnknownPeer(f"cannot register {name}: unknown here or revoked; join again")
        return
    node = tables.nodes.get(name)
    if node is None or node.revoked:
        raise UnknownPeer(f"cannot register {name}: unknown here or revoked; join again")
    tables.nodes[name] = replace(
        node,
        boot_id=boot_id,
        generation=generation,
        report_seq=0,
        last_seen_at=connection.now,
    )


async def read_node_ids(connection: SimDbConnection) -> list[NodeId]:
    await connection.round_trip()
    return [
        NodeId(node.node_id)
        for node in connection.tables.nodes.values()
        if not node.revoked and node.last_seen_at is not None
    ]


async def record_pulses(connection: SimDbConnection, pulses: Sequence[Any]) -> None:
    await connection.round_trip()
    tables = await connection.write()
    for pulse in pulses:
        if (node := tables.nodes.get(pulse.node_id)) is not None:
            tables.nodes[pulse.node_id] = replace(
                node, last_seen_at=connection.now, generation=pulse.generation
            )


async def record_routers_seen(connection: SimDbConnection, seen: object) -> None:
    await connection.round_trip()
    await connection.write()
