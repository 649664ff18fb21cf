"""A tenant whose clients read slowly keeps no other tenant from what schedulers store."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from isochrone.service.network.http_server import HttpServerLimits, serve_http
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import TenantId
from isochrone.wire.peers import relay as wire
from isochrone.wire.peers.batches import LeaseItems
from router import scheduler_silence
from router.app import RouterApp
from router.scheduler_client import READ_TIMEOUT_S, RELAYED_MAX, SchedulerAccess, SchedulerClient
from tests.integration.router.fleet_of import a_key

SLOW, OTHER = (msgspec.structs.replace(a_key(), tenant_id=TenantId(name)) for name in "ab")


@asynccontextmanager
async def client_of(
    port: int, read_timeout_s: float = READ_TIMEOUT_S
) -> AsyncIterator[SchedulerClient]:
    """Return a client of the scheduler at a port of this machine."""
    client = SchedulerClient(None, read_timeout_s)
    client.access = SchedulerAccess(f"http://127.0.0.1:{port}", "token")
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def a_client() -> AsyncIterator[SchedulerClient]:
    """Return a client of a scheduler that sends the first byte of a file, and nothing more."""

    async def send_file(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        await asyncio.Event().wait()
        return response

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get(wire.TENANT, ""))

    app = web.Application()
    app.router.add_get(f"{wire.PUBLIC_PREFIX}/v1/files/f/content", send_file)
    app.router.add_route("*", "/{path:.*}", answer)
    async with serve_http(app, "127.0.0.1", 0) as port, client_of(port) as client:
        yield client


async def test_slow_downloads_of_a_tenant_leave_others_their_share() -> None:
    async with a_client() as client, AsyncExitStack() as downloads, asyncio.timeout(30):

        async def begin() -> None:
            download = client.relay(SLOW, "GET", "/v1/files/f/content")
            response = await downloads.enter_async_context(download)
            assert await response.content.readexactly(1) == b"x"

        for _ in range(RELAYED_MAX // 2):
            await begin()
        with pytest.raises(ApiError, match="too many requests of this tenant") as refused:
            await begin()
        assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
        async with client.relay(OTHER, "GET", "/v1/files") as response:
            assert await response.text() == "b"
        # The router's own work, and the storing of responses, does not count.
        assert await client.post("/work", LeaseItems(wanted={})) == b""
        await downloads.aclose()
        async with client.relay(SLOW, "GET", "/v1/files") as response:
            assert await response.text() == "a"


@asynccontextmanager
async def a_client_of(
    hangs: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SchedulerClient]:
    """Return a client of a scheduler that takes long, and answers nothing once it `hangs`."""
    monkeypatch.setattr(scheduler_silence, "LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(scheduler_silence, "PATIENCE_S", 0.1)
    monkeypatch.setattr(scheduler_silence, "ANSWER_TIMEOUT_S", 2.0)

    async def answer_health(request: web.Request) -> web.Response:
        if hangs.is_set():
            await asyncio.Event().wait()
        return web.Response()

    async def answer_late(request: web.Request) -> web.Response:
        await asyncio.sleep(1.0)
        return web.Response(text="late")

    async def read_all(request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        hangs.set()
        await asyncio.Event().wait()
        return web.Response()

    async def send_file(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        hangs.set()
        await asyncio.Event().wait()
        return response

    async def read_nothing(request: web.Request) -> web.Response:
        hangs.set()
        await asyncio.Event().wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/healthz", answer_health)
    app.router.add_get(f"{wire.PUBLIC_PREFIX}/v1/files", answer_late)
    app.router.add_post(f"{wire.PUBLIC_PREFIX}/v1/files", read_nothing)
    app.router.add_post(f"{wire.PUBLIC_PREFIX}/ai/finetunes/a/finetune-assets", read_all)
    app.router.add_get(f"{wire.PUBLIC_PREFIX}/v1/files/f/content", send_file)
    limits = HttpServerLimits(shutdown_timeout_s=0.1)
    async with serve_http(app, "127.0.0.1", 0, limits=limits) as port, client_of(port) as client:
        yield client


async def test_a_scheduler_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        a_client_of(asyncio.Event(), monkeypatch) as client,
        asyncio.timeout(30),
        client.relay(SLOW, "GET", "/v1/files") as response,
    ):
        assert await response.text() == "late"


async def test_a_hung_scheduler_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that is not read or not stored, and a download that does not go on."""
    for method, path, body in (
        ("POST", "/v1/files", io.BytesIO(bytes(64 << 20))),
        ("POST", "/ai/finetunes/a/finetune-assets", io.BytesIO(bytes(1 << 20))),
        ("GET", "/v1/files/f/content", None),
    ):
        hangs = asyncio.Event()
        async with a_client_of(hangs, monkeypatch) as client, asyncio.timeout(20):
            with pytest.raises(ApiError, match="cannot reach the scheduler") as refused:
                size = 0 if body is None else len(body.getvalue())
                async with client.relay(
                    SLOW, method, path, body=body, stored_bytes=size
                ) as response:
                    await response.read()
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert refused.value.retry_after_s


@pytest.mark.parametrize("is_read", [False, True], ids=["while it is read", "while it is stored"])
async def test_an_upload_may_take_longer_than_other_requests(is_read: bool) -> None:
    """A bucket takes a large file only when it has arrived: its upload was cut after 60 s."""
    size, is_taking, may_go_on = 64 << 20, asyncio.Event(), asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        count = len(await request.content.readany())
        while not request.content.at_eof():
            if not is_read:
                is_taking.set()
                await may_go_on.wait()
            count += len(await request.content.readany())
        is_taking.set()
        await may_go_on.wait()
        return web.Response(text=str(count))

    async def answer(request: web.Request) -> web.Response:
        if request.path != "/healthz":
            await may_go_on.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post(f"{wire.PUBLIC_PREFIX}/v1/files", take)
    app.router.add_get("/{path:.*}", answer)
    async with (
        serve_http(app, "127.0.0.1", 0) as port,
        client_of(port, read_timeout_s=0.3) as client,
        asyncio.timeout(30),
    ):

        async def upload() -> str:
            body = io.BytesIO(bytes(size))
            async with client.relay(
                SLOW, "POST", "/v1/files", body=body, stored_bytes=size
            ) as response:
                return await response.text()

        uploading = asyncio.create_task(upload())
        await is_taking.wait()
        # One that began later is cut for its silence: the time of others is over.
        with pytest.raises(ApiError, match="cannot reach the scheduler"):
            async with client.relay(OTHER, "GET", "/v1/files"):
                pass
        may_go_on.set()
        assert await uploading == str(size)


async def test_the_access_ends_with_the_control_connection() -> None:
    """Else requests went to the address of a scheduler that was gone, until the next welcome."""
    client, sent = SchedulerClient(None), list[SchedulerAccess]()
    client.access = SchedulerAccess("http://127.0.0.1:1", "token")

    async def send_table() -> int:
        return 0

    app: Any = SimpleNamespace(
        link=SimpleNamespace(connected=True),
        scheduler_client=client,
        workers=SimpleNamespace(broadcast=sent.append, send_table=send_table),
    )
    for connected in (True, False):
        app.link.connected = connected
        await RouterApp.send_table(app)
        assert bool(client.access.token) == connected
        assert sent[-1] == client.access
    with pytest.raises(ApiError, match="no scheduler is connected"):
        await client.post("/work", LeaseItems(wanted={}))
