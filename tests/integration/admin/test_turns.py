"""Peers that connect while others are not served yet wait on their connections for their turn."""

import re
from pathlib import Path

import aiohttp
import pytest

from isochrone.service.trust import identity as identities
from isochrone.service.trust.identity import Identity
from isochrone.wire import codec
from isochrone.wire.ids import BootId, Epoch, Generation
from isochrone.wire.peers.control import (
    Challenge,
    RefusedCode,
    Register,
    RegistrationRefused,
    ToAgent,
    Welcome,
    register_payload,
)
from scheduler.decide.membership import connection_admission
from tests.builders import a_report
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_control import Agent, dialling, joined
from tests.system.harness import until

READER = codec.decoder(ToAgent)
WAITING = re.compile(r"^isochrone_scheduler_peers_waiting (\S+)", re.M)


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_admission, "UNSERVED_MAX", 1)


async def register(socket: aiohttp.ClientWebSocketResponse, identity: Identity) -> None:
    """Answer the challenge as an agent does."""
    challenge = codec.decode(await socket.receive_bytes(timeout=5), READER)
    assert isinstance(challenge, Challenge)
    payload = register_payload(
        cluster_id=identity.cluster_id,
        nonce=challenge.nonce,
        name=identity.name,
        boot_id=BootId("b1"),
    )
    answer = Register(
        protocol=codec.PROTOCOL,
        role=identity.role,
        name=identity.name,
        pop=identity.pop,
        boot_id=BootId("b1"),
        certificate_pem=identity.certificate_pem,
        signature=identities.sign(identity.key_pem, payload),
        cluster_id=identity.cluster_id,
        generation=Generation(0),
        epoch=Epoch(0),
    )
    await socket.send_bytes(codec.encode(answer))


async def until_waiting(admin: Admin, count: int) -> None:
    async def as_many_wait() -> bool:
        found = WAITING.search((await admin.ask("GET", "/metrics")).body)
        return found is not None and float(found.group(1)) == count

    await until(f"{count} wait", as_many_wait, 5.0)


async def test_a_peer_registers_once_the_one_before_it_is_served(
    admin: Admin, tmp_path: Path
) -> None:
    first, second = [
        Agent(admin, await joined(admin, tmp_path / name, name), "b1") for name in ("n1", "n2")
    ]
    async with dialling(first):
        await until("the first is welcome", first.is_welcome, 5.0)
        async with dialling(second):
            await until_waiting(admin, 1)
            assert not second.welcomes
            assert await first.link.send(a_report("n1", 1, boot_id=BootId("b1")))
            await until("the second is welcome", second.is_welcome, 5.0)
            assert not second.link.last_refusal
    await until_waiting(admin, 0)


async def test_a_waiting_peer_answers_pings_and_may_leave_or_come_again(
    admin: Admin, tmp_path: Path
) -> None:
    first = Agent(admin, await joined(admin, tmp_path / "n1", "n1"), "b1")
    second = await joined(admin, tmp_path / "n2", "n2")
    url = f"{admin.control_url}/v1/agent"
    async with aiohttp.ClientSession() as http, dialling(first):
        await until("the first is welcome", first.is_welcome, 5.0)
        async with http.ws_connect(url, autoping=False) as socket:
            await register(socket, second)
            await until_waiting(admin, 1)
            await socket.ping(b"alive?")
            assert (await socket.receive(timeout=5)).type is aiohttp.WSMsgType.PONG
        await until_waiting(admin, 0)

        async with http.ws_connect(url) as old, http.ws_connect(url) as new:
            await register(old, second)
            await until_waiting(admin, 1)
            await register(new, second)
            refused = codec.decode(await old.receive_bytes(timeout=5), READER)
            assert isinstance(refused, RegistrationRefused)
            assert refused.code is RefusedCode.DUPLICATE
            assert await first.link.send(a_report("n1", 1, boot_id=BootId("b1")))
            assert isinstance(codec.decode(await new.receive_bytes(timeout=5), READER), Welcome)


async def test_a_waiting_peer_that_sends_more_is_refused(admin: Admin, tmp_path: Path) -> None:
    first = Agent(admin, await joined(admin, tmp_path / "n1", "n1"), "b1")
    second = await joined(admin, tmp_path / "n2", "n2")
    async with aiohttp.ClientSession() as http, dialling(first):
        await until("the first is welcome", first.is_welcome, 5.0)
        async with http.ws_connect(f"{admin.control_url}/v1/agent") as socket:
            await register(socket, second)
            await socket.send_bytes(codec.encode(a_report("n2", 1)))
            refused = codec.decode(await socket.receive_bytes(timeout=5), READER)
            assert isinstance(refused, RegistrationRefused)
            assert refused.code is RefusedCode.MALFORMED
            assert "before the welcome" in refused.reason
    await until_waiting(admin, 0)


async def test_a_peer_that_waits_too_long_is_told_to_come_back(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.api.control.peers.TURN_TIMEOUT_S", 0.1)
    first = Agent(admin, await joined(admin, tmp_path / "n1", "n1"), "b1")
    second = Agent(admin, await joined(admin, tmp_path / "n2", "n2"), "b1")
    async with dialling(first):
        await until("the first is welcome", first.is_welcome, 5.0)
        async with dialling(second):
            await until("the second is refused", second.is_refused, 5.0)
            assert "many peers connect" in second.link.last_refusal
