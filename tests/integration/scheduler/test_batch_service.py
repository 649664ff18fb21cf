"""A tenant's batches and queued runs: what they may take of the scheduler, and how they fail."""

import asyncio
import io
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from isochrone.service.network.http_server import error_middleware, json_error
from isochrone.wire.errors import ApiError
from isochrone.wire.peers import relay
from isochrone.wire.peers.batches import (
    LEASE_PATH,
    RESULTS_PATH,
    ItemRef,
    ItemResult,
    ItemResults,
    LeaseItems,
)
from scheduler.api.client_objects.batch_service import BatchService, BatchStorage
from scheduler.api.client_objects.relayed import (
    LARGE_AT_ONCE,
    LARGE_BYTES,
    ClientTurns,
    work_route,
)
from scheduler.decide.batch_limits import BatchLimits
from scheduler.state.files import file_threads
from scheduler.state.files.batch_results import write_results
from scheduler.state.files.file_threads import THREADS_MAX
from scheduler.store.client_objects import batch_items
from scheduler.store.client_objects.batch_files import add_file, delete_expired_file
from scheduler.store.client_objects.batch_items import each_item, lease_items, store_results
from scheduler.store.client_objects.batches import (
    begin_finalizing,
    due_batches,
    fail_batch,
    read_batch,
)
from scheduler.store.pool import Connection, transaction, using
from tests.integration.scheduler.test_batch_turns import Turns, turns, with_key
from tests.integration.scheduler.test_quotas import KEY
from tests.system.harness import until

__all__ = ["turns", "with_key"]

MIB = 1 << 20
ANSWERS = 48


async def answer_all(turns: Turns, sizes: list[int]) -> None:
    """Begin a batch, and answer each item with so many bytes."""
    await turns.begin("batch", lines=len(sizes))
    await turns.until_begun("batch")
    for size in sizes:
        async with transaction(turns.pool) as connection:
            leased = await lease_items(
                connection, "batch", count=1, bytes_max=MIB, lease_id="lease", lease_s=60.0
            )
            body = b'"' + bytes([ord("a") + size % 26]) * (size - 2) + b'"'
            results = [ItemResult(ref=one.ref, status_code=200, body=body) for one in leased]
            await store_results(connection, results)


async def test_large_answers_are_not_in_memory_together(turns: Turns) -> None:
    """64 were, of up to 16 MiB each: the acting scheduler was killed for its memory."""
    await answer_all(turns, [MIB] * ANSWERS)
    async with transaction(turns.pool) as connection:
        batch = await begin_finalizing(connection, "batch")
    assert batch is not None
    tracemalloc.start()
    try:
        output, _ = await write_results(turns.pool, turns.folder, batch)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert output.size_bytes > ANSWERS * MIB
    assert peak_bytes < ANSWERS * MIB / 3


async def test_results_are_given_up_if_no_thread_is_free_for_their_files(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing files waits for a thread as long as it takes; here none is open."""
    await answer_all(turns, [2])
    async with transaction(turns.pool) as connection:
        batch = await begin_finalizing(connection, "batch")
    assert batch is not None
    monkeypatch.setattr(file_threads, "TURN_TIMEOUT_S", 0.1)
    folder, may_end = turns.folder.of_tenant("acme"), threading.Event()
    hanging = [asyncio.create_task(folder.run(may_end.wait, 60)) for _ in range(THREADS_MAX)]
    await asyncio.wait(hanging, timeout=0)
    try:
        async with asyncio.timeout(20):
            with pytest.raises(ApiError, match="does not answer"):
                await write_results(turns.pool, folder, batch)
    finally:
        may_end.set()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_all_answers_are_read_in_their_order_whatever_their_size(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_items, "PAGE_ITEMS", 3)
    monkeypatch.setattr(batch_items, "PAGE_BYTES", 50)
    sizes = [2, 2, 2, 2, 60, 70, 2, 49, 2, 50, 2]
    await answer_all(turns, sizes)
    async with transaction(turns.pool, by_index=True) as connection:
        items = [item async for item in each_item(connection, "batch")]
    assert [item.line for item in items] == list(range(1, len(sizes) + 1))
    assert [len(item.result) for item in items] == sizes


@asynccontextmanager
async def a_tenant(turns: Turns, limits: BatchLimits) -> AsyncIterator[Callable[..., Any]]:
    """Yield a function that sends a tenant's request, and returns the status and the answer."""
    app = web.Application(middlewares=[error_middleware(json_error)])
    tokens: Any = SimpleNamespace(peer_of=lambda _: "router")
    storage = BatchStorage(turns.folder, limits, lambda: None)
    BatchService(turns.pool, storage, tokens, ClientTurns()).add_routes(app)
    of_key = {relay.TENANT: "acme", relay.KEY: KEY}
    headers = {**of_key, "content-type": "multipart/form-data; boundary=b"}
    async with TestClient(TestServer(app)) as client:

        async def ask(method: str, path: str, body: Any = b"") -> tuple[int, Any]:
            data = io.BytesIO(body) if isinstance(body, bytes) else body
            async with client.request(
                method, f"{relay.PUBLIC_PREFIX}{path}", headers=headers, data=data
            ) as response:
                return response.status, await response.json()

        yield ask


async def test_work_that_the_store_cannot_hold_is_the_routers_error(turns: Turns) -> None:
    """Each was a 500, with a traceback in the log."""
    app = web.Application(middlewares=[error_middleware(json_error)])
    tokens: Any = SimpleNamespace(peer_of=lambda _: "router")
    storage = BatchStorage(turns.folder, BatchLimits(), lambda: None)
    BatchService(turns.pool, storage, tokens, ClientTurns()).add_routes(app)
    ref = ItemRef("batch\0", 2**40, "lease")
    async with TestClient(TestServer(app)) as client:
        for path, message in (
            (LEASE_PATH, LeaseItems(wanted={}, holds=(ref,))),
            (RESULTS_PATH, ItemResults(results=(ItemResult(ref=ref, status_code=200),))),
        ):
            async with client.post(path, data=msgspec.msgpack.encode(message)) as response:
                assert response.status == 400, await response.text()


async def test_queued_runs_count_for_the_bytes_that_a_tenant_stores(turns: Turns) -> None:
    """They were not limited, and each may have 16 MiB."""
    async with a_tenant(turns, BatchLimits(tenant_bytes_max=1000)) as ask:
        path = "/ai/queued?model=m"
        assert [(await ask("POST", path, b"x" * 400))[0] for _ in range(3)] == [200, 200, 429]
        status, answer = await ask("POST", path, b"x" * 201)
    assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
    assert "this tenant has 800 of 1000 bytes" in answer["error"]["message"]
    assert len(list(turns.folder._folder.iterdir())) == 2


async def test_a_tenant_has_a_limit_of_files_whatever_their_size(turns: Turns) -> None:
    """Empty ones took no bytes, so that any number of them could be stored."""
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\r\n--b--\r\n'
    )
    async with a_tenant(turns, BatchLimits(tenant_files_max=2)) as ask:
        stored = [await ask("POST", "/v1/files", form) for _ in range(3)]
        assert [status for status, _ in stored] == [200, 200, 429]
        assert "has 2 of 2 files" in stored[2][1]["error"]["message"]
        assert (await ask("DELETE", f"/v1/files/{stored[0][1]['id']}"))[0] == 200
        assert (await ask("POST", "/v1/files", form))[0] == 200


async def test_queued_runs_are_not_in_memory_while_they_are_stored(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router relays up to 256 of 16 MiB; the disk may take its time."""
    count, parts, part = 7, 12, b"x" * MIB
    may_write, opened = threading.Event(), threading.Semaphore(0)
    writing = turns.folder.writing

    @contextmanager
    def write_later(file_id: str) -> Iterator[BinaryIO]:
        opened.release()
        may_write.wait(60)
        with writing(file_id) as output:
            yield output

    monkeypatch.setattr(turns.folder, "writing", write_later)
    async with a_tenant(turns, BatchLimits()) as ask, asyncio.timeout(60):

        async def body() -> AsyncIterator[bytes]:
            for _ in range(parts):
                yield part

        tracemalloc.start()
        try:
            queued = [
                asyncio.create_task(ask("POST", "/ai/queued?model=m", body())) for _ in range(count)
            ]
            for _ in range(count):
                assert await asyncio.to_thread(opened.acquire, timeout=20)
            may_write.set()
            assert [(await one)[0] for one in queued] == [200] * count
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            may_write.set()
            tracemalloc.stop()
    assert peak_bytes < count * parts * MIB / 3


async def test_few_large_messages_of_routers_are_in_memory_together() -> None:
    """All were, of up to 64 MiB from each router."""
    may_end, running, most = asyncio.Event(), 0, 0

    async def handle(body: bytes) -> None:
        nonlocal running, most
        if len(body) > 9:
            running += 1
            most = max(most, running)
            await may_end.wait()
            running -= 1

    app, tokens = web.Application(), SimpleNamespace(peer_of=lambda _: "router")
    app.router.add_post("/", work_route(cast(Any, tokens), handle))
    async with TestClient(TestServer(app)) as client, asyncio.timeout(60):

        async def send(size: int) -> int:
            async with client.post("/", data=io.BytesIO(b"x" * size)) as response:
                return response.status

        large = [asyncio.create_task(send(LARGE_BYTES)) for _ in range(3 * LARGE_AT_ONCE)]
        # Small ones do not wait for them.
        assert [await send(1) for _ in range(20)] == [200] * 20

        async def are_read() -> bool:
            return running == LARGE_AT_ONCE

        await until("as many as may are read", are_read)
        may_end.set()
        assert [await one for one in large] == [200] * len(large)
    assert most == LARGE_AT_ONCE


async def test_a_tenant_has_a_limit_of_batches_that_have_not_ended(turns: Turns) -> None:
    """Two million were permitted, and each turn of the job read all of them."""
    async with a_tenant(turns, BatchLimits(tenant_batches_max=2)) as ask:
        path, body = "/ai/queued?model=m", b"x"
        first = (await ask("POST", path, body))[1]["request_id"]
        assert [(await ask("POST", path, body))[0] for _ in range(2)] == [200, 429]
        created = await ask(
            "POST",
            "/v1/batches",
            b'{"input_file_id": "%s", "endpoint": "/v1/completions", "completion_window": "24h"}'
            % (await file_of(turns, first)).encode(),
        )
        assert created[0] == 429
        assert (
            "2 of this tenant have not ended, and the limit is 2" in created[1]["error"]["message"]
        )
        async with transaction(turns.pool) as connection:
            await connection.execute(
                "UPDATE batch SET status = 'failed' WHERE batch_id = $1", first
            )
        assert (await ask("POST", path, body))[0] == 200


async def test_queued_runs_whose_input_is_lost_fail(turns: Turns) -> None:
    """The poll returned no responses and no error, so that the client asked for ever."""
    async with a_tenant(turns, BatchLimits()) as ask:
        run = (await ask("POST", "/ai/queued?model=m", b"x"))[1]["request_id"]
        async with transaction(turns.pool) as connection:
            error = {"code": "file_not_found", "message": "the input file was deleted"}
            await fail_batch(connection, run, [error])
        status, answer = await ask("GET", f"/ai/queued/{run}?model=m")
    assert (status, answer["error"]["code"]) == (409, "conflict")
    assert "the input file was deleted; queue them again" in answer["error"]["message"]


async def file_of(turns: Turns, batch_id: str) -> str:
    async with using(turns.pool) as connection:
        batch = await read_batch(connection, batch_id)
    assert batch is not None
    return batch.input_file_id


async def test_a_turn_reads_no_batches_that_only_wait(turns: Turns) -> None:
    now = time.time()
    rows = (
        # Of acme two are due before the others of its tenant; other's come in their order, too.
        ("waits", "acme", "in_progress", 0, 60.0),
        ("answered", "acme", "in_progress", 2, 60.0),
        ("expired", "acme", "in_progress", 0, -60.0),
        ("cancelled", "acme", "cancelling", 0, 60.0),
        ("unread", "full", "validating", 0, 60.0),
        ("unread-and-expired", "full", "validating", 0, -60.0),
        ("running", "other", "finalizing", 0, 60.0),
        ("ends", "other", "finalizing", 0, 60.0),
        ("ended", "other", "completed", 2, 60.0),
        ("new", "other", "validating", 0, 60.0),
    )
    async with transaction(turns.pool) as connection:
        for name, tenant_id, status, completed, left_s in rows:
            await connection.execute(
                """
                INSERT INTO batch (batch_id, tenant_id, key_id, endpoint, input_file_id, status,
                    total, completed, created_at, expires_at)
                VALUES ($1, $2, 'k', 'e', 'f', $3, 2, $4, clock_timestamp(), to_timestamp($5))
                """,
                *(name, tenant_id, status, completed, now + left_s),
            )
        found = await due_batches(
            connection, now=now, full={"full"}, excluded=["running"], of_tenant_max=2
        )
    names = ["answered", "expired", "unread-and-expired", "ends", "new"]
    assert [one.batch.batch_id for one in found] == names
    expired = [one.batch.batch_id for one in found if one.is_expired]
    assert expired == ["expired", "unread-and-expired"]


async def test_a_clock_that_is_ahead_ends_no_batch(turns: Turns) -> None:
    """The answers that a batch had not got by then were lost."""
    await turns.begin("batch")
    turns.skipped_s = 2 * 3600.0
    await turns.until_begun("batch")
    for _ in range(3):
        await turns.job.run_once()
    assert await turns.statuses() == {"batch": "in_progress"}
    async with using(turns.pool) as connection:
        await connection.execute("UPDATE batch SET expires_at = now()")
        # By a clock that is behind it has time left.
        assert await due(connection, -3600.0) == []
        assert await due(connection, 3600.0) == ["batch"]


async def test_a_clock_that_is_ahead_deletes_no_file(turns: Turns) -> None:
    """With Postgres a month ahead, all files that had less time left were deleted."""
    passed = "UPDATE history_clock SET at = now() + $1 * interval '1 second'"
    async with transaction(turns.pool) as connection:
        await add_file(
            connection,
            file_id="a",
            tenant_id="acme",
            purpose="batch",
            filename="a",
            size_bytes=1,
            expires_after_s=-3600,
        )
        await connection.execute(passed, -7200.0)
        assert await delete_expired_file(connection, "") is None
        await connection.execute(passed, -60.0)
        assert await delete_expired_file(connection, "") == "a"


async def due(connection: Connection, ahead_s: float) -> list[str]:
    found = await due_batches(
        connection, now=time.time() + ahead_s, full=(), excluded=(), of_tenant_max=9
    )
    return [one.batch.batch_id for one in found]
