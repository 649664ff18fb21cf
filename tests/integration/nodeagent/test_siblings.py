"""A sibling that holds a request: waited for while its node answers pings, and no longer."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from isochrone.service.http_server import serve_http
from isochrone.wire.headers import Sibling
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent.api.siblings import SiblingLost, Siblings

PING_S = 0.1


class Mute:
    """A door that answers a request late, and pings for as long as it is `awake`."""

    def __init__(self) -> None:
        self.awake = True
        self.answers = asyncio.Event()

    async def ping(self, request: web.Request) -> web.Response:
        if not self.awake:
            await asyncio.Event().wait()
        return web.Response(status=204)

    async def relay(self, request: web.Request) -> web.Response:
        await self.answers.wait()
        return web.Response(text="late")


@asynccontextmanager
async def a_sibling(mute: Mute) -> AsyncIterator[tuple[Siblings, Sibling]]:
    app = web.Application()
    app.router.add_get("/ping", mute.ping)
    app.router.add_post("/v1/completions", mute.relay)
    siblings = Siblings(None, time.monotonic, ping_timeout_s=PING_S)
    async with serve_http(app, "127.0.0.1", 0) as port:
        try:
            yield (
                siblings,
                Sibling(ReplicaId("r2"), NodeId("n2"), f"http://127.0.0.1:{port}", 1, 1, 1),
            )
        finally:
            await siblings.close()


async def test_one_that_is_slow_and_answers_pings_is_waited_for() -> None:
    mute = Mute()
    async with a_sibling(mute) as (siblings, sibling):
        asyncio.get_running_loop().call_later(8 * PING_S, mute.answers.set)
        async with siblings.answering(sibling, "/v1/completions", b"{}", {}) as answer:
            assert await answer.text() == "late"


async def test_one_whose_node_fell_silent_is_let_go() -> None:
    mute = Mute()
    async with a_sibling(mute) as (siblings, sibling):
        mute.awake = False
        with pytest.raises(SiblingLost, match="TimeoutError"):
            async with (
                asyncio.timeout(30),
                siblings.answering(sibling, "/v1/completions", b"{}", {}),
            ):
                pass
        # It is left alone for a while.
        assert await siblings.unread([sibling]) == {}
