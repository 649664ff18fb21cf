"""Unfinished bodies of one router or node leave memory for the bodies of others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from isochrone.service.network.http_server import error_middleware, json_error, serve_http
from isochrone.wire.http import headers
from nodeagent.api.request.unfinished_bodies import UnfinishedBodies

LIMIT = 1000


@asynccontextmanager
async def reading() -> AsyncIterator[tuple[aiohttp.ClientSession, aiohttp.ClientSession]]:
    """Serve; yield the sessions of two senders."""
    bodies = UnfinishedBodies(LIMIT)

    async def read(request: web.Request) -> web.Response:
        return web.Response(body=await bodies.read(request, bytes_max=400, timeout_s=30.0))

    app = web.Application(middlewares=[error_middleware(json_error)])
    app.router.add_post("/", read)
    async with serve_http(app, "127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port}"
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with (
            aiohttp.ClientSession(url) as first,
            aiohttp.ClientSession(url, connector=connector) as second,
        ):
            yield first, second


async def test_unfinished_bodies_of_one_sender_leave_memory_to_others() -> None:
    more = asyncio.Event()

    async def unfinished() -> AsyncIterator[bytes]:
        yield b"x"
        await more.wait()

    async def send(http: aiohttp.ClientSession) -> tuple[int, str]:
        async with http.post("/", data=unfinished()) as answer:
            return answer.status, answer.headers.get(headers.REFUSED, "")

    async with reading() as (first, second):
        tasks = [asyncio.create_task(send(first)) for _ in range(9)]
        # Each may have 400 bytes, as it does not say how many it has: one fits its sender's half.
        refused, waiting = set[asyncio.Task[tuple[int, str]]](), set(tasks)
        while len(refused) < 8:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            refused |= ended
        assert {task.result() for task in refused} == {(429, headers.BUSY)}
        async with second.post("/", data=b"y" * 300) as answer:
            assert (answer.status, await answer.read()) == (200, b"y" * 300)
        more.set()
        assert await waiting.pop() == (200, "")
        async with first.post("/", data=b"y" * 400) as answer:
            assert answer.status == 200
