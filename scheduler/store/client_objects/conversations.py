"""The rows of conversations and their items. A conversation's row is locked before its items."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from scheduler.decide.response_items import StoredItem
from scheduler.store.pool import Connection, affected_rows, as_json, as_struct


class StoredConversation(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation. `created_at` is Unix time in seconds."""

    conversation_id: str
    metadata: dict[str, str]
    item_count: int
    next_position: int
    size_bytes: int
    created_at: int


_COLUMNS: Final = (
    "conversation_id, metadata, item_count, next_position, size_bytes,"
    " extract(epoch FROM created_at)::bigint AS created_at"
)


async def add_conversation(
    connection: Connection,
    conversation_id: str,
    tenant_id: str,
    metadata: dict[str, str],
    keep_days: float,
) -> None:
    """Add an empty conversation."""
    await connection.execute(
        "INSERT INTO conversation (conversation_id, tenant_id, metadata, expires_at)"
        " VALUES ($1, $2, $3, now() + $4 * interval '1 day')",
        *(conversation_id, tenant_id, as_json(metadata), keep_days),
    )


async def read_conversation(
    connection: Connection, conversation_id: str, tenant_id: str | None, *, lock: bool = False
) -> StoredConversation | None:
    """Return a conversation of a tenant; of any if `tenant_id` is None."""
    row = await connection.fetchrow(
        f"SELECT {_COLUMNS} FROM conversation WHERE conversation_id = $1"  # noqa: S608
        f" AND ($2::text IS NULL OR tenant_id = $2){' FOR UPDATE' if lock else ''}",
        conversation_id,
        tenant_id,
    )
    if row is None:
        return None
    return as_struct(row, StoredConversation, metadata=msgspec.json.decode(row["metadata"]))


async def set_metadata(
    connection: Connection, conversation_id: str, metadata: dict[str, str]
) -> None:
    """Replace a conversation's metadata."""
    await connection.execute(
        "UPDATE conversation SET metadata = $2 WHERE conversation_id = $1",
        conversation_id,
        as_json(metadata),
    )


async def delete_conversation(connection: Connection, conversation_id: str, tenant_id: str) -> bool:
    """Delete a conversation and its items; return false if there is none."""
    deleted = await connection.execute(
        "DELETE FROM conversation WHERE conversation_id = $1 AND tenant_id = $2",
        conversation_id,
        tenant_id,
    )
    return affected_rows(deleted) == 1


async def add_items(
    connection: Connection,
    conversation: StoredConversation,
    items: Sequence[StoredItem],
    keep_days: float,
) -> list[StoredItem]:
    """Append items to a conversation that is locked; return those whose id it has not yet."""
    known = {
        row["item_id"]
        for row in await connection.fetch(
            "SELECT item_id FROM conversation_item WHERE conversation_id = $1"
            " AND item_id = ANY($2)",
            conversation.conversation_id,
            [item.item_id for item in items],
        )
    }
    added: list[StoredItem] = []
    for item in items:
        if item.item_id not in known:
            known.add(item.item_id)
            added.append(item)
    await connection.copy_records_to_table(
        "conversation_item",
        columns=("conversation_id", "position", "item_id", "item"),
        records=[
            (conversation.conversation_id, position, item.item_id, item.item)
            for position, item in enumerate(added, conversation.next_position)
        ],
    )
    await connection.execute(
        "UPDATE conversation SET item_count = item_count + $2, next_position = next_position + $2,"
        " size_bytes = size_bytes + $3, expires_at = now() + $4 * interval '1 day'"
        " WHERE conversation_id = $1",
        *(conversation.conversation_id, len(added), sum(len(item.item) for item in added)),
        keep_days,
    )
    return added


async def all_items(connection: Connection, conversation_id: str) -> list[bytes]:
    """Return all items of a conversation, the oldest first."""
    rows = await connection.fetch(
        "SELECT item FROM conversation_item WHERE conversation_id = $1 ORDER BY position",
        conversation_id,
    )
    return [row["item"] for row in rows]


async def list_items(
    connection: Connection,
    conversation_id: str,
    *,
    after: str,
    is_ascending: bool,
    limit: int,
    bytes_max: int,
) -> tuple[list[StoredItem], bool]:
    """Return a page of items after the item `after`, and whether more follow.

    An unknown `after` has nothing after it. The page ends with the item that reaches `bytes_max`:
    items are large, too.
    """
    comparison, order = (">", "ASC") if is_ascending else ("<", "DESC")
    rows: list[Any] = await connection.fetch(
        f"""
        SELECT item_id, item, found FROM (
            SELECT *, count(*) OVER () AS found,
                sum(length(item)) OVER (ORDER BY position {order}) - length(item) AS bytes_before
            FROM (
                SELECT position, item_id, item FROM conversation_item
                WHERE conversation_id = $1
                    AND ($2 = '' OR position {comparison} (SELECT position FROM conversation_item
                        WHERE conversation_id = $1 AND item_id = $2))
                ORDER BY position {order} LIMIT $3 + 1) next_items) sized
        WHERE bytes_before < $4 ORDER BY position {order} LIMIT $3
        """,  # noqa: S608 - constants
        *(conversation_id, after, limit, bytes_max),
    )
    items = [StoredItem(row["item_id"], row["item"]) for row in rows]
    return items, bool(rows) and rows[0]["found"] > len(rows)


async def read_item(
    connection: Connection, conversation_id: str, item_id: str
) -> StoredItem | None:
    """Return one item of a conversation."""
    row = await connection.fetchrow(
        "SELECT item_id, item FROM conversation_item WHERE conversation_id = $1 AND item_id = $2",
        conversation_id,
        item_id,
    )
    return None if row is None else as_struct(row, StoredItem)


async def delete_item(connection: Connection, conversation_id: str, item_id: str) -> bool:
    """Delete one item of a conversation that is locked; return false if there is none."""
    size_bytes = await connection.fetchval(
        "DELETE FROM conversation_item WHERE conversation_id = $1 AND item_id = $2"
        " RETURNING length(item)",
        conversation_id,
        item_id,
    )
    if size_bytes is None:
        return False
    await connection.execute(
        "UPDATE conversation SET item_count = item_count - 1, size_bytes = size_bytes - $2"
        " WHERE conversation_id = $1",
        conversation_id,
        size_bytes,
    )
    return True
