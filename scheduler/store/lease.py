"""The lease: who acts, fenced by an epoch that only rises.

The holder may trust itself until `asked_at + ttl - margin` on its own monotonic clock, counted
from before it asked: a slow round trip to the database cannot stretch leadership. Expiry is judged
by the database's clock alone, and every decision carries `WHERE epoch = $n` (`assert_epoch`), so a
holder that was paused past its time cannot write. A holder is one process, not a name: two of one
name, or one started again, must not share an epoch.
"""

from typing import Final

import msgspec

from isochrone.wire.ids import ClusterId, Epoch, Generation
from scheduler.store.pool import Connection, affected_rows, as_struct, fetch_one

TTL_S: Final = 6.0
MARGIN_S: Final = 1.0
_RETURNING: Final = (
    "RETURNING epoch, extract(epoch FROM clock_timestamp() - acting_since)::float8 AS acting_for_s"
)


class EpochLost(Exception):
    """Another scheduler acts now; what was about to be written was not."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease held, as the database told it."""

    epoch: Epoch
    acting_for_s: float


class ClusterRow(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster's one row."""

    cluster_id: ClusterId
    generation: Generation
    route_generation: Generation


async def ensure_cluster(connection: Connection, new_id: ClusterId) -> ClusterRow:
    """Return the cluster's row, making it under `new_id` in a database that has none."""
    await connection.execute(
        "INSERT INTO cluster (cluster_id) VALUES ($1) ON CONFLICT DO NOTHING", new_id
    )
    await connection.execute("INSERT INTO lease DEFAULT VALUES ON CONFLICT DO NOTHING")
    return await read_cluster_row(connection)


async def claim_authority(connection: Connection, fingerprint: str) -> str:
    """Return the fingerprint of the cluster's authority; where none was told yet, it is this."""
    await connection.execute("UPDATE cluster SET authority = $1 WHERE authority = ''", fingerprint)
    held: str = await connection.fetchval("SELECT authority FROM cluster")
    return held


async def read_cluster_row(connection: Connection) -> ClusterRow:
    """Return the cluster's one row."""
    row = await fetch_one(
        connection, "SELECT cluster_id, generation, route_generation FROM cluster"
    )
    return as_struct(row, ClusterRow)


async def acquire_or_renew_lease(
    connection: Connection, holder: str, ttl_s: float = TTL_S
) -> Lease | None:
    """Renew the lease if `holder` has it, take it if it has expired, else return None."""
    lease = await renew_lease(connection, holder, ttl_s)
    if lease is not None:
        return lease
    row = await connection.fetchrow(
        f"""
        UPDATE lease SET epoch = epoch + 1, acting_since = clock_timestamp(), holder = $1,
            expires_at = clock_timestamp() + make_interval(secs => $2)
        WHERE expires_at <= clock_timestamp() {_RETURNING}
        """,  # noqa: S608
        holder,
        ttl_s,
    )
    return as_struct(row, Lease) if row else None


async def renew_lease(connection: Connection, holder: str, ttl_s: float = TTL_S) -> Lease | None:
    """Renew the lease if `holder` has it, else return None.

    It leaves the row's keys as they are, so that it never waits for writers who hold the epoch
    (`assert_epoch`): of those there may always be some, each for a moment.
    """
    row = await connection.fetchrow(
        f"""
        UPDATE lease SET expires_at = clock_timestamp() + make_interval(secs => $2)
        WHERE holder = $1 AND expires_at > clock_timestamp() {_RETURNING}
        """,  # noqa: S608
        holder,
        ttl_s,
    )
    return as_struct(row, Lease) if row else None


async def release_lease(connection: Connection, holder: str) -> None:
    """Let a standby act at once: this scheduler is stopping."""
    await connection.execute("UPDATE lease SET expires_at = '-infinity' WHERE holder = $1", holder)


async def assert_epoch(connection: Connection, epoch: Epoch) -> None:
    """Hold the epoch until this transaction ends, or raise EpochLost. First line of every write."""
    current = await connection.fetchval(
        "SELECT epoch FROM lease WHERE epoch = $1 FOR KEY SHARE", epoch
    )
    if current is None:
        raise EpochLost(f"cannot write with epoch {epoch}: another scheduler has a newer one")


async def raise_epoch_and_generation(
    connection: Connection, *, holder: str, generation: Generation, epoch: Epoch
) -> bool:
    """Lift a database that is behind what its fleet has seen (it was restored from a backup).

    Returns whether anything was lifted; the caller's epoch is then no longer the newest, and its
    next turn of the lease takes up the new one.
    """
    # The epoch first, as every writer asks for it first.
    raised = await connection.execute(
        "UPDATE lease SET epoch = $1 + 1 WHERE holder = $2 AND epoch < $1", epoch, holder
    )
    lifted = await connection.execute(
        """
        UPDATE cluster SET generation = greatest(generation, $1 + 1),
                           route_generation = greatest(route_generation, $1 + 1)
        WHERE generation < $1 OR route_generation < $1
        """,
        generation,
    )
    return affected_rows(lifted) > 0 or affected_rows(raised) > 0


async def read_lease_remaining_s(connection: Connection) -> float:
    """Return for how long the lease is still held; 0 where it is free."""
    left_s: float = await connection.fetchval(
        "SELECT greatest(0, extract(epoch FROM expires_at - clock_timestamp()))::float8 FROM lease"
        " WHERE expires_at > '-infinity' UNION ALL SELECT 0::float8 LIMIT 1"
    )
    return left_s


async def count_peers(connection: Connection) -> int:
    """Return how many nodes and routers may dial."""
    count: int = await connection.fetchval(
        "SELECT (SELECT count(*) FROM node WHERE NOT revoked)"
        " + (SELECT count(*) FROM router WHERE NOT revoked)"
    )
    return count


async def read_acting_for_s(connection: Connection) -> float | None:
    """Return how long whoever holds the lease has acted; None where nobody does."""
    held: float | None = await connection.fetchval(
        """
        SELECT extract(epoch FROM clock_timestamp() - acting_since)::float8 FROM lease
        WHERE expires_at > clock_timestamp()
        """
    )
    return held
