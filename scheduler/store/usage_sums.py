"""What keys and tenants used, added up from the usage itself: by day (UTC), or over all days asked.

Read by the indexes on when a request began: a key's usage is found as its tenant's.
"""

from datetime import date
from typing import Final, NamedTuple

import asyncpg
import msgspec

from isochrone.wire.admin import UsageView
from scheduler.store.pool import Connection

STATEMENT_TIMEOUT_S: Final = 8.0
"""Less than a connection's own: this one ends in words, and the connection goes on."""


class TooMuchUsage(Exception):
    """It was not added up in time; the message says what to do."""


class UsageQuery(NamedTuple):
    """Which usage (`key_id` and `tenant_id` empty: all), from a day to another, and how summed."""

    first: date
    last: date
    tenant_id: str = ""
    key_id: str = ""
    is_by_key: bool = True
    is_per_day: bool = False


class UsageCursor(NamedTuple):
    """Where a row stands among the sums; totals stand on the first day asked."""

    day: date
    tenant_id: str = ""
    key_id: str = ""
    deployment_id: str = ""


async def read_today(connection: Connection) -> date:
    """Return the day (UTC) by the clock that all schedulers share."""
    today: date = await connection.fetchval("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
    return today


async def sum_usage(
    connection: Connection, asked: UsageQuery, after: UsageCursor, limit: int
) -> list[UsageView]:
    """Return the sums in the order of day, tenant, key and deployment; raises TooMuchUsage.

    Spend is by the prices of today, as a quota's is.
    """
    day = "(started_at AT TIME ZONE 'UTC')::date" if asked.is_per_day else "$1::date"
    key_id = "key_id" if asked.is_by_key else "''::text"
    # Nothing that was asked for is part of the text. Days before the page's need no look. Were the
    # limit known within, Postgres would walk all of the tenants' index for the sake of its order.
    statement = f"""
        WITH sums AS MATERIALIZED (
            SELECT {day} AS day, tenant_id, {key_id} AS key_id, deployment_id,
                   count(*) AS requests, sum(prompt_tokens)::bigint AS prompt_tokens,
                   sum(cached_tokens)::bigint AS cached_tokens,
                   sum(output_tokens)::bigint AS output_tokens
            FROM usage
            WHERE started_at >= greatest($1::date, $3::date)::timestamp AT TIME ZONE 'UTC'
              AND started_at < ($2::date + 1)::timestamp AT TIME ZONE 'UTC'
              {"AND tenant_id = $8" if asked.tenant_id else "AND $8 = ''"}
              {"AND key_id = $9" if asked.key_id else "AND $9 = ''"}
              AND ({day}, tenant_id, {key_id}, deployment_id) > ($3, $4, $5, $6)
            GROUP BY 1, 2, 3, 4
        )
        SELECT sums.*, spend_of(deployment_id, prompt_tokens, cached_tokens, output_tokens) AS spend
        FROM sums ORDER BY day, tenant_id, key_id, deployment_id LIMIT $7
        """  # noqa: S608
    in_time = f"SET LOCAL statement_timeout = {round(STATEMENT_TIMEOUT_S * 1000)}"
    try:
        async with connection.transaction():
            await connection.execute(in_time)
            rows = await connection.fetch(
                statement, asked.first, asked.last, *after, limit, asked.tenant_id, asked.key_id
            )
    except asyncpg.QueryCanceledError as error:
        raise TooMuchUsage(
            f"cannot add up this usage within {STATEMENT_TIMEOUT_S:g} s: "
            "ask for fewer days, or for one tenant or key"
        ) from error
    return [_view(row, asked) for row in rows]


def _view(row: asyncpg.Record, asked: UsageQuery) -> UsageView:
    day = row["day"].isoformat() if asked.is_per_day else None
    return msgspec.convert({**row, "day": day}, UsageView)
