"""The rows of stored responses: begun by a router, and ended once."""

from collections.abc import Sequence
from typing import Final

import msgspec

from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.peers.responses import (
    MESSAGE_BYTES_MAX,
    BeginResponse,
    FinishResponse,
    LeasedResponse,
    ResponseRef,
)
from scheduler.decide.response_limits import ResponseLimits
from scheduler.store.client_objects.batch_items import RETRY_GROWTH
from scheduler.store.pool import Connection, affected_rows, as_struct

_COLUMNS: Final = (
    "response_id, status, is_background, conversation_id, body, context_items, input_items,"
    " lease_id"
)


class ResponseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One response of a tenant."""

    response_id: str
    status: str
    is_background: bool
    conversation_id: str | None
    body: bytes
    context_items: bytes
    input_items: bytes
    lease_id: str

    @property
    def is_open(self) -> bool:
        """Whether the response has not ended."""
        return self.status in ("queued", "in_progress")


class TenantUse(msgspec.Struct, frozen=True):
    """The number and size of a tenant's stored objects."""

    count: int
    size_bytes: int


async def tenant_use(connection: Connection, tenant_id: str) -> TenantUse:
    """Return what a tenant stores, in responses and conversations.

    Other transactions that ask for the same tenant wait until this one ends.
    """
    await connection.execute(
        "SELECT pg_advisory_xact_lock(hashtextextended('responses ' || $1, 0))", tenant_id
    )
    row = await connection.fetchrow(
        """
        SELECT greatest(r.count, c.count) AS count, r.bytes + c.bytes AS size_bytes
        FROM (SELECT count(*), coalesce(sum(size_bytes), 0)::bigint AS bytes
              FROM stored_response WHERE tenant_id = $1) r,
             (SELECT count(*), coalesce(sum(size_bytes), 0)::bigint AS bytes
              FROM conversation WHERE tenant_id = $1) c
        """,
        tenant_id,
    )
    assert row is not None
    return TenantUse(**row)


async def add_response(
    connection: Connection,
    message: BeginResponse,
    context_items: bytes,
    lease_id: str,
    limits: ResponseLimits,
) -> bool:
    """Add a response; with a `lease_id` it is answered now. Return false if the id is known."""
    added = await connection.execute(
        """
        INSERT INTO stored_response (response_id, tenant_id, key_id, conversation_id, status,
            is_background, body, context_items, input_items, run, size_bytes, lease_id,
            available_at, expires_at)
        VALUES ($1, $2, $3, $4, CASE WHEN $5 THEN 'queued' ELSE 'in_progress' END, $5,
            $6, $7, $8, $9, $13, $10,
            now() + CASE WHEN $5 THEN 0 ELSE $11 END * interval '1 second',
            now() + $12 * interval '1 day')
        ON CONFLICT DO NOTHING
        """,
        *(message.response_id, message.tenant_id, message.key_id, message.conversation_id or None),
        *(bool(message.run), message.body, context_items, message.input_items, message.run),
        *(lease_id, limits.lease_s, limits.keep_days),
        sum(map(len, (message.body, context_items, message.input_items, message.run))),
    )
    return affected_rows(added) == 1


async def read_response(
    connection: Connection, response_id: str, *, tenant_id: str | None = None, lock: bool = False
) -> ResponseRow | None:
    """Return a response, of a tenant if one is given."""
    row = await connection.fetchrow(
        f"SELECT {_COLUMNS} FROM stored_response WHERE response_id = $1"  # noqa: S608
        f" AND ($2::text IS NULL OR tenant_id = $2){' FOR UPDATE' if lock else ''}",
        response_id,
        tenant_id,
    )
    return None if row is None else as_struct(row, ResponseRow)


async def end_response(
    connection: Connection, response_id: str, status: str, body: bytes, lease_id: str = ""
) -> None:
    """Store the end of a response whose row is locked.

    A router that repeats the message with which it ended the response has its `lease_id`.
    """
    await connection.execute(
        "UPDATE stored_response SET status = $2, body = $3, run = '', lease_id = $4,"
        " size_bytes = length($3::bytea) + length(context_items) + length(input_items)"
        " WHERE response_id = $1",
        *(response_id, status, body, lease_id),
    )


async def postpone_response(
    connection: Connection, message: FinishResponse, attempts_max: int
) -> bool:
    """Let a leased response be tried again later; return false if it has failed too often."""
    attempts = await connection.fetchval(
        """
        UPDATE stored_response SET status = 'queued', lease_id = '',
            attempts = attempts + $3::boolean::int, available_at = now() + interval '1 second'
                * $4::float8 * (CASE WHEN $3 THEN $5 ^ attempts ELSE 1 END)
        WHERE response_id = $1 AND lease_id = $2 AND status = 'in_progress' RETURNING attempts
        """,
        *(
            message.ref.response_id,
            message.ref.lease_id,
            message.counts_as_attempt,
            message.retry_after_s,
        ),
        float(RETRY_GROWTH),
    )
    return attempts is None or int(attempts) < attempts_max


async def delete_response(connection: Connection, response_id: str, tenant_id: str) -> bool:
    """Delete a response of a tenant; return false if there is none."""
    deleted = await connection.execute(
        "DELETE FROM stored_response WHERE response_id = $1 AND tenant_id = $2",
        response_id,
        tenant_id,
    )
    return affected_rows(deleted) == 1


async def lease_responses(
    connection: Connection, count: int, lease_id: str, lease_s: float
) -> list[LeasedResponse]:
    """Lease background responses that no router holds, as many as fit into a message.

    Tenants take turns.
    """
    rows = await connection.fetch(
        """
        UPDATE stored_response r SET status = 'in_progress', lease_id = $2,
            available_at = now() + $3 * interval '1 second'
        FROM (SELECT response_id FROM stored_response WHERE response_id = ANY (ARRAY(
                  SELECT response_id FROM (
                      SELECT *, sum(size_bytes) OVER (ORDER BY place, response_id) AS sum_bytes
                      FROM (
                          SELECT response_id, size_bytes, row_number() OVER (
                              PARTITION BY tenant_id ORDER BY created_at) AS place
                          FROM stored_response
                          WHERE status IN ('queued', 'in_progress') AND is_background
                              AND available_at <= now() AND expires_at > now()) waiting
                      ORDER BY place, response_id LIMIT $1) sized
                  WHERE sum_bytes <= $4::bigint OR sum_bytes = size_bytes))
                  AND status IN ('queued', 'in_progress') AND available_at <= now()
              FOR UPDATE SKIP LOCKED) free
        WHERE r.response_id = free.response_id
        RETURNING r.response_id, tenant_id, key_id, body, context_items, run
        """,
        count,
        lease_id,
        lease_s,
        MESSAGE_BYTES_MAX,
    )
    return [
        LeasedResponse(
            ref=ResponseRef(row["response_id"], lease_id),
            tenant_id=TenantId(row["tenant_id"]),
            key_id=KeyId(row["key_id"]),
            body=row["body"],
            context_items=row["context_items"],
            run=row["run"],
        )
        for row in rows
    ]


async def renew_responses(
    connection: Connection, refs: Sequence[ResponseRef], lease_s: float
) -> list[ResponseRef]:
    """Renew leases; return those that are lost: ended, deleted, or leased again."""
    rows = await connection.fetch(
        """
        UPDATE stored_response r SET available_at = now() + $3 * interval '1 second'
        FROM unnest($1::text[], $2::text[]) AS held (response_id, lease_id)
        WHERE r.response_id = held.response_id AND r.lease_id = held.lease_id
            AND r.status = 'in_progress'
        RETURNING r.response_id, r.lease_id
        """,
        [ref.response_id for ref in refs],
        [ref.lease_id for ref in refs],
        lease_s,
    )
    kept = {ResponseRef(row["response_id"], row["lease_id"]) for row in rows}
    return [ref for ref in refs if ref not in kept]


async def abandoned_responses(connection: Connection, limit: int) -> list[str]:
    """Return the responses whose router is gone and whose client waited for it, and lock them."""
    rows = await connection.fetch(
        "SELECT response_id FROM stored_response"
        " WHERE status = 'in_progress' AND NOT is_background AND available_at <= now()"
        " ORDER BY available_at LIMIT $1 FOR UPDATE SKIP LOCKED",
        limit,
    )
    return [row["response_id"] for row in rows]
