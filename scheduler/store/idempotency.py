"""Stored responses by Idempotency-Key: a repeated request is answered and not carried out."""

from typing import NamedTuple

from scheduler.store.pool import Connection


class StoredResponse(NamedTuple):
    """A response, and the digest of the request body that it answered."""

    body_sha256: str
    status: int
    body: bytes


async def load_response(
    connection: Connection, key: str, method: str, path: str
) -> StoredResponse | None:
    """Return the stored response, if any, and lock the key until the transaction ends.

    Of two simultaneous requests, one does the work and the other then gets its response.
    """
    await connection.execute(
        "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", f"{key} {method} {path}"
    )
    row = await connection.fetchrow(
        "SELECT body_sha256, status, body FROM idempotency"
        " WHERE idempotency_key = $1 AND method = $2 AND path = $3",
        key,
        method,
        path,
    )
    return StoredResponse(row["body_sha256"], row["status"], row["body"]) if row else None


async def store_response(
    connection: Connection, key: str, method: str, path: str, response: StoredResponse
) -> None:
    """Store a response in the transaction of the change that it reports."""
    await connection.execute(
        """
        INSERT INTO idempotency (idempotency_key, method, path, body_sha256, status, body)
        VALUES ($1, $2, $3, $4, $5, $6)
        """,
        key,
        method,
        path,
        response.body_sha256,
        response.status,
        response.body,
    )
