"""Wall clocks that jump under load: whatever is measured by a monotonic clock is not affected.

Leases are the database's time, limits and deadlines the monotonic clock's, and the age of demand is
its sender's own measure. Only certificates and the expiry of keys go by the wall clock.
"""

import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import asyncpg
import pytest
import pytest_asyncio

from isochrone.service.trust.identity import BACKDATED_MAX, CLOCK_SKEW
from scheduler.decide.membership.peer_clock import SUSTAINED_S
from tests.chaos.invariants import invariants
from tests.system.harness import Fleet, a_fleet, until
from tests.system.load import under_load, wait_ended
from tests.system.tls_fleet import TlsFleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOUR_S = 3600
BEHIND_S = 45.0
"""How much longer a node refuses its routers than a fleet takes to start."""

SOURCE = Path(__file__).parent / "wall_clock.c"
PARTS = ("scheduler-a", "node-ams", "node-sin", "router-ams", "router-sin")


class Clocks:
    """Sets the wall clock of each process of a fleet separately."""

    def __init__(self, fleet: Fleet) -> None:
        self._folder = fleet.folder
        shared = fleet.folder / "wall_clock.so"
        try:
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-O1", "-o", shared, SOURCE],
                check=True, capture_output=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs a C compiler: {error}")
        for part in PARTS:
            self.set(part, 0)
            clock = {"LD_PRELOAD": str(shared), "WALL_CLOCK": str(self._path(part))}
            fleet.environment[part] = clock

    def set(self, part: str, ahead_s: float) -> None:
        """Put a clock ahead of, or behind, the true time."""
        path = self._path(part)
        data = struct.pack("q", int(ahead_s * 1e9))
        # In place: the process has it mapped.
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(data)

    def _path(self, part: str) -> Path:
        return self._folder / f"{part}.clock"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet_and_clocks() -> AsyncIterator[tuple[Fleet, Clocks]]:
    async with a_fleet(comes_up=False) as fleet:
        clocks = Clocks(fleet)
        await fleet.up()
        await fleet.deploy(replicas=2)
        fleet.note_baseline()
        yield fleet, clocks


async def status(fleet: Fleet) -> tuple[bool, int, str, int, int]:
    told = await fleet.ask("GET", "/v1/status")
    heard = told["nodes_ready"], told["routers_ready"]
    return told["acting"], told["epoch"], told["frozen"], *heard


async def test_clock_jumps_affect_no_lease_limit_or_demand(
    fleet_and_clocks: tuple[Fleet, Clocks],
) -> None:
    fleet, clocks = fleet_and_clocks
    before, engines = await status(fleet), fleet.engine_pids()
    limited = (
        await fleet.ask("POST", "/v1/keys", {"tenant_id": "few", "limits": {"requests_per_min": 1}})
    )["key"]
    async with aiohttp.ClientSession() as http:
        url = f"{fleet.endpoint('ams')}/v1/chat/completions"
        message = {"role": "user", "content": "x"}
        body = {"model": "mock", "messages": [message], "max_tokens": 1}

        async def is_answered(key: str) -> bool:
            who = {"authorization": f"Bearer {key}"}
            async with http.post(url, json=body, headers=who) as response:
                return response.status == 200

        await until("the new key reaches the router", lambda: is_answered(limited))
        assert not await is_answered(limited)
        jumps = (
            {"router-ams": 3 * HOUR_S, "node-sin": -2 * HOUR_S, "scheduler-a": 5 * HOUR_S},
            {"router-ams": -3 * HOUR_S, "node-ams": 26 * HOUR_S, "scheduler-a": -30 * HOUR_S},
            dict.fromkeys(PARTS, 0),
        )
        async with under_load(fleet, ["ams", "sin"]) as load:
            for jump in jumps:
                for part, ahead_s in jump.items():
                    clocks.set(part, ahead_s)
                assert not await is_answered(limited), "no minute passes by setting a clock"
                await wait_ended(load, 20)

                async def is_as_before() -> bool:
                    # The epoch among it: an older one never comes back.
                    return await status(fleet) == before

                await until("all is as before", is_as_before)
                assert await fleet.is_warm(2)
    assert not load.failures(), load.failures()
    assert fleet.engine_pids() == engines
    await invariants(fleet, load)
    connection = await asyncpg.connect(fleet.dsn())
    oldest = await connection.fetchval("SELECT min(minute) FROM demand")
    newest = await connection.fetchval("SELECT max(minute) FROM demand")
    now = await connection.fetchval("SELECT clock_timestamp()")
    await connection.close()
    assert (now - oldest).total_seconds() < 300
    assert (newest - now).total_seconds() < 60


async def test_a_scheduler_in_the_wrong_year_refuses_peers_and_stops_no_replica(
    fleet_and_clocks: tuple[Fleet, Clocks],
) -> None:
    """All certificates look expired to it. Peers keep serving, and reconnect to a correct clock."""
    fleet, clocks = fleet_and_clocks
    engines = fleet.engine_pids()
    async with under_load(fleet, ["sin"], streams=4) as load:
        clocks.set("scheduler-a", 400 * 24 * HOUR_S)
        logs = [fleet.folder / "logs" / f"{part}.log" for part in PARTS if "scheduler" not in part]

        async def all_are_told() -> bool:
            return all("join again, if the clocks are right" in log.read_text() for log in logs)

        await until("all are told why", all_are_told, 10.0)
        await wait_ended(load, 8)
        clocks.set("scheduler-a", 0)
    assert not load.failures(), load.failures()
    for start, part in ((fleet.start_node, "node-sin"), (fleet.start_router, "router-sin")):
        await fleet.kill(part)
        await start("sin")

    async def are_let_in() -> bool:
        told = await fleet.ask("GET", "/v1/status")
        return bool(told["acting"] and told["nodes_ready"] and told["routers_ready"])

    await until("who dials is let in", are_let_in, 10.0)
    await invariants(fleet, load)
    assert fleet.engine_pids() == engines


async def test_a_node_whose_clock_is_behind_serves_once_certificates_are_valid_to_it() -> None:
    """Certificates are dated back by a day; to it those of new routers begin later."""
    async with a_fleet(comes_up=False, make=TlsFleet) as fleet:
        clocks = Clocks(fleet)
        # The authority is a day older than the fleet.
        clocks.set("scheduler-a", -24 * HOUR_S)
        clocks.set("node-sin", -((BACKDATED_MAX + CLOCK_SKEW).total_seconds() + BEHIND_S))
        start_scheduler = fleet.start_scheduler

        async def start_and_correct(name: str) -> None:
            await start_scheduler(name)
            clocks.set("scheduler-a", 0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleet, "start_scheduler", start_and_correct)
            await fleet.up()
        await fleet.deploy(replicas=2)
        async with under_load(fleet, ["ams", "sin"], streams=4) as load:
            await wait_ended(load, 4)
            # It is warm, and refuses its routers: they use other nodes meanwhile.
            assert {ended.node for ended in load.ended} == {"ams-1"}

            async def is_used() -> bool:
                return any(ended.node == "sin-1" for ended in load.ended)

            await until("the node is used", is_used, 2 * BEHIND_S)
        assert not load.failures(), load.failures()

        async def is_shown() -> bool:
            [problem] = (await fleet.ask("GET", "/v1/status"))["clocks"] or [""]
            return "node sin-1: its clock is 867" in problem and " s behind " in problem

        await until("status names the node", is_shown, 2 * SUSTAINED_S)
