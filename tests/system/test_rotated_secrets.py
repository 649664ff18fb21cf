"""Secrets are replaced under requests as docs/operations.md and docs/security.md say.

No request is refused, no engine is started anew, and what was replaced is not accepted any more.
"""

import shutil
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from isochrone.cli.client import AdminError
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.load import under_load, wait_ended
from tests.system.tls_fleet import TlsFleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIRST, LATER = CITIES


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet(comes_up=False, make=TlsFleet) as running:
        for pop in CITIES:
            running.settings[f"node-{pop}"]["keep_engines_on_stop"] = True
        await running.up()
        await running.deploy(replicas=2)
        yield running


async def is_whole(fleet: Fleet) -> bool:
    """Return whether all are heard and both replicas are warm."""
    try:
        status = await fleet.ask("GET", "/v1/status")
        heard = (status["nodes_ready"], status["routers_ready"]) == (2, 2)
        return heard and await fleet.is_warm(2)
    except AdminError:
        return False


async def change_in_database(fleet: Fleet, change: str) -> None:
    connection = await asyncpg.connect(fleet.dsn())
    await connection.execute(f"UPDATE cluster SET {change}")
    await connection.close()


def salt_secrets(fleet: Fleet) -> set[bytes]:
    """Return the secrets of the nodes' cache salts: one, if they all have the same."""
    return {path.read_bytes() for path in fleet.folder.glob("node-*/cluster_cache_salt.key")}


async def join_again(fleet: Fleet, part: str) -> None:
    """Let a node or router join as if it never had."""
    kind, _, pop = part.partition("-")
    await fleet.processes.stop(part)
    (fleet.folder / part / "identity.json").unlink()
    await (fleet.start_node(pop) if kind == "node" else fleet.start_router(pop))


async def test_the_secret_of_the_prefix_caches_is_replaced(fleet: Fleet) -> None:
    before, engines = salt_secrets(fleet), fleet.engine_pids()
    async with under_load(fleet, [*CITIES], streams=4, creates_keys=False) as load:
        await wait_ended(load, 4)
        await change_in_database(fleet, "cache_salt_version = cache_salt_version + 1")
        await fleet.processes.stop("scheduler-a")
        await fleet.start_scheduler("a")

        async def is_replaced() -> bool:
            now = salt_secrets(fleet)
            return len(now) == 1 and now != before

        await until("both nodes have the new secret", is_replaced)
        await until("the fleet is whole", lambda: is_whole(fleet))
        await wait_ended(load, 8)
    assert len(before) == 1
    assert not load.failures(), load.failures()
    assert fleet.engine_pids() == engines


async def test_the_authority_is_replaced(fleet: Fleet) -> None:
    """In the first PoP nodes join before routers, in the next one routers before nodes."""
    salts, engines = salt_secrets(fleet), fleet.engine_pids()
    async with under_load(fleet, [*CITIES], streams=4, creates_keys=False) as load:
        await wait_ended(load, 4)
        await fleet.processes.stop("scheduler-a")
        shutil.move(fleet.folder / "ca", fleet.folder / "old")
        await change_in_database(fleet, "authority = ''")
        await fleet.start_scheduler("a")
        await until("the scheduler acts", fleet.acts)
        await wait_ended(load, 8)
        for part in (f"node-{FIRST}", f"router-{FIRST}", f"router-{LATER}", f"node-{LATER}"):
            await join_again(fleet, part)
            await wait_ended(load, 8)
        await until("the fleet is whole", lambda: is_whole(fleet))
        await wait_ended(load, 8)
    # Each city has one router, whose clients find none while it is restarted.
    cut = [ended for ended in load.failures() if ended.how != "reset" or ended.tokens]
    assert not cut, cut
    assert fleet.engine_pids() == engines
    assert len(salt_secrets(fleet)) == 1 and salt_secrets(fleet) != salts
