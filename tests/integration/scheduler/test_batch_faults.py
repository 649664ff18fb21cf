"""Faults of the store of files and of the database while batches are read, leased and ended."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from isochrone.service.network.http_server import error_middleware, json_error
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers import batches as wire
from isochrone.wire.peers import relay
from isochrone.wire.peers.batches import ItemResult, LeasedItem, LeasedItems, LeaseItems
from scheduler.api.client_objects import uploads
from scheduler.api.client_objects.batch_service import BatchService, BatchStorage
from scheduler.api.client_objects.relayed import ClientTurns
from scheduler.api.client_objects.uploads import add_or_discard
from scheduler.loops import advance_batches
from scheduler.state.files import file_threads
from scheduler.state.files.batch_folder import RELEASES, UNFINISHED, UNFINISHED_S
from scheduler.state.files.batch_results import ItemsMissing, write_results
from scheduler.store.client_objects.batch_files import add_file, stored_files
from scheduler.store.client_objects.batch_items import lease_items, store_results
from scheduler.store.client_objects.batches import (
    StoredBatch,
    begin_finalizing,
    end_batch,
    read_batch,
)
from scheduler.store.pool import Connection, Pool, transaction, using
from tests.integration.scheduler.test_batch_turns import LIMITS, MODEL, Turns, turns, with_key
from tests.system.harness import until

__all__ = ["turns", "with_key"]

LOST = asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")


async def turn(turns: Turns) -> None:
    """Take a turn; a step that failed is logged and repeated."""
    try:
        await turns.job.run_once()
    except (ApiError, OSError, asyncpg.PostgresError):
        turns.skipped_s += 60.0


async def until_status(turns: Turns, batch_id: str, status: str) -> StoredBatch:
    async def has_status() -> StoredBatch | None:
        await turn(turns)
        async with using(turns.pool) as connection:
            batch = await read_batch(connection, batch_id)
        return batch if batch is not None and batch.status == status else None

    batch: StoredBatch = await until(f"{batch_id} is {status}", has_status)
    return batch


async def items_of(pool: Pool) -> int:
    async with using(pool) as connection:
        return int(await connection.fetchval("SELECT count(*) FROM batch_item"))


async def answer(turns: Turns, batch_id: str) -> None:
    """Answer every item of a batch."""
    async with transaction(turns.pool) as connection:
        leased = await lease_items(
            connection, batch_id, count=9, bytes_max=1 << 20, lease_id="lease", lease_s=60.0
        )
        results = [ItemResult(ref=one.ref, status_code=200, body=b"{}") for one in leased]
        await store_results(connection, results)


async def test_steps_that_fail_for_ever_delay_no_other_of_their_tenant(turns: Turns) -> None:
    for name in ("broken-1", "broken-2", "broken-3", "small"):
        await turns.begin(name)

    async def has_begun() -> bool:
        with suppress(ApiError):
            await turns.job.run_once()
        return (await turns.statuses())["small"] == "in_progress"

    await until("the batch that can be read has begun", has_begun, 20.0)


async def test_an_input_that_cannot_be_read_in_time_ends_its_batch(turns: Turns) -> None:
    await turns.begin("broken")
    await turn(turns)
    turns.skipped_s += 60.0
    async with using(turns.pool) as connection:
        await connection.execute("UPDATE batch SET expires_at = now()")
    batch = await until_status(turns, "broken", "failed")
    assert [error["code"] for error in batch.errors] == ["batch_expired"]


@pytest.mark.parametrize("is_there", [True, False], ids=["cut", "missing"])
async def test_no_batch_begins_without_all_of_its_lines(turns: Turns, is_there: bool) -> None:
    """A disk or a bucket that ends a file early, without an error, must not drop lines."""
    await turns.begin("batch", lines=3)
    path = Path(turns.folder._folder / "batch")
    text = path.read_bytes()
    if is_there:
        path.write_bytes(text[: text.rindex(b"\n")])
    else:
        path.unlink()
    for _ in range(3):
        await turn(turns)
        await asyncio.gather(
            *(step.task for step in turns.job._steps.values()), return_exceptions=True
        )
    assert await turns.statuses() == {"batch": "validating"}
    assert await items_of(turns.pool) == 0
    path.write_bytes(text)
    assert (await until_status(turns, "batch", "in_progress")).total == 3


async def test_a_scheduler_that_hung_replaces_no_files_of_a_batch_that_has_ended(
    turns: Turns,
) -> None:
    """It read the batch, hung while another one ended it, and wrote the items that were left."""
    await turns.begin("batch", lines=3)
    await until_status(turns, "batch", "in_progress")
    await answer(turns, "batch")
    async with transaction(turns.pool) as connection:
        seen_before = await begin_finalizing(connection, "batch")
    assert seen_before is not None
    ended = await until_status(turns, "batch", "completed")
    assert ended.output_file_id is not None
    path = turns.folder._folder / ended.output_file_id
    whole = path.read_bytes()
    assert whole.count(b"\n") == 3

    async def are_deleted() -> bool:
        await turn(turns)
        return await items_of(turns.pool) == 0

    await until("the items are deleted", are_deleted)
    with pytest.raises(ItemsMissing, match="0 of 3 items"):
        await write_results(turns.pool, turns.folder, seen_before)
    assert path.read_bytes() == whole
    assert not list(turns.folder._folder.glob("*.part"))


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_lost_answer_to_the_commit_loses_no_answers(
    turns: Turns, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    """The files of results were deleted although the batch had ended with them."""
    await turns.begin("batch", lines=2)
    await until_status(turns, "batch", "in_progress")
    await answer(turns, "batch")
    ends = []

    async def end(*arguments: Any, **named: Any) -> bool:
        has_ended = await end_batch(*arguments, **named)
        ends.append(has_ended)
        if not is_committed and len(ends) == 1:
            raise LOST
        return has_ended

    @asynccontextmanager
    async def losing(pool: Pool, **options: Any) -> AsyncIterator[Any]:
        before = len(ends)
        async with transaction(pool, **options) as connection:
            yield connection
        if is_committed and len(ends) > before:
            raise LOST

    monkeypatch.setattr(advance_batches, "end_batch", end)
    monkeypatch.setattr(advance_batches, "transaction", losing)
    batch = await until_status(turns, "batch", "completed")
    await turns.job.close()
    assert len(ends) == (1 if is_committed else 2)
    assert batch.output_file_id is not None
    with turns.folder.open(batch.output_file_id) as output:
        assert len(output.read().splitlines()) == 2
    names = {path.name for path in turns.folder._folder.iterdir()}
    assert {"batch", batch.output_file_id} <= names
    # Of the attempt that was undone nothing is left but perhaps the empty file of errors.
    assert len(names) <= 3


async def test_a_file_stays_if_its_row_was_added_though_the_client_has_left(turns: Turns) -> None:
    """Its row would name contents that are gone."""
    with turns.folder.writing("file-1"), turns.folder.writing("file-2"):
        pass
    may_end = asyncio.Event()

    async def add(file_id: str, *, fails: bool) -> None:
        async with transaction(turns.pool) as connection:
            await may_end.wait()
            await add_file(
                connection,
                file_id=file_id,
                tenant_id="acme",
                purpose="batch",
                filename="a",
                size_bytes=0,
                expires_after_s=None,
            )
            if fails:
                raise LOST

    adding = [
        asyncio.create_task(
            add_or_discard(turns.pool, turns.folder, file_id, add(file_id, fails=fails))
        )
        for file_id, fails in (("file-1", False), ("file-2", True))
    ]
    await asyncio.sleep(0.1)
    for task in adding:
        task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*adding, return_exceptions=True)
    assert [path.name for path in turns.folder._folder.iterdir()] == ["file-1"]


async def test_an_expired_file_that_cannot_be_deleted_delays_no_other(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = turns.folder.delete

    async def may_delete(file_id: str) -> None:
        if file_id == "a":
            raise ApiError(ErrorCode.UNAVAILABLE, "cannot use the bucket")
        await delete(file_id)

    monkeypatch.setattr(turns.folder, "delete", may_delete)
    async with transaction(turns.pool) as connection:
        for name in ("a", "b", "c"):
            await add_file(
                connection,
                file_id=name,
                tenant_id="acme",
                purpose="batch",
                filename=name,
                size_bytes=1,
                expires_after_s=-86_400,
            )

    async def left() -> list[str]:
        async with using(turns.pool) as connection:
            rows = await connection.fetch("SELECT file_id FROM batch_file")
        return [row["file_id"] for row in rows]

    async def has_only_the_first() -> bool:
        await turn(turns)
        return await left() == ["a"]

    await until("the other files are deleted", has_only_the_first, 20.0)
    monkeypatch.undo()
    await turns.job.run_once()
    await turns.job.run_once()
    assert await left() == []


async def test_a_tenant_has_no_more_items_in_the_database_than_its_limit(turns: Turns) -> None:
    """Batches that were not read yet counted as empty, so any number of them could be begun."""
    await turns.begin("first", lines=LIMITS.tenant_items_max)
    await until_status(turns, "first", "in_progress")
    await turns.begin("second")
    await turns.begin("of-other", "other")
    await turns.until_begun("of-other")
    assert (await turns.statuses())["second"] == "validating"
    async with using(turns.pool) as connection:
        await connection.execute("UPDATE batch SET expires_at = now() WHERE batch_id = 'first'")
    # It begins when the items of the first are deleted.
    await turns.until_begun("second")
    assert await items_of(turns.pool) == 2


async def test_uploads_at_the_same_time_are_counted_one_after_another(turns: Turns) -> None:
    """Each saw none of the others, so together they passed the tenant's limit."""
    async with transaction(turns.pool) as first:
        assert await stored_files(first, "acme") == (0, 0)

        async def count(tenant_id: str) -> int:
            async with transaction(turns.pool) as second:
                return (await stored_files(second, tenant_id)).size_bytes

        counting = asyncio.create_task(count("acme"))
        assert await count("other") == 0
        await add_file(
            first,
            file_id="file-1",
            tenant_id="acme",
            purpose="batch",
            filename="a",
            size_bytes=7,
            expires_after_s=None,
        )
        assert not counting.done()
    assert await counting == 7


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_file_stays_until_the_database_says_whether_it_has_its_row(
    turns: Turns, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    """A stopped Postgres commits once it goes on; its file was deleted meanwhile."""
    monkeypatch.setattr(uploads, "DECIDING_PAUSE_S", 0.01)
    path, asked = turns.folder._folder / "file-1", 0
    path.write_bytes(b"content")

    async def add() -> None:
        raise LOST

    async def has_row(connection: Connection, file_id: str) -> bool:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise LOST
        # The first answer comes before the commit of a backend that was stopped.
        return is_committed and asked > 4

    with pytest.raises(type(LOST)):
        await add_or_discard(turns.pool, turns.folder, "file-1", add(), has_row)
    assert path.exists()
    await asyncio.gather(*uploads._UNDOING)
    assert (path.exists(), asked) == (is_committed, 5)


@asynccontextmanager
async def a_router(turns: Turns) -> AsyncIterator[TestClient[Any, Any]]:
    """Yield a client of the service that leases items."""
    app = web.Application(middlewares=[error_middleware(json_error)])
    tokens: Any = SimpleNamespace(peer_of=lambda _: "router")
    storage = BatchStorage(turns.folder, LIMITS, lambda: None)
    BatchService(turns.pool, storage, tokens, ClientTurns()).add_routes(app)
    async with TestClient(TestServer(app)) as client:
        yield client


async def lease(client: TestClient[Any, Any], count: int) -> tuple[LeasedItem, ...]:
    message = msgspec.msgpack.encode(LeaseItems(wanted={MODEL: count}))
    async with client.post(wire.LEASE_PATH, data=message) as response:
        assert response.status == 200
        return msgspec.msgpack.decode(await response.read(), type=LeasedItems).items


@pytest.mark.parametrize("fault", ["is gone", "is cut", "is a folder"])
async def test_an_input_that_cannot_be_read_delays_no_items_of_others(
    turns: Turns, fault: str
) -> None:
    await turns.begin("damaged")
    await turns.begin("sound")
    await turns.until_begun("damaged", "sound")
    path = turns.folder._folder / "damaged"
    text = path.read_bytes()
    path.unlink()
    if fault == "is cut":
        path.write_bytes(text[:9])
    elif fault == "is a folder":
        path.mkdir()
    async with a_router(turns) as client:
        (item,) = await lease(client, 9)
        assert item.ref.batch_id == "sound"
        async with using(turns.pool) as connection:
            await connection.execute("UPDATE batch_item SET available_at = now(), lease_id = ''")
        (item,) = await lease(client, 1)
        assert item.ref.batch_id == "sound", "it takes no place of an item that can run"


async def test_only_items_that_fit_into_a_message_are_leased(turns: Turns) -> None:
    """Those that did not fit were in memory together, and waited until their leases ran out."""
    await turns.begin("batch", lines=9)
    await turns.until_begun("batch")
    size = relay.WORK_BYTES_MAX // 4
    async with using(turns.pool) as connection:
        await connection.execute("UPDATE batch_item SET byte_length = $1", size)
    read = []

    async def read_parts(_: str, parts: list[tuple[int, int]]) -> list[bytes]:
        read.append(sum(length for _, length in parts))
        return [b'{"body":{}}' for _ in parts]

    turns.folder.read_parts = read_parts  # type: ignore[method-assign, assignment]
    async with a_router(turns) as client:
        lines = [item.ref.line for _ in range(3) for item in await lease(client, 9)]
    assert lines == list(range(1, 10))
    assert read == [3 * size] * 3


async def test_what_killed_schedulers_have_left_unfinished_is_deleted(turns: Turns) -> None:
    """It stayed until a scheduler started a day later."""
    folder = turns.folder._folder
    for name, age_s in (("old", 2 * UNFINISHED_S), ("young", 0.0)):
        path = folder / f"file-1.{name}{UNFINISHED}"
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    await turns.job.run_once()
    await asyncio.gather(*RELEASES)
    assert [path.name for path in folder.iterdir()] == [f"file-1.young{UNFINISHED}"]


async def test_deletions_that_hang_leave_the_database_to_others(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds its transaction until the contents are gone, and kept all connections."""
    names = [f"file-{number}" for number in range(40)]
    async with transaction(turns.pool) as connection:
        for name in names:
            await add_file(
                connection,
                file_id=name,
                tenant_id="acme",
                purpose="batch",
                filename=name,
                size_bytes=0,
                expires_after_s=None,
            )
    may_end, has_begun = threading.Event(), threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        has_begun.set()
        may_end.wait(60)

    monkeypatch.setattr(Path, "unlink", hang)
    monkeypatch.setattr(file_threads, "TURN_TIMEOUT_S", 1.0)
    headers = {relay.TENANT: "acme"}
    prefix = relay.PUBLIC_PREFIX
    async with a_router(turns) as client:

        async def delete(name: str) -> int:
            async with client.delete(f"{prefix}/v1/files/{name}", headers=headers) as response:
                return response.status

        deleting = [asyncio.create_task(delete(name)) for name in names]
        try:
            assert await asyncio.to_thread(has_begun.wait, 20)
            async with asyncio.timeout(20):
                for _ in range(10):
                    async with client.get(f"{prefix}/v1/files", headers=headers) as response:
                        assert response.status == 200, await response.text()
                # Nothing waits for ever, and each client may ask again.
                assert {await task for task in deleting} == {503}
        finally:
            may_end.set()
            monkeypatch.undo()
            await asyncio.gather(*deleting, return_exceptions=True)
        assert [await delete(name) for name in names[:2]] == [200, 200]
