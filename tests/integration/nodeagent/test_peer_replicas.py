"""A handed-off request is awaited for as long as the peer's node answers pings."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from isochrone.service.network.http_server import HttpServerLimits, serve_http
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent.api import peer_replicas
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.decide.requests.handoff import PeerReplicaLost
from tests.system.harness import until

PING_S = 0.1


class SlowNode:
    """A node that answers a request late, and pings only while it is `awake`."""

    def __init__(self) -> None:
        self.awake = True
        self.answers = asyncio.Event()
        self.asked = 0
        self.loads = ""

    async def ping(self, request: web.Request) -> web.Response:
        if not self.awake:
            await asyncio.Event().wait()
        return web.Response(status=204, headers={headers.LOADS: self.loads})

    async def relay(self, request: web.Request) -> web.Response:
        self.asked += 1
        await self.answers.wait()
        return web.Response(text="late")


@asynccontextmanager
async def serving(node: SlowNode, number: int) -> AsyncIterator[PeerReplica]:
    app = web.Application()
    app.router.add_get("/ping", node.ping)
    app.router.add_post("/v1/completions", node.relay)
    limits = HttpServerLimits(shutdown_timeout_s=0.1)
    async with serve_http(app, "127.0.0.1", 0, limits=limits) as port:
        names = ReplicaId(f"r{number}"), NodeId(f"n{number}")
        yield PeerReplica(*names, f"http://127.0.0.1:{port}", 1, 1, 1)


@asynccontextmanager
async def a_peer(node: SlowNode) -> AsyncIterator[tuple[PeerReplicaClient, PeerReplica]]:
    client = PeerReplicaClient(None, time.monotonic, ping_timeout_s=PING_S)
    async with serving(node, 2) as peer:
        try:
            yield client, peer
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


async def test_a_node_says_nothing_about_the_replicas_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It drew requests to itself, or away from others, by what it said of their queues."""
    # A connection may take longer on a busy machine.
    monkeypatch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 30.0)
    honest, liar = SlowNode(), SlowNode()
    honest.loads = "r3 p=0;d=0;r=0;w=0;u=7;o=7;e=0"
    liar.loads = "r2 p=0;d=0;r=0;w=0;u=1;o=1;e=0,r3 p=0;d=0;r=0;w=0;u=9999;o=9999;e=0"
    async with serving(honest, 3) as other, a_peer(liar) as (client, peer):
        for replicas in ([peer, other], [other, peer]):
            client._loads.clear()
            queued = await client.queued_tokens(replicas, 30.0)
            assert queued == {peer.replica_id: 1, other.replica_id: 7}


async def test_a_node_that_answers_nothing_leaves_connections_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_replicas, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(peer_replicas, "CONNECTIONS_PER_NODE_MAX", 4)
    honest, hung = SlowNode(), SlowNode()
    honest.answers.set()
    async with serving(honest, 3) as other, a_peer(hung) as (client, peer):

        async def ask(peer: PeerReplica) -> int:
            async with client.relay(peer, "/v1/completions", b"{}", {}) as answer:
                return answer.status

        waiting = [asyncio.create_task(ask(peer)) for _ in range(20)]
        try:
            await until("its connections are taken", lambda: is_true(hung.asked >= 4))
            async with asyncio.timeout(30):
                assert await ask(other) == 200
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)


async def is_true(value: bool) -> bool:
    return value
