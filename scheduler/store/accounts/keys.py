"""Clients' API keys: digests, limits and revocations; and the route table's next generation."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import asyncpg
import msgspec

from isochrone.wire.admin import KeyBody, KeyView
from isochrone.wire.client_keys.key_table import BUDGET_PREFIX, KeyTableBuilder
from isochrone.wire.ids import Epoch, Generation, KeyId
from isochrone.wire.peers.routes import KeyEntry, KeyLimits, KeyTable
from isochrone.wire.peers.table_parts import SharedFields
from scheduler.store.accounts.quotas import has_quota, recount
from scheduler.store.catalogue import EtagMoved
from scheduler.store.lease import EpochLost, assert_epoch
from scheduler.store.pool import (
    Connection,
    Pool,
    affected_rows,
    as_json,
    as_struct,
    fetch_one,
    using,
)
from scheduler.store.readable_rows import RowReader

TOMBSTONE_DAYS: Final = 30
TOMBSTONES_MAX: Final = 10_000
"""If more keys were revoked within these days, only the newest have tombstones. Tombstones matter
only where a table is refused: any other table revokes a key by not having it."""

ROWS_PER_PAGE: Final = 1_000
"""How many keys are read before the event loop has its turn."""

_IS_KEY: Final = f"key_id NOT LIKE '{BUDGET_PREFIX}%'"
"""The other rows are budgets of tenants: `scheduler/store/accounts/tenant_budgets.py`."""

_LIVE: Final = """
    SELECT k.key_id, secret_sha256, tenant_id, deployments, regions, limits,
           coalesce(extract(epoch FROM expires_at), 0)::float8 AS expires_at,
           coalesce(tokens, 0) AS tokens, coalesce(spend, 0) AS spend,
           month_tokens, month_spend,
           extract(epoch FROM date_trunc('day', clock_timestamp(), 'UTC')
                              + interval '1 day')::float8 AS midnight,
           extract(epoch FROM (date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC')
                               + interval '1 month') AT TIME ZONE 'UTC')::float8 AS month_end
    FROM api_key k LEFT JOIN key_day d
        ON d.key_id = k.key_id AND d.day = (clock_timestamp() AT TIME ZONE 'UTC')::date
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(m.tokens), 0)::float8 AS month_tokens,
               coalesce(sum(m.spend), 0) AS month_spend
        FROM key_day m
        WHERE m.key_id = k.key_id
            AND m.day >= date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC')::date
            AND (k.limits->'tokens_per_month' > '0' OR k.limits->'spend_per_month' > '0')
    ) AS month
    WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())
"""


class KeyPage(NamedTuple):
    """Keys in order, and the last one read; None if the page ends the table."""

    keys: tuple[KeyEntry, ...]
    until: KeyId | None


async def live_keys(connection: Connection, key_ids: Sequence[KeyId]) -> tuple[KeyEntry, ...]:
    """Return those of these keys that are valid; keys with a spent quota say until when."""
    rows = await connection.fetch(f"{_LIVE} AND k.key_id = ANY($1)", key_ids)
    return RowReader().read_each("api_key", rows, _entry, name="key_id")


async def read_key_page(connection: Connection, after: KeyId) -> KeyPage:
    """Return the next valid keys after one, up to ROWS_PER_PAGE, in the order of routers.

    A key whose row cannot be read is left out, so that routers refuse it.
    """
    rows = await connection.fetch(
        f"""
        {_LIVE} AND k.key_id COLLATE "C" > $1 ORDER BY k.key_id COLLATE "C" LIMIT $2
        """,
        after,
        ROWS_PER_PAGE,
    )
    reader = RowReader()
    keys = reader.read_each("api_key", rows, _entry, name="key_id")
    reader.log_all()
    return KeyPage(keys, rows[-1]["key_id"] if len(rows) >= ROWS_PER_PAGE else None)


async def read_all_keys(pool: Pool, known: KeyTable) -> KeyTable:
    """Return all valid keys; keys that are equal in `known` are taken from there.

    Keys are read page by page, each by its own statement: a change meanwhile may be missed, and is
    published by itself (`PublishedRoutes.mark_key_changed`).
    """
    builder, share = KeyTableBuilder(known), SharedFields()
    after = KeyId("")
    while True:
        async with using(pool) as connection:
            page = await read_key_page(connection, after)
        for key in page.keys:
            same = known.get(key.key_id)
            builder.add(same if same == key else share.of(key))
        if page.until is None:
            return builder.build()
        after = page.until


async def revoked_keys(connection: Connection) -> tuple[KeyId, ...]:
    """Return keys revoked within TOMBSTONE_DAYS, longer than a router keeps a route table."""
    rows = await connection.fetch(
        """
        SELECT key_id FROM api_key
        WHERE revoked_at > clock_timestamp() - make_interval(days => $1)
        ORDER BY revoked_at DESC LIMIT $2
        """,
        TOMBSTONE_DAYS,
        TOMBSTONES_MAX,
    )
    return tuple(sorted(KeyId(row["key_id"]) for row in rows))


async def revoked_among(connection: Connection, key_ids: Sequence[KeyId]) -> set[KeyId]:
    """Return those of these keys that are revoked."""
    rows = await connection.fetch(
        "SELECT key_id FROM api_key WHERE key_id = ANY($1) AND revoked_at IS NOT NULL", key_ids
    )
    return {KeyId(row["key_id"]) for row in rows}


async def next_route_generation(
    connection: Connection, epoch: Epoch, above: Generation, *, keys_only: bool = False
) -> Generation:
    """Return the next route table's generation, higher than `above`, the one published before.

    After a table with `keys_only`, the first routes since a loss of history are still to come.
    Raises EpochLost, also if the database is behind that one: it has lost history, and what was
    read from it may lack what routers have.
    """
    await assert_epoch(connection, epoch)
    generation = await connection.fetchval(
        """
        UPDATE cluster SET route_generation = route_generation + 1,
                           lost_generation = lost_generation
                               + ($2 AND lost_generation = route_generation)::int
        WHERE route_generation >= $1 RETURNING route_generation
        """,
        above,
        keys_only,
    )
    if generation is None:
        raise EpochLost(f"cannot publish routes: the database is older than generation {above}")
    return Generation(generation)


async def add_key(
    connection: Connection, *, key_id: KeyId, secret_sha256: str, body: KeyBody
) -> KeyView:
    """Store a new key's digest."""
    row = await fetch_one(
        connection,
        f"""
        INSERT INTO api_key
            (key_id, secret_sha256, tenant_id, note, deployments, limits, expires_at, regions)
        VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp() + make_interval(secs => $7), $8)
        RETURNING {_KEY_COLUMNS}
        """,  # noqa: S608
        key_id,
        secret_sha256,
        body.tenant_id,
        body.note,
        list(body.deployments),
        as_json(body.limits),
        body.ttl_s,
        list(body.regions),
    )
    return _view(row)


async def list_keys(connection: Connection, after: str, limit: int) -> list[KeyView]:
    """Return keys in the order of their ids, never their secrets."""
    rows = await connection.fetch(
        f"SELECT {_KEY_COLUMNS} FROM api_key"  # noqa: S608
        f" WHERE key_id > $1 AND {_IS_KEY} ORDER BY key_id LIMIT $2",
        after,
        limit,
    )
    return [_view(row) for row in rows]


async def get_key(connection: Connection, key_id: str) -> KeyView | None:
    """Return one key, without its secret."""
    row = await connection.fetchrow(
        f"SELECT {_KEY_COLUMNS} FROM api_key WHERE key_id = $1 AND {_IS_KEY}",  # noqa: S608
        key_id,
    )
    return _view(row) if row else None


async def set_limits(
    connection: Connection, key_id: str, limits: KeyLimits, etag: int | None
) -> KeyView:
    """Replace a key's limits; raises EtagMoved."""
    row = await connection.fetchrow(
        f"""
        UPDATE api_key SET limits = $2, etag = etag + 1
        WHERE key_id = $1 AND ($3::bigint IS NULL OR etag = $3)
        RETURNING {_KEY_COLUMNS}
        """,  # noqa: S608
        key_id,
        as_json(limits),
        etag,
    )
    if row is None:
        raise EtagMoved(key_id)
    if has_quota(limits):
        await recount(connection, key_id)
    return _view(row)


async def revoke_key(connection: Connection, key_id: str, etag: int | None) -> None:
    """Revoke a key; raises EtagMoved."""
    done = await connection.execute(
        "UPDATE api_key SET revoked_at = coalesce(revoked_at, clock_timestamp()), etag = etag + 1"
        " WHERE key_id = $1 AND ($2::bigint IS NULL OR etag = $2)",
        key_id,
        etag,
    )
    if not affected_rows(done):
        raise EtagMoved(key_id)


async def revoke_all(connection: Connection, tenant_id: str) -> list[KeyId]:
    """Revoke a tenant's keys and end its budget; return the ids that were not revoked before."""
    rows = await connection.fetch(
        "UPDATE api_key SET revoked_at = clock_timestamp(), etag = etag + 1"
        " WHERE tenant_id = $1 AND revoked_at IS NULL RETURNING key_id",
        tenant_id,
    )
    return [KeyId(row["key_id"]) for row in rows]


def _entry(row: asyncpg.Record) -> KeyEntry:
    limits = msgspec.json.decode(row["limits"], type=KeyLimits)
    is_spent = (0 < limits.tokens_per_day <= row["tokens"]) or (
        0 < limits.spend_per_day <= row["spend"]
    )
    is_month_spent = (0 < limits.tokens_per_month <= row["month_tokens"]) or (
        0 < limits.spend_per_month <= row["month_spend"]
    )
    until = row["midnight"] if is_spent else 0.0
    if is_month_spent:
        until = row["month_end"]
    return as_struct(row, KeyEntry, limits=limits, spent_until=until)


_KEY_COLUMNS: Final = (
    "key_id, tenant_id, note, deployments, regions, limits, etag,"
    " revoked_at IS NOT NULL AS revoked,"
    " extract(epoch FROM expires_at)::float8 AS expires_at,"
    " (SELECT (tokens, spend) FROM key_day d WHERE d.key_id = api_key.key_id"
    " AND d.day = (clock_timestamp() AT TIME ZONE 'UTC')::date) AS today"
)


def _view(row: asyncpg.Record) -> KeyView:
    tokens, spend = row["today"] or (0, 0.0)
    limits = msgspec.json.decode(row["limits"], type=KeyLimits)
    return as_struct(row, KeyView, limits=limits, tokens_today=tokens, spend_today=spend)
