"""Poison requests: a request that kills each engine that processes it is refused (E1).

Other requests that ran beside it, and those that merely waited, are answered.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.chaos.invariants import invariants
from tests.system.harness import Fleet, a_fleet, until
from tests.system.load import Ended, one_stream, under_load, wait_ended

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLICAS = 2
ENGINES_LOST_MAX = 2


@asynccontextmanager
async def a_fleet_with_replicas() -> AsyncIterator[Fleet]:
    async with a_fleet() as running:
        await running.deploy(replicas=REPLICAS, options={"itl_ms": "10", "ttft_ms": "30"})
        await until("the fleet is whole", lambda: running.is_warm(REPLICAS))
        running.note_baseline()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Fleet]:
    async with a_fleet_with_replicas() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(shared: Fleet) -> Fleet:
    await until("the fleet is whole", lambda: shared.is_warm(REPLICAS))
    shared.note_baseline()
    return shared


@asynccontextmanager
async def counting_engines(fleet: Fleet) -> AsyncIterator[set[int]]:
    """Yield a set to which each new engine's process is added."""
    before = set(fleet.engine_pids().values())
    new: set[int] = set()

    async def watch() -> None:
        while True:
            new.update(set(fleet.engine_pids().values()) - before - {0})
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    try:
        yield new
        await until("the engines are replaced", lambda: fleet.is_warm(REPLICAS))
    finally:
        watching.cancel()


@pytest.mark.parametrize("at_token", [0, 5], ids=["before the first token", "in mid-stream"])
async def test_a_poison_request_costs_two_engines_and_no_other_request(
    fleet: Fleet, at_token: int
) -> None:
    tenant = f"poisoner-{at_token}"
    key = await fleet.new_key(tenant)
    poison: dict[str, Any] = {"key": key, "mock": {"crash_at_token": at_token}}

    async def send(http: aiohttp.ClientSession, tokens: int) -> Ended:
        return await one_stream(fleet, http, "ams", tokens, **poison)

    async with (
        counting_engines(fleet) as new_engines,
        under_load(fleet, ["ams", "sin"]) as load,
        aiohttp.ClientSession() as http,
    ):
        await wait_ended(load, 8)
        first = await send(http, 8)
        assert first.how == ("error-event" if at_token else "refused"), first
        assert first.tokens == at_token
        for _ in range(3):
            again = await send(http, 8)
            assert again.how == "refused" and "2 engines failed" in again.detail
        # The same body of another tenant, and another body, are other requests.
        other = await one_stream(fleet, http, "ams", 8)
        changed = await one_stream(fleet, http, "ams", 8, key=key)
        assert (other.how, changed.how) == ("complete", "complete")
        await until("two warm engines", lambda: fleet.is_warm(REPLICAS))
        await wait_ended(load, 16)
    assert len(new_engines) <= ENGINES_LOST_MAX
    assert not load.failures(), load.failures()
    await invariants(fleet, load)


async def test_what_one_router_refuses_the_others_refuse_soon(fleet: Fleet) -> None:
    key = await fleet.new_key("wanderer")
    poison: dict[str, Any] = {"key": key, "mock": {"crash_at_token": 0}}
    async with counting_engines(fleet) as new_engines, aiohttp.ClientSession() as http:
        told_before = await losses_told(fleet, "sin")
        first = await one_stream(fleet, http, "ams", 8, **poison)
        assert first.how == "refused" and "2 engines failed" in first.detail, first
        await until("two warm engines", lambda: fleet.is_warm(REPLICAS))

        async def is_told() -> bool:
            return await losses_told(fleet, "sin") >= told_before + ENGINES_LOST_MAX

        # Routers tell each other once a second; with others busy this may take longer.
        await until("the other router was told of both losses", is_told, 30.0)
        for pop in ("sin", "ams", "sin"):
            again = await one_stream(fleet, http, pop, 8, **poison)
            assert again.how == "refused" and "2 engines failed" in again.detail, (pop, again)
    assert len(new_engines) <= ENGINES_LOST_MAX


async def losses_told(fleet: Fleet, pop: str) -> float:
    """Return of how many engines, lost to suspect requests, other routers have told this one."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{fleet.endpoint(pop)}/metrics") as response,
    ):
        text = await response.text()
    name = "isochrone_router_suspicions_received_total"
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(name))


async def test_a_request_that_ran_beside_a_killed_engine_twice_is_not_refused() -> None:
    """Equal requests share a fingerprint: the answers of the others clear it.

    In a fleet of its own: an engine that was lost before is restarted later each time, and streams
    wait for it no longer than other requests.
    """
    async with a_fleet_with_replicas() as fleet:
        await kill_beside_load(fleet)


async def kill_beside_load(fleet: Fleet) -> None:
    async with under_load(fleet, ["ams"], streams=4, tokens=20) as load:
        for number in (1, 2):
            key = await fleet.new_key(f"killer-{number}")
            await wait_ended(load, 4)
            async with aiohttp.ClientSession() as http:
                fault = {"mock": {"crash_at_token": 0}}
                ended = await one_stream(fleet, http, "ams", 8, key=key, **fault)
            assert ended.how == "refused" and "2 engines failed" in ended.detail, ended
            await until("two warm engines", lambda: fleet.is_warm(REPLICAS))
            await wait_ended(load, 8)
    assert not load.failures(), load.failures()
    await invariants(fleet, load)
