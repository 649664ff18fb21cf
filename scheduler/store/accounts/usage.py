"""Demand, usage and round trips: sent at least once, and counted exactly once."""

from datetime import UTC, date, datetime, timedelta
from operator import attrgetter
from typing import Final

from isochrone.wire.ids import PopId
from isochrone.wire.peers.usage import Demand, RoundTrip, UsageRow
from scheduler.decide.demand import COUNTS, AcceptedDemand
from scheduler.store.accounts.quotas import share_usage_locks
from scheduler.store.history_clock import read_history_clock
from scheduler.store.pool import Connection, affected_rows, columns
from scheduler.store.retention import DEMAND_DAYS

DAYS_AHEAD: Final = 2
COUNT_SUM_MAX: Final = 2**62
"""Sums are clamped to it before they grow, so that they do not overflow a bigint."""
_USAGE_COLUMNS: Final = (
    "request_id", "key_id", "tenant_id", "deployment_id", "pop", "node_id", "replica_id",
    "started_at", "prompt_tokens", "cached_tokens", "output_tokens", "outcome", "ttft_ms",
    "duration_ms",
)  # fmt: skip


async def record_demand(
    connection: Connection, demand: Demand, taken: AcceptedDemand
) -> int | None:
    """Add a batch to its minute; None if it was counted before, else the number of unknown rows.

    Rows are unknown if their deployment or PoP does not exist. The minute is the database's time
    less the batch's age: a router's wall clock may be wrong.
    """
    inserted = await connection.execute(
        """
        INSERT INTO demand_seen (router_id, boot_id, seq) VALUES ($1, $2, $3)
        ON CONFLICT DO NOTHING
        """,
        demand.router_id,
        demand.boot_id,
        demand.seq,
    )
    if not affected_rows(inserted):
        return None
    if not taken.rows:
        return 0
    # Sorted, so that two simultaneous batches lock rows in the same order.
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
    """Store a batch that is sorted by request id; rows already stored are left as they are."""
    await share_usage_locks(connection, [row.tenant_id for row in rows])
    await connection.executemany(
        f"""
        INSERT INTO usage ({", ".join(_USAGE_COLUMNS)})
        VALUES ($1, $2, $3, $4, $5, $6, $7, to_timestamp($8), $9, $10, $11, $12, $13, $14)
        ON CONFLICT (request_id) DO NOTHING
        """,  # noqa: S608
        map(attrgetter(*_USAGE_COLUMNS), rows),
    )


async def record_round_trips(
    connection: Connection, pop: PopId, rows: tuple[RoundTrip, ...]
) -> None:
    """Store the newest round trip from a PoP to each node that exists."""
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
    """Create partitions for today and the next days, drop expired ones; return the changes.

    Days to come follow the database's clock; a day has expired only if the clock of `now`
    agrees and history has advanced so far, as in retention.py. A day with rows in the default
    partition stays there: moving a million minutes would block counting for too long.
    """
    today = await connection.fetchval("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
    days = await connection.fetch(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = 'demand'::regclass"
    )
    existing = {row["relname"] for row in days}
    changes = 0
    for ahead in range(DAYS_AHEAD + 1):
        day = today + timedelta(days=ahead)
        if _partition(day) not in existing and not await _has_begun(connection, day):
            await _make_day(connection, day)
            changes += 1
    history = datetime.fromtimestamp((await read_history_clock(connection)).at_s, UTC).date()
    oldest = _partition(min(today, now.date(), history) - timedelta(days=DEMAND_DAYS))
    for name in sorted(existing - {"demand_default"}):
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
    # Created apart and then attached, which takes a weaker lock than CREATE ... PARTITION OF.
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
