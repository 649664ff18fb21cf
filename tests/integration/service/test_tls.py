"""TLS between nodes, routers and schedulers: only the cluster's own certificates are accepted."""

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from isochrone.service.files import write_atomic
from isochrone.service.network.control_link import ControlLink, Progress
from isochrone.service.network.http_server import serve_http
from isochrone.service.trust import identity as papers
from isochrone.service.trust import tls
from isochrone.service.trust.identity import Authority, Identity, IdentityError
from isochrone.service.trust.joining import join
from isochrone.service.trust.peer_refusal import refuse_peers
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation, NodeId, PopId, ReplicaId
from isochrone.wire.peers.assignment import RevokedCertificate
from isochrone.wire.peers.control import PeerRole, ToAgent, Welcome
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.decide.requests.handoff import PeerReplicaLost
from scheduler.app import serve
from scheduler.config import SchedulerConfig
from tests.integration.admin.conftest import TOKEN
from tests.ports import free_port
from tests.system.harness import until

NOW = datetime.now(UTC)


def a_peer(
    authority: Authority, name: str, role: PeerRole, pop: str = "ams", now: datetime = NOW
) -> Identity:
    key = papers.new_key_pem()
    certificate = authority.issue(
        papers.make_csr(key, name), role=role, name=name, pop=PopId(pop), now=now
    )
    return Identity(
        name=name,
        role=role,
        pop=PopId(pop),
        cluster_id=ClusterId("c"),
        key_pem=key,
        certificate_pem=certificate,
        ca_pem=authority.ca_pem,
    )


def a_link(
    identity: Identity, urls: list[str], on_welcome: Callable[[Any], Awaitable[None]]
) -> ControlLink:
    async def on_message(message: object) -> None:
        return None

    return ControlLink(
        urls=urls,
        identity=identity,
        boot_id=BootId("b"),
        incoming=ToAgent,
        progress=lambda: Progress(identity.cluster_id, Generation(0), Epoch(0)),
        on_welcome=on_welcome,
        on_message=on_message,
        rng=random.Random(1),
    )


async def test_a_node_serves_only_routers_of_its_cluster(tmp_path: Path) -> None:
    ours = Authority.create(tmp_path / "a", "ours", NOW)
    theirs = Authority.create(tmp_path / "b", "theirs", NOW)
    node = a_peer(ours, "n1", PeerRole.AGENT)

    async def ping(request: web.Request) -> web.Response:
        return web.Response(status=204)

    app = web.Application()
    app.router.add_get("/ping", ping)
    async with (
        serve_http(app, "127.0.0.1", 0, ssl_context=tls.node_server_context(node)) as port,
        aiohttp.ClientSession() as http,
    ):
        url = f"https://127.0.0.1:{port}/ping"
        ours_context = tls.client_context(a_peer(ours, "r1", PeerRole.ROUTER))
        async with http.get(url, ssl=ours_context, server_hostname="n1") as response:
            assert response.status == 204
        strangers = (
            tls.client_context(a_peer(theirs, "r1", PeerRole.ROUTER)),
            tls.verifying_context(ours.ca_pem),
        )
        for context in strangers:
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                async with http.get(url, ssl=context, server_hostname="n1") as response:
                    pytest.fail("a stranger was let in")


async def test_a_node_sends_no_prompt_to_a_node_of_another_cluster(tmp_path: Path) -> None:
    """Whatever a router says: the prompt is read elsewhere."""
    ours = Authority.create(tmp_path / "a", "ours", NOW)
    theirs = Authority.create(tmp_path / "b", "theirs", NOW)
    served: list[str] = []

    async def serve_any(request: web.Request) -> web.Response:
        served.append(request.path)
        return web.Response(status=204)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve_any)
    context = tls.node_server_context(a_peer(theirs, "n2", PeerRole.AGENT))
    async with serve_http(app, "127.0.0.1", 0, ssl_context=context) as port:
        node = tls.client_context(a_peer(ours, "n1", PeerRole.AGENT))
        peers = PeerReplicaClient(node, time.monotonic)
        peer = PeerReplica(ReplicaId("r2"), NodeId("n2"), f"127.0.0.1:{port}", 200, 20, 100)
        try:
            assert await peers.queued_tokens([peer], 5.0) == {}
            with pytest.raises(PeerReplicaLost, match="Certificate"):
                async with peers.relay(peer, "/v1/completions", b"{}", {}):
                    pytest.fail("a stranger got the prompt")
        finally:
            await peers.close()
    assert not served


async def test_a_node_refuses_a_revoked_certificate_on_an_open_connection_too(
    tmp_path: Path,
) -> None:
    authority = Authority.create(tmp_path / "a", "ours", NOW)
    node = a_peer(authority, "n1", PeerRole.AGENT)
    old, other = (a_peer(authority, name, PeerRole.ROUTER) for name in ("r1", "r2"))
    again = a_peer(authority, "r1", PeerRole.ROUTER)
    revoked: list[RevokedCertificate] = []

    async def ping(request: web.Request) -> web.Response:
        return web.Response(status=204)

    app = web.Application(middlewares=[refuse_peers(PopId("ams"), lambda: revoked)])
    app.router.add_get("/ping", ping)
    async with serve_http(app, "127.0.0.1", 0, ssl_context=tls.node_server_context(node)) as port:

        async def asks(http: aiohttp.ClientSession, identity: Identity) -> tuple[int, str]:
            url = f"https://127.0.0.1:{port}/ping"
            context = tls.client_context(identity)
            async with http.get(url, ssl=context, server_hostname="n1") as answer:
                return answer.status, answer.headers.get(headers.REFUSED, "")

        async with aiohttp.ClientSession() as http:
            context = tls.client_context(old)
            url = f"https://127.0.0.1:{port}/ping"
            async with http.get(url, ssl=context, server_hostname="n1") as answer:
                assert answer.status == 204
            serial = papers.read_certificate(old.certificate_pem).serial
            revoked.append(
                RevokedCertificate(role="router", name="r1", serial=serial, at=NOW.timestamp())
            )
            # On the connection that is already open.
            async with http.get(url, ssl=context, server_hostname="n1") as answer:
                assert (answer.status, answer.headers[headers.REFUSED]) == (403, "revoked")
            assert await asks(http, old) == (403, "revoked")
            assert await asks(http, again) == (204, "")
            # By name: every certificate issued before, and no other name's.
            revoked.append(RevokedCertificate(role="router", name="r1", at=NOW.timestamp() + 1))
            assert await asks(http, again) == (403, "revoked")
            assert await asks(http, other) == (204, "")
            revoked[:] = [RevokedCertificate(role="agent", name="r1", at=NOW.timestamp() + 1)]
            assert await asks(http, again) == (204, "")


async def test_a_node_of_another_pop_only_fetches_artifacts(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "a", "ours", NOW)
    node = a_peer(authority, "n1", PeerRole.AGENT)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=204)

    app = web.Application(middlewares=[refuse_peers(PopId("ams"), tuple)])
    app.router.add_route("*", "/{path:.*}", answer)
    callers = {
        "near": a_peer(authority, "n2", PeerRole.AGENT),
        "far": a_peer(authority, "n3", PeerRole.AGENT, "iad"),
        "router": a_peer(authority, "r1", PeerRole.ROUTER, "iad"),
    }
    served: set[tuple[str, str]] = set()
    paths = ("/v1/artifacts/a/b", "/ping", "/v1/chat/completions", "/loads", "/kv/blocks")
    async with (
        serve_http(app, "127.0.0.1", 0, ssl_context=tls.node_server_context(node)) as port,
        aiohttp.ClientSession() as http,
    ):
        for name, caller in callers.items():
            context = tls.client_context(caller)
            for path in paths:
                url = f"https://127.0.0.1:{port}{path}"
                async with http.post(url, ssl=context, server_hostname="n1") as response:
                    if response.status == 204:
                        served.add((name, path))
                    else:
                        assert response.status == 403
                        assert response.headers[headers.REFUSED] == "foreign_node"
    assert served == {
        *((name, path) for name in ("near", "router") for path in paths),
        *(("far", path) for path in paths[:2]),
    }


async def test_a_peer_whose_clock_is_behind_trusts_a_scheduler_that_has_just_started(
    tmp_path: Path,
) -> None:
    authority = Authority.create(tmp_path / "a", "ours", NOW - timedelta(days=1))

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=204)

    app = web.Application()
    app.router.add_get("/v1/agent", answer)
    ahead = tls.control_server_context(authority, NOW + timedelta(minutes=10))
    async with (
        serve_http(app, "127.0.0.1", 0, ssl_context=ahead) as port,
        aiohttp.ClientSession() as http,
        http.get(
            f"https://127.0.0.1:{port}/v1/agent",
            ssl=tls.client_context(a_peer(authority, "n1", PeerRole.AGENT)),
            server_hostname=papers.SCHEDULER_NAME,
        ) as response,
    ):
        assert response.status == 204


@pytest.mark.parametrize("who_is_behind", ["router", "node"])
async def test_a_clock_that_is_a_day_behind_trusts_a_peer_that_has_just_joined(
    tmp_path: Path, who_is_behind: str
) -> None:
    """In a cluster that has just been made. Beyond five minutes it trusted none."""
    tomorrow = NOW + timedelta(days=1)
    authority = Authority.create(tmp_path / "a", "ours", tomorrow)
    node = a_peer(authority, "n1", PeerRole.AGENT, now=tomorrow)
    router = a_peer(authority, "r1", PeerRole.ROUTER, now=tomorrow)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=204)

    app = web.Application()
    app.router.add_get("/ping", answer)
    server, client = tls.node_server_context(node), tls.client_context(router)
    # This process is behind. So the other one of the two verifies nothing.
    if who_is_behind == "router":
        server.verify_mode = ssl.CERT_NONE
    else:
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    async with (
        serve_http(app, "127.0.0.1", 0, ssl_context=server) as port,
        aiohttp.ClientSession() as http,
        http.get(f"https://127.0.0.1:{port}/ping", ssl=client, server_hostname="n1") as response,
    ):
        assert response.status == 204


async def test_a_node_cannot_pass_for_a_scheduler(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "a", "ours", NOW)
    node, router = a_peer(authority, "n1", PeerRole.AGENT), a_peer(authority, "r1", PeerRole.ROUTER)
    asked: list[str] = []

    async def never(welcome: Welcome) -> None:
        pytest.fail("it was believed")

    async def lure(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text=authority.ca_pem)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", lure)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "n1.pem").write_text(node.key_pem + node.certificate_pem)
    context.load_cert_chain(tmp_path / "n1.pem")
    async with serve_http(app, "127.0.0.1", 0, ssl_context=context) as port:
        urls = [f"https://127.0.0.1:{port}"]
        token = papers.format_join_token(authority.fingerprint, "abcdefghijkl", "S" * 43)
        with pytest.raises(IdentityError, match="_scheduler"):
            await join(urls=urls, token=token, role=PeerRole.AGENT, name="n2", folder=tmp_path)
        link = a_link(router, urls, never)
        dialling = asyncio.create_task(link.run())

        async def is_refused() -> bool:
            return bool(link.last_refusal)

        await until("it turns away", is_refused, 10.0)
        dialling.cancel()
        with suppress(asyncio.CancelledError):
            await dialling
    assert "_scheduler" in link.last_refusal
    assert set(asked) == {"/v1/ca"}, "only the unauthenticated request for the authority is sent"


@pytest.mark.parametrize(("has_tls", "advice"), [(True, "with https:"), (False, "with http:")])
async def test_a_url_of_the_wrong_scheme_is_named(
    has_tls: bool, advice: str, tmp_path: Path
) -> None:
    authority = Authority.create(tmp_path / "a", "ours", NOW)
    context = tls.control_server_context(authority, NOW) if has_tls else None
    async with serve_http(web.Application(), "127.0.0.1", 0, ssl_context=context) as port:
        urls = [f"{'http' if has_tls else 'https'}://127.0.0.1:{port}"]
        token = papers.format_join_token(authority.fingerprint, "abcdefghijkl", "S" * 43)
        with pytest.raises(IdentityError, match=advice):
            await join(urls=urls, token=token, role=PeerRole.AGENT, name="n2", folder=tmp_path)


async def test_join_and_control_over_tls(database_dsn: str, tmp_path: Path) -> None:
    write_atomic(tmp_path / "token", TOKEN.encode())
    config = SchedulerConfig(
        name="s1",
        database_url=database_dsn,
        authority=tmp_path / "ca",
        admin_token_file=tmp_path / "token",
        admin_port=free_port(),
        control_port=free_port(),
        control_tls=True,
        lease_renew_s=0.2,
    )
    stopping = asyncio.Event()
    running = asyncio.create_task(serve(config, stopping))
    admin = f"http://127.0.0.1:{config.admin_port}"
    urls = [f"https://127.0.0.1:{config.control_port}"]
    welcomes: list[Welcome] = []

    async def on_welcome(welcome: Welcome) -> None:
        welcomes.append(welcome)

    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKEN}"}) as http:

        async def acts() -> bool:
            with suppress(aiohttp.ClientError):
                async with http.get(f"{admin}/v1/status") as response:
                    return bool((await response.json())["acting"])
            return False

        await until("the scheduler acts", acts, 10.0)
        place = {"city": "A", "country": "NL", "latitude": 52.0, "longitude": 4.0}
        async with http.put(f"{admin}/v1/pops/ams", json=place) as response:
            assert response.status == 200
        async with http.post(f"{admin}/v1/join-tokens", json={"pop": "ams"}) as response:
            token = (await response.json())["token"]
    # A token that names another authority is not sent to this server.
    prefix, fingerprint, rest = token.split("_", 2)
    forged = f"{prefix}_{'0' * len(fingerprint)}_{rest}"
    with pytest.raises(IdentityError, match="the authority is not the one"):
        await join(urls=urls, token=forged, role=PeerRole.AGENT, name="n1", folder=tmp_path / "n1")
    identity = await join(
        urls=urls, token=token, role=PeerRole.AGENT, name="n1", folder=tmp_path / "n1"
    )
    link = a_link(identity, urls, on_welcome)
    dialling = asyncio.create_task(link.run())

    async def is_welcome() -> bool:
        return bool(welcomes)

    await until("welcome over TLS", is_welcome, 10.0)
    dialling.cancel()
    with suppress(asyncio.CancelledError):
        await dialling
    stopping.set()
    assert await running == 0
