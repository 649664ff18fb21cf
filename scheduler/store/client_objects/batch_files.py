"""The rows of files of the public API. Their contents lie in the batch folder."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from scheduler.store.history_clock import HISTORY_AT
from scheduler.store.pool import Connection, as_struct, fetch_one


class BatchFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file. Times are Unix time in seconds."""

    file_id: str
    tenant_id: str
    purpose: str
    filename: str
    size_bytes: int
    created_at: int
    expires_at: int | None


_COLUMNS = (
    "file_id, tenant_id, purpose, filename, size_bytes,"
    " extract(epoch FROM created_at)::bigint AS created_at,"
    " extract(epoch FROM expires_at)::bigint AS expires_at"
)


async def add_file(
    connection: Connection,
    *,
    file_id: str,
    tenant_id: str,
    purpose: str,
    filename: str,
    size_bytes: int,
    expires_after_s: int | None,
) -> BatchFile:
    """Add a file whose contents are stored already."""
    row = await connection.fetchrow(
        f"""
        INSERT INTO batch_file (file_id, tenant_id, purpose, filename, size_bytes, expires_at)
        VALUES ($1, $2, $3, $4, $5, now() + $6 * interval '1 second')
        RETURNING {_COLUMNS}
        """,  # noqa: S608 - a constant
        file_id,
        tenant_id,
        purpose,
        filename,
        size_bytes,
        expires_after_s,
    )
    assert row is not None
    return as_struct(row, BatchFile)


async def read_file(connection: Connection, tenant_id: str, file_id: str) -> BatchFile | None:
    """Return a tenant's file."""
    row = await connection.fetchrow(
        f"SELECT {_COLUMNS} FROM batch_file WHERE tenant_id = $1 AND file_id = $2",  # noqa: S608
        tenant_id,
        file_id,
    )
    return as_struct(row, BatchFile) if row else None


async def has_file(connection: Connection, file_id: str) -> bool:
    """Return whether there is a row of a file."""
    query = "SELECT EXISTS (SELECT FROM batch_file WHERE file_id = $1)"
    return bool(await connection.fetchval(query, file_id))


async def files_among(connection: Connection, file_ids: Sequence[str]) -> set[str]:
    """Return those of the ids that have a row."""
    rows = await connection.fetch(
        "SELECT file_id FROM batch_file WHERE file_id = ANY($1)", file_ids
    )
    return {row["file_id"] for row in rows}


async def list_files(
    connection: Connection, tenant_id: str, *, purpose: str, after: str, limit: int, newest: bool
) -> list[BatchFile]:
    """Return a tenant's files after the file `after`, in the order of their creation.

    A condition that does not apply is left out, so that each page is read from an index in order.
    """
    order, compare = ("DESC", "<") if newest else ("ASC", ">")
    of_purpose = "AND purpose = $2" if purpose else "AND $2 = ''"
    position = "SELECT f.created_at, f.file_id FROM batch_file f WHERE f.file_id = $3"
    after_file = f"(batch_file.created_at, file_id) {compare} ({position} AND f.tenant_id = $1)"
    rows = await connection.fetch(
        f"""
        SELECT {_COLUMNS} FROM batch_file
        WHERE tenant_id = $1 {of_purpose} AND {after_file if after else "$3 = ''"}
        ORDER BY batch_file.created_at {order}, file_id {order} LIMIT $4
        """,  # noqa: S608 - constants
        tenant_id,
        purpose,
        after,
        limit,
    )
    return [as_struct(row, BatchFile) for row in rows]


async def delete_file(connection: Connection, tenant_id: str, file_id: str) -> bool:
    """Delete a file's row; return False if there is none, or an open batch reads it."""
    deleted = await connection.fetchval(
        """
        DELETE FROM batch_file f WHERE tenant_id = $1 AND file_id = $2 AND NOT EXISTS (
            SELECT FROM batch b WHERE b.tenant_id = $1 AND b.input_file_id = f.file_id
                AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))
        RETURNING true
        """,
        tenant_id,
        file_id,
    )
    return bool(deleted)


async def delete_expired_file(connection: Connection, after: str) -> str | None:
    """Delete the row of the first expired file after the id `after` that no open batch reads.

    Return its id. A file expires by the time that schedulers have seen passing, as history does.
    """
    file_id: str | None = await connection.fetchval(
        f"""
        DELETE FROM batch_file WHERE file_id IN (
            SELECT file_id FROM batch_file f
            WHERE expires_at < least(now(), {HISTORY_AT}) AND file_id > $1 AND NOT EXISTS (
                SELECT FROM batch b WHERE b.input_file_id = f.file_id
                    AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))
            ORDER BY file_id LIMIT 1)
        RETURNING file_id
        """,  # noqa: S608 - a constant
        after,
    )
    return file_id


class StoredFiles(NamedTuple):
    """How many files a tenant has, and their size."""

    files: int
    size_bytes: int


async def stored_files(connection: Connection, tenant_id: str) -> StoredFiles:
    """Count all files of a tenant.

    Other transactions that ask for the same tenant wait until this one ends.
    """
    await connection.execute(
        "SELECT pg_advisory_xact_lock(hashtextextended('files ' || $1, 0))", tenant_id
    )
    row = await fetch_one(
        connection,
        "SELECT count(*) AS files, coalesce(sum(size_bytes), 0)::bigint AS size_bytes"
        " FROM batch_file WHERE tenant_id = $1",
        tenant_id,
    )
    return StoredFiles(**row)
