"""A fleet with TLS, and two nodes in each of two PoPs."""

import os
import signal
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest

from tests.system.harness import CITIES, Fleet, a_fleet, node_process, until
from tests.system.load import under_load, wait_ended, wait_running_ended
from tests.system.tls_fleet import TlsFleet

NODES = 2
WARM_S = 90.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet(make=partial(TlsFleet, nodes_in_pop=NODES)) as running:
        for pop in CITIES:
            await running.start_node(pop, 2)
        yield running


async def test_streams_are_whole_when_engines_die_in_either_pop(fleet: Fleet) -> None:
    """One engine after the other, then all of a PoP: its router uses the nodes of the other PoP."""
    await fleet.deploy(replicas=len(CITIES) * NODES)
    async with under_load(fleet, [*CITIES], streams=8) as load:
        await wait_ended(load, 16)
        for pid in fleet.engine_pids().values():
            os.killpg(pid, signal.SIGKILL)
            await wait_running_ended(load)
        await until("all are warm again", lambda: fleet.is_warm(len(CITIES) * NODES), WARM_S)
        engines = fleet.engine_pids()
        for number in range(1, NODES + 1):
            os.killpg(engines[node_process("ams", number)], signal.SIGKILL)
        await wait_ended(load, 16)
    assert not load.failures(), load.failures()
    # Each node was sent requests: none was left out because another refused it something.
    assert len({ended.node for ended in load.ended}) == len(CITIES) * NODES


async def test_nodes_hand_requests_off_to_each_other(fleet: Fleet) -> None:
    options = {"sequences": "2", "ttft_ms": "50", "itl_ms": "20"}
    await fleet.deploy(replicas=len(CITIES) * NODES, options=options)

    async def was_handed_off() -> bool:
        return await handed_off(fleet) > 0

    async with under_load(fleet, [*CITIES], streams=24) as load:
        await until("a request is handed off", was_handed_off, WARM_S)
        await wait_ended(load, 24)
    assert not load.failures(), load.failures()


async def handed_off(fleet: Fleet) -> float:
    """Return how many requests nodes have handed off to others."""
    count = 0.0
    sample = 'isochrone_node_requests_total{outcome="handed_off"}'
    async with aiohttp.ClientSession() as http:
        for pop in CITIES:
            for number in range(1, NODES + 1):
                async with http.get(f"{fleet.url(node_process(pop, number))}/metrics") as page:
                    lines = (await page.text()).splitlines()
                count += sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(sample))
    return count
