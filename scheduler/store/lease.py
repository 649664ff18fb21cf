"""The lease: which scheduler acts, fenced by an epoch that only rises.

The holder trusts its lease until `requested_at + ttl - MARGIN_S` on its own monotonic clock,
counted from before the request: a slow round trip to the database cannot extend leadership. The
database's clock alone decides expiry. Every write checks its epoch (`assert_epoch`), so a holder
that was paused beyond its lease cannot write. A holder is one process and not a name: two processes
of one name, or one that restarts, must not share an epoch.

A server that has just started may hold a restored backup, in which the epoch of the last holder is
free again. So an expired lease is taken only when the server has run for a TTL: until then every
holder that the backup does not know has stopped trusting its lease.

A restored backup, or a promoted standby that lacks the last transactions, looks like any other
state, and its counters may catch up with those that are lost before a peer shows higher ones. But
it is always another server, or another table, than the one on which the last term began. The first
term on a server therefore counts as one after a loss of history (`are_routes_after_loss`).
"""

from typing import Final

import msgspec

from isochrone.wire.ids import ClusterId, Epoch, Generation
from scheduler.store.pool import Connection, affected_rows, as_struct, fetch_one

TTL_S: Final = 6.0
MARGIN_S: Final = 1.0
TTL_RATIO_MAX: Final = 10
"""The largest ratio between two schedulers' TTLs. A lease that expires later than that was written
before the database's clock was set back, and counts as expired."""

_RETURNING: Final = (
    "RETURNING epoch, extract(epoch FROM clock_timestamp() - acting_since)::float8 AS acting_for_s"
)

_SERVER: Final = (
    "extract(epoch FROM pg_postmaster_start_time())::text || ' ' || 'lease'::regclass::oid"
)
"""A value that changes when a server starts, another one is promoted, or a dump restores the
table."""


class EpochLost(Exception):
    """Another scheduler has a newer epoch; nothing was written."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A held lease: its epoch, and for how long its holder has acted."""

    epoch: Epoch
    acting_for_s: float


class ClusterRow(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster's row, of which a database has one."""

    cluster_id: ClusterId
    generation: Generation
    route_generation: Generation
    cache_salt_version: int


async def ensure_cluster(connection: Connection, new_id: ClusterId) -> ClusterRow:
    """Return the cluster's row; in an empty database, add it with `new_id`."""
    await connection.execute(
        "INSERT INTO cluster (cluster_id) VALUES ($1) ON CONFLICT DO NOTHING", new_id
    )
    await connection.execute("INSERT INTO lease DEFAULT VALUES ON CONFLICT DO NOTHING")
    return await read_cluster_row(connection)


async def claim_authority(connection: Connection, fingerprint: str) -> str:
    """Return the fingerprint of the cluster's authority; set it to this one if there is none."""
    await connection.execute("UPDATE cluster SET authority = $1 WHERE authority = ''", fingerprint)
    authority: str = await connection.fetchval("SELECT authority FROM cluster")
    return authority


async def read_cluster_row(connection: Connection) -> ClusterRow:
    """Return the cluster's one row."""
    row = await fetch_one(
        connection,
        "SELECT cluster_id, generation, route_generation, cache_salt_version FROM cluster",
    )
    return as_struct(row, ClusterRow)


async def acquire_or_renew_lease(
    connection: Connection, holder: str, ttl_s: float = TTL_S
) -> Lease | None:
    """Renew the lease if `holder` has it, or take it if it has expired; else return None.

    The first term that begins on a server counts as one after a loss of history.
    """
    lease = await renew_lease(connection, holder, ttl_s)
    if lease is not None:
        return lease
    row = await connection.fetchrow(
        f"""
        WITH before AS (SELECT server, {_SERVER} AS now FROM lease), taken AS (
            UPDATE lease SET epoch = epoch + 1, acting_since = clock_timestamp(), holder = $1,
                expires_at = clock_timestamp() + make_interval(secs => $2), server = before.now
            FROM before
            WHERE (expires_at <= clock_timestamp()
                OR expires_at > clock_timestamp() + make_interval(secs => $2 * {TTL_RATIO_MAX}))
                AND (epoch = 0 OR NOT clock_timestamp() - pg_postmaster_start_time()
                    BETWEEN interval '0' AND make_interval(secs => $2))
            {_RETURNING}, epoch > 1 AND before.server <> before.now AS is_first_here
        ), marked AS (
            UPDATE cluster SET lost_generation = route_generation
            FROM taken WHERE taken.is_first_here
        )
        SELECT epoch, acting_for_s FROM taken
        """,  # noqa: S608
        holder,
        ttl_s,
    )
    return as_struct(row, Lease) if row else None


async def renew_lease(connection: Connection, holder: str, ttl_s: float = TTL_S) -> Lease | None:
    """Renew the lease if `holder` has it; else return None.

    The epoch, which is the row's key, stays as it is: so the update does not wait for the writers
    that hold the epoch with FOR KEY SHARE (`assert_epoch`), of which there are always some.
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
    """Let the lease expire at once, so that a standby can act."""
    await connection.execute("UPDATE lease SET expires_at = '-infinity' WHERE holder = $1", holder)


async def assert_epoch(connection: Connection, epoch: Epoch) -> None:
    """Lock the epoch until the transaction ends, or raise EpochLost. Begins every write."""
    current = await connection.fetchval(
        "SELECT epoch FROM lease WHERE epoch = $1 FOR KEY SHARE", epoch
    )
    if current is None:
        raise EpochLost(f"cannot write with epoch {epoch}: another scheduler has a newer one")


async def raise_epoch_and_generation(
    connection: Connection, *, holder: str, generation: Generation, epoch: Epoch
) -> bool:
    """Raise the counters of a database that was restored from a backup above what its fleet has.

    Return whether anything was raised. Until a route table is published, the database remembers
    that it has lost history (`are_routes_after_loss`). The caller's epoch may then be outdated; its
    next renewal of the lease returns the new one, and with it a new term begins.
    """
    # The epoch is locked first, as in every transaction.
    raised_epoch = await connection.execute(
        "UPDATE lease SET epoch = $1 + 1, acting_since = clock_timestamp()"
        " WHERE holder = $2 AND epoch < $1",
        epoch,
        holder,
    )
    raised_generation = await connection.execute(
        """
        UPDATE cluster SET generation = greatest(generation, $1 + 1),
                           route_generation = greatest(route_generation, $1 + 1)
        WHERE generation < $1 OR route_generation < $1
        """,
        generation,
    )
    if affected_rows(raised_generation) == 0 and affected_rows(raised_epoch) == 0:
        return False
    await connection.execute("UPDATE cluster SET lost_generation = route_generation")
    return True


async def are_routes_after_loss(connection: Connection) -> bool:
    """Return whether history may be lost and no route table has been published since."""
    is_after_loss: bool = await connection.fetchval(
        "SELECT route_generation = lost_generation FROM cluster"
    )
    return is_after_loss


async def read_lease_remaining_s(connection: Connection) -> float:
    """Return for how many seconds the lease is still held; 0 if it is free."""
    remaining_s: float = await connection.fetchval(
        "SELECT greatest(0, extract(epoch FROM expires_at - clock_timestamp()))::float8 FROM lease"
        " WHERE expires_at > '-infinity' UNION ALL SELECT 0::float8 LIMIT 1"
    )
    return remaining_s


async def count_peers(connection: Connection) -> int:
    """Return how many nodes and routers may connect."""
    count: int = await connection.fetchval(
        "SELECT (SELECT count(*) FROM node WHERE NOT revoked)"
        " + (SELECT count(*) FROM router WHERE NOT revoked)"
    )
    return count


async def read_acting_for_s(connection: Connection) -> float | None:
    """Return for how long the lease's holder has acted; None if the lease is free."""
    acting_for_s: float | None = await connection.fetchval(
        """
        SELECT extract(epoch FROM clock_timestamp() - acting_since)::float8 FROM lease
        WHERE expires_at > clock_timestamp()
        """
    )
    return acting_for_s
