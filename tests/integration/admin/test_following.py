"""`status` says which peers do not follow what the scheduler publishes, and why."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from isochrone.wire.ids import BootId
from isochrone.wire.peers.control import TABLE_PARTS
from scheduler.decide.membership import following
from tests.builders import a_report
from tests.integration.admin import test_routers as routers
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_control import Agent, dialling, joined
from tests.system.harness import until
from tests.unit.scheduler.test_intake import a_demand


async def shown(admin: Admin) -> Sequence[str]:
    view = (await admin.ask("GET", "/v1/status")).body
    lagging: list[str] = view["not_following"]
    assert view["routers_ready"] + view["nodes_ready"] + len(lagging) == 1
    return lagging


async def test_a_router_that_refuses_the_table_is_shown_with_its_reason(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "BEHIND_S", 0.0)
    async with routers.dialling(admin, tmp_path, (TABLE_PARTS,)) as router:
        assert (await admin.ask("POST", "/v1/keys", {"tenant_id": "t"})).status == 201

        async def is_shown() -> bool:
            # Until a table with the key is published, there is none to follow.
            await router.say(a_demand(table_refusal="its disk is full"))
            return bool(await shown(admin))

        await until("it is shown", is_shown)
        [problem] = await shown(admin)
        assert problem.startswith("router r: it serves generation 0, at least ")
        assert problem.endswith(": its disk is full")

        async def follows() -> bool:
            # A newer table may have been published meanwhile: then that one is due.
            published = (await admin.ask("GET", "/v1/status")).body["route_generation"]
            await router.say(a_demand(seq=2, table_generation=published))
            return not await shown(admin)

        await until("it follows", follows)


async def test_a_node_without_its_assignment_is_shown(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "ASSIGNMENT_BEHIND_S", 0.0)
    identity = await joined(admin, tmp_path)
    async with dialling(Agent(admin, identity, "b", generation=5_000, epoch=77)) as agent:
        await until("welcome", agent.is_welcome)
        await agent.link.send(a_report("n1", 1, boot_id=BootId("b")))
        await until("it is sent an assignment", agent.is_told)
        await agent.link.send(a_report("n1", 2, boot_id=BootId("b")))

        async def problems() -> Sequence[str]:
            return await shown(admin)

        [problem] = await until("it is shown", problems)
        assert problem.startswith("node n1: it has assignment 0, at least ")
