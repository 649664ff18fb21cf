"""Demand, usage and round trips: at least once on the wire, counted once here."""

from isochrone.wire.usage import Demand, RoundTrips, Usage
from scheduler.store.pool import Connection


async def record_demand(connection: Connection, demand: Demand) -> bool:
    """Add one router's window to the minutes; False where this batch was already counted."""
    seen = await connection.execute(
        """
        INSERT INTO demand_seen (router_id, boot_id, seq) VALUES ($1, $2, $3)
        ON CONFLICT DO NOTHING
        """,
        demand.router_id,
        demand.boot_id,
        demand.seq,
    )
    if seen == "INSERT 0 0":
        return False
    # Sorted, so that two batches at once take their row locks in one order.
    rows = sorted(demand.rows, key=lambda row: (row.deployment_id, row.pop))
    # The minute is that of arrival by the database's clock: a router's clock may be wrong, and
    # demand delayed by a partition must not look like demand of now.
    await connection.executemany(
        """
        INSERT INTO demand AS d (minute, deployment_id, pop, requests, prompt_tokens,
                                 uncached_tokens, output_tokens, refused, no_replica)
        VALUES (date_trunc('minute', clock_timestamp()), $1, $2, $3, $4, $5, $6, $7, $8)
        ON CONFLICT (minute, deployment_id, pop) DO UPDATE SET
            requests = d.requests + $3, prompt_tokens = d.prompt_tokens + $4,
            uncached_tokens = d.uncached_tokens + $5, output_tokens = d.output_tokens + $6,
            refused = d.refused + $7, no_replica = d.no_replica + $8
        """,
        [
            (
                row.deployment_id,
                row.pop,
                row.requests,
                row.prompt_tokens,
                row.uncached_tokens,
                row.output_tokens,
                row.refused,
                row.no_replica,
            )
            for row in rows
        ],
    )
    return True


async def record_usage(connection: Connection, usage: Usage) -> None:
    """Write a batch; a request id already written is left as it is."""
    await connection.executemany(
        """
        INSERT INTO usage (request_id, key_id, tenant_id, deployment_id, pop, node_id, replica_id,
                           started_at, prompt_tokens, cached_tokens, output_tokens, outcome,
                           ttft_ms, duration_ms)
        VALUES ($1, $2, $3, $4, $5, $6, $7, to_timestamp($8), $9, $10, $11, $12, $13, $14)
        ON CONFLICT (request_id) DO NOTHING
        """,
        [
            (
                row.request_id,
                row.key_id,
                row.tenant_id,
                row.deployment_id,
                row.pop,
                row.node_id,
                row.replica_id,
                row.started_at,
                row.prompt_tokens,
                row.cached_tokens,
                row.output_tokens,
                row.outcome.value,
                row.ttft_ms,
                row.duration_ms,
            )
            for row in sorted(usage.rows, key=lambda row: row.request_id)
        ],
    )


async def record_round_trips(connection: Connection, trips: RoundTrips) -> None:
    """Keep the newest round trip from a PoP to each node that still exists."""
    rows = sorted(trips.rows, key=lambda row: row.node_id)
    await connection.execute(
        """
        INSERT INTO round_trip (pop, node_id, rtt_ms)
        SELECT $1, node_id, rtt_ms
        FROM unnest($2::text[], $3::float8[]) AS row (node_id, rtt_ms) JOIN node USING (node_id)
        ON CONFLICT (pop, node_id) DO UPDATE
            SET rtt_ms = excluded.rtt_ms, measured_at = clock_timestamp()
        """,
        trips.pop,
        [row.node_id for row in rows],
        [max(0.0, row.rtt_ms) for row in rows],
    )


async def prune(connection: Connection, *, batch: int = 5_000) -> int:
    """Forget what is past its keeping, a batch at a time; return the rows forgotten."""
    forgotten = 0
    for statement in (
        "DELETE FROM demand_seen WHERE ctid IN (SELECT ctid FROM demand_seen"
        " WHERE seen_at < clock_timestamp() - interval '1 hour' LIMIT $1)",
        "DELETE FROM demand WHERE ctid IN (SELECT ctid FROM demand"
        " WHERE minute < clock_timestamp() - interval '30 days' LIMIT $1)",
        "DELETE FROM usage WHERE ctid IN (SELECT ctid FROM usage"
        " WHERE started_at < clock_timestamp() - interval '90 days' LIMIT $1)",
        "DELETE FROM idempotency WHERE ctid IN (SELECT ctid FROM idempotency"
        " WHERE created_at < clock_timestamp() - interval '1 day' LIMIT $1)",
        "DELETE FROM placement WHERE ctid IN (SELECT ctid FROM placement"
        " WHERE released_at < clock_timestamp() - interval '7 days' LIMIT $1)",
        "DELETE FROM join_token WHERE ctid IN (SELECT ctid FROM join_token"
        " WHERE expires_at < clock_timestamp() - interval '7 days' LIMIT $1)",
    ):
        done = await connection.execute(statement, batch)
        forgotten += int(done.split()[1])
    return forgotten
