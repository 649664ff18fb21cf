"""Machines short of something under load: disk speed, CPU time, descriptors, memory, a GPU, others.

One fleet suffers it all. After each fault no request has failed that could be served, the fleet is
whole by itself, and the invariants hold.
"""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from isochrone.cli.client import AdminError
from router.recording.usage_journal import REST_S
from tests.chaos import fake_nvml
from tests.chaos.invariants import invariants
from tests.chaos.metric_values import metric
from tests.chaos.slow_disk import SlowDisks
from tests.chaos.starvation import (
    a_memory_group,
    cpu_s,
    starved_of_cpu,
    without_descriptors,
)
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.load import Load, under_load, wait_ended

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEATS = 8
RECENT = 20
SHARE_MIN = 0.8
SLOW_S = 0.3
"""Longer than any operation of a healthy disk."""

WINDOW_S = 1.0
CPU_SHARE_MAX = 0.5
RECOVERED_S = 30.0
RETRY_SHARE_MAX = 0.2
"""The retry budget: retries per request."""

RETRY_RESERVE = 10 + SEATS
"""Beyond it: its reserve, and the requests that the lost replica held."""


class Hosts:
    """A fleet whose machines can be made short of things."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.disks = SlowDisks(fleet)
        self.gpus = fleet.folder / "gpus.json"
        self.set_gpus(False, False)
        for part in ("node-sin", "router-sin", "scheduler-a"):
            fleet.environment[part] = self.disks.environment(part)
        (fleet.folder / "nvml").mkdir()
        shutil.copy(Path(fake_nvml.__file__), fleet.folder / "nvml" / "pynvml.py")
        fleet.environment["node-sin"] |= {
            "PYTHONPATH": str(fleet.folder / "nvml"),
            "FAKE_NVML": str(self.gpus),
        }

    def set_gpus(self, *are_lost: bool) -> None:
        """Have so many GPUs in `sin`, of which some are lost."""
        self.gpus.write_text(json.dumps(are_lost))

    async def is_whole(self) -> bool:
        """Return whether all are heard and both replicas are warm."""
        try:
            status = await self.fleet.ask("GET", "/v1/status")
            is_warm = await self.fleet.is_warm(2, [*CITIES])
        except AdminError:
            return False
        heard = status["nodes_ready"] == 2 and status["routers_ready"] == 2
        return bool(status["acting"] and heard and is_warm)

    async def hold_invariants(self, load: Load, *, may_fail: int = 0) -> None:
        """Check what must hold after each fault."""
        await until("the fleet is whole", self.is_whole)
        assert len(load.failures()) <= may_fail, load.failures()
        assert self.fleet.engine_processes() == 2
        await invariants(self.fleet, load)


async def prefer(load: Load, node: str, timeout_s: float = RECOVERED_S) -> None:
    """Wait until almost all requests go to one node."""

    async def do_prefer() -> bool:
        last = [ended.node for ended in load.ended[-RECENT:]]
        return len(last) == RECENT and last.count(node) >= SHARE_MIN * RECENT

    await until(f"requests go to {node}", do_prefer, timeout_s)


async def retries_and_requests(fleet: Fleet, pop: str) -> tuple[float, float]:
    """Return how many attempts failed at a router, not counting refusals, and its requests."""
    router = f"router-{pop}"
    return (
        await metric(fleet, router, "isochrone_router_retries_total", 'cause="refused"'),
        await metric(fleet, router, "isochrone_router_requests_total"),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Hosts]:
    async with a_fleet(comes_up=False) as fleet:
        hosts = Hosts(fleet)
        for pop in CITIES:
            fleet.settings[f"router-{pop}"] = {"stream_idle_timeout_s": 3.0}
        await fleet.up()
        await fleet.deploy(replicas=2, options={"itl_ms": "10", "sequences": str(SEATS)})
        yield hosts


@pytest_asyncio.fixture(loop_scope="module")
async def hosts(shared: Hosts) -> Hosts:
    await until("the fleet is whole", shared.is_whole)
    shared.fleet.note_baseline()
    return shared


async def test_an_agent_without_cpu_time_is_not_lost(hosts: Hosts) -> None:
    """It gets a tenth of a processor (R5)."""
    fleet = hosts.fleet
    before = fleet.engine_pids()
    async with under_load(fleet, [*CITIES], streams=4) as load:
        await wait_ended(load, 8)
        async with starved_of_cpu(fleet.processes.pid("node-sin")):
            await wait_ended(load, 40)
            assert (await fleet.ask("GET", "/v1/status"))["nodes_ready"] == 2
        await wait_ended(load, 8)
    assert fleet.engine_pids() == before
    await hosts.hold_invariants(load)


async def test_requests_leave_an_engine_that_becomes_slow(hosts: Hosts) -> None:
    """Its tokens come at a tenth of their rate; then it is as before (E5)."""
    fleet = hosts.fleet
    before = fleet.engine_pids()
    async with under_load(fleet, ["sin"], streams=4) as load:
        await wait_ended(load, 8)
        async with starved_of_cpu(before["node-sin"]):
            await prefer(load, "ams-1")
        await wait_ended(load, 8)
    assert fleet.engine_pids() == before
    await hosts.hold_invariants(load)


async def test_a_slow_disk_delays_no_heartbeat_and_no_token(hosts: Hosts) -> None:
    """Every operation on the state of a node and a router takes 0.3 s longer (R2)."""
    fleet, parts = hosts.fleet, ("node-sin", "router-sin")
    async with under_load(fleet, [*CITIES], streams=4) as load:
        await wait_ended(load, 8)
        for part in parts:
            hosts.disks.set(part, SLOW_S)
        began_s = asyncio.get_running_loop().time()
        # A new table, a new assignment and a new engine's files are stored meanwhile.
        await deploy_in_sin(fleet, "slow")
        await wait_ended(load, 20)
        waits = {part: hosts.disks.waits(part) for part in parts}
        passed_s = asyncio.get_running_loop().time() - began_s
        for part in parts:
            hosts.disks.set(part, 0.0)
        assert (await fleet.ask("GET", "/v1/status"))["nodes_ready"] == 2
    # Once in a while a router tries whether it can journal usage again.
    tries = 2 * (1 + passed_s / REST_S)
    assert waits["router-sin"].event_loop <= tries, "its event loop waited for its disk"
    assert waits["node-sin"].event_loop == 0, "its event loop waited for its disk"
    assert all(waits[part].all > tries for part in parts), "no disk was slow"
    await fleet.ask("DELETE", "/v1/deployments/slow")

    async def are_two() -> bool:
        return fleet.engine_processes() == 2

    await until("the new engine is gone", are_two)
    await hosts.hold_invariants(load)


async def deploy_in_sin(fleet: Fleet, name: str) -> None:
    """Deploy one more replica in `sin`, and wait until it is warm."""
    body = {
        "deployment_id": name, "name": name, "model_id": "mock",
        "engine": {"driver": "mock", "kv_memory_bytes": 1000, "options": {"itl_ms": "10"}},
        "policy": {"replicas_min": 1, "replicas_max": 1, "keep_warm": ["sin"], "allow": ["sin"]},
    }  # fmt: skip
    await fleet.ask("POST", "/v1/deployments", body)

    async def is_warm() -> bool:
        rows = (await fleet.ask("GET", "/v1/placements"))["data"]
        return any(row["deployment_id"] == name and row["state"] == "warm" for row in rows)

    await until(f"{name} is warm", is_warm)


async def test_an_agent_and_a_scheduler_out_of_descriptors_neither_die_nor_spin(
    hosts: Hosts,
) -> None:
    """A crowd takes their last descriptors; whoever is connected is served (R4)."""
    fleet = hosts.fleet
    async with under_load(fleet, [*CITIES], streams=4) as load:
        await wait_ended(load, 8)
        for part, port in (
            ("node-sin", fleet.ports["node-sin"]),
            ("scheduler-a", fleet.ports["control-a"]),
            ("scheduler-a", fleet.ports["admin-a"]),
        ):
            pid = fleet.processes.pid(part)
            usual_s = await cpu_in_window_s(pid)
            async with without_descriptors(pid, port):
                spent_s = await cpu_in_window_s(pid)
                await wait_ended(load, 8)
            assert spent_s < usual_s + CPU_SHARE_MAX * WINDOW_S, f"{part} spins"
            assert fleet.processes.pid(part) == pid
            await until("the fleet is whole", hosts.is_whole)
    assert not fleet.processes.ended()
    await hosts.hold_invariants(load)


async def cpu_in_window_s(pid: int) -> float:
    """Return the CPU time that a process uses in WINDOW_S."""
    process = psutil.Process(pid)
    before_s = cpu_s(process)
    await asyncio.sleep(WINDOW_S)
    return cpu_s(process) - before_s


async def test_parts_killed_for_memory_come_back(hosts: Hosts) -> None:
    """The kernel kills an engine, then its agent, for want of memory (R3)."""
    fleet = hosts.fleet
    async with under_load(fleet, [*CITIES], streams=4) as load:
        await wait_ended(load, 8)
        with a_memory_group() as group:
            engine = fleet.engine_pids()["node-sin"]
            await asyncio.to_thread(group.kill_for_memory, engine)

            async def is_replaced() -> bool:
                return fleet.engine_pids().get("node-sin") not in (None, 0, engine)

            await until("the agent starts another engine", is_replaced)
            await until("both warm", lambda: fleet.is_warm(2))
            await wait_ended(load, 8)
            engine = fleet.engine_pids()["node-sin"]
            await asyncio.to_thread(group.kill_for_memory, fleet.processes.pid("node-sin"))
            await fleet.processes.stop("node-sin")
            await wait_ended(load, 8)
            await fleet.start_node("sin")
        await until("it is heard again", hosts.is_whole)
        await wait_ended(load, 8)
        assert fleet.engine_pids()["node-sin"] == engine, "its engine is adopted"
    # Only streams that had begun on the killed engine may end in an error event.
    assert all(ended.how == "error-event" for ended in load.failures()), load.failures()
    await hosts.hold_invariants(load, may_fail=4)


async def test_a_gpu_that_falls_off_loses_its_replica_to_another(hosts: Hosts) -> None:
    """NVML fails for one of two GPUs: what ran there is moved, and the other is used (E4)."""
    fleet = hosts.fleet

    async def on_device() -> dict[str, Any]:
        rows = (await fleet.ask("GET", "/v1/placements"))["data"]
        return {
            row["device_ids"][0]: row["replica_id"]
            for row in rows
            if row["pop"] == "sin" and row["state"] == "warm" and not row["ending"]
        }

    async with under_load(fleet, [*CITIES], streams=4) as load:
        await wait_ended(load, 8)
        (lost,) = await on_device()
        (other,) = {"gpu0", "gpu1"} - {lost}
        hosts.set_gpus(lost == "gpu0", lost == "gpu1")

        async def is_moved() -> bool:
            return set(await on_device()) == {other} and fleet.engine_processes() == 2

        await until("its replica runs on the other GPU", is_moved)
        await wait_ended(load, 8)
        hosts.set_gpus(False, False)
    await hosts.hold_invariants(load)


async def test_half_the_capacity_lost_for_a_while_leaves_no_trace(hosts: Hosts) -> None:
    """More requests than half of the fleet can carry, from clients that retry at once (C6)."""
    fleet = hosts.fleet
    streams = SEATS + SEATS // 2
    before = {pop: await retries_and_requests(fleet, pop) for pop in CITIES}
    async with under_load(fleet, [*CITIES], streams=streams, tokens=20) as load:
        await wait_ended(load, 2 * streams)
        await fleet.kill("node-sin")
        os.kill(fleet.engine_pids()["node-sin"], signal.SIGKILL)
        await wait_ended(load, 4 * streams)
        await fleet.start_node("sin")

        async def is_at_baseline() -> bool:
            last = load.ended[-2 * streams :]
            nodes = {ended.node for ended in last}
            return len(nodes) == 2 and all(ended.how == "complete" for ended in last)

        await until("both cities answer and no request fails", is_at_baseline, RECOVERED_S)
    refused = [ended for ended in load.failures() if ended.how == "refused"]
    # Whatever the killed engine was generating may end in an error event.
    assert len(load.failures()) - len(refused) <= streams, load.failures()
    for pop in CITIES:
        retries, requests = await retries_and_requests(fleet, pop)
        more = requests - before[pop][1]
        assert retries - before[pop][0] <= RETRY_SHARE_MAX * more + RETRY_RESERVE, pop
    await hosts.hold_invariants(load, may_fail=len(load.failures()))
