"""Tenants: a tenant exists while it has a key that is not revoked, or a budget."""

from typing import Final

from scheduler.store.pool import Connection

_LIVE: Final = "FROM api_key WHERE revoked_at IS NULL"


async def has_tenant(connection: Connection, tenant_id: str) -> bool:
    """Return whether a tenant exists."""
    found = await connection.fetchval(
        f"SELECT EXISTS (SELECT 1 {_LIVE} AND tenant_id = $1)",
        tenant_id,
    )
    return bool(found)


async def had_key(connection: Connection, tenant_id: str) -> bool:
    """Return whether a tenant has or had a key or a budget: revoked ones are kept."""
    found = await connection.fetchval(
        "SELECT EXISTS (SELECT 1 FROM api_key WHERE tenant_id = $1)", tenant_id
    )
    return bool(found)


async def first_tenants(connection: Connection, limit: int) -> list[str]:
    """Return the names of tenants, in their order."""
    rows = await connection.fetch(
        f"SELECT DISTINCT tenant_id {_LIVE} ORDER BY tenant_id LIMIT $1",
        limit,
    )
    return [row["tenant_id"] for row in rows]
