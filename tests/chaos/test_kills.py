"""kill -9 of each part in turn, under a running load of numbered streams.

Afterwards the invariants hold: every request has one end (I3), tokens are contiguous (I4, checked
by the load itself), usage is what was delivered, once per request (I5), nothing stays in flight
(I6), memory is where it was (I7), no one had to help (I8), and no prompt or key is in a log (I10).
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import aiohttp
import asyncpg
import pytest

from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.load import Load, one_stream, under_load, wait_ended

pytestmark = pytest.mark.timeout(180)

MEMORY_GROWTH_MAX_KIB = 64 * 1024


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet() as running:
        await running.deploy(replicas=2)
        running.baseline_kib = running.memory_kib()
        yield running


async def invariants(fleet: Fleet, load: Load) -> None:
    """Check what must hold after any fault, once the load has ended."""
    assert load.count("broken") == 0, [e for e in load.ended if e.how == "broken"]
    complete = {e.request_id: e.tokens for e in load.ended if e.how == "complete"}

    async def usage_is_whole() -> bool:
        try:
            connection = await asyncpg.connect(fleet.dsn(), timeout=2)
        except (OSError, TimeoutError, asyncpg.PostgresError):
            return False
        rows = await connection.fetch("SELECT request_id, output_tokens FROM usage")
        await connection.close()
        known = {row["request_id"]: row["output_tokens"] for row in rows}
        return all(known.get(request_id) == n for request_id, n in complete.items())

    await until("usage = tokens delivered, once a request", usage_is_whole, 20.0)
    await until("nothing in flight", lambda: nothing_in_flight(fleet), 15.0)
    now_kib = fleet.memory_kib()
    for process, before_kib in fleet.baseline_kib.items():
        grown_kib = now_kib.get(process, 0) - before_kib
        assert grown_kib < MEMORY_GROWTH_MAX_KIB, f"{process[0]} grew by {grown_kib} KiB"
    for path in (fleet.folder / "logs").glob("*.log"):
        text = path.read_text(errors="replace")
        assert fleet.key.split("_")[2] not in text, f"a key's secret is in {path.name}"
        assert "count" not in text.replace("counts", ""), f"a prompt is in {path.name}"


async def nothing_in_flight(fleet: Fleet) -> bool:
    async with aiohttp.ClientSession() as http:
        for pop in CITIES:
            url = f"http://127.0.0.1:{fleet.ports[f'node-{pop}']}/metrics"
            try:
                async with http.get(url) as response:
                    lines = (await response.text()).splitlines()
            except (aiohttp.ClientError, OSError):
                return False
            held = [x for x in lines if x.startswith("isochrone_node_in_flight_tokens{")]
            if any(float(line.rpartition(" ")[2]) != 0 for line in held):
                return False
    return True


async def test_an_engine_killed_is_restarted_and_every_stream_has_one_end(fleet: Fleet) -> None:
    before = fleet.engine_pids()
    async with under_load(fleet, ["ams", "sin"]) as load:
        await wait_ended(load, 8)
        os.kill(before["node-ams"], signal.SIGKILL)

        async def is_replaced() -> bool:
            pid = fleet.engine_pids().get("node-ams")
            return pid is not None and pid != before["node-ams"]

        await until("the agent starts another engine", is_replaced, 10.0)
        await until("it is warm", lambda: fleet.is_warm(2), 15.0)
        await wait_ended(load, 16)
    # Only streams that had begun on the killed engine may end in an error event.
    assert all(e.how == "error-event" and e.tokens > 0 for e in load.failures()), load.failures()
    assert len(load.failures()) <= 8
    await invariants(fleet, load)


async def test_an_agent_killed_leaves_its_engine_which_is_adopted(fleet: Fleet) -> None:
    before = fleet.engine_pids()
    async with under_load(fleet, ["sin"]) as load:
        await wait_ended(load, 4)
        await fleet.kill("node-ams")
        await wait_ended(load, 8)
        await fleet.start_node("ams")
        await until("both warm", lambda: fleet.is_warm(2), 15.0)
        await wait_ended(load, 8)
    assert fleet.engine_pids() == before, "the engine was restarted, not adopted"
    assert fleet.engine_processes() == 2
    await invariants(fleet, load)


async def test_the_acting_scheduler_killed_costs_no_request_and_the_other_acts(
    fleet: Fleet,
) -> None:
    await fleet.start_scheduler("b")
    status = await fleet.ask("GET", "/v1/status", of="b")
    assert not status["acting"]
    async with under_load(fleet, ["ams", "sin"]) as load:
        await wait_ended(load, 8)
        await fleet.kill("scheduler-a")

        async def b_acts() -> bool:
            return bool((await fleet.ask("GET", "/v1/status", of="b"))["acting"])

        await until("the standby acts within the lease", b_acts, 6.0)

        async def all_found_b() -> bool:
            status = await fleet.ask("GET", "/v1/status", of="b")
            return status["nodes_ready"] == 2 and status["routers_ready"] == 2

        await until("nodes and routers find it", all_found_b, 20.0)
        await wait_ended(load, 16)
        # I1: what was acknowledged before is there, and writes go on.
        assert (await fleet.ask("GET", "/v1/deployments/mock", of="b"))["name"] == "mock"
        await fleet.ask("POST", "/v1/keys", {"tenant_id": "later"}, of="b")
    after = await fleet.ask("GET", "/v1/status", of="b")
    assert after["epoch"] > status["epoch"]  # I2
    assert not load.failures(), load.failures()
    await invariants(fleet, load)


async def test_postgres_killed_costs_no_request_and_usage_is_kept(fleet: Fleet) -> None:
    async with under_load(fleet, ["ams", "sin"]) as load:
        await wait_ended(load, 8)
        await fleet.kill("postgres")
        await wait_ended(load, 30)
        began = asyncio.get_running_loop().time()
        with pytest.raises(Exception, match="unavailable"):
            await fleet.ask("GET", "/v1/pops")
        assert asyncio.get_running_loop().time() - began < 5.0
        await fleet.start_postgres()

        async def acts_again() -> bool:
            try:
                return bool((await fleet.ask("GET", "/v1/status"))["acting"])
            except Exception as error:
                return "unavailable" not in str(error) and False

        await until("the scheduler acts again", acts_again, 20.0)
        await wait_ended(load, 8)
    assert not load.failures(), load.failures()
    await until("both warm", lambda: fleet.is_warm(2), 15.0)
    await invariants(fleet, load)


async def test_a_router_killed_cuts_its_own_streams_alone(fleet: Fleet) -> None:
    async with under_load(fleet, ["ams"], streams=4) as others:
        async with under_load(fleet, ["sin"], streams=4) as load:
            await wait_ended(load, 4)
            await fleet.kill("router-sin")
            await asyncio.sleep(0)
            await wait_ended(others, 8)
            await fleet.start_router("sin")
            await wait_ended(load, 8)
        await wait_ended(others, 4)
    assert not others.failures(), others.failures()
    assert {e.how for e in load.failures()} <= {"reset", "refused"}, load.failures()
    load.ended += others.ended
    # Usage of streams cut by the router's own death is the one thing that may be lost.
    await invariants(fleet, load)


async def test_all_control_dead_and_a_router_and_an_agent_restarted_cold_serve_from_disk(
    fleet: Fleet,
) -> None:
    await fleet.kill("scheduler-a")
    await fleet.kill("postgres")
    async with under_load(fleet, ["ams", "sin"]) as load:
        await wait_ended(load, 30)
    assert not load.failures(), load.failures()
    for name in ("router-sin", "node-sin"):
        await fleet.kill(name)
    for pid in [pid for name, pid in fleet.engine_pids().items() if name == "node-sin"]:
        os.kill(pid, signal.SIGKILL)
    await fleet.start_node("sin")
    await fleet.start_router("sin")

    async def cold_node_serves() -> bool:
        url = f"http://127.0.0.1:{fleet.ports['node-sin']}/healthz"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return bool((await response.json())["replicas"].get("warm"))

    await until("the cold agent has its replica warm again", cold_node_serves, 15.0)
    async with aiohttp.ClientSession() as http:
        for _ in range(5):
            ended = await one_stream(fleet, http, "sin", 5)
            assert ended.how == "complete", ended
