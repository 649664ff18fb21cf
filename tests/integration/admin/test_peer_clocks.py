"""`status` shows a peer whose clock is wrong."""

import logging
import time
from pathlib import Path

import pytest

from isochrone.wire.ids import BootId, Generation, NodeId, RouterId
from isochrone.wire.peers.report import Pulse
from isochrone.wire.peers.usage import Demand
from scheduler.decide.membership import peer_clock
from tests.integration.admin import test_routers as routers
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_control import Agent, dialling, joined
from tests.system.harness import until


async def shown_clocks(admin: Admin) -> list[str]:
    shown: list[str] = (await admin.ask("GET", "/v1/status")).body["clocks"]
    return shown


async def counted_clocks(admin: Admin, role: str) -> float:
    page: str = (await admin.ask("GET", "/metrics")).body
    name = f'isochrone_scheduler_wrong_clocks{{role="{role}"}} '
    [line] = [line for line in page.splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))


async def test_a_node_whose_clock_is_behind_is_shown_until_it_is_right(
    admin: Admin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(peer_clock, "SUSTAINED_S", 0.0)
    identity = await joined(admin, tmp_path)

    async def clocks() -> list[str]:
        return await shown_clocks(admin)

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
        assert await counted_clocks(admin, "agent") == 0
        with caplog.at_level(logging.WARNING):
            await pulse(600.0)
            await until("it is shown", clocks)
        assert [word for word in await clocks() if "node n1: its clock is 600 s behind" in word]
        assert "the clock of a peer differs" in caplog.text
        assert await counted_clocks(admin, "agent") == 1
        assert await counted_clocks(admin, "router") == 0
        await pulse(0.0)

        async def is_right() -> bool:
            return not await clocks()

        await until("it is not shown any more", is_right)
        assert await counted_clocks(admin, "agent") == 0


async def test_a_router_whose_clock_is_ahead_is_shown_while_it_is_connected(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_clock, "SUSTAINED_S", 0.0)
    async with routers.dialling(admin, tmp_path) as router:
        demand = Demand(
            router_id=RouterId("r"),
            boot_id=BootId("b"),
            seq=1,
            window_s=1.0,
            rows=(),
            sent_at=time.time() + 600.0,
        )
        await router.say(demand)
        [problem] = await shown_clocks(admin)
        assert "router r: its clock is 600 s ahead of" in problem
        assert await counted_clocks(admin, "router") == 1

    async def is_gone() -> bool:
        return not await shown_clocks(admin)

    await until("it is not shown any more", is_gone)
    assert await counted_clocks(admin, "router") == 0
