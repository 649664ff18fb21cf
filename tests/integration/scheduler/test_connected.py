"""Peers that misbehave: one that reads nothing, one that says everything a hundred times."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType, web

from isochrone.service.http_server import serve_http
from isochrone.service.identity import Authority
from isochrone.wire.control import PeerRole, Refused, Welcome
from isochrone.wire.ids import BootId, Generation, NodeId, PopId
from isochrone.wire.report import Pulse
from scheduler.acting import PULSES_WRITTEN_MAX, Acting
from scheduler.app import control_app
from scheduler.connected import OUTBOX_MAX, Connected
from scheduler.loops.hold_lease import HoldLease
from scheduler.store.pool import Pool
from tests.integration.scheduler.test_store import begun
from tests.integration.scheduler.test_trust import an_acting, expire
from tests.integration.service.test_tls import NOW, a_link, a_peer
from tests.system.harness import until

TABLE = bytes(14 * 1024 * 1024)
"""More than two sockets hold between them."""

LARGE_AT_ONCE = 2
HEARTBEAT_S = 3.0


class Door:
    """Takes conversations, and keeps them by name."""

    def __init__(self) -> None:
        self.peers: dict[str, Connected] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Read what a peer says, and send what it is told."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S)
        await socket.prepare(request)
        name = request.query["name"]
        peer = self.peers[name] = Connected(
            socket,
            request.transport,
            role=PeerRole.ROUTER,
            name=name,
            pop=PopId("ams"),
            boot_id=BootId("b"),
            certificate=cast(Any, None),
            large=self._large,
        )
        ended = self.ended[name] = asyncio.Event()
        sender = asyncio.create_task(peer.empty_outbox())
        try:
            async for _ in socket:
                pass
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            ended.set()
        return socket


@pytest.fixture
async def door_and_url() -> AsyncIterator[tuple[Door, str]]:
    door = Door()
    app = web.Application()
    app.router.add_get("/", door.handle)
    async with serve_http(app, "127.0.0.1", 0) as port:
        yield door, f"http://127.0.0.1:{port}/"


async def test_routers_that_read_nothing_are_cut_and_the_others_have_their_tables(
    door_and_url: tuple[Door, str],
) -> None:
    door, url = door_and_url
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        names = ["deaf0", "deaf1", "reading"]
        sockets = {
            name: await http.ws_connect(url, params={"name": name}, max_msg_size=0)
            for name in names
        }
        for name in names[:LARGE_AT_ONCE]:
            cast(Any, sockets[name])._response.connection.transport.pause_reading()
        # Those who read nothing are first in line, and there is no room for a third.
        for name in names:
            door.peers[name].tell(TABLE)
        frame = await sockets["reading"].receive()
        assert (frame.type, len(frame.data)) == (WSMsgType.BINARY, len(TABLE))
        for name in names[:LARGE_AT_ONCE]:
            await door.ended[name].wait()
        assert not door.ended["reading"].is_set()


async def test_a_router_that_falls_behind_is_cut(door_and_url: tuple[Door, str]) -> None:
    door, url = door_and_url
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        socket = await http.ws_connect(url, params={"name": "slow"}, max_msg_size=0)
        for _ in range(OUTBOX_MAX + 1):
            door.peers["slow"].tell(b"delta")
        await door.ended["slow"].wait()
        assert (await socket.receive()).type is not WSMsgType.BINARY


async def test_a_node_that_pulses_a_hundred_times_too_often_takes_no_other_nodes_place(
    pool: Pool,
) -> None:
    await begun(pool)
    acting = await an_acting(pool)
    names = [NodeId(f"n{index}") for index in range(2 * PULSES_WRITTEN_MAX)]
    for name in names:
        pulse = Pulse(node_id=name, boot_id=BootId("b"), seq=1, generation=Generation(1))
        for _ in range(100 if name == names[0] else 1):
            acting.heard_from(name, pulse)
    first, second = acting.take_pulses(), acting.take_pulses()
    assert [pulse.node_id for pulse in (*first, *second)] == names
    assert acting.take_pulses() == []


class Predecessor:
    """A peer's conversation before this one. While it is seen off, the new one breaks too."""

    boot_id = BootId("b")

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def end(self, refused: Refused) -> None:
        successor = self._acting.peers[PeerRole.AGENT, "n1"]
        assert successor._transport is not None
        successor._transport.abort()
        await asyncio.Event().wait()


async def test_a_peer_that_is_lost_while_its_last_conversation_is_ended_is_forgotten(
    pool: Pool, tmp_path: Path
) -> None:
    """Else one that never comes back would count as connected, and be told everything, for ever."""
    await begun(pool)
    await expire(pool)
    acting = await an_acting(pool)
    acting.authority = Authority.create(tmp_path, "test", NOW)
    assert (await HoldLease(acting).run_once()).acting
    identity = a_peer(acting.authority, "n1", PeerRole.AGENT)
    identity = msgspec.structs.replace(identity, cluster_id=acting.cluster_id)
    acting.peers[PeerRole.AGENT, "n1"] = cast(Any, Predecessor(acting))

    async def welcome(_: Welcome) -> None:
        """Nothing is to be done."""

    async def is_forgotten() -> bool:
        return acting.ended == 1 and not acting.peers

    async with serve_http(control_app(acting), "127.0.0.1", 0) as port:
        link = a_link(identity, [f"http://127.0.0.1:{port}"], welcome)
        running = asyncio.create_task(link.run())
        try:
            await until("the conversation is forgotten", is_forgotten, 5.0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
