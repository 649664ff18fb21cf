"""The last answer to each Idempotency-Key: a repeated request is answered, not repeated."""

from typing import NamedTuple

from scheduler.store.pool import Connection


class StoredResponse(NamedTuple):
    """What was answered, and the digest of the body that was answered so."""

    body_sha256: str
    status: int
    body: bytes


async def load_response(
    connection: Connection, key: str, method: str, path: str
) -> StoredResponse | None:
    """Return the stored answer; holds the key until the transaction ends, so that of two requests
    at once one does the work and the other gets its answer."""
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
    connection: Connection, key: str, method: str, path: str, answer: StoredResponse
) -> None:
    """Store an answer in the transaction of its deed."""
    await connection.execute(
        """
        INSERT INTO idempotency (idempotency_key, method, path, body_sha256, status, body)
        VALUES ($1, $2, $3, $4, $5, $6)
        """,
        key,
        method,
        path,
        answer.body_sha256,
        answer.status,
        answer.body,
    )
