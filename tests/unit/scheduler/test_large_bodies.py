"""Large bodies of conversations are read a few at a time."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from isochrone.wire.peers import relay as wire
from scheduler.api.client_objects import conversations
from scheduler.api.client_objects.relayed import LARGE_AT_ONCE, LARGE_BYTES, ClientTurns
from scheduler.api.client_objects.response_service import add_response_routes
from scheduler.decide.response_limits import ResponseLimits

PATH = f"{wire.PUBLIC_PREFIX}/v1/conversations"
SMALL = b'{"metadata":{}}'


async def test_large_conversations_are_not_in_memory_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that routers relay were, of 8 MiB each, while the database did not answer."""
    waiting = most_waiting = 0
    has_database, has_large = asyncio.Event(), asyncio.Semaphore(0)

    @asynccontextmanager
    async def transaction(_: Any) -> AsyncIterator[Any]:
        nonlocal waiting, most_waiting
        waiting += 1
        most_waiting = max(most_waiting, waiting)
        has_large.release()
        await has_database.wait()
        waiting -= 1
        raise web.HTTPServiceUnavailable
        yield

    monkeypatch.setattr(conversations, "transaction", transaction)
    app = web.Application(client_max_size=1 << 30)
    nothing: Any = SimpleNamespace(peer_of=lambda _: "router")
    add_response_routes(app, nothing, ResponseLimits(), nothing, ClientTurns())
    async with TestClient(TestServer(app)) as client, asyncio.timeout(60):

        async def send(body: bytes, path: str = PATH, tenant_id: str = "other") -> int:
            data, headers = io.BytesIO(body), {wire.TENANT: tenant_id}
            async with client.post(path, data=data, headers=headers) as response:
                return response.status

        large = SMALL + LARGE_BYTES * b" "
        sending = [
            asyncio.create_task(send(large, path, tenant_id))
            for path in 2 * (PATH, f"{PATH}/conv_1")
            for tenant_id in "abcd"
        ]
        for _ in range(LARGE_AT_ONCE):
            await has_large.acquire()
        small = asyncio.create_task(send(SMALL))
        await has_large.acquire()
        assert waiting == LARGE_AT_ONCE + 1, "small ones do not wait for them"
        has_database.set()
        assert {await one for one in (*sending, small)} == {503}
    assert most_waiting == LARGE_AT_ONCE + 1
