"""Daily totals of keys with a quota, exact however often a router sends its usage."""

from collections.abc import Sequence
from typing import NamedTuple

from isochrone.wire.ids import KeyId
from scheduler.store.pool import Connection, fetch_one


class QuotaUsage(NamedTuple):
    """How many rows of usage were added, and the keys among them whose quota of today is spent."""

    rows: int
    spent: Sequence[KeyId]


async def sum_quota_usage(connection: Connection) -> QuotaUsage:
    """Move usage since the last call into the daily totals."""
    row = await fetch_one(
        connection,
        """
        WITH taken AS (DELETE FROM key_use RETURNING key_id, day, tokens, spend),
        added AS (
            INSERT INTO key_day AS d (key_id, day, tokens, spend)
            SELECT key_id, day, sum(tokens), sum(spend) FROM taken JOIN api_key USING (key_id)
            GROUP BY key_id, day ORDER BY key_id, day
            ON CONFLICT (key_id, day) DO UPDATE
                SET tokens = d.tokens + excluded.tokens, spend = d.spend + excluded.spend
            RETURNING key_id, day, tokens, spend
        )
        SELECT (SELECT count(*) FROM taken) AS rows, (
            SELECT coalesce(array_agg(a.key_id), '{}') FROM added a JOIN api_key k USING (key_id)
            WHERE a.day = (clock_timestamp() AT TIME ZONE 'UTC')::date AND (
                a.tokens >= nullif((k.limits->>'tokens_per_day')::float8, 0)
                OR a.spend >= nullif((k.limits->>'spend_per_day')::float8, 0))
        ) AS spent
        """,
    )
    return QuotaUsage(row["rows"], row["spent"])


async def recount_today(connection: Connection, key_id: str) -> None:
    """Set a key's total for today from its usage rows: its quota may be newer than they are.

    A single statement sees one snapshot: usage that commits later is added by `sum_quota_usage`.
    """
    await connection.execute(
        """
        WITH dropped AS (
            DELETE FROM key_use
            WHERE key_id = $1 AND day = (clock_timestamp() AT TIME ZONE 'UTC')::date
        )
        INSERT INTO key_day (key_id, day, tokens, spend)
        SELECT k.key_id, (clock_timestamp() AT TIME ZONE 'UTC')::date,
               coalesce(sum(u.prompt_tokens + u.output_tokens), 0),
               coalesce(sum(spend_of(u.deployment_id, u.prompt_tokens, u.cached_tokens,
                                     u.output_tokens)), 0)
        FROM api_key k LEFT JOIN usage u
            ON u.key_id = k.key_id AND u.tenant_id = k.tenant_id
            AND u.started_at >= date_trunc('day', clock_timestamp(), 'UTC')
        WHERE k.key_id = $1
        GROUP BY k.key_id
        ON CONFLICT (key_id, day) DO UPDATE SET tokens = excluded.tokens, spend = excluded.spend
        """,
        key_id,
    )
