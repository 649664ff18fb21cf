"""The rows of batches. A batch's row is locked before the rows of its items."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from scheduler.store.pool import Connection, affected_rows, as_json, as_struct, fetch_one

OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch. Times are Unix time in seconds."""

    batch_id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    deployment: str
    status: str
    metadata: dict[str, str]
    errors: list[dict[str, Any]]
    total: int
    completed: int
    failed: int
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None

    @property
    def unanswered(self) -> int:
        """How many items have no result yet."""
        return self.total - self.completed - self.failed


_TIMES: Final = (
    *("created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)
_COLUMNS: Final = (
    "batch_id, tenant_id, key_id, endpoint, input_file_id, output_file_id, error_file_id,"
    " deployment, status, metadata, errors, total, completed, failed, "
    + ", ".join(f"extract(epoch FROM {name})::bigint AS {name}" for name in _TIMES)
)


def _batch(row: Any) -> StoredBatch:
    metadata, errors = msgspec.json.decode(row["metadata"]), msgspec.json.decode(row["errors"])
    return as_struct(row, StoredBatch, metadata=metadata, errors=errors)


async def add_batch(
    connection: Connection,
    *,
    batch_id: str,
    tenant_id: str,
    key_id: str,
    endpoint: str,
    input_file_id: str,
    metadata: Mapping[str, str],
    expires_after_s: float,
) -> StoredBatch:
    """Add a batch whose input is still to be read."""
    row = await connection.fetchrow(
        f"""
        INSERT INTO batch
            (batch_id, tenant_id, key_id, endpoint, input_file_id, metadata, expires_at)
        VALUES ($1, $2, $3, $4, $5, $6, now() + $7 * interval '1 second') RETURNING {_COLUMNS}
        """,  # noqa: S608 - a constant
        batch_id,
        tenant_id,
        key_id,
        endpoint,
        input_file_id,
        as_json(metadata),
        expires_after_s,
    )
    return _batch(row)


async def read_batch(
    connection: Connection, batch_id: str, *, tenant_id: str | None = None, lock: bool = False
) -> StoredBatch | None:
    """Return a batch, of the tenant if one is given."""
    row = await connection.fetchrow(
        f"SELECT {_COLUMNS} FROM batch WHERE batch_id = $1 AND ($2::text IS NULL OR tenant_id = $2)"  # noqa: S608
        + (" FOR UPDATE" if lock else ""),
        batch_id,
        tenant_id,
    )
    return _batch(row) if row else None


async def list_batches(
    connection: Connection, tenant_id: str, after: str, limit: int
) -> list[StoredBatch]:
    """Return a tenant's batches after the batch `after`, the newest first.

    Without `after` its condition is left out, so that each page is read from an index in order.
    """
    position = "SELECT b.created_at, b.batch_id FROM batch b WHERE b.batch_id = $2"
    after_batch = f"(batch.created_at, batch_id) < ({position} AND b.tenant_id = $1)"
    rows = await connection.fetch(
        f"""
        SELECT {_COLUMNS} FROM batch
        WHERE tenant_id = $1 AND {after_batch if after else "$2 = ''"}
        ORDER BY batch.created_at DESC, batch_id DESC LIMIT $3
        """,  # noqa: S608 - constants
        tenant_id,
        after,
        limit,
    )
    return [_batch(row) for row in rows]


async def open_batch_ids(connection: Connection) -> list[str]:
    """Return the ids of all batches that have not ended."""
    rows = await connection.fetch("SELECT batch_id FROM batch WHERE status = ANY($1)", OPEN)
    return [row["batch_id"] for row in rows]


class DueBatch(NamedTuple):
    """A batch, and whether its time has run out."""

    batch: StoredBatch
    is_expired: bool


async def due_batches(
    connection: Connection,
    *,
    now: float,
    full: Collection[str],
    excluded: Collection[str],
    of_tenant_max: int,
) -> list[DueBatch]:
    """Return open batches that do not just wait for answers at the Unix time `now`, oldest first.

    The first `of_tenant_max` of each tenant, without the batches `excluded`. Those of tenants that
    are `full` are read once they have expired. A batch has expired if the database's clock says so,
    too: one that is ahead must not end all batches.
    """
    rows = await connection.fetch(
        f"""
        SELECT {_COLUMNS}, is_expired FROM (
            SELECT *, row_number() OVER (PARTITION BY tenant_id ORDER BY created_at) AS place
            FROM (
                SELECT *, expires_at <= least(now(), to_timestamp($3)) AS is_expired FROM batch
                WHERE status = ANY($1) AND batch_id <> ALL($2)) listed
            WHERE (status <> 'in_progress' OR completed + failed = total OR is_expired)
                AND (status <> 'validating' OR tenant_id <> ALL($4) OR is_expired)) due
        WHERE place <= $5 ORDER BY due.created_at
        """,  # noqa: S608 - a constant
        OPEN,
        list(excluded),
        now,
        list(full),
        of_tenant_max,
    )
    return [DueBatch(_batch(row), row["is_expired"]) for row in rows]


class OpenCounts(NamedTuple):
    """How many batches of a tenant have not ended, and how many of their items have no answer."""

    batches: int
    unanswered: int


async def open_counts(connection: Connection, tenant_id: str) -> OpenCounts:
    """Count a tenant's open batches."""
    row = await fetch_one(
        connection,
        "SELECT count(*) AS batches, coalesce(sum(total - completed - failed), 0)::bigint"
        " AS unanswered FROM batch WHERE tenant_id = $1 AND status = ANY($2)",
        tenant_id,
        OPEN,
    )
    return OpenCounts(**row)


async def full_tenants(connection: Connection, items_max: int) -> set[str]:
    """Return the tenants whose batches have `items_max` items or more in the database.

    Items stay there for a while after the end of their batch.
    """
    rows = await connection.fetch(
        """
        SELECT tenant_id FROM (
            SELECT tenant_id, total FROM batch WHERE status = ANY($1)
            UNION ALL
            SELECT tenant_id, total FROM batch WHERE has_items
                AND status IN ('completed', 'failed', 'expired', 'cancelled')) with_items
        GROUP BY tenant_id HAVING sum(total) >= $2
        """,
        OPEN,
        items_max,
    )
    return {row["tenant_id"] for row in rows}


async def cancel_batch(connection: Connection, batch_id: str) -> None:
    """Let a batch begin no further items."""
    await connection.execute(
        "UPDATE batch SET status = 'cancelling', cancelling_at = now()"
        " WHERE batch_id = $1 AND status IN ('validating', 'in_progress')",
        batch_id,
    )


async def start_batch(
    connection: Connection, batch_id: str, *, deployment: str, total: int, failed: int
) -> bool:
    """Let routers lease the items of a batch, whose input has been read; False if it is no longer
    being read.
    """
    changed = await connection.execute(
        "UPDATE batch SET status = 'in_progress', in_progress_at = now(), deployment = $2,"
        " total = $3, failed = $4 WHERE batch_id = $1 AND status = 'validating'",
        batch_id,
        deployment,
        total,
        failed,
    )
    return affected_rows(changed) > 0


async def fail_batch(
    connection: Connection, batch_id: str, errors: Sequence[Mapping[str, Any]]
) -> None:
    """End a batch whose input cannot be used."""
    await connection.execute(
        "UPDATE batch SET status = 'failed', failed_at = now(), errors = $2"
        " WHERE batch_id = $1 AND status = 'validating'",
        batch_id,
        as_json(list(errors)),
    )


async def begin_finalizing(connection: Connection, batch_id: str) -> StoredBatch | None:
    """Accept no further results of a batch, and return it; None if it is not open.

    From then on it does not change until it ends.
    """
    row = await connection.fetchrow(
        "UPDATE batch SET status = 'finalizing', finalizing_at = now()"  # noqa: S608 - a constant
        f" WHERE batch_id = $1 AND status IN ('in_progress', 'cancelling') RETURNING {_COLUMNS}",
        batch_id,
    )
    return _batch(row) if row else None


async def end_batch(
    connection: Connection,
    batch_id: str,
    *,
    status: str,
    output_file_id: str | None,
    error_file_id: str | None,
) -> bool:
    """End a batch as `completed`, `cancelled` or `expired`; return False if it has ended."""
    column = {"completed": "completed_at", "cancelled": "cancelled_at", "expired": "expired_at"}
    changed = await connection.execute(
        f"UPDATE batch SET status = $2, {column[status]} = now(), output_file_id = $3,"  # noqa: S608
        " error_file_id = $4 WHERE batch_id = $1 AND status = 'finalizing'",
        batch_id,
        status,
        output_file_id,
        error_file_id,
    )
    return affected_rows(changed) > 0
