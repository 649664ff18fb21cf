"""`status` shows a peer whose clock is wrong."""

import logging
import time
from pathlib import Path

import pytest

from isochrone.wire.ids import BootId, Generation, NodeId
from isochrone.wire.peers.report import Pulse
from scheduler.decide.membership import peer_clock
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_control import Agent, dialling, joined
from tests.system.harness import until


async def test_a_node_whose_clock_is_behind_is_shown_until_it_is_right(
    admin: Admin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(peer_clock, "SUSTAINED_S", 0.0)
    identity = await joined(admin, tmp_path)

    async def clocks() -> list[str]:
        shown: list[str] = (await admin.ask("GET", "/v1/status")).body["clocks"]
        return shown

    async with dialling(Agent(admin, identity, "boot-1")) as agent:
        await until("welcome", agent.is_welcome)

        async def pulse(behind_s: float) -> None:
            message = Pulse(
                node_id=NodeId("n1"),
                boot_id=BootId("boot-1"),
                seq=1,
                generation=Generation(0),
                sent_at=time.time() - behind_s,
            )
            assert await agent.link.send(message)

        await pulse(0.0)
        assert await clocks() == []
        with caplog.at_level(logging.WARNING):
            await pulse(600.0)
            await until("it is shown", clocks)
        assert [word for word in await clocks() if "node n1: its clock is 600 s behind" in word]
        assert "the clock of a peer differs" in caplog.text
        await pulse(0.0)

        async def is_right() -> bool:
            return not await clocks()

        await until("it is not shown any more", is_right)
