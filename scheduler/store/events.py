"""The event log, appended to in the transaction of the change that an event records."""

import msgspec

from isochrone.wire.client_keys.key_table import budget_id
from isochrone.wire.ids import KeyId
from scheduler.store.pool import Connection, as_json


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `event_id` increases; `at` is Unix time."""

    event_id: int
    at: float
    actor: str
    kind: str
    subject: str
    reason: str
    before: msgspec.Raw | None = None
    after: msgspec.Raw | None = None
    request_id: str = ""


async def record_event(
    connection: Connection,
    *,
    actor: str,
    kind: str,
    subject: str,
    reason: str = "",
    before: msgspec.Struct | None = None,
    after: msgspec.Struct | None = None,
    request_id: str = "",
) -> None:
    """Append one event."""
    await connection.execute(
        """
        INSERT INTO event (actor, kind, subject, reason, before, after, request_id)
        VALUES ($1, $2, $3, $4, $5, $6, $7)
        """,
        actor,
        kind,
        subject,
        reason,
        None if before is None else as_json(before),
        None if after is None else as_json(after),
        request_id,
    )


async def list_events(
    connection: Connection, *, before_id: int | None, limit: int, subject: str | None
) -> list[EventView]:
    """Return events, the newest first, older than `before_id`."""
    rows = await connection.fetch(
        """
        SELECT event_id, extract(epoch FROM at)::float8 AS at, actor, kind, subject, reason,
               before, after, request_id
        FROM event
        WHERE ($1::bigint IS NULL OR event_id < $1) AND ($3::text IS NULL OR subject = $3)
        ORDER BY event_id DESC LIMIT $2
        """,
        before_id,
        limit,
        subject,
    )
    return [
        EventView(**{**row, "before": _raw(row["before"]), "after": _raw(row["after"])})
        for row in rows
    ]


async def recent_key_changes(connection: Connection, limit: int) -> list[tuple[int, KeyId]]:
    """Return the ids of those of the newest `limit` events that changed a key or a tenant's budget,
    and of the key or budget."""
    rows = await connection.fetch(
        "SELECT event_id, kind, subject FROM event ORDER BY event_id DESC LIMIT $1", limit
    )
    changes = []
    for row in rows:
        table, _, _ = row["kind"].partition(".")
        if table == "key":
            changes.append((row["event_id"], KeyId(row["subject"])))
        elif table == "tenant":
            changes.append((row["event_id"], KeyId(budget_id(row["subject"]))))
    return changes


def _raw(stored: str | None) -> msgspec.Raw | None:
    return None if stored is None else msgspec.Raw(stored.encode())
