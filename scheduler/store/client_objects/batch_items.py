"""The rows of batch items: leased by routers, and answered once."""

from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from isochrone.wire.client_keys.key_table import budget_id
from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.peers.batches import ItemRef, ItemResult
from scheduler.decide.batch_shares import WaitingBatch
from scheduler.store.accounts.keys import live_keys
from scheduler.store.pool import Connection, affected_rows

ATTEMPTS_MAX: Final = 5
"""An item that failed so often gets an error as its answer."""

RETRY_GROWTH: Final = 4
"""How many times longer an item waits after each further failure. So its attempts take more than a
minute, and it does not fail because a node has."""

REPEATED_AT_ONCE: Final = 1_000
"""Items with a repeated id that are answered by one statement."""

PAGE_ITEMS: Final = 256
PAGE_BYTES: Final = 4 * 1024 * 1024
"""How many results are in memory while the files of a batch are written: one has up to 16 MiB."""

_ITEM_COLUMNS: Final = ("batch_id", "line", "custom_id", "byte_offset", "byte_length")
_ANSWERED_COLUMNS: Final = (*_ITEM_COLUMNS, "is_done", "error_code", "result")

# If statistics do not know a batch, the planner expects a single row of it, and may read all of
# them rather than look up a few. So transactions that lease or answer items are `by_index`. A
# statement on given items finds each by both columns of the primary key: it joins them with a list
# and with no other table, and does not test `is_done` as the index of open items does. A statement
# without given items reads in the order of that index.
_NOT_DONE: Final = "i.is_done::integer = 0"
_FROM_HELD: Final = (
    "FROM unnest($1::text[], $2::integer[], $3::text[]) AS held (batch_id, line, lease_id)"
)
_IS_HELD: Final = "i.batch_id = held.batch_id AND i.line = held.line AND i.lease_id = held.lease_id"
_FROM_GIVEN: Final = "FROM unnest($1::text[], $2::integer[]) AS given (batch_id, line)"
_IS_GIVEN: Final = "i.batch_id = given.batch_id AND i.line = given.line"


class NewItem(msgspec.Struct, frozen=True):
    """A line of an input file; with an `error_code` it is answered already."""

    line: int
    custom_id: str
    byte_offset: int
    byte_length: int
    error_code: str = ""
    message: str = ""


class LeasedLine(msgspec.Struct, frozen=True):
    """A leased item, and where its line is in the input file."""

    ref: ItemRef
    byte_offset: int
    byte_length: int


class AnsweredItem(msgspec.Struct, frozen=True):
    """An item as the files of a batch show it; `is_done` is false if it was never answered."""

    line: int
    custom_id: str
    is_done: bool
    status_code: int
    request_id: str
    result: bytes
    error_code: str

    @property
    def is_error(self) -> bool:
        """Whether the item belongs to the error file."""
        return not self.is_done or bool(self.error_code) or self.status_code >= 400


async def add_items(connection: Connection, batch_id: str, items: Sequence[NewItem]) -> None:
    """Add items of a batch."""
    await connection.copy_records_to_table(
        "batch_item",
        columns=_ANSWERED_COLUMNS,
        records=[
            (
                *(batch_id, item.line, item.custom_id, item.byte_offset, item.byte_length),
                *(bool(item.error_code), item.error_code, item.message.encode()),
            )
            for item in items
        ],
    )


async def fail_repeated_ids(connection: Connection, batch_id: str) -> None:
    """Answer every item whose custom id an earlier line has with an error. In a transaction.

    In one statement the items are joined with those that are repeated. A planner that does not know
    of this batch yet expects a single row of each, and compares every item with every other one.
    """
    repeated = connection.cursor(
        """
        SELECT line FROM (
            SELECT line, row_number() OVER (PARTITION BY custom_id ORDER BY line) AS place
            FROM batch_item WHERE batch_id = $1 AND error_code = '') numbered
        WHERE place > 1
        """,
        batch_id,
        prefetch=REPEATED_AT_ONCE,
        timeout=120.0,
    )
    lines: list[int] = []
    async for row in repeated:
        lines.append(row["line"])
        if len(lines) == REPEATED_AT_ONCE:
            await _fail_repeated(connection, batch_id, lines)
            lines.clear()
    await _fail_repeated(connection, batch_id, lines)


async def _fail_repeated(connection: Connection, batch_id: str, lines: Sequence[int]) -> None:
    await connection.execute(
        f"""
        UPDATE batch_item i SET is_done = true, error_code = 'duplicate_custom_id',
            result = convert_to('cannot use ''custom_id'': an earlier line has the same', 'UTF8')
        {_FROM_GIVEN} WHERE {_IS_GIVEN} AND {_NOT_DONE}
        """,  # noqa: S608 - constants
        [batch_id] * len(lines),
        lines,
        timeout=120.0,
    )


async def analyze_items(connection: Connection) -> None:
    """Let the database plan its statements with the new rows, before it analyses the table by
    itself."""
    await connection.execute("ANALYZE batch_item")


async def count_failed(connection: Connection, batch_id: str) -> int:
    """Return how many items of a batch are answered with an error before it starts."""
    count = await connection.fetchval(
        "SELECT count(*) FROM batch_item WHERE batch_id = $1 AND is_done", batch_id, timeout=120.0
    )
    return int(count)


async def waiting_batches(
    connection: Connection, deployments: Sequence[str], limit: int
) -> list[WaitingBatch]:
    """Return the batches in progress with items that may be leased now, the oldest first.

    `waiting` is counted up to `limit`.
    """
    rows = await connection.fetch(
        """
        SELECT b.batch_id, b.tenant_id, b.key_id, b.deployment, (
            SELECT count(*) FROM (SELECT FROM batch_item i WHERE i.batch_id = b.batch_id
                AND NOT is_done AND available_at <= now()
                ORDER BY available_at, line LIMIT $2) counted) AS waiting
        FROM batch b
        WHERE b.status = 'in_progress' AND b.deployment = ANY($1) AND b.expires_at > now()
        ORDER BY b.created_at
        """,
        deployments,
        limit,
    )
    return [WaitingBatch(**row) for row in rows]


async def without_spent_quota(
    connection: Connection, batches: Sequence[WaitingBatch]
) -> list[WaitingBatch]:
    """Return those batches whose key, and its tenant, may use more now; note which keys are valid.

    Routers would refuse the items of the others, which would take places from items that can run.
    """
    keys = {KeyId(batch.key_id) for batch in batches}
    budgets = {budget_id(TenantId(batch.tenant_id)) for batch in batches}
    entries = await live_keys(connection, sorted(keys | budgets))
    valid = {entry.key_id for entry in entries}
    spent = {entry.key_id for entry in entries if entry.spent_until > 0}
    return [
        msgspec.structs.replace(batch, is_key_valid=KeyId(batch.key_id) in valid)
        for batch in batches
        if not spent.intersection((KeyId(batch.key_id), budget_id(TenantId(batch.tenant_id))))
    ]


async def leased_by_tenant(connection: Connection) -> dict[str, int]:
    """Return how many items of each tenant are leased now."""
    rows = await connection.fetch(
        """
        SELECT b.tenant_id, sum(held.leased)::bigint AS leased
        FROM batch b CROSS JOIN LATERAL (
            SELECT count(*) AS leased FROM (SELECT FROM batch_item i
                WHERE i.batch_id = b.batch_id AND NOT i.is_done AND i.available_at > now()
                    AND i.lease_id <> '' ORDER BY available_at, line) counted) held
        WHERE b.status = 'in_progress' AND held.leased > 0
        GROUP BY b.tenant_id
        """
    )
    return {row["tenant_id"]: row["leased"] for row in rows}


async def lease_items(
    connection: Connection,
    batch_id: str,
    *,
    count: int,
    bytes_max: int,
    lease_id: str,
    lease_s: float,
) -> list[LeasedLine]:
    """Lease up to `count` items of a batch that no router holds, of `bytes_max` bytes in total."""
    free = await connection.fetch(
        "SELECT line, byte_offset, byte_length FROM batch_item"
        " WHERE batch_id = $1 AND NOT is_done AND available_at <= now()"
        " ORDER BY available_at, line LIMIT $2 FOR UPDATE SKIP LOCKED",
        batch_id,
        count,
    )
    sizes = accumulate(row["byte_length"] for row in free)
    rows = [row for row, size in zip(free, sizes, strict=True) if size <= bytes_max]
    await connection.execute(
        f"""
        UPDATE batch_item i SET lease_id = $3, available_at = now() + $4 * interval '1 second'
        {_FROM_GIVEN} WHERE {_IS_GIVEN}
        """,  # noqa: S608 - constants
        [batch_id] * len(rows),
        [row["line"] for row in rows],
        lease_id,
        lease_s,
    )
    return [
        LeasedLine(ItemRef(batch_id, row["line"], lease_id), row["byte_offset"], row["byte_length"])
        for row in rows
    ]


async def renew_leases(
    connection: Connection, refs: Sequence[ItemRef], lease_s: float
) -> list[ItemRef]:
    """Renew leases; return those that are lost: answered, leased again, or their batch has ended.

    Leases on items of a batch that is being cancelled are released.
    """
    batches = await connection.fetch(
        "SELECT batch_id, status FROM batch WHERE batch_id = ANY($1)"
        " AND status IN ('in_progress', 'cancelling')",
        sorted({ref.batch_id for ref in refs}),
    )
    statuses = {row["batch_id"]: row["status"] for row in batches}
    cancelled = [ref for ref in refs if statuses.get(ref.batch_id) == "cancelling"]
    if cancelled:
        await connection.execute(
            f"UPDATE batch_item i SET lease_id = '' {_FROM_HELD} WHERE {_IS_HELD} AND {_NOT_DONE}",  # noqa: S608
            *_columns_of(cancelled),
        )
    rows = await connection.fetch(
        f"""
        UPDATE batch_item i SET available_at = now() + $4 * interval '1 second' {_FROM_HELD}
        WHERE {_IS_HELD} AND {_NOT_DONE} RETURNING i.batch_id, i.line, i.lease_id
        """,  # noqa: S608 - constants
        *_columns_of([ref for ref in refs if statuses.get(ref.batch_id) == "in_progress"]),
        lease_s,
    )
    kept = {ItemRef(row["batch_id"], row["line"], row["lease_id"]) for row in rows}
    return [ref for ref in refs if ref not in kept]


async def store_results(connection: Connection, results: Sequence[ItemResult]) -> bool:
    """Store the results of items that have none yet; return whether a batch has all of them now.

    The batches are locked first, in the order of their ids. Those that have ended take no results.
    """
    rows = await connection.fetch(
        "SELECT batch_id FROM batch WHERE batch_id = ANY($1)"
        " AND status IN ('in_progress', 'cancelling') ORDER BY batch_id FOR UPDATE",
        sorted({result.ref.batch_id for result in results}),
    )
    batch_ids = [row["batch_id"] for row in rows]
    ordered = sorted(
        (result for result in results if result.ref.batch_id in batch_ids),
        key=lambda result: (result.ref.batch_id, result.ref.line),
    )
    await _postpone(connection, [result for result in ordered if result.retry_after_s > 0])
    answered = [result for result in ordered if result.retry_after_s <= 0]
    rows = await connection.fetch(
        f"""
        UPDATE batch_item i SET is_done = true, status_code = given.status_code,
            request_id = given.request_id, result = given.body
        FROM unnest($1::text[], $2::int[], $3::int[], $4::text[], $5::bytea[])
            AS given (batch_id, line, status_code, request_id, body)
        WHERE {_IS_GIVEN} AND {_NOT_DONE} RETURNING i.batch_id, i.status_code
        """,  # noqa: S608 - constants
        [result.ref.batch_id for result in answered],
        [result.ref.line for result in answered],
        [result.status_code for result in answered],
        [result.request_id for result in answered],
        [result.body for result in answered],
    )
    await _count(connection, [(row["batch_id"], row["status_code"] >= 400) for row in rows])
    return bool(
        await connection.fetchval(
            "SELECT EXISTS (SELECT FROM batch WHERE batch_id = ANY($1)"
            " AND status = 'in_progress' AND completed + failed = total)",
            batch_ids,
        )
    )


async def _postpone(connection: Connection, results: Sequence[ItemResult]) -> None:
    """Let items be tried again later; answer those that failed too often with an error."""
    if not results:
        return
    rows = await connection.fetch(
        f"""
        UPDATE batch_item i SET lease_id = '', attempts = attempts + held.attempt::int,
            available_at = now() + interval '1 second'
                * held.after_s * (CASE WHEN held.attempt THEN $7 ^ attempts ELSE 1 END),
            is_done = attempts + held.attempt::int >= $6,
            error_code = CASE WHEN attempts + held.attempt::int >= $6 THEN 'server_error'
                ELSE '' END,
            result = convert_to('cannot answer: ' || $6::int || ' attempts failed', 'UTF8')
        FROM unnest($1::text[], $2::int[], $3::text[], $4::float8[], $5::boolean[])
            AS held (batch_id, line, lease_id, after_s, attempt)
        WHERE {_IS_HELD} AND {_NOT_DONE} RETURNING i.batch_id, i.is_done
        """,  # noqa: S608 - constants
        *_columns_of([result.ref for result in results]),
        [result.retry_after_s for result in results],
        [result.counts_as_attempt for result in results],
        ATTEMPTS_MAX,
        float(RETRY_GROWTH),
    )
    await _count(connection, [(row["batch_id"], True) for row in rows if row["is_done"]])


async def _count(connection: Connection, answered: Sequence[tuple[str, bool]]) -> None:
    """Count answers in the rows of their batches; the second value is whether one is an error."""
    counts: dict[str, list[int]] = {}
    for batch_id, is_error in answered:
        counts.setdefault(batch_id, [0, 0])[is_error] += 1
    for batch_id, (completed, failed) in sorted(counts.items()):
        await connection.execute(
            "UPDATE batch SET completed = completed + $2, failed = failed + $3 WHERE batch_id = $1",
            batch_id,
            completed,
            failed,
        )


async def leased_items(connection: Connection, batch_id: str) -> int:
    """Return how many items of a batch are leased now."""
    count = await connection.fetchval(
        "SELECT count(*) FROM (SELECT FROM batch_item WHERE batch_id = $1 AND NOT is_done"
        " AND available_at > now() AND lease_id <> '' ORDER BY available_at, line) counted",
        batch_id,
    )
    return int(count)


async def each_item(connection: Connection, batch_id: str) -> AsyncIterator[AnsweredItem]:
    """Yield the items of a batch in the order of their lines, in a transaction `by_index`.

    They are read in pages: the results of a page have at most PAGE_BYTES, or are a single larger
    one.
    """
    line = -1
    while rows := await connection.fetch(
        """
        SELECT line, custom_id, is_done, status_code, request_id, coalesce(result, '') AS result,
            error_code
        FROM (
            SELECT *, sum(octet_length(result)) OVER (
                ORDER BY line ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
            FROM (
                SELECT * FROM batch_item WHERE batch_id = $1 AND line > $2
                ORDER BY line LIMIT $3) listed) sized
        WHERE coalesce(bytes_before, 0) < $4 ORDER BY line
        """,
        batch_id,
        line,
        PAGE_ITEMS,
        PAGE_BYTES,
    ):
        line = rows[-1]["line"]
        for row in rows:
            yield AnsweredItem(**row)


async def delete_items(connection: Connection, limit: int) -> int:
    """Delete up to `limit` items of a batch that has ended; return 0 if no batch has any."""
    batch_id = await connection.fetchval(
        "SELECT batch_id FROM batch WHERE has_items"
        " AND status IN ('completed', 'failed', 'expired', 'cancelled') LIMIT 1"
    )
    if batch_id is None:
        return 0
    deleted = await connection.execute(
        "DELETE FROM batch_item WHERE ctid = ANY(ARRAY"
        "(SELECT ctid FROM batch_item WHERE batch_id = $1 ORDER BY line LIMIT $2))",
        batch_id,
        limit,
    )
    if affected_rows(deleted) < limit:
        await connection.execute("UPDATE batch SET has_items = false WHERE batch_id = $1", batch_id)
    return limit


def _columns_of(refs: Sequence[ItemRef]) -> tuple[list[str], list[int], list[str]]:
    return (
        [ref.batch_id for ref in refs],
        [ref.line for ref in refs],
        [ref.lease_id for ref in refs],
    )
