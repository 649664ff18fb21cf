"""The control listener: which peers may register, and how the others are refused."""

import asyncio
import random
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgpack
import pytest
from aiohttp import web

from isochrone.service.network.control_link import ControlLink, Progress
from isochrone.service.network.http_server import serve_http
from isochrone.service.trust.identity import Identity, IdentityError
from isochrone.service.trust.joining import join
from isochrone.wire import codec
from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation, NodeId
from isochrone.wire.peers.assignment import Assignment
from isochrone.wire.peers.control import (
    PeerRole,
    RefusedCode,
    RegistrationRefused,
    ToAgent,
    ToRouter,
    Welcome,
)
from isochrone.wire.peers.report import Pulse
from scheduler.api.control import peer_frames, peers
from scheduler.api.control.control_socket import CONTROL_FRAME_PAUSE_S, REGISTER_BYTES_MAX
from scheduler.api.control.join import READING_PER_NETWORK_MAX
from scheduler.api.control.peers import AGENT_MESSAGES_PER_S
from scheduler.decide.membership.message_rate_limit import BURST_S
from tests.builders import a_report
from tests.integration.admin.conftest import Admin
from tests.system.harness import until

UNREGISTERED_MAX = 20


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"unregistered_peers_per_network_max": UNREGISTERED_MAX}


async def joined(
    admin: Admin, folder: Path, name: str = "n1", role: PeerRole = PeerRole.AGENT
) -> Identity:
    await admin.pop()
    wanted = {"pop": "ams", "role": role.value}
    token = (await admin.ask("POST", "/v1/join-tokens", wanted)).body["token"]
    return await join(urls=[admin.control_url], token=token, role=role, name=name, folder=folder)


class Agent:
    """A node agent's end of the control connection, and the messages it received."""

    def __init__(
        self,
        admin: Admin,
        identity: Identity,
        boot: str,
        folder: Path | None = None,
        **fields: Any,
    ) -> None:
        self.assignments: list[Assignment] = []
        self.welcomes: list[Welcome] = []
        self.link = ControlLink(
            urls=[*fields.get("first_urls", ()), fields.get("url", admin.control_url)],
            identity=identity,
            boot_id=BootId(boot),
            incoming=ToAgent if identity.role is PeerRole.AGENT else ToRouter,
            progress=lambda: Progress(
                fields.get("cluster_id", identity.cluster_id),
                Generation(fields.get("generation", 0)),
                Epoch(fields.get("epoch", 0)),
            ),
            on_welcome=self._welcomed,
            on_message=self._told,
            rng=random.Random(1),
            folder=folder,
        )

    async def _welcomed(self, welcome: Welcome) -> None:
        self.welcomes.append(welcome)

    async def _told(self, message: object) -> None:
        if isinstance(message, Assignment):
            self.assignments.append(message)

    async def is_welcome(self) -> bool:
        return bool(self.welcomes)

    async def is_welcome_again(self) -> bool:
        return len(self.welcomes) > 1

    async def is_refused(self) -> bool:
        return bool(self.link.last_refusal)

    async def is_told(self) -> bool:
        return bool(self.assignments)


@asynccontextmanager
async def dialling(agent: Agent) -> AsyncIterator[Agent]:
    task = asyncio.create_task(agent.link.run())
    try:
        yield agent
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_token_joins_once_and_a_replay_is_refused(admin: Admin, tmp_path: Path) -> None:
    await admin.pop()
    token = (await admin.ask("POST", "/v1/join-tokens", {"pop": "ams"})).body["token"]
    urls = [admin.control_url]
    identity = await join(
        urls=urls, token=token, role=PeerRole.AGENT, name="n1", folder=tmp_path / "a"
    )
    assert identity.pop == "ams"
    assert (tmp_path / "a" / "identity.json").stat().st_mode & 0o777 == 0o600
    for name, text in (("n2", token), ("n3", token[:-3] + "xyz"), ("n4", "ij1_nonsense")):
        with pytest.raises(IdentityError, match="cannot join"):
            await join(
                urls=urls, token=text, role=PeerRole.AGENT, name=name, folder=tmp_path / name
            )
    nodes = (await admin.ask("GET", "/v1/nodes")).body["data"]
    assert [node["node_id"] for node in nodes] == ["n1"]


async def test_no_token_is_used_if_the_identity_cannot_be_stored(
    admin: Admin, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match="cannot join: no identity can be stored in"):
        await joined(admin, tmp_path / "file")
    tokens = (await admin.ask("GET", "/v1/join-tokens")).body["data"]
    assert [token["uses"] for token in tokens] == [0]


async def test_a_node_that_reports_too_fast_is_read_at_the_message_rate_limit(
    admin: Admin, tmp_path: Path
) -> None:
    identity = await joined(admin, tmp_path)
    taken = re.compile(r'^isochrone_scheduler_reports_total\{kind="(\w+)"\} (\S+)', re.M)

    async def reports() -> float:
        page = (await admin.ask("GET", "/metrics")).body
        return sum(float(count) for _, count in taken.findall(page))

    before = await reports()
    async with dialling(Agent(admin, identity, "b1")) as agent, asyncio.timeout(30):
        await until("it is welcome", agent.is_welcome, 5.0)
        began = time.monotonic()
        sent = 0
        while sent < 1000:
            sent += await agent.link.send(a_report(seq=sent, boot_id=BootId("b1")))
        await asyncio.sleep(1.0)
        read = await reports() - before
        may = AGENT_MESSAGES_PER_S * (BURST_S + time.monotonic() - began)
    assert may - 20 < read <= may + 1


async def test_a_node_reports_only_for_itself_and_gets_its_assignment(
    admin: Admin, tmp_path: Path
) -> None:
    identity = await joined(admin, tmp_path)
    async with dialling(Agent(admin, identity, "boot-1")) as agent:
        await until("welcome", agent.is_welcome)
        assert await agent.link.send(a_report("n1", 1))

        await until("an assignment", agent.is_told)
        assert agent.assignments[0].node_id == "n1"
        assert await agent.link.send(a_report("somebody-else", 2))
        await until("refused", agent.is_refused)
        assert "cannot report for somebody-else" in agent.link.last_refusal
    events = (await admin.ask("GET", "/v1/events")).body["data"]
    assert "node.impostor" in {event["kind"] for event in events}
    node = (await admin.ask("GET", "/v1/nodes/n1")).body
    assert [device["device_id"] for device in node["devices"]] == ["cpu"]


@pytest.mark.parametrize("role", PeerRole)
async def test_a_second_machine_under_the_same_name_is_refused(
    role: PeerRole, admin: Admin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two that are accepted in turn would disconnect each other without end."""
    identity = await joined(admin, tmp_path, role=role)
    async with dialling(Agent(admin, identity, "boot-1")) as first:
        await until("welcome", first.is_welcome)
        async with dialling(Agent(admin, identity, "boot-2")) as twin:
            await until("the twin is refused", twin.is_refused)
            assert "is this disk cloned?" in twin.link.last_refusal
            assert first.link.connected
            assert not twin.welcomes
    said = [record.__dict__.get("fields", {}).get("reason") for record in caplog.records]
    assert said.count("another machine has the identity of n1") == 1


async def test_a_machine_takes_over_from_one_of_its_name_that_is_silent(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that crashed is started from a copy: its old connection may look alive for long."""
    monkeypatch.setattr("scheduler.api.control.peers.ALIVE_S", dict.fromkeys(PeerRole, 0.0))
    identity = await joined(admin, tmp_path, role=PeerRole.ROUTER)
    async with dialling(Agent(admin, identity, "boot-1")) as first:
        await until("welcome", first.is_welcome)
        async with dialling(Agent(admin, identity, "boot-2")) as second:
            await until("the second is welcome", second.is_welcome)
            await until("the first is refused", first.is_refused)
            assert "is this disk cloned?" in first.link.last_refusal


async def test_a_peer_of_another_cluster_goes_on_without_this_scheduler(
    admin: Admin, tmp_path: Path
) -> None:
    identity = await joined(admin, tmp_path)
    stranger = Agent(admin, identity, "boot-1", cluster_id=ClusterId("other"))
    async with dialling(stranger) as agent:
        await until("it refuses", agent.is_refused)
        assert "going on as before" in agent.link.last_refusal
        assert not agent.assignments


async def test_a_peer_with_higher_counters_raises_the_stores(admin: Admin, tmp_path: Path) -> None:
    identity = await joined(admin, tmp_path)
    async with dialling(Agent(admin, identity, "b", generation=5_000, epoch=77)) as agent:
        await until("welcome", agent.is_welcome)
        assert agent.welcomes[0].epoch > 77
        await agent.link.send(a_report("n1", 1, boot_id=BootId("b")))

        await until("an assignment", agent.is_told)
        assert agent.assignments[0].generation > 5_000
        assert agent.assignments[0].epoch > 77


async def test_a_node_whose_registration_the_store_has_lost_registers_again(
    admin: Admin, tmp_path: Path, database_dsn: str
) -> None:
    identity = await joined(admin, tmp_path)
    async with dialling(Agent(admin, identity, "boot-2")) as agent:
        await until("welcome", agent.is_welcome)
        connection = await asyncpg.connect(database_dsn)
        # As in a backup, or after a crash of the database that lost the last commits.
        await connection.execute("UPDATE node SET boot_id = 'boot-1', report_seq = 4")
        await connection.close()
        await agent.link.send(a_report("n1", 9, boot_id=BootId("boot-2")))
        await until("it has registered again", agent.is_welcome_again)
        await agent.link.send(a_report("n1", 10, boot_id=BootId("boot-2")))
        await until("its report is stored", agent.is_told)


async def test_a_scheduler_that_hangs_does_not_keep_a_peer_from_the_other(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel accepts connections, and nothing answers on them."""
    for limit in ("CONNECT_TIMEOUT_S", "HANDSHAKE_TIMEOUT_S"):
        monkeypatch.setattr(f"isochrone.service.network.control_link.{limit}", 1.0)
    identity = await joined(admin, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        urls = [f"http://127.0.0.1:{hanging.getsockname()[1]}"]
        async with dialling(Agent(admin, identity, "boot-1", first_urls=urls)) as agent:
            await until("the other scheduler welcomes it", agent.is_welcome)


async def test_a_revoked_node_is_refused(admin: Admin, tmp_path: Path) -> None:
    identity = await joined(admin, tmp_path)
    assert (await admin.ask("POST", "/v1/nodes/n1/revoke")).status == 200
    async with dialling(Agent(admin, identity, "boot-1")) as agent:
        await until("refused", agent.is_refused)
        assert "revoked" in agent.link.last_refusal


REGISTER = {
    **{"type": "register", "protocol": 1, "role": "agent", "name": "n1", "pop": "ams"},
    **{"boot_id": "b", "certificate_pem": "x", "signature": b"", "cluster_id": ""},
    **{"generation": 0, "epoch": 0},
}
PULSE = Pulse(node_id=NodeId("n1"), boot_id=BootId("b"), seq=1, generation=Generation(1))
STRANGE = {
    "empty": b"",
    "reserved": b"\xc1",
    "deep": b"\x91" * 60_000,
    "type": msgpack.packb({"type": "report", "node_id": 7}),
    "unregistered": codec.encode(PULSE),
    "protocol": msgpack.packb({**REGISTER, "protocol": 99}),
    "certificate": msgpack.packb(REGISTER),
}


async def test_an_unknown_client_is_refused_with_a_reason_and_disconnected(admin: Admin) -> None:
    reader = codec.decoder(ToAgent)
    for name, frame in STRANGE.items():
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(f"{admin.control_url}/v1/agent") as socket,
        ):
            await socket.receive_bytes(timeout=5)  # the challenge
            await socket.send_bytes(frame)
            refused = codec.decode(await socket.receive_bytes(timeout=5), reader)
            assert isinstance(refused, RegistrationRefused), name
            assert refused.reason
            assert (await socket.receive(timeout=5)).type in (
                aiohttp.WSMsgType.CLOSE,
                aiohttp.WSMsgType.CLOSED,
            )
    assert (await admin.ask("GET", "/v1/status")).status == 200


async def test_a_peer_above_the_limit_is_told_so_before_it_is_verified(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS_MAX", 0)
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{admin.control_url}/v1/agent") as socket,
    ):
        refused = codec.decode(await socket.receive_bytes(timeout=5), codec.decoder(ToAgent))
        assert isinstance(refused, RegistrationRefused)
        assert (refused.code, refused.reason) == (RefusedCode.BUSY, "0 peers are connected")


async def test_the_only_scheduler_is_tried_again_when_it_says(admin: Admin, tmp_path: Path) -> None:
    """A standby without another scheduler may act at any moment."""
    identity, dials = await joined(admin, tmp_path), count(1)
    refused = RegistrationRefused(
        code=RefusedCode.NOT_ACTING, reason="not acting", retry_after_s=0.05
    )
    asked_often = asyncio.Event()

    async def refuse(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(codec.encode(refused))
        if next(dials) == 10:
            asked_often.set()
        return socket

    app = web.Application()
    app.router.add_get("/v1/agent", refuse)
    async with serve_http(app, "127.0.0.1", 0) as port:
        agent = Agent(admin, identity, "b1", url=f"http://127.0.0.1:{port}")
        async with dialling(agent), asyncio.timeout(10.0):
            await asked_often.wait()


async def test_unverified_clients_take_no_places_in_the_registration_queue(
    admin: Admin, tmp_path: Path
) -> None:
    """Otherwise any client could make all peers wait."""
    identity, reader = await joined(admin, tmp_path), codec.decoder(ToAgent)
    async with aiohttp.ClientSession() as http:
        at_once = asyncio.Semaphore(UNREGISTERED_MAX // 2)

        async def forge(number: int) -> RegistrationRefused:
            async with at_once, http.ws_connect(f"{admin.control_url}/v1/agent") as socket:
                await socket.receive_bytes(timeout=5)
                await socket.send_bytes(msgpack.packb({**REGISTER, "name": f"no-{number}"}))
                refused: RegistrationRefused = codec.decode(
                    await socket.receive_bytes(timeout=5), reader
                )
                return refused

        answers = await asyncio.gather(*(forge(number) for number in range(300)))
    assert {refused.code for refused in answers} == {RefusedCode.IDENTITY}
    async with dialling(Agent(admin, identity, "b1")) as agent:
        await until("welcome", agent.is_welcome, 10.0)
    assert not agent.link.last_refusal, "at once"


async def test_an_unverified_clients_frame_is_neither_decompressed_nor_decoded(
    admin: Admin,
) -> None:
    """16 KB could decompress to a report of 16 MB: a second of the scheduler's time."""
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{admin.control_url}/v1/agent", compress=15) as socket,
    ):
        assert not socket.compress
        await socket.receive_bytes(timeout=5)
        frame = codec.encode(a_report(artifacts=("f" * 64,) * 2_000))
        await socket.send_bytes(frame)
        assert (await socket.receive(timeout=5)).data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_a_strangers_pings_are_answered_with_pauses(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answered at once, those of one read would keep the scheduler from all else for a second."""
    monkeypatch.setattr(peer_frames, "REGISTER_TIMEOUT_S", 1.0)
    pongs = 0
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{admin.control_url}/v1/agent", autoping=False) as socket,
    ):
        await socket.receive_bytes(timeout=5)
        for _ in range(5_000):
            await socket.ping()
        while (await socket.receive(timeout=20)).type is aiohttp.WSMsgType.PONG:
            pongs += 1
    assert 1 <= pongs <= 1 / CONTROL_FRAME_PAUSE_S + 1


async def test_a_registered_peer_may_send_larger_messages_than_a_stranger(
    admin: Admin, tmp_path: Path
) -> None:
    identity = await joined(admin, tmp_path)
    async with dialling(Agent(admin, identity, "boot-1")) as agent:
        await until("welcome", agent.is_welcome, 10.0)
        report = a_report(artifacts=tuple(f"{number:064}" for number in range(2_000)))
        assert len(codec.encode(report)) > REGISTER_BYTES_MAX
        assert await agent.link.send(report)
        await until("an assignment, which only a stored report gets", agent.is_told, 10.0)


async def test_strangers_take_no_more_than_their_networks_share_and_are_cut_off(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_frames, "REGISTER_TIMEOUT_S", 1.0)
    identity = await joined(admin, tmp_path)
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        silent = [
            await stack.enter_async_context(http.ws_connect(f"{admin.control_url}/v1/agent"))
            for _ in range(UNREGISTERED_MAX)
        ]
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(f"{admin.control_url}/v1/agent")
        assert refused.value.status == 503
        assert "retry-after" in (refused.value.headers or {})
        for socket in silent:
            assert (await socket.receive(timeout=5)).type is aiohttp.WSMsgType.BINARY
            reply = codec.decode(await socket.receive_bytes(timeout=5), codec.decoder(ToAgent))
            assert isinstance(reply, RegistrationRefused)
            assert "no registration" in reply.reason
    async with dialling(Agent(admin, identity, "b1")) as agent:
        await until("welcome", agent.is_welcome, 10.0)


async def test_unfinished_joins_take_no_more_than_their_networks_share(
    admin: Admin, tmp_path: Path
) -> None:
    port = int(admin.control_url.rpartition(":")[2])
    head = b"POST /v1/join HTTP/1.1\r\nHost: scheduler\r\nContent-Length: 9000\r\n\r\n"
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:

        async def sends(body: bytes) -> socket.socket:
            opened = stack.enter_context(socket.socket())
            opened.setblocking(False)
            await loop.sock_connect(opened, ("127.0.0.1", port))
            await loop.sock_sendall(opened, head + body)
            return opened

        for _ in range(READING_PER_NETWORK_MAX):
            await sends(b"{")

        async def is_refused() -> bool:
            return b" 429 " in await loop.sock_recv(await sends(bytes(9_000)), 100)

        await until("a further one is refused", is_refused)

    async def may_join() -> bool:
        with suppress(IdentityError):
            return bool(await joined(admin, tmp_path))
        return False

    await until("the next one joins", may_join)


async def test_a_frame_over_the_limit_closes_the_connection(admin: Admin) -> None:
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{admin.control_url}/v1/agent") as socket,
    ):
        await socket.receive_bytes(timeout=5)
        with suppress(ConnectionError):
            await socket.send_bytes(b"\0" * (codec.FRAME_BYTES_MAX + 1))
        assert (await socket.receive(timeout=5)).type is not aiohttp.WSMsgType.BINARY
    assert (await admin.ask("GET", "/v1/status")).status == 200
