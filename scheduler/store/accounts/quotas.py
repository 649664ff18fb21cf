"""Daily totals of keys and tenants with a quota, exact however often a router sends its usage."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from isochrone.wire.client_keys.key_table import KeyLimits
from isochrone.wire.ids import KeyId, TenantId
from scheduler.store.pool import Connection, fetch_one

QUOTA_LOCK: Final = 0x150C_0002
"""Held while usage is moved into the totals, and shared while totals are counted again."""

USAGE_LOCK: Final = 0x150C_0003
USAGE_LOCKS: Final = 16
"""Locks of usage that is being stored; each tenant has one of them. Few, so that a batch with
thousands of tenants does not fill the database's table of locks."""

_LOCK_OF_TENANT: Final = f"abs(hashtext(tenant_id) % {USAGE_LOCKS})"


class QuotaUsage(NamedTuple):
    """How many rows of usage were added, and the keys and budgets with a spent quota among them."""

    rows: int
    spent: Sequence[KeyId]


async def sum_quota_usage(connection: Connection) -> QuotaUsage:
    """Move usage since the last call into the daily totals."""
    await connection.execute("SELECT pg_advisory_xact_lock($1)", QUOTA_LOCK)
    row = await fetch_one(
        connection,
        """
        WITH taken AS (DELETE FROM key_use RETURNING key_id, day, tokens, spend),
        added AS (
            INSERT INTO key_day AS d (key_id, day, tokens, spend)
            SELECT key_id, day, tokens, spend FROM (
                SELECT key_id, day, sum(tokens) AS tokens, sum(spend) AS spend
                FROM taken GROUP BY key_id, day
            ) AS sums
            -- Looked up one by one: the planner does not know how few keys were used, and joined
            -- them with all keys.
            CROSS JOIN LATERAL (
                SELECT FROM api_key k WHERE k.key_id = sums.key_id OFFSET 0
            ) AS known
            ORDER BY key_id, day
            ON CONFLICT (key_id, day) DO UPDATE
                SET tokens = d.tokens + excluded.tokens, spend = d.spend + excluded.spend
            RETURNING key_id, day, tokens, spend
        )
        SELECT (SELECT count(*) FROM taken) AS rows, (
            SELECT coalesce(array_agg(a.key_id), '{}') FROM added a JOIN api_key k USING (key_id)
            WHERE a.day = (clock_timestamp() AT TIME ZONE 'UTC')::date AND (
                a.tokens >= nullif((k.limits->>'tokens_per_day')::float8, 0)
                OR a.spend >= nullif((k.limits->>'spend_per_day')::float8, 0))
        ) AS spent, (
            SELECT coalesce(array_agg(DISTINCT a.key_id), '{}')
            FROM added a JOIN api_key k USING (key_id)
            WHERE coalesce((k.limits->>'tokens_per_month')::float8, 0) > 0
                OR coalesce((k.limits->>'spend_per_month')::float8, 0) > 0
        ) AS monthly
        """,
    )
    # A statement does not see what it writes, so the sums of the month need another.
    monthly = await connection.fetch(
        """
        SELECT k.key_id FROM api_key k JOIN key_day d USING (key_id)
        WHERE k.key_id = ANY($1)
            AND d.day >= date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC')::date
        GROUP BY k.key_id
        HAVING sum(d.tokens) >= nullif((k.limits->>'tokens_per_month')::float8, 0)
            OR sum(d.spend) >= nullif((k.limits->>'spend_per_month')::float8, 0)
        """,
        row["monthly"],
    )
    spent = {*row["spent"], *(found["key_id"] for found in monthly)}
    return QuotaUsage(row["rows"], sorted(spent))


def has_quota(limits: KeyLimits) -> bool:
    """Return whether use is to be counted by day."""
    return bool(
        limits.tokens_per_day
        or limits.spend_per_day
        or limits.tokens_per_month
        or limits.spend_per_month
    )


async def share_usage_locks(connection: Connection, tenants: Sequence[TenantId]) -> None:
    """Wait for counts of these tenants' usage, and hold up new ones until the transaction ends.

    Usage is counted by the limits that its key has when it is stored. If these change before the
    transaction ends, neither it nor the count of `recount` would include the usage.
    """
    await connection.execute(
        f"""
        SELECT pg_advisory_xact_lock_shared($1, number) FROM (
            SELECT DISTINCT {_LOCK_OF_TENANT} AS number FROM unnest($2::text[]) AS tenant_id
            ORDER BY number
        ) AS numbers
        """,  # noqa: S608
        USAGE_LOCK,
        tenants,
    )


async def recount(connection: Connection, key_id: str) -> None:
    """Set the totals of this month's days from the usage rows: a quota may be newer than they are.

    Call it in the transaction that sets the limits. It waits for usage of the tenant that is being
    stored, and usage that comes later waits for the transaction, which may take seconds for a
    tenant with much usage.
    A single statement sees one snapshot: usage that commits later is added by `sum_quota_usage`,
    but not before these totals are committed, which would replace its sums.
    """
    await connection.execute(
        f"SELECT pg_advisory_xact_lock($1, {_LOCK_OF_TENANT}) FROM api_key WHERE key_id = $2",  # noqa: S608
        USAGE_LOCK,
        key_id,
    )
    await connection.execute("SELECT pg_advisory_xact_lock_shared($1)", QUOTA_LOCK)
    await connection.execute(
        """
        WITH since AS (
            SELECT date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC') AS start
        ), dropped AS (
            DELETE FROM key_use USING since WHERE key_id = $1 AND day >= since.start::date
        )
        INSERT INTO key_day (key_id, day, tokens, spend)
        SELECT k.key_id, (u.started_at AT TIME ZONE 'UTC')::date,
               sum(u.prompt_tokens + u.output_tokens),
               sum(spend_of(u.deployment_id, u.prompt_tokens, u.cached_tokens, u.output_tokens))
        FROM since, api_key k JOIN usage u
            ON u.tenant_id = k.tenant_id
            AND (u.key_id = k.key_id OR k.key_id = 'tenant:' || k.tenant_id)
        WHERE k.key_id = $1 AND u.started_at >= since.start AT TIME ZONE 'UTC'
        GROUP BY 1, 2
        ON CONFLICT (key_id, day) DO UPDATE SET tokens = excluded.tokens, spend = excluded.spend
        """,
        key_id,
    )
