"""The record of who did what, appended in the transaction of the deed."""

import msgspec

from scheduler.store.pool import Connection


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the record. `event_id` only rises; `at` is Unix time."""

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
        None if before is None else msgspec.json.encode(before).decode(),
        None if after is None else msgspec.json.encode(after).decode(),
        request_id,
    )


async def prune_events(connection: Connection, *, keep_days: float, batch: int) -> int:
    """Forget the oldest events past their keeping; return how many."""
    # The id rises with the time, so that the oldest are found without an index on the time.
    done = await connection.execute(
        """
        DELETE FROM event WHERE event_id IN (SELECT event_id FROM event ORDER BY event_id LIMIT $1)
            AND at < clock_timestamp() - make_interval(secs => $2)
        """,
        batch,
        keep_days * 86_400,
    )
    return int(done.split()[1])


async def list_events(
    connection: Connection, *, before_id: int | None, limit: int, subject: str | None = None
) -> list[Event]:
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
        Event(
            event_id=row["event_id"],
            at=row["at"],
            actor=row["actor"],
            kind=row["kind"],
            subject=row["subject"],
            reason=row["reason"],
            before=None if row["before"] is None else msgspec.Raw(row["before"].encode()),
            after=None if row["after"] is None else msgspec.Raw(row["after"].encode()),
            request_id=row["request_id"],
        )
        for row in rows
    ]
