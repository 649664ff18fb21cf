"""Demand, usage and round trips: at least once on the wire, counted once here."""

from datetime import UTC, date, datetime, timedelta
from operator import attrgetter
from typing import Final

from isochrone.wire.ids import PopId
from isochrone.wire.usage import Demand, RoundTrip, UsageRow
from scheduler.decide.demand.intake import COUNTS, AcceptedDemand
from scheduler.store.pool import Connection, affected_rows, columns
from scheduler.store.retention import DEMAND_DAYS

DAYS_AHEAD: Final = 2
COUNT_SUM_MAX: Final = 2**62
_USAGE: Final = (
    "request_id", "key_id", "tenant_id", "deployment_id", "pop", "node_id", "replica_id",
    "started_at", "prompt_tokens", "cached_tokens", "output_tokens", "outcome", "ttft_ms",
    "duration_ms",
)  # fmt: skip


async def record_demand(
    connection: Connection, demand: Demand, taken: AcceptedDemand
) -> int | None:
    """Add a batch to its minute; None where it was already counted, else the rows of no use.

    Those are rows of a deployment or a PoP that is not there. The minute is reckoned from the
    database's clock and the batch's age: a router's wall clock may be wrong.
    """
    seen = await connection.execute(
        """
        INSERT INTO demand_seen (router_id, boot_id, seq) VALUES ($1, $2, $3)
        ON CONFLICT DO NOTHING
        """,
        demand.router_id,
        demand.boot_id,
        demand.seq,
    )
    if not affected_rows(seen):
        return None
    if not taken.rows:
        return 0
    # Rows come sorted, so that two batches at once take their row locks in one order.
    done = await connection.execute(
        """
        INSERT INTO demand AS d (minute, deployment_id, pop, requests, prompt_tokens,
                                 uncached_tokens, output_tokens, refused, no_replica)
        SELECT date_trunc('minute', clock_timestamp() - make_interval(secs => $9)), batch.*
        FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[],
                    $6::bigint[], $7::bigint[], $8::bigint[])
            AS batch (deployment_id, pop, requests, prompt_tokens, uncached_tokens,
                      output_tokens, refused, no_replica)
        WHERE EXISTS (SELECT FROM deployment e WHERE e.deployment_id = batch.deployment_id)
          AND EXISTS (SELECT FROM pop p WHERE p.pop = batch.pop)
        ORDER BY batch.deployment_id, batch.pop
        ON CONFLICT (minute, deployment_id, pop) DO UPDATE SET
            requests = least(d.requests, $10) + excluded.requests,
            prompt_tokens = least(d.prompt_tokens, $10) + excluded.prompt_tokens,
            uncached_tokens = least(d.uncached_tokens, $10) + excluded.uncached_tokens,
            output_tokens = least(d.output_tokens, $10) + excluded.output_tokens,
            refused = least(d.refused, $10) + excluded.refused,
            no_replica = least(d.no_replica, $10) + excluded.no_replica
        """,
        *columns(taken.rows, "deployment_id", "pop", *COUNTS),
        taken.age_s,
        COUNT_SUM_MAX,
    )
    return len(taken.rows) - affected_rows(done)


async def record_usage(connection: Connection, rows: tuple[UsageRow, ...]) -> None:
    """Write a batch, sorted by request id; an id already written is left as it is."""
    await connection.executemany(
        f"""
        INSERT INTO usage ({", ".join(_USAGE)})
        VALUES ($1, $2, $3, $4, $5, $6, $7, to_timestamp($8), $9, $10, $11, $12, $13, $14)
        ON CONFLICT (request_id) DO NOTHING
        """,  # noqa: S608
        map(attrgetter(*_USAGE), rows),
    )


async def record_round_trips(
    connection: Connection, pop: PopId, rows: tuple[RoundTrip, ...]
) -> None:
    """Keep the newest round trip from a PoP to each node that still exists."""
    await connection.execute(
        """
        INSERT INTO round_trip (pop, node_id, rtt_ms)
        SELECT $1, node_id, rtt_ms
        FROM unnest($2::text[], $3::float8[]) AS row (node_id, rtt_ms) JOIN node USING (node_id)
        ORDER BY node_id
        ON CONFLICT (pop, node_id) DO UPDATE
            SET rtt_ms = excluded.rtt_ms, measured_at = clock_timestamp()
        """,
        pop,
        *columns(rows, "node_id", "rtt_ms"),
    )


async def rotate_demand_partitions(connection: Connection, now: datetime) -> int:
    """Make the days that demand is coming for, drop those past their keeping; return the changes.

    Past it by two clocks, as in retention.py: those that come are by the database's alone.
    A day that began before it was made stays in the default partition: to move a million minutes
    takes longer than anybody may be kept from counting.
    """
    today = await connection.fetchval("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
    days = await connection.fetch(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = 'demand'::regclass"
    )
    there = {row["relname"] for row in days}
    changes = 0
    for ahead in range(DAYS_AHEAD + 1):
        day = today + timedelta(days=ahead)
        if _partition(day) not in there and not await _has_begun(connection, day):
            await _make_day(connection, day)
            changes += 1
    oldest = _partition(min(today, now.date()) - timedelta(days=DEMAND_DAYS))
    for name in sorted(there - {"demand_default"}):
        if name < oldest:
            await connection.execute(f"DROP TABLE {name}")
            changes += 1
    return changes


async def _has_begun(connection: Connection, day: date) -> bool:
    begun: bool = await connection.fetchval(
        "SELECT EXISTS (SELECT FROM demand_default WHERE minute >= $1 AND minute < $2)", *_span(day)
    )
    return begun


async def _make_day(connection: Connection, day: date) -> None:
    name = _partition(day)
    start, end = _span(day)
    # Attached and not made as a partition: nobody who counts has to wait for it.
    await connection.execute(f"CREATE TABLE {name} (LIKE demand INCLUDING ALL)")
    await connection.execute(
        f"ALTER TABLE demand ATTACH PARTITION {name}"
        f" FOR VALUES FROM ('{start.isoformat()}') TO ('{end.isoformat()}')"
    )


def _partition(day: date) -> str:
    return f"demand_{day:%Y%m%d}"


def _span(day: date) -> tuple[datetime, datetime]:
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return start, start + timedelta(days=1)
