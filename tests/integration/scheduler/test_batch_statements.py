"""Statements on a few items read only those, whatever the planner knows of their batch.

It expects a single row of a batch that statistics do not know. So a plan that reads all of the
batch's items seems to cost nothing.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import pytest

from isochrone.wire.peers.batches import ItemRef, ItemResult
from scheduler.store.client_objects.batch_items import (
    NewItem,
    add_items,
    delete_items,
    lease_items,
    leased_by_tenant,
    leased_items,
    renew_leases,
    store_results,
    waiting_batches,
)
from scheduler.store.client_objects.batches import add_batch
from scheduler.store.pool import Connection, Pool, transaction

ITEMS: Final = 20_000
HELD: Final = 40
DONE: Final = ITEMS - 2 * HELD
"""The items of the batch "new" that are answered, where most are."""

READ_MAX: Final = 8 * HELD
"""A statement may look at an item a few times: to find it, to lock it and to change it."""

READ: Final = """
    SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
    FROM pg_stat_xact_user_tables WHERE relname = 'batch_item'
"""
"""The rows that this connection has read, beside those that it has reported already."""

Act = Callable[[Connection, list[ItemRef]], Awaitable[object]]


async def lease(connection: Connection, refs: list[ItemRef]) -> None:
    leased = await lease_items(
        connection, "new", count=HELD, bytes_max=1 << 30, lease_id="other", lease_s=60.0
    )
    assert len(leased) == HELD


async def renew(connection: Connection, refs: list[ItemRef]) -> None:
    assert await renew_leases(connection, refs, 60.0) == []


async def release(connection: Connection, refs: list[ItemRef]) -> None:
    await connection.execute("UPDATE batch SET status = 'cancelling'")
    assert len(await renew_leases(connection, refs, 60.0)) == HELD
    assert await leased_items(connection, "new") == 0


async def answer(connection: Connection, refs: list[ItemRef]) -> None:
    await store_results(connection, [ItemResult(ref=ref, status_code=200) for ref in refs])
    assert await leased_items(connection, "new") == 0


async def postpone(connection: Connection, refs: list[ItemRef]) -> None:
    await store_results(connection, [ItemResult(ref=ref, retry_after_s=5.0) for ref in refs])
    assert await leased_items(connection, "new") == 0


async def count(connection: Connection, refs: list[ItemRef]) -> None:
    found = await waiting_batches(connection, ["d"], HELD)
    assert {batch.batch_id: batch.waiting for batch in found} == {"old": HELD, "new": HELD}
    assert await leased_by_tenant(connection) == {"new": HELD}


async def delete(connection: Connection, refs: list[ItemRef]) -> None:
    await connection.execute("UPDATE batch SET status = 'completed' WHERE batch_id = 'new'")
    assert await delete_items(connection, HELD) == HELD


async def begin(connection: Connection, batch_id: str) -> None:
    """Add a batch in progress."""
    await add_batch(
        connection,
        batch_id=batch_id,
        tenant_id=batch_id,
        key_id="k",
        endpoint="/v1/chat/completions",
        input_file_id="f",
        metadata={},
        expires_after_s=3600,
    )
    await connection.execute(
        "UPDATE batch SET status = 'in_progress', deployment = 'd', total = $2 WHERE batch_id = $1",
        batch_id,
        ITEMS,
    )
    await add_items(connection, batch_id, [NewItem(line, f"{line}", 0, 1) for line in range(ITEMS)])


async def finish_most(connection: Connection) -> None:
    """Answer most items of the batch "new"."""
    await connection.execute(
        "UPDATE batch_item SET is_done = true, lease_id = 'x', available_at = now()"
        " WHERE batch_id = 'new' AND line < $1",
        DONE,
    )


class _Undo(Exception):
    """Undoes a transaction."""


ACTS: Final[tuple[Act, ...]] = (lease, renew, release, answer, postpone, count, delete)
MODES: Final = ("force_custom_plan", "force_generic_plan")


async def rows_read(pool: Pool, act: Act, mode: str) -> int:
    """Return how many rows of items `act` reads, in a transaction that is undone."""
    refs = [ItemRef("new", DONE + number, "held") for number in range(HELD)]
    count = 0
    with suppress(_Undo):
        async with transaction(pool, by_index=True) as connection:
            await connection.execute(f"SET LOCAL plan_cache_mode = {mode}")
            before = await connection.fetchval(READ)
            await act(connection, refs)
            count = int(await connection.fetchval(READ)) - int(before)
            raise _Undo
    return count


@pytest.mark.parametrize("known", ["nothing", "another batch", "its begin", "all"])
async def test_a_few_items_are_found_without_reading_others(pool: Pool, known: str) -> None:
    async with transaction(pool) as connection:
        await connection.execute("ALTER TABLE batch_item SET (autovacuum_enabled = false)")
        await begin(connection, "old")
        if known == "another batch":
            await connection.execute("ANALYZE batch_item")
        await begin(connection, "new")
        if known == "its begin":
            await connection.execute("ANALYZE batch_item")
        await finish_most(connection)
        await connection.execute(
            "UPDATE batch_item SET lease_id = 'held', available_at = now() + interval '1 minute'"
            " WHERE batch_id = 'new' AND line BETWEEN $1 AND $2",
            *(DONE, DONE + HELD - 1),
        )
        if known == "all":
            await connection.execute("ANALYZE batch_item")
    read = {
        (act.__name__, mode): await rows_read(pool, act, mode) for act in ACTS for mode in MODES
    }
    assert {case: count for case, count in read.items() if not 0 < count <= READ_MAX} == {}
