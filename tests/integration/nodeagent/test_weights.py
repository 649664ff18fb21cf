"""Fetching artifacts from other nodes over real sockets: resumed, verified, or from the origin.

Honest peers use the agent's own upload route; hostile peers use routes of these tests.
"""

import asyncio
import random
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from ssl import SSLContext

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from isochrone.service.network.http_server import error_middleware, json_error, serve_http
from isochrone.service.trust import tls
from isochrone.service.trust.identity import Authority
from isochrone.wire.http import headers
from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.models.model import Artifact
from isochrone.wire.peers.assignment import PeerSource
from isochrone.wire.peers.control import PeerRole
from nodeagent.api.artifact_uploads import ArtifactUploads
from nodeagent.decide.bandwidth import MinimumRate
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.download import ArtifactError
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.peers import PeerFetcher, PeerFetchLimits
from nodeagent.host.artifacts.sources import ArtifactSources
from tests.integration.nodeagent.test_artifacts import MINIMUM_RATE, Origin, artifact_of, origin
from tests.integration.service.test_tls import NOW, a_peer

__all__ = ["origin"]

BODY = random.Random(7).randbytes(3_000_000)
SMALL = b"{}"
FILES = {"sub/w.safetensors": BODY, "config.json": SMALL}
PATIENT = PeerFetchLimits(poll_interval_s=0.05)
QUICK = PeerFetchLimits(
    connect_timeout_s=1.0,
    read_timeout_s=0.5,
    minimum_rate=MinimumRate(bytes_per_s=100_000.0, window_s=0.3),
    poll_interval_s=0.05,
    stall_s=0.5,
)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class City:
    """Nodes that serve artifacts, and hostile peers, on loopback."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.limits = PATIENT

    def node(
        self,
        name: str,
        *peers: PeerSource,
        holders: Sequence[PeerSource] | None = None,
        download_bytes_per_s: float = 0.0,
        context: SSLContext | None = None,
    ) -> ArtifactStore:
        """Create a node's artifact store with these peers, or with `holders`, which may change."""
        sources_of = peers if holders is None else holders
        fetcher = PeerFetcher(
            holders=lambda digest: sources_of,
            pop=PopId(name[:3]),
            context=context,
            clock=time.monotonic,
            rng=random.Random(1),
            limits=self.limits,
        )
        sources = ArtifactSources(private=True, hf_url="", minimum_rate=MINIMUM_RATE)
        link = TransferLink(download_bytes_per_s, time.monotonic)
        return ArtifactStore(
            self.folder / name,
            sources,
            1 << 30,
            link=link,
            peers=fetcher,
        )

    async def serving(
        self,
        name: str,
        store: ArtifactStore,
        *,
        upload_bytes_per_s: float = 0.0,
        uploads_max: int = 4,
        context: SSLContext | None = None,
    ) -> PeerSource:
        """Serve a node's artifacts."""
        app = web.Application(middlewares=[error_middleware(json_error)])
        uplink = TransferLink(upload_bytes_per_s, time.monotonic)
        ArtifactUploads(store, uplink, uploads_max=uploads_max).attach(app)
        return await self.listening(name, app, context)

    async def hostile(self, name: str, answer: Answer) -> PeerSource:
        """Start a peer that gives an arbitrary answer."""
        app = web.Application()
        app.router.add_get("/v1/artifacts/{digest}/{path:.+}", answer)
        return await self.listening(name, app)

    async def listening(
        self, name: str, app: web.Application, context: SSLContext | None = None
    ) -> PeerSource:
        port = await self.stack.enter_async_context(
            serve_http(app, "127.0.0.1", 0, ssl_context=context)
        )
        scheme = "http" if context is None else "https"
        return PeerSource(
            node_id=NodeId(name), pop=PopId(name[:3]), address=f"{scheme}://127.0.0.1:{port}"
        )

    async def holder(self, name: str, artifact: Artifact) -> PeerSource:
        """Start a node that has the artifact and serves it."""
        store = self.node(name)
        await fetched(store, artifact)
        return await self.serving(name, store)


@pytest.fixture
async def city(tmp_path: Path) -> AsyncIterator[City]:
    async with AsyncExitStack() as stack:
        yield City(tmp_path, stack)


async def fetched(store: ArtifactStore, artifact: Artifact) -> Path:
    path = await store.ensure(artifact, tuple, lambda size: None)
    for name, body in FILES.items():
        assert (path / name).read_bytes() == body
    return path


def an_artifact(origin: tuple[Origin, str]) -> Artifact:
    served, url = origin
    served.files.update({f"/m/{name}": body for name, body in FILES.items()})
    return artifact_of(f"{url}/m", FILES)


def empty(origin: tuple[Origin, str]) -> None:
    """Remove all files from the origin."""
    origin[0].files.clear()


async def test_a_node_fetches_from_a_peer_and_then_serves_others(
    city: City, origin: tuple[Origin, str]
) -> None:
    artifact = an_artifact(origin)
    first = await city.holder("ams-1", artifact)
    empty(origin)
    second = city.node("fra-1", first)
    await fetched(second, artifact)
    third = city.node("sin-1", await city.serving("fra-1", second))
    await fetched(third, artifact)
    assert third.digests() == (artifact.digest,)


async def test_only_complete_artifacts_are_served(city: City, origin: tuple[Origin, str]) -> None:
    artifact = an_artifact(origin)
    peer = await city.holder("ams-1", artifact)
    (city.folder / "ams-1" / "secret").write_bytes(b"s")
    (city.folder / "ams-1" / ("0" * 64 + ".partial")).mkdir()
    url = f"{peer.address}/v1/artifacts"
    async with aiohttp.ClientSession() as http:
        for path, status in (
            (f"{artifact.digest}/config.json", 200),
            (f"{artifact.digest}/nothing", 404),
            (f"{artifact.digest}/sub", 404),
            (f"{artifact.digest}/%2e%2e/secret", 400),
            (f"{artifact.digest}/..%2fsecret", 400),
            (f"{'0' * 64}.partial/w", 404),
            (f"{'0' * 64}/w", 404),
            ("..%2f..%2fetc/passwd", 404),
        ):
            async with http.get(URL(f"{url}/{path}", encoded=True)) as response:
                assert response.status == status, path
        whole = f"{url}/{artifact.digest}/sub/w.safetensors"
        for asked, status in (
            ("bytes=2999990-", 206), ("bytes=3000000-", 400), ("bytes=0-5", 400), ("x", 400),
        ):  # fmt: skip
            async with http.get(whole, headers={"range": asked}) as response:
                assert response.status == status, asked
                if status == 206:
                    assert await response.read() == BODY[2_999_990:]


async def test_a_fetch_is_resumed_from_another_peer_and_from_the_origin(
    city: City, origin: tuple[Origin, str]
) -> None:
    artifact = an_artifact(origin)
    parts: list[tuple[str, str]] = []

    def cutting(name: str, size: int) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            body = FILES[request.match_info["path"]]
            asked = request.headers.get("range", "bytes=0-")
            parts.append((name, asked))
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            response = web.StreamResponse(status=206 if start else 200)
            response.headers["content-range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            response.content_length = len(body) - start
            await response.prepare(request)
            await response.write(body[start : start + size])
            if start + size < len(body):
                await response.drain()
                assert request.transport is not None
                request.transport.close()
            return response

        return answer

    one = await city.hostile("fra-1", cutting("one", 700_000))
    two = await city.hostile("fra-2", cutting("two", 500_000))
    await fetched(city.node("ams-1", one, two), artifact)
    big = [(name, asked) for name, asked in parts if asked != "bytes=0-"]
    assert [name for name, _ in big] == ["two", "one", "two"]
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for _, asked in big]
    assert starts == sorted(starts)
    assert starts[0] > 0
    served, _ = origin
    assert len(served.ranges) == 1, "the origin sent only the rest"
    assert int(served.ranges[0].removeprefix("bytes=").rstrip("-")) > starts[-1]


async def wrong_bytes(request: web.Request) -> web.StreamResponse:
    body = FILES[request.match_info["path"]]
    return web.Response(body=bytes(len(body)))


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(bytes(1 << 20))


async def truncated(request: web.Request) -> web.StreamResponse:
    return web.Response(body=FILES[request.match_info["path"]][:1])


async def another_part(request: web.Request) -> web.StreamResponse:
    return web.Response(status=206, body=BODY, headers={"content-range": "bytes 7-9/10"})


async def redirecting(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:1/steal")


async def silent(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.Event().wait()
    return response


async def trickling(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x")
        await asyncio.sleep(0.05)


async def busy_for_ever(request: web.Request) -> web.StreamResponse:
    return web.Response(status=429)


async def fetching_for_ever(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, headers={headers.FETCHED_BYTES: "5"})


@pytest.mark.parametrize(
    "answer",
    [
        wrong_bytes, endless, truncated, another_part, redirecting, silent, trickling,
        fetching_for_ever,
    ],
    ids=lambda answer: answer.__name__,
)  # fmt: skip
@pytest.mark.parametrize("pop", ["ams", "sin"], ids=["near", "far"])
async def test_nothing_from_a_bad_peer_is_kept_and_the_origin_is_used(
    city: City, origin: tuple[Origin, str], answer: Answer, pop: str
) -> None:
    city.limits = QUICK
    artifact = an_artifact(origin)
    bad = await city.hostile(f"{pop}-9", answer)
    node = city.node("ams-1", bad)
    path = await fetched(node, artifact)
    assert node.digests() == (artifact.digest,)
    assert sorted(p.name for p in path.rglob("*") if p.is_file()) == [
        "config.json", "w.safetensors",
    ]  # fmt: skip
    assert not list(city.folder.glob("ams-1/*.partial"))
    # Without the origin too, wrong bytes lead to an error and never to an artifact.
    empty(origin)
    other = city.node("ams-2", bad)
    with pytest.raises(ArtifactError, match="answered 404"):
        await other.ensure(artifact, tuple, lambda size: None)
    assert other.digests() == ()


async def test_wrong_bytes_exclude_every_sender_but_never_become_an_artifact(
    city: City, origin: tuple[Origin, str]
) -> None:
    artifact = an_artifact(origin)

    async def wrong_first_part(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(FILES[request.match_info["path"]])
        await response.prepare(request)
        await response.write(b"!" * 1000)
        assert request.transport is not None
        request.transport.close()
        return response

    dishonest = await city.hostile("ams-8", wrong_first_part)
    honest = await city.holder("ams-9", artifact)
    empty(origin)
    node = city.node("ams-1", dishonest, honest)
    # The combined file fails verification, and it is unknown which peer was wrong. Both are
    # excluded, and without an origin the fetch fails.
    with pytest.raises(ArtifactError, match="answered 404"):
        await node.ensure(artifact, tuple, lambda size: None)
    assert node.digests() == ()
    an_artifact(origin)
    await fetched(node, artifact)


async def test_the_nodes_of_a_pop_use_the_origin_once(
    city: City, origin: tuple[Origin, str]
) -> None:
    artifact = an_artifact(origin)
    served, _ = origin
    asked: list[str] = []
    get = served.get

    async def counted(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        await asyncio.sleep(0.2)
        return await get(request)

    app = web.Application()
    app.router.add_get("/{path:.*}", counted)
    slow = await city.listening("org-1", app)
    artifact = artifact_of(f"{slow.address}/m", FILES)
    nodes: list[ArtifactStore] = []
    before: list[PeerSource] = []
    for index in range(6):
        name = f"ams-{index}"
        node = city.node(name, *before)
        nodes.append(node)
        peer = await city.serving(name, node, uploads_max=2)
        before.append(
            PeerSource(node_id=peer.node_id, pop=peer.pop, address=peer.address, holds=False)
        )
    await asyncio.gather(*(fetched(node, artifact) for node in nodes))
    assert sorted(asked) == ["/m/config.json", "/m/sub/w.safetensors"]


async def test_a_peer_found_later_resumes_what_a_slow_origin_began(
    city: City, origin: tuple[Origin, str]
) -> None:
    served, _ = origin
    artifact = an_artifact(origin)
    holder = await city.holder("ams-1", artifact)
    asked: list[PeerSource] = []
    served.trickles_after = [2_000_000]
    served.on_trickle = lambda: asked.append(holder)
    await fetched(city.node("ams-2", holders=asked), artifact)
    assert served.ranges == []


async def test_an_unreachable_or_busy_peer_costs_little_time(
    city: City, origin: tuple[Origin, str]
) -> None:
    artifact = an_artifact(origin)
    down = PeerSource(node_id=NodeId("fra-1"), pop=PopId("fra"), address="http://127.0.0.1:9")
    busy = await city.hostile("sin-1", busy_for_ever)
    began = time.monotonic()
    await fetched(city.node("ams-1", down, busy), artifact)
    # The node waits neither for its recovery nor for the end of its exclusion.
    assert time.monotonic() - began < PATIENT.stall_s / 2


async def test_the_bandwidth_is_limited_in_both_directions(
    city: City, origin: tuple[Origin, str]
) -> None:
    artifact = an_artifact(origin)
    held = city.node("ams-9")
    await fetched(held, artifact)
    free = await city.serving("ams-9", held)
    capped = await city.serving("ams-8", held, upload_bytes_per_s=1_500_000.0)
    # Three megabytes; the burst is one second's worth, so about one second of waiting remains.
    for name, peer, rate in (("fra-1", capped, 0.0), ("fra-2", free, 1_500_000.0)):
        began = time.monotonic()
        await fetched(city.node(name, peer, download_bytes_per_s=rate), artifact)
        assert time.monotonic() - began > 0.9, name


async def test_with_tls_only_nodes_of_the_cluster_get_artifacts(
    city: City, origin: tuple[Origin, str], tmp_path: Path
) -> None:
    artifact = an_artifact(origin)
    ours = Authority.create(tmp_path / "ours", "ours", NOW)
    theirs = Authority.create(tmp_path / "theirs", "theirs", NOW)
    held = city.node("ams-9")
    await fetched(held, artifact)
    context = tls.node_server_context(a_peer(ours, "ams-9", PeerRole.AGENT))
    peer = await city.serving("ams-9", held, context=context)
    stranger = tls.client_context(a_peer(theirs, "ams-1", PeerRole.AGENT))
    empty(origin)
    with pytest.raises(ArtifactError, match="answered 404"):
        await city.node("ams-1", peer, context=stranger).ensure(artifact, tuple, lambda size: None)
    member = tls.client_context(a_peer(ours, "ams-1", PeerRole.AGENT))
    await fetched(city.node("ams-1", peer, context=member), artifact)


async def test_a_complete_file_is_not_fetched_again(city: City, origin: tuple[Origin, str]) -> None:
    artifact = an_artifact(origin)
    asked: list[str] = []

    async def counting(request: web.Request) -> web.StreamResponse:
        asked.append(request.match_info["path"])
        return web.Response(body=FILES[request.match_info["path"]])

    partial = city.folder / "ams-1" / f"{artifact.digest}.partial" / "sub"
    partial.mkdir(parents=True)
    (partial / "w.safetensors").write_bytes(BODY)
    peer = await city.hostile("ams-9", counting)
    await fetched(city.node("ams-1", peer), artifact)
    assert asked == ["config.json"]


async def test_a_peer_is_not_excluded_for_bytes_of_an_earlier_run(
    city: City, origin: tuple[Origin, str]
) -> None:
    artifact = an_artifact(origin)
    honest = await city.holder("ams-9", artifact)
    empty(origin)
    partial = city.folder / "ams-1" / f"{artifact.digest}.partial" / "sub"
    partial.mkdir(parents=True)
    (partial / "w.safetensors").write_bytes(BODY[:1000] + bytes(1000))
    await fetched(city.node("ams-1", honest), artifact)


async def test_a_full_disk_is_not_counted_against_the_peer(
    city: City, origin: tuple[Origin, str]
) -> None:
    """Once there is space, the same peer is used again instead of the origin."""
    artifact = an_artifact(origin)
    peer = await city.holder("ams-1", artifact)
    empty(origin)
    store = city.node("ams-2", peer)
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, allowed[1]))
    try:
        for _ in range(QUICK.tries):
            with pytest.raises(ArtifactError, match="cannot store"):
                await fetched(store, artifact)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    await fetched(store, artifact)
