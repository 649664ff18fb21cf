"""Mistakes of the control plane never stop warm replicas."""

import os
import shutil
from collections.abc import AsyncIterator

import aiohttp
import asyncpg
import pytest

from isochrone.cli.client import AdminError
from tests.system.harness import Fleet, a_fleet, until
from tests.system.load import one_stream


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet(comes_up=False) as running:
        # There is no standby that a stall could help to the lease: only a restart waits for it.
        running.settings["scheduler-a"] = {"lease_ttl_s": 2.5}
        await running.up()
        yield running


PLACE_TURNS = 'isochrone_scheduler_job_turns{loop="place_replicas",outcome="ended"}'


async def serves(fleet: Fleet, times: int = 4) -> None:
    async with aiohttp.ClientSession() as http:
        for pop in ("ams", "sin"):
            for _ in range(times // 2):
                ended = await one_stream(fleet, http, pop, 5)
                assert ended.how == "complete", ended


async def quiet_turns(fleet: Fleet, turns: int = 4) -> None:
    """Wait for some placement turns of the active scheduler, in which it could do harm."""
    await until("it acts", fleet.acts)

    async def turned() -> float:
        url = f"http://127.0.0.1:{fleet.ports['admin-a']}/metrics"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            for line in (await response.text()).splitlines():
                if line.startswith(PLACE_TURNS):
                    return float(line.rpartition(" ")[2])
        return 0.0

    target = await turned() + turns

    async def reached() -> bool:
        return await turned() >= target

    await until(f"{turns} turns of place", reached)


async def test_a_scheduler_pointed_at_an_empty_database_stops_nothing(fleet: Fleet) -> None:
    await fleet.deploy(replicas=2)
    before = fleet.engine_pids()
    await fleet.kill("scheduler-a")
    await fleet.processes.stop("postgres")
    shutil.move(fleet.folder / "pg", fleet.folder / "pg-real")
    await fleet.start_postgres()
    await fleet.start_scheduler("a")
    await quiet_turns(fleet)
    status = await fleet.ask("GET", "/v1/status")
    assert status["acting"]
    assert status["nodes"] == 0  # another cluster: neither agents nor routers take its word
    assert fleet.engine_pids() == before
    await serves(fleet)


async def test_a_database_backup_an_hour_old_stops_nothing_and_adopts_replicas(
    fleet: Fleet,
) -> None:
    await back_up(fleet)
    await fleet.deploy(replicas=2)
    before = fleet.engine_pids()
    await fleet.kill("scheduler-a")
    await restore(fleet)
    await fleet.start_scheduler("a")
    await until("both replicas are adopted", lambda: has_adopted(fleet), 20.0)
    await quiet_turns(fleet)
    deployments = (await fleet.ask("GET", "/v1/deployments"))["data"]
    assert [row["name"] for row in deployments] == ["mock"]
    kinds = {e["kind"] for e in (await fleet.ask("GET", "/v1/events"))["data"]}
    assert {"replica.adopted", "deployment.recreated"} <= kinds
    assert fleet.engine_pids() == before
    assert fleet.engine_processes() == 2
    await serves(fleet)


async def test_a_backup_restored_under_a_running_scheduler_is_followed_by_all(
    fleet: Fleet,
) -> None:
    await back_up(fleet)
    await fleet.deploy(replicas=2)
    before = fleet.engine_pids()
    await restore(fleet)
    await until("both replicas are adopted", lambda: has_adopted(fleet))
    kinds = {e["kind"] for e in (await fleet.ask("GET", "/v1/events"))["data"]}
    assert {"database.lost_history", "replica.adopted"} <= kinds
    # Routers refuse generations that they have seen: a new key proves that they follow.
    fleet.key = await fleet.new_key("test")
    await serves(fleet)
    assert fleet.engine_pids() == before
    assert fleet.engine_processes() == 2


async def back_up(fleet: Fleet) -> None:
    """Copy the database as it is "an hour ago": with nodes and routers, and no deployment."""
    await fleet.processes.stop("postgres")
    shutil.copytree(fleet.folder / "pg", fleet.folder / "pg-old", symlinks=True)
    owner = (fleet.folder / "pg").stat()
    for path in (fleet.folder / "pg-old", *(fleet.folder / "pg-old").rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
    await fleet.start_postgres()
    await until("the scheduler acts again", fleet.acts)


async def restore(fleet: Fleet) -> None:
    """Put the copy in the database's place."""
    await fleet.processes.stop("postgres")
    shutil.move(fleet.folder / "pg", fleet.folder / "pg-new")
    shutil.move(fleet.folder / "pg-old", fleet.folder / "pg")
    await fleet.start_postgres()


async def has_adopted(fleet: Fleet) -> bool:
    try:
        rows = (await fleet.ask("GET", "/v1/placements"))["data"]
    except AdminError:
        return False
    return len([r for r in rows if "adopted" in r["reason"] and r["state"] == "warm"]) == 2


async def test_placement_freezes_while_all_agents_are_silent(fleet: Fleet) -> None:
    await fleet.deploy(replicas=2)
    # Silence as the store sees it: no agent connected, last heard a minute ago.
    for pop in ("ams", "sin"):
        await fleet.kill(f"node-{pop}")
    await fleet.kill("scheduler-a")
    dsn = f"postgresql://isochrone@/isochrone?host={fleet.folder}/pg"
    connection = await asyncpg.connect(dsn)
    await connection.execute("UPDATE node SET last_seen_at = clock_timestamp() - interval '60 s'")
    await connection.execute("UPDATE lease SET acting_since = clock_timestamp() - interval '1 day'")
    await connection.close()
    await fleet.start_scheduler("a")

    async def is_frozen() -> bool:
        return bool((await fleet.ask("GET", "/v1/status"))["frozen"])

    await until("it has waited to hear them, and freezes", is_frozen)
    await quiet_turns(fleet)
    assert await is_frozen()
    rows = (await fleet.ask("GET", "/v1/placements"))["data"]
    assert sorted(row["state"] for row in rows) == ["warm", "warm"]
    assert not any(row["ending"] for row in rows)
    assert fleet.engine_processes() == 2
    for pop in ("ams", "sin"):
        await fleet.start_node(pop)

    async def thawed() -> bool:
        return not await is_frozen()

    await until("it thaws when they are heard again", thawed)
    await serves(fleet)


async def test_a_truncated_route_table_is_refused_by_routers(fleet: Fleet) -> None:
    await fleet.deploy(replicas=2)
    await serves(fleet)
    # A fault of the centre: the store suddenly says that nothing is warm.
    dsn = f"postgresql://isochrone@/isochrone?host={fleet.folder}/pg"
    connection = await asyncpg.connect(dsn)
    before = (await fleet.ask("GET", "/v1/status"))["route_generation"]
    await connection.execute("UPDATE placement SET state = 'failed'")
    await connection.close()

    async def published() -> bool:
        return bool((await fleet.ask("GET", "/v1/status"))["route_generation"] > before)

    await until("the wrong table is published", published)

    async def refused() -> bool:
        total = 0.0
        for pop in ("ams", "sin"):
            url = f"{fleet.endpoint(pop)}/metrics"
            async with aiohttp.ClientSession() as http, http.get(url) as response:
                for line in (await response.text()).splitlines():
                    if "refused" in line and "table" in line and not line.startswith("#"):
                        total += float(line.rpartition(" ")[2])
        return total >= 2

    await until("both routers refuse it", refused)
    await serves(fleet)
