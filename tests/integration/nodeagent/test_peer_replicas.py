"""A handed-off request is awaited for as long as the peer's node answers pings."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.decide.requests.handoff import PeerReplicaLost

PING_S = 0.1


class SlowNode:
    """A node that answers a request late, and pings only while it is `awake`."""

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
async def a_peer(node: SlowNode) -> AsyncIterator[tuple[PeerReplicaClient, PeerReplica]]:
    app = web.Application()
    app.router.add_get("/ping", node.ping)
    app.router.add_post("/v1/completions", node.relay)
    client = PeerReplicaClient(None, time.monotonic, ping_timeout_s=PING_S)
    async with serve_http(app, "127.0.0.1", 0) as port:
        try:
            yield (
                client,
                PeerReplica(ReplicaId("r2"), NodeId("n2"), f"http://127.0.0.1:{port}", 1, 1, 1),
            )
        finally:
            await client.close()


async def test_a_slow_peer_that_answers_pings_is_awaited() -> None:
    node = SlowNode()
    async with a_peer(node) as (client, peer):
        asyncio.get_running_loop().call_later(8 * PING_S, node.answers.set)
        async with client.relay(peer, "/v1/completions", b"{}", {}) as answer:
            assert await answer.text() == "late"


async def test_a_peer_whose_node_is_silent_is_given_up() -> None:
    node = SlowNode()
    async with a_peer(node) as (client, peer):
        node.awake = False
        with pytest.raises(PeerReplicaLost, match="TimeoutError"):
            async with (
                asyncio.timeout(30),
                client.relay(peer, "/v1/completions", b"{}", {}),
            ):
                pass
        # The node is not probed for a while.
        assert await client.queued_tokens([peer]) == {}
