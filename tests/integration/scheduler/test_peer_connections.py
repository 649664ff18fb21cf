"""Peers that misbehave: one reads nothing, one repeats every message a hundred times."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType, web

from isochrone.service.network.http_server import serve_http
from isochrone.service.trust.identity import Authority
from isochrone.service.trust.tls import control_server_context
from isochrone.wire import codec
from isochrone.wire.ids import BootId, Generation, NodeId, PopId
from isochrone.wire.peers.control import Challenge, PeerRole, RegistrationRefused, Welcome
from isochrone.wire.peers.report import Pulse
from scheduler import listeners, metrics
from scheduler.api.control.certificates import CertificateIssuer
from scheduler.api.control.control_socket import ControlSocket
from scheduler.listeners import control_app
from scheduler.state.peers import heartbeats
from scheduler.state.peers.heartbeats import PULSES_WRITTEN_MAX, PulseBuffer
from scheduler.state.peers.peer_connection import (
    LARGE_FRAME_BYTES,
    QUEUED_MESSAGES_MAX,
    PeerConnection,
)
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.state.peers.relay_tokens import RelayTokens
from scheduler.store.pool import Pool
from tests.integration.scheduler.scheduler_parts import expire_lease, no_nudge, scheduler_parts
from tests.integration.scheduler.test_store import begun
from tests.integration.service.test_tls import NOW, a_link, a_peer
from tests.system.harness import until

TABLE = bytes(14 * 1024 * 1024)
"""More than the buffers of two sockets hold."""

LARGE_FRAMES_AT_ONCE = 2
HEARTBEAT_S = 3.0


class Server:
    """Accepts connections and keeps them by name."""

    def __init__(self) -> None:
        self.peers: dict[str, PeerConnection] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self._large_frame_slots = asyncio.Semaphore(LARGE_FRAMES_AT_ONCE)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Read and ignore messages; send what is queued."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S)
        await socket.prepare(request)
        name = request.query["name"]
        peer = self.peers[name] = PeerConnection(
            socket,
            request.transport,
            role=PeerRole.ROUTER,
            name=name,
            pop=PopId("ams"),
            boot_id=BootId("b"),
            certificate=cast(Any, None),
            large_frame_slots=self._large_frame_slots,
        )
        ended = self.ended[name] = asyncio.Event()
        sender = asyncio.create_task(peer.send_queued())
        try:
            async for _ in socket:
                pass
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            ended.set()
        return socket


@pytest.fixture
async def server_and_url() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    app = web.Application()
    app.router.add_get("/", server.handle)
    async with serve_http(app, "127.0.0.1", 0) as port:
        yield server, f"http://127.0.0.1:{port}/"


async def test_routers_that_read_nothing_are_disconnected_and_the_others_get_their_tables(
    server_and_url: tuple[Server, str],
) -> None:
    server, url = server_and_url
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        names = ["deaf0", "deaf1", "reading"]
        sockets = {
            name: await http.ws_connect(url, params={"name": name}, max_msg_size=0)
            for name in names
        }
        for name in names[:LARGE_FRAMES_AT_ONCE]:
            cast(Any, sockets[name])._response.connection.transport.pause_reading()
        # The two that read nothing take both slots for large frames; the third peer has to wait.
        for name in names:
            server.peers[name].enqueue(TABLE)
        frame = await sockets["reading"].receive()
        assert (frame.type, len(frame.data)) == (WSMsgType.BINARY, len(TABLE))
        for name in names[:LARGE_FRAMES_AT_ONCE]:
            await server.ended[name].wait()
        assert not server.ended["reading"].is_set()


async def test_a_router_that_falls_behind_is_disconnected(
    server_and_url: tuple[Server, str],
) -> None:
    server, url = server_and_url
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        socket = await http.ws_connect(url, params={"name": "slow"}, max_msg_size=0)
        for _ in range(QUEUED_MESSAGES_MAX + 1):
            server.peers["slow"].enqueue(b"delta")
        await server.ended["slow"].wait()
        assert (await socket.receive()).type is not WSMsgType.BINARY


class SlowSocket:
    """A peer's socket that takes a frame only once it is told to."""

    def __init__(self) -> None:
        self.may_take = asyncio.Event()
        self.at_once = self.at_once_max = self.taken = 0

    async def send_bytes(self, frame: bytes) -> None:
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        await self.may_take.wait()
        self.at_once -= 1
        self.taken += 1


async def test_few_large_frames_are_copied_at_once() -> None:
    """aiohttp copies each: those of all peers would take the scheduler's memory."""
    socket, slots = SlowSocket(), asyncio.Semaphore(LARGE_FRAMES_AT_ONCE)
    senders = []
    for number in range(5):
        peer = PeerConnection(
            cast(Any, socket),
            None,
            role=PeerRole.ROUTER,
            name=f"r{number}",
            pop=PopId("ams"),
            boot_id=BootId("b"),
            certificate=cast(Any, None),
            large_frame_slots=slots,
        )
        peer.enqueue(bytes(LARGE_FRAME_BYTES))
        senders.append(asyncio.create_task(peer.send_queued()))
    for _ in range(10):
        await asyncio.sleep(0)
    socket.may_take.set()

    async def are_taken() -> bool:
        return socket.taken == len(senders)

    await until("all frames are taken", are_taken, 10.0)
    assert socket.at_once_max == LARGE_FRAMES_AT_ONCE
    for sender in senders:
        sender.cancel()
    await asyncio.gather(*senders, return_exceptions=True)


class ThreeParts:
    """Stands for a table in parts."""

    def frame(self, index: int) -> bytes | None:
        return b"part" if index < 3 else None


async def test_a_router_that_is_sent_a_table_may_fall_behind_meanwhile(
    server_and_url: tuple[Server, str],
) -> None:
    """Changes are published faster than it can take 264 MiB."""
    server, url = server_and_url
    changes = 2 * QUEUED_MESSAGES_MAX
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        socket = await http.ws_connect(url, params={"name": "r"})
        server.peers["r"].enqueue(ThreeParts())
        for _ in range(changes):
            server.peers["r"].enqueue(b"delta")
        frames = [(await socket.receive()).data for _ in range(3 + changes)]
        assert frames == [b"part"] * 3 + [b"delta"] * changes


async def test_a_message_above_the_limit_is_not_sent_and_the_connection_goes_on(
    server_and_url: tuple[Server, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its receiver would close the connection, and get the same message on the next one."""
    server, url = server_and_url
    monkeypatch.setattr(codec, "FRAME_BYTES_MAX", 1000)
    refused = metrics.FRAMES_REFUSED.labels("frame")
    before = refused._value.get()
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        socket = await http.ws_connect(url, params={"name": "r"})
        for frame in (bytes(1001), b"small"):
            server.peers["r"].enqueue(frame)
        assert (await socket.receive()).data == b"small"
    assert refused._value.get() == before + 1
    (reason,) = (
        record.__dict__["fields"]["reason"]
        for record in caplog.records
        if record.message == "message not sent"
    )
    assert "1001 bytes, the limit is 1000" in reason


def test_a_node_that_pulses_too_often_does_not_displace_other_nodes() -> None:
    buffer = PulseBuffer()
    names = [NodeId(f"n{index}") for index in range(2 * PULSES_WRITTEN_MAX)]
    for name in names:
        pulse = Pulse(node_id=name, boot_id=BootId("b"), seq=1, generation=Generation(1))
        for _ in range(100 if name == names[0] else 1):
            buffer.add(pulse)
    first, second = buffer.take(), buffer.take()
    assert [pulse.node_id for pulse in (*first, *second)] == names
    assert buffer.take() == []


def test_the_pulses_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Postgres hangs they wait; the store learns of the others by their next pulses."""
    monkeypatch.setattr(heartbeats, "PULSES_BUFFERED_MAX", 3)
    buffer = PulseBuffer()
    names = [NodeId(f"n{index}") for index in range(5)]
    for seq, name in enumerate([*names, names[0]]):
        buffer.add(Pulse(node_id=name, boot_id=BootId("b"), seq=seq, generation=Generation(1)))
    # A node that waits already is known by its newest pulse.
    assert [(pulse.node_id, pulse.seq) for pulse in buffer.take()] == [
        (names[0], 5),
        (names[1], 1),
        (names[2], 2),
    ]


class PreviousConnection:
    """A peer's connection before this one. While it is being refused, the new one breaks too."""

    boot_id = BootId("b")

    def __init__(self, peers: PeerRegistry) -> None:
        self._peers = peers

    async def refuse(self, refused: RegistrationRefused) -> None:
        """Abort the new connection and never return."""
        newer = self._peers.by_name[PeerRole.AGENT, "n1"]
        assert newer._transport is not None
        newer._transport.abort()
        await asyncio.Event().wait()


async def test_a_peer_that_is_lost_while_its_previous_connection_is_refused_is_removed(
    pool: Pool, tmp_path: Path
) -> None:
    """Otherwise it would count as connected, and be sent every message, until it came back."""
    await begun(pool)
    await expire_lease(pool)
    scheduler = await scheduler_parts(pool)
    authority = Authority.create(tmp_path, "test", NOW)
    assert (await scheduler.hold_lease.run_once()).acting
    identity = a_peer(authority, "n1", PeerRole.AGENT)
    identity = msgspec.structs.replace(identity, cluster_id=scheduler.database.cluster_id)
    peers = scheduler.state.peers
    peers.by_name[PeerRole.AGENT, "n1"] = cast(Any, PreviousConnection(peers))

    async def welcome(_: Welcome) -> None:
        """Ignore it."""

    async def is_removed() -> bool:
        return peers.closed_count == 1 and len(peers) == 0

    issuer = CertificateIssuer(authority, lifetime_s=3600.0)
    app = control_app(scheduler.database, scheduler.state, issuer, no_nudge)
    async with serve_http(app, "127.0.0.1", 0) as port:
        link = a_link(identity, [f"http://127.0.0.1:{port}"], welcome)
        running = asyncio.create_task(link.run())
        try:
            await until("the connection is removed", is_removed, 5.0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_peer_that_leaves_in_the_instant_of_its_turn_leaves_no_token(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its unfinished registration delay that of others."""
    await begun(pool)
    await expire_lease(pool)
    scheduler = await scheduler_parts(pool)
    authority = Authority.create(tmp_path, "test", NOW)
    assert (await scheduler.hold_lease.run_once()).acting
    identity = a_peer(authority, "n1", PeerRole.AGENT)
    identity = msgspec.structs.replace(identity, cluster_id=scheduler.database.cluster_id)
    left, released = asyncio.Event(), asyncio.Event()
    tokens: list[RelayTokens] = []

    class NotedTokens(RelayTokens):
        def __init__(self) -> None:
            super().__init__()
            tokens.append(self)

    receive_at_server = ControlSocket.receive

    async def receive_and_note(socket: Any, timeout: float | None = None) -> Any:
        message = await receive_at_server(socket, timeout)
        if message.type is WSMsgType.CLOSE:
            left.set()
        return message

    async def wait_turn(role: PeerRole, name: str) -> None:
        await left.wait()

    async def ignore(_: Welcome) -> None:
        raise AssertionError("a peer that left is welcome")

    monkeypatch.setattr(listeners, "RelayTokens", NotedTokens)
    monkeypatch.setattr(ControlSocket, "receive", receive_and_note)
    monkeypatch.setattr(scheduler.state.admission, "wait_turn", wait_turn)
    monkeypatch.setattr(scheduler.state.admission, "release", lambda *_: released.set())
    issuer = CertificateIssuer(authority, lifetime_s=3600.0)
    app = control_app(scheduler.database, scheduler.state, issuer, no_nudge)
    context = control_server_context(authority, NOW)
    async with serve_http(app, "127.0.0.1", 0, ssl_context=context) as port:
        link = a_link(identity, [f"https://127.0.0.1:{port}"], ignore)
        receive_at_peer = link._receive

        async def receive_once(socket: Any) -> Any:
            if not isinstance(message := await receive_at_peer(socket), Challenge):
                return message
            monkeypatch.setattr(link, "_receive", leave)
            return message

        async def leave(socket: Any) -> Any:
            # On a slow line the end of the TLS session takes longer than the registration.
            transport = socket._response.connection.transport
            transport.pause_reading()
            await socket._writer.close()
            try:
                await asyncio.Event().wait()
            finally:
                transport.abort()

        monkeypatch.setattr(link, "_receive", receive_once)
        running = asyncio.create_task(link.run())
        try:
            async with asyncio.timeout(10.0):
                await released.wait()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert len(tokens) == 2
    assert not any(issued._peers for issued in tokens)
    assert len(scheduler.state.peers) == 0
