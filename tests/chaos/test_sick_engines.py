"""Engines that run and do not work: hung, stopped, failing to load; and graceful shutdowns.

One fleet suffers it all; the last test leaves it with a node drained.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.chaos.invariants import invariants
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.load import Load, one_stream, under_load, wait_ended

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Fleet]:
    async with a_fleet(comes_up=False) as running:
        for pop in CITIES:
            running.settings[f"node-{pop}"] = {"stall_s": 2.0}
            running.settings[f"router-{pop}"] = {"stream_idle_timeout_s": 2.0}
        await running.up()
        await running.deploy(replicas=2)
        running.note_baseline()
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(shared: Fleet) -> Fleet:
    await until("the fleet is whole", lambda: shared.is_warm(2))
    return shared


async def placements(fleet: Fleet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await fleet.ask("GET", "/v1/placements"))["data"]
    return rows


def replaced(fleet: Fleet, before: dict[str, int], node: str):  # type: ignore[no-untyped-def]
    async def is_replaced() -> bool:
        pid = fleet.engine_pids().get(node)
        return pid is not None and pid != before[node]

    return is_replaced


async def test_an_engine_without_progress_is_killed(fleet: Fleet) -> None:
    """Its health check answers 200, requests are in flight, and no token comes (E2).

    The other replica continues the stream and hangs at the same token.
    """
    before = fleet.engine_pids()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        ended = await one_stream(fleet, http, "ams", 20, mock={"hang_at_token": 5})
        assert ended.how == "error-event", ended
        assert ended.tokens == 5
        changed = [replaced(fleet, before, node) for node in before]

        async def both_were_replaced() -> bool:
            return all([await check() for check in changed])

        await until("the agents kill both and start others", both_were_replaced, 25.0)
        await until("both warm", lambda: fleet.is_warm(2))
        load = Load([await one_stream(fleet, http, "ams", 5)])
    assert not load.failures(), load.failures()
    await invariants(fleet, load)


async def test_a_stopped_engine_is_killed_and_the_other_serves(fleet: Fleet) -> None:
    """SIGSTOP in the middle of its streams: the process exists and answers nothing (K7)."""
    before = fleet.engine_pids()
    async with under_load(fleet, ["ams", "sin"], streams=6) as load:
        await wait_ended(load, 6)
        os.kill(before["node-ams"], signal.SIGSTOP)
        await wait_ended(load, 12)
        await until("replaced", replaced(fleet, before, "node-ams"), 25.0)
        await until("both warm", lambda: fleet.is_warm(2))
        await wait_ended(load, 12)
    assert not load.failures(), load.failures()
    assert fleet.engine_processes() == 2
    await invariants(fleet, load)


async def test_a_stopped_agent_delays_its_requests_by_seconds_only(fleet: Fleet) -> None:
    """SIGSTOP: the node accepts connections and answers neither requests nor pings."""
    agent = fleet.processes.pid("node-sin")
    os.kill(agent, signal.SIGSTOP)
    try:
        async with aiohttp.ClientSession() as http:
            streams = [asyncio.create_task(one_stream(fleet, http, "sin", 5)) for _ in range(6)]

            async def have_ended() -> bool:
                return all(stream.done() for stream in streams)

            # A ping is given two seconds, twice; a first byte would have been given sixty.
            await until("all are answered", have_ended, 12.0)
            load = Load([stream.result() for stream in streams])
    finally:
        os.kill(agent, signal.SIGCONT)
    await until("both warm", lambda: fleet.is_warm(2))
    assert not load.failures(), load.failures()
    await invariants(fleet, load)


async def test_an_engine_that_cannot_load_is_reported_and_harms_no_other(fleet: Fleet) -> None:
    before = fleet.engine_pids()
    engine = {"driver": "mock", "kv_memory_bytes": 1000, "options": {"fail_load": "1"}}
    policy = {"replicas_min": 1, "replicas_max": 1}
    await fleet.ask(
        "POST",
        "/v1/deployments",
        {"deployment_id": "broken", "model_id": "mock", "name": "broken", "engine": engine,
         "policy": policy},
    )  # fmt: skip

    async def is_ended() -> bool:
        events = (await fleet.ask("GET", "/v1/events"))["data"]
        return any(
            e["kind"] == "replica.ended" and "fail_load is set" in e["reason"] for e in events
        )

    await until("given up, with the engine's own last words", is_ended, 60.0)
    assert {n: p for n, p in fleet.engine_pids().items() if p in before.values()} == before
    assert await fleet.is_warm(2)
    await fleet.ask("DELETE", "/v1/deployments/broken")


async def test_a_graceful_shutdown_of_a_node_costs_no_request(fleet: Fleet) -> None:
    """SIGTERM of an agent under load: running requests finish, new ones go elsewhere (K9)."""
    async with under_load(fleet, ["sin"], streams=6, tokens=20) as load:
        await wait_ended(load, 6)
        await fleet.processes.stop("node-sin")
        await wait_ended(load, 12)
        await fleet.start_node("sin")
        await until("both warm", lambda: fleet.is_warm(2))
        await wait_ended(load, 6)
    assert not load.failures(), load.failures()
    await invariants(fleet, load)


async def test_draining_a_node_moves_its_replica_without_a_failed_request(fleet: Fleet) -> None:
    async with under_load(fleet, ["ams", "sin"], streams=6, tokens=20) as load:
        await wait_ended(load, 6)
        row = next(r for r in await placements(fleet) if r["pop"] == "sin")
        await fleet.ask("POST", "/v1/nodes/sin-1/drain")

        async def is_moved() -> bool:
            rows = await placements(fleet)
            return row["replica_id"] not in {r["replica_id"] for r in rows} and all(
                r["pop"] == "ams" for r in rows
            )

        await until("the replica has left the draining node", is_moved, 40.0)
        await wait_ended(load, 12)
    assert not load.failures(), load.failures()
    assert await fleet.is_warm(2)
    await invariants(fleet, load)
