"""A router's control connection: permanently refused rows are reported once and dropped."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from isochrone.service.network.control_link import ControlLink, Progress
from isochrone.service.trust.joining import join
from isochrone.wire.ids import BootId, Epoch, Generation, KeyId, RouterId
from isochrone.wire.peers.control import PeerRole, ToRouter, Welcome
from isochrone.wire.peers.usage import Usage, UsageAck
from scheduler.api.control import routers
from scheduler.decide.demand.intake import AcceptedUsage
from tests.integration.admin.conftest import Admin
from tests.system.harness import until
from tests.unit.scheduler.test_intake import a_demand, a_row, a_usage


class Router:
    """A router's end of the control connection, and the acknowledgements it received."""

    def __init__(self) -> None:
        self.link: ControlLink | None = None
        self.welcome = asyncio.Event()
        self.acks: asyncio.Queue[UsageAck] = asyncio.Queue()

    async def welcomed(self, _: Welcome) -> None:
        self.welcome.set()

    async def told(self, message: object) -> None:
        if isinstance(message, UsageAck):
            self.acks.put_nowait(message)

    async def say(self, message: msgspec.Struct) -> UsageAck:
        """Send a batch and return its acknowledgement."""
        assert self.link is not None
        assert await self.link.send(message)
        async with asyncio.timeout(30):
            return await self.acks.get()


@asynccontextmanager
async def dialling(
    admin: Admin, folder: Path, capabilities: tuple[str, ...] = ()
) -> AsyncIterator[Router]:
    await admin.pop()
    body = {"pop": "ams", "role": "router"}
    token = (await admin.ask("POST", "/v1/join-tokens", body)).body["token"]
    identity = await join(
        urls=[admin.control_url], token=token, role=PeerRole.ROUTER, name="r", folder=folder
    )
    router = Router()
    router.link = ControlLink(
        urls=[admin.control_url],
        identity=identity,
        boot_id=BootId("b"),
        incoming=ToRouter,
        progress=lambda: Progress(identity.cluster_id, Generation(0), Epoch(0)),
        on_welcome=router.welcomed,
        on_message=router.told,
        rng=random.Random(1),
        capabilities=capabilities,
    )
    task = asyncio.create_task(router.link.run())
    try:
        async with asyncio.timeout(30):
            await router.welcome.wait()
        yield router
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def refused_rows(admin: Admin, kind: str) -> float:
    text = (await admin.ask("GET", "/metrics")).body
    name = f'isochrone_scheduler_refused_rows_total{{kind="{kind}"}} '
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if name in line)


async def test_rows_that_cannot_be_stored_are_refused_once_and_counted(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with dialling(admin, tmp_path) as router:
        before = await refused_rows(admin, "usage")
        rows = (a_usage("ok"), a_usage("bad", key_id=KeyId("k\0")))
        ack = await router.say(Usage(router_id=RouterId("r"), batch_id="1", rows=rows))
        assert (ack.batch_id, ack.refused) == ("1", 1)
        assert "NUL" in ack.reason
        # A batch that passes the checks and is refused by Postgres is refused once, as a whole.
        monkeypatch.setattr(routers, "accept_usage", lambda usage: AcceptedUsage(usage.rows, {}))
        ack = await router.say(Usage(router_id=RouterId("r"), batch_id="2", rows=rows[1:]))
        assert (ack.batch_id, ack.refused) == ("2", 1)
        assert ack.reason.startswith("cannot store the batch")
        assert await refused_rows(admin, "usage") == before + 2
        ack = await router.say(Usage(router_id=RouterId("r"), batch_id="3", rows=rows[:1]))
        assert (ack.batch_id, ack.refused) == ("3", 0)


@pytest.mark.parametrize("settings", [{"place_interval_s": 3600.0}])
async def test_demand_without_a_replica_triggers_a_plan_at_once(
    admin: Admin, tmp_path: Path
) -> None:
    async def plans() -> float:
        text = (await admin.ask("GET", "/metrics")).body
        name = 'isochrone_scheduler_job_turns{loop="place_replicas",outcome="ended"} '
        return sum(float(line.removeprefix(name)) for line in text.splitlines() if name in line)

    async with dialling(admin, tmp_path) as router:
        # A new term plans once or twice without demand.
        for seq in range(5):
            before = await plans()
            await router.say(a_demand(a_row(requests=1, no_replica=1), seq=seq))

            async def is_planned(before: float = before) -> bool:
                return await plans() > before

            await until("another plan is made", is_planned, 20.0)


async def test_demand_is_acknowledged_and_a_flood_is_refused_with_the_reason(
    admin: Admin, tmp_path: Path
) -> None:
    async with dialling(admin, tmp_path) as router:
        batch = a_demand(a_row("no-such", requests=1), seq=7)
        ack = await router.say(batch)
        assert (ack.batch_id, ack.demand_boot, ack.demand_seq, ack.refused) == ("", "b", 7, 1)
        assert "no such deployment" in ack.reason
        assert (await router.say(batch)).refused == 0, "a repeat was already counted"
        flood = a_demand(*[a_row(f"d{n}", requests=1) for n in range(25_000)], seq=8)
        ack = await router.say(flood)
        assert (ack.demand_seq, ack.refused) == (8, 25_000)
        assert "at most" in ack.reason
    assert (await admin.ask("GET", "/v1/status")).status == 200
