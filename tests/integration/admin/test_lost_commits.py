"""A commit whose confirmation was lost takes effect all the same."""

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from isochrone.wire.ids import BootId
from isochrone.wire.peers.assignment import Assignment
from scheduler.loops.publish_routes import PublishRoutes
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers import assignment_outbox
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.fleet.nodes import read_assignment
from tests.builders import a_model, a_report
from tests.faults import Faults
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_control import Agent, dialling, joined
from tests.system.harness import until


async def test_a_plan_whose_commit_was_not_confirmed_is_sent_to_its_nodes(
    admin: Admin, tmp_path: Path, database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = await joined(admin, tmp_path)
    faults = Faults(monkeypatch, database_dsn)
    async with dialling(Agent(admin, identity, "b1")) as agent:
        await until("it is welcome", agent.is_welcome)
        seq = 1

        async def runs_it() -> bool:
            # As a node repeats its report every ten seconds.
            nonlocal seq
            seq += 1
            await agent.link.send(a_report(seq=seq, boot_id=BootId("b1")))
            await asyncio.sleep(0.1)
            return any(told.replicas for told in agent.assignments)

        await agent.link.send(a_report(seq=seq, boot_id=BootId("b1")))
        await until("it has reported", agent.is_told)
        await admin.ask("PUT", "/v1/models/m", msgspec.to_builtins(a_model()))
        faults.lose_commit(doing="INSERT INTO placement")
        engine = {"driver": "mock", "kv_memory_bytes": 1}
        body = {"deployment_id": "d", "model_id": "m", "engine": engine}
        assert (await admin.ask("POST", "/v1/deployments", body)).status == 201
        await until("it is told what to run", runs_it, 15.0)
        assert faults.broken == ["COMMIT;"]
        assert len((await admin.ask("GET", "/v1/placements")).body["data"]) == 1


def announced_keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of keys that are announced to be published from now on."""

    async def compare_none(*_: Any) -> None:
        """Do not find changes that were not announced."""

    marked: list[str] = []
    monkeypatch.setattr(PublishRoutes, "_compare_keys", compare_none)
    monkeypatch.setattr(PublishedRoutes, "mark_key_changed", lambda _, name: marked.append(name))
    return marked


async def test_a_key_whose_commit_was_not_confirmed_is_published(
    admin: Admin, database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would else be found among all keys, half an hour later if there are a million."""
    marked = announced_keys(monkeypatch)
    faults = Faults(monkeypatch, database_dsn)
    faults.lose_commit(doing="INSERT INTO api_key")
    assert (await admin.ask("POST", "/v1/keys", {"tenant_id": "a"})).status == 503
    (made,) = (await admin.ask("GET", "/v1/keys")).body["data"]
    assert made["key_id"] in marked


async def test_a_scheduler_that_stands_by_keeps_no_changed_keys(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It publishes none, and may change any number of them."""
    marked = announced_keys(monkeypatch)
    monkeypatch.setattr(LeaseState, "is_held", False)
    made = (await admin.ask("POST", "/v1/keys", {"tenant_id": "a"})).body["key_id"]
    assert made not in marked


async def test_an_assignment_that_could_not_be_read_follows_the_next_report(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = await joined(admin, tmp_path)
    asked = []

    async def breaks_once(*args: Any, **given: Any) -> Assignment:
        asked.append(args)
        if len(asked) == 1:
            raise asyncpg.ConnectionDoesNotExistError("gone")
        return await read_assignment(*args, **given)

    monkeypatch.setattr(assignment_outbox, "read_assignment", breaks_once)
    async with dialling(Agent(admin, identity, "b1")) as agent:
        await until("it is welcome", agent.is_welcome)
        for seq in (1, 2):
            await agent.link.send(a_report(seq=seq, boot_id=BootId("b1")))
        await until("it is told", agent.is_told, 5.0)
    assert len(asked) == 2
