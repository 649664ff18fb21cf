"""The server at a node's address must prove that it is that node, and not another one."""

import random
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.service.trust import tls
from isochrone.service.trust.identity import Authority, Identity
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, PopId, ReplicaId
from isochrone.wire.peers.assignment import PeerSource
from isochrone.wire.peers.control import PeerRole
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.decide.requests.handoff import PeerReplicaLost
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.download import ArtifactError
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.peers import PeerFetcher
from nodeagent.host.artifacts.sources import ArtifactSources
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.exchange import AttemptFailed, NodeRequest
from router.dataplane.upstream import Upstream
from tests.integration.nodeagent.test_artifacts import MINIMUM_RATE, artifact_of
from tests.integration.service.test_tls import NOW, a_peer

BODY = b"the prompt"
NAME = "/v1/completions"


class Place:
    """An address, and whoever answers there: `holder` may change while connections stay open."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.create(folder / "ca", "ours", NOW)
        self.context = self.papers("n1", PeerRole.AGENT)
        self.port = 0
        self.asked: list[str] = []
        self.told_to = ""

    def papers(self, name: str, role: PeerRole) -> ssl.SSLContext:
        """Return the TLS settings of a server that shows a certificate issued for any `role`."""
        identity = a_peer(self.authority, name, role)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_verify_locations(cadata=identity.ca_pem)
        context.verify_mode = ssl.CERT_REQUIRED
        tls.reload_identity(context, identity)
        return context

    def is_taken_by(self, identity: Identity) -> None:
        """From now on another's papers are shown here."""
        tls.reload_identity(self.context, identity)

    def client(self, name: str = "a1", role: PeerRole = PeerRole.ROUTER) -> ssl.SSLContext:
        """Return what dials it."""
        return tls.client_context(a_peer(self.authority, name, role))

    @property
    def address(self) -> str:
        """As an operator writes it."""
        return f"https://127.0.0.1:{self.port}"

    async def answer(self, request: web.Request) -> web.Response:
        """Take what is asked."""
        self.asked.append(request.path)
        if self.told_to:
            raise web.HTTPTemporaryRedirect(self.told_to)
        return web.Response(body=BODY)


@asynccontextmanager
async def a_place(
    folder: Path, name: str = "n1", role: PeerRole = PeerRole.AGENT
) -> AsyncIterator[Place]:
    place = Place(folder)
    place.context = place.papers(name, role)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", place.answer)
    async with serve_http(app, "127.0.0.1", 0, ssl_context=place.context) as place.port:
        yield place


@asynccontextmanager
async def a_pool(context: ssl.SSLContext) -> AsyncIterator[Upstream]:
    deadlines = Deadlines(time.monotonic)
    deadlines.start()
    upstream = Upstream(RouterConfig(), deadlines, time.monotonic, context)
    try:
        yield upstream
    finally:
        await upstream.close()
        deadlines.stop()


async def ask(upstream: Upstream, node: str, address: str) -> int:
    """Ask a node as a router does; return the status of its answer, or 0 where it was not met."""
    request = NodeRequest("POST", NAME, "", BODY)
    exchange = upstream.send(NodeId(node), address, request, 5.0, 1024)
    try:
        await exchange.opened
        return exchange.response_head().status
    except AttemptFailed:
        return 0
    finally:
        exchange.abandon()


async def test_a_router_sends_nothing_to_another_node_at_a_nodes_address(tmp_path: Path) -> None:
    async with a_place(tmp_path, "n2") as place, a_pool(place.client()) as upstream:
        assert await ask(upstream, "n1", place.address) == 0
        assert place.asked == []
        # Where n2 is meant it is met, at the same address; its connection is kept, and is its own.
        assert await ask(upstream, "n2", place.address) == 200
        assert await ask(upstream, "n1", place.address) == 0
        assert place.asked == [NAME]
        # The address of n2 as it might be reported, to be dialled without a proof of who is there.
        assert await ask(upstream, "n1", place.address.replace("https", "http")) == 0


async def test_renewed_papers_are_of_the_same_name_and_serve(tmp_path: Path) -> None:
    async with a_place(tmp_path) as place, a_pool(place.client()) as upstream:
        assert await ask(upstream, "n1", place.address) == 200
        upstream.close_idle(NodeId("n1"))
        place.is_taken_by(a_peer(place.authority, "n1", PeerRole.AGENT))
        assert await ask(upstream, "n1", place.address) == 200
        upstream.close_idle(NodeId("n1"))
        place.is_taken_by(a_peer(place.authority, "n2", PeerRole.AGENT))
        assert await ask(upstream, "n1", place.address) == 0


async def test_a_router_is_no_node_though_it_has_a_nodes_name(tmp_path: Path) -> None:
    """A token for any new name gives a router the name of a node: that is another's table."""
    async with a_place(tmp_path, role=PeerRole.ROUTER) as place, a_pool(place.client()) as upstream:
        assert await ask(upstream, "n1", place.address) == 0
        assert place.asked == []


@pytest.mark.parametrize("name", ["10.1.0.7", "ams_gpu-7.rack-12", "n" * 63])
async def test_whatever_a_node_may_be_called_is_proven(tmp_path: Path, name: str) -> None:
    async with a_place(tmp_path, name) as place, a_pool(place.client()) as upstream:
        assert await ask(upstream, name, place.address) == 200
        assert await ask(upstream, "10.1.0.8", place.address) == 0


async def test_a_node_passes_nothing_on_to_another_at_a_peer_replicas_address(
    tmp_path: Path,
) -> None:
    async with a_place(tmp_path, "n2") as place:
        peers = PeerReplicaClient(place.client("n3", PeerRole.AGENT), time.monotonic)
        one, other = (
            PeerReplica(ReplicaId("r1"), NodeId(name), place.address, 1, 1, 1)
            for name in ("n1", "n2")
        )
        try:
            async with peers.relay(other, NAME, BODY, {}) as answer:
                assert await answer.read() == BODY
            with pytest.raises(PeerReplicaLost):
                async with peers.relay(one, NAME, BODY, {}):
                    pass
        finally:
            await peers.close()
        assert place.asked == [NAME]


async def test_a_peer_replica_cannot_send_a_node_elsewhere(tmp_path: Path) -> None:
    """What a node can reach, its cloud's metadata among it, is not for others to ask through it."""
    inside = web.Application()
    met: list[str] = []

    async def meet(request: web.Request) -> web.Response:
        met.append(request.path)
        return web.Response(text="a secret")

    inside.router.add_route("*", "/{path:.*}", meet)
    async with a_place(tmp_path) as place, serve_http(inside, "127.0.0.1", 0) as port:
        place.told_to = f"http://127.0.0.1:{port}/latest/meta-data"
        peers = PeerReplicaClient(place.client("n3", PeerRole.AGENT), time.monotonic)
        replica = PeerReplica(ReplicaId("r1"), NodeId("n1"), place.address, 1, 1, 1)
        try:
            async with peers.relay(replica, NAME, BODY, {}) as answer:
                assert answer.status == 307
        finally:
            await peers.close()
        assert (place.asked, met) == ([NAME], [])


async def test_weights_are_asked_of_the_node_that_is_said_to_hold_them(tmp_path: Path) -> None:
    async with a_place(tmp_path, "n2") as place:
        holders: list[PeerSource] = []
        peers = PeerFetcher(
            holders=lambda digest: holders,
            pop=PopId("ams"),
            context=place.client("n3", PeerRole.AGENT),
            clock=time.monotonic,
            rng=random.Random(1),
        )
        sources = ArtifactSources(private=True, hf_url="", minimum_rate=MINIMUM_RATE)
        link = TransferLink(0.0, time.monotonic)
        held = ArtifactStore(tmp_path / "held", sources, 1 << 20, link=link, peers=peers)
        artifact = artifact_of("http://127.0.0.1:1/nowhere", {"config.json": BODY})
        for address in (place.address, place.address.replace("https", "http")):
            holders[:] = [PeerSource(node_id=NodeId("n1"), pop=PopId("iad"), address=address)]
            with pytest.raises(ArtifactError):
                await held.ensure(artifact, tuple, lambda done: None)
        assert place.asked == []
        holders[:] = [PeerSource(node_id=NodeId("n2"), pop=PopId("iad"), address=place.address)]
        folder = await held.ensure(artifact, tuple, lambda done: None)
        assert (folder / "config.json").read_bytes() == BODY
