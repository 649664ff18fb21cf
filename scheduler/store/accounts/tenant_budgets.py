"""Budgets of tenants above their keys: rows of `api_key` that no secret opens."""

from typing import Final

import asyncpg
import msgspec

from isochrone.wire.admin import TenantBudgetView
from isochrone.wire.client_keys.key_table import BUDGET_PREFIX, budget_id
from isochrone.wire.peers.routes import KeyLimits
from scheduler.store.accounts.quotas import has_quota, recount
from scheduler.store.catalogue import EtagMoved
from scheduler.store.pool import Connection, affected_rows, as_json

_SELECT: Final = f"""
    SELECT k.key_id, tenant_id, limits, etag, coalesce(sum(d.tokens), 0)::bigint AS month_tokens,
           coalesce(sum(d.spend), 0) AS month_spend,
           coalesce(sum(d.tokens) FILTER (WHERE d.day = today), 0)::bigint AS tokens,
           coalesce(sum(d.spend) FILTER (WHERE d.day = today), 0) AS spend
    FROM (SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date AS today) AS clock, api_key k
    LEFT JOIN key_day d ON d.key_id = k.key_id
        AND d.day >= date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC')::date
    WHERE k.key_id COLLATE "C" LIKE '{BUDGET_PREFIX}%' AND revoked_at IS NULL
"""  # noqa: S608
_GROUP: Final = " GROUP BY k.key_id, tenant_id, limits, etag"


async def list_budgets(connection: Connection, after: str, limit: int) -> list[TenantBudgetView]:
    """Return budgets in the order of their tenants."""
    rows = await connection.fetch(
        f"{_SELECT} AND tenant_id > $1 {_GROUP} ORDER BY tenant_id LIMIT $2", after, limit
    )
    return [_view(row) for row in rows]


async def get_budget(connection: Connection, tenant_id: str) -> TenantBudgetView | None:
    """Return a tenant's budget."""
    row = await connection.fetchrow(f"{_SELECT} AND k.key_id = $1 {_GROUP}", budget_id(tenant_id))
    return _view(row) if row else None


async def put_budget(
    connection: Connection, tenant_id: str, limits: KeyLimits, etag: int | None
) -> TenantBudgetView:
    """Create or replace a tenant's budget; raises EtagMoved."""
    key_id = budget_id(tenant_id)
    done = await connection.execute(
        """
        INSERT INTO api_key AS k (key_id, secret_sha256, tenant_id, limits)
        SELECT $1, '', $2, $3
        WHERE $4::bigint IS NULL OR EXISTS (SELECT 1 FROM api_key WHERE key_id = $1)
        ON CONFLICT (key_id) DO UPDATE SET limits = $3, etag = k.etag + 1, revoked_at = NULL
            WHERE $4::bigint IS NULL OR k.etag = $4
        """,
        key_id,
        tenant_id,
        as_json(limits),
        etag,
    )
    if not affected_rows(done):
        raise EtagMoved(tenant_id)
    if has_quota(limits):
        await recount(connection, key_id)
    found = await get_budget(connection, tenant_id)
    assert found is not None
    return found


async def delete_budget(connection: Connection, tenant_id: str, etag: int | None) -> None:
    """End a tenant's budget; raises EtagMoved."""
    done = await connection.execute(
        "UPDATE api_key SET revoked_at = clock_timestamp(), etag = etag + 1"
        " WHERE key_id = $1 AND revoked_at IS NULL AND ($2::bigint IS NULL OR etag = $2)",
        budget_id(tenant_id),
        etag,
    )
    if not affected_rows(done):
        raise EtagMoved(tenant_id)


def _view(row: asyncpg.Record) -> TenantBudgetView:
    return TenantBudgetView(
        tenant_id=row["tenant_id"],
        key_id=row["key_id"],
        limits=msgspec.json.decode(row["limits"], type=KeyLimits),
        etag=row["etag"],
        tokens_today=row["tokens"],
        spend_today=row["spend"],
        tokens_this_month=row["month_tokens"],
        spend_this_month=row["month_spend"],
    )
