"""Sums of usage by key or tenant, by day (UTC) or over all days of a query.

The sums are computed from the usage rows by the index on tenant and start time: a key's rows are
found among its tenant's.
"""

from datetime import date
from typing import Final, NamedTuple

import asyncpg
import msgspec

from isochrone.wire.admin import UsageView
from scheduler.store.pool import Connection

STATEMENT_TIMEOUT_S: Final = 8.0
"""Less than the connection's own timeout: the error says what to do, the connection is kept."""


class TooMuchUsage(Exception):
    """The sums took too long; the message says what to do."""


class UsageQuery(NamedTuple):
    """The days, the tenant and key (empty: all), and how to group the sums."""

    first: date
    last: date
    tenant_id: str = ""
    key_id: str = ""
    is_by_key: bool = True
    is_per_day: bool = False


class UsageCursor(NamedTuple):
    """A row's position in the order of the sums; totals have the first day of the query."""

    day: date
    tenant_id: str = ""
    key_id: str = ""
    deployment_id: str = ""


async def read_today(connection: Connection) -> date:
    """Return today (UTC) by the database's clock."""
    today: date = await connection.fetchval("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")
    return today


async def sum_usage(
    connection: Connection, query: UsageQuery, after: UsageCursor, limit: int
) -> list[UsageView]:
    """Return the sums in the order of day, tenant, key and deployment; raises TooMuchUsage.

    Spend is at today's prices, as for quotas.
    """
    day = "(started_at AT TIME ZONE 'UTC')::date" if query.is_per_day else "$1::date"
    key_id = "key_id" if query.is_by_key else "''::text"
    # No value of the query is part of the text. Days before the cursor's are not read. The LIMIT is
    # outside the sums: inside, Postgres would scan the whole tenant index for its order.
    statement = f"""
        WITH sums AS MATERIALIZED (
            SELECT {day} AS day, tenant_id, {key_id} AS key_id, deployment_id,
                   count(*) AS requests, sum(prompt_tokens)::bigint AS prompt_tokens,
                   sum(cached_tokens)::bigint AS cached_tokens,
                   sum(output_tokens)::bigint AS output_tokens
            FROM usage
            WHERE started_at >= greatest($1::date, $3::date)::timestamp AT TIME ZONE 'UTC'
              AND started_at < ($2::date + 1)::timestamp AT TIME ZONE 'UTC'
              {"AND tenant_id = $8" if query.tenant_id else "AND $8 = ''"}
              {"AND key_id = $9" if query.key_id else "AND $9 = ''"}
              AND ({day}, tenant_id, {key_id}, deployment_id) > ($3, $4, $5, $6)
            GROUP BY 1, 2, 3, 4
        )
        SELECT sums.*, spend_of(deployment_id, prompt_tokens, cached_tokens, output_tokens) AS spend
        FROM sums ORDER BY day, tenant_id, key_id, deployment_id LIMIT $7
        """  # noqa: S608
    set_timeout = f"SET LOCAL statement_timeout = {round(STATEMENT_TIMEOUT_S * 1000)}"
    try:
        async with connection.transaction():
            await connection.execute(set_timeout)
            rows = await connection.fetch(
                statement, query.first, query.last, *after, limit, query.tenant_id, query.key_id
            )
    except asyncpg.QueryCanceledError as error:
        raise TooMuchUsage(
            f"cannot sum this usage within {STATEMENT_TIMEOUT_S:g} s: "
            "ask for fewer days, or for one tenant or key"
        ) from error
    return [_view(row, query) for row in rows]


def _view(row: asyncpg.Record, query: UsageQuery) -> UsageView:
    day = row["day"].isoformat() if query.is_per_day else None
    return msgspec.convert({**row, "day": day}, UsageView)
