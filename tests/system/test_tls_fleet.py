"""A fleet with TLS, and two nodes in each of two PoPs."""

import os
import signal
from collections.abc import AsyncIterator
from functools import partial

import pytest

from tests.system.harness import CITIES, Fleet, a_fleet, node_process, until
from tests.system.load import under_load, wait_ended
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
            await wait_ended(load, 8)
        await until("all are warm again", lambda: fleet.is_warm(len(CITIES) * NODES), WARM_S)
        engines = fleet.engine_pids()
        for number in range(1, NODES + 1):
            os.killpg(engines[node_process("ams", number)], signal.SIGKILL)
        await wait_ended(load, 16)
    assert not load.failures(), load.failures()
    # Each node was sent requests: none was left out because another refused it something.
    assert len({ended.node for ended in load.ended}) == len(CITIES) * NODES
