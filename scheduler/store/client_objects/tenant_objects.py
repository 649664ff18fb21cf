"""All that the store has of one tenant's clients, deleted at once."""

from typing import Final, NamedTuple

from scheduler.store.pool import Connection, affected_rows

DELETE_BATCHES_TIMEOUT_S: Final = 25.0
"""A tenant may have two million items of batches: some 250,000 are deleted in a second."""


class DeletedObjects(NamedTuple):
    """How many objects of a tenant were deleted."""

    files: int
    batches: int
    responses: int
    conversations: int


async def delete_objects(connection: Connection, tenant_id: str) -> DeletedObjects:
    """Delete a tenant's batches, responses and conversations, and let its files expire now.

    Expired files are deleted together with their contents, and again if that fails.
    """
    batches = await connection.execute(
        "DELETE FROM batch WHERE tenant_id = $1", tenant_id, timeout=DELETE_BATCHES_TIMEOUT_S
    )
    files = await connection.execute(
        "UPDATE batch_file SET expires_at = to_timestamp(0) WHERE tenant_id = $1"
        " AND expires_at IS DISTINCT FROM to_timestamp(0)",
        tenant_id,
    )
    responses = await connection.execute(
        "DELETE FROM stored_response WHERE tenant_id = $1", tenant_id
    )
    conversations = await connection.execute(
        "DELETE FROM conversation WHERE tenant_id = $1", tenant_id
    )
    return DeletedObjects(
        *map(affected_rows, (files, batches, responses, conversations)),
    )
