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
from isochrone.wire.peers import batches as wire
from isochrone.wire.peers.batches import LeaseItems
from router import scheduler_silence
from router.app import RouterApp
from router.batch_client import RELAYED_MAX, BatchAccess, BatchClient
from tests.integration.router.fleet_of import a_key

SLOW, OTHER = (msgspec.structs.replace(a_key(), tenant_id=TenantId(name)) for name in "ab")


@asynccontextmanager
async def a_client() -> AsyncIterator[BatchClient]:
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
    async with serve_http(app, "127.0.0.1", 0) as port:
        client = BatchClient(None)
        client.access = BatchAccess(f"http://127.0.0.1:{port}", "token")
        try:
            yield client
        finally:
            await client.close()


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
) -> AsyncIterator[BatchClient]:
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
    app.router.add_get(f"{wire.PUBLIC_PREFIX}/v1/files/f/content", send_file)
    limits = HttpServerLimits(shutdown_timeout_s=0.1)
    async with serve_http(app, "127.0.0.1", 0, limits=limits) as port:
        client = BatchClient(None)
        client.access = BatchAccess(f"http://127.0.0.1:{port}", "token")
        try:
            yield client
        finally:
            await client.close()


async def test_a_scheduler_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        a_client_of(asyncio.Event(), monkeypatch) as client,
        asyncio.timeout(30),
        client.relay(SLOW, "GET", "/v1/files") as response,
    ):
        assert await response.text() == "late"


async def test_a_hung_scheduler_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that is not read, a download that does not go on, and a request without answer."""
    for method, path, body in (
        ("POST", "/v1/files", io.BytesIO(bytes(64 << 20))),
        ("GET", "/v1/files/f/content", None),
    ):
        hangs = asyncio.Event()
        async with a_client_of(hangs, monkeypatch) as client, asyncio.timeout(20):
            with pytest.raises(ApiError, match="cannot reach the scheduler") as refused:
                async with client.relay(SLOW, method, path, body=body) as response:
                    await response.read()
            assert refused.value.code is ErrorCode.UNAVAILABLE
            assert refused.value.retry_after_s


async def test_the_access_ends_with_the_control_connection() -> None:
    """Else requests went to the address of a scheduler that was gone, until the next welcome."""
    client, sent = BatchClient(None), list[BatchAccess]()
    client.access = BatchAccess("http://127.0.0.1:1", "token")

    async def send_table() -> int:
        return 0

    app: Any = SimpleNamespace(
        link=SimpleNamespace(connected=True),
        batch_client=client,
        workers=SimpleNamespace(broadcast=sent.append, send_table=send_table),
    )
    for connected in (True, False):
        app.link.connected = connected
        await RouterApp.send_table(app)
        assert bool(client.access.token) == connected
        assert sent[-1] == client.access
    with pytest.raises(ApiError, match="no scheduler is connected"):
        await client.post("/work", LeaseItems(wanted={}))
