"""A PoP with its node and router is cut off from everything, and comes back.

Packets between the two cities are lost without a sign. Each city serves its own clients meanwhile:
the one that is cut off by the last route table, the other one by what the scheduler decides. Then
both are one fleet again, with no engine, request or row of usage too many.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import asyncpg
import pytest
import pytest_asyncio

from isochrone.cli.client import AdminError
from tests.chaos.invariants import invariants
from tests.chaos.wide_area import WideArea, a_wide_area
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.load import one_stream, under_load, wait_ended

pytestmark = pytest.mark.asyncio(loop_scope="module")

CENTRE, FAR = CITIES
"""The scheduler and Postgres are in the first."""

ANY = "0.0.0.0"
DELAY_MS = 20.0
WHOLE_AGAIN_S = 60.0


def settings_of(area: WideArea, fleet: Fleet) -> None:
    """Put a node and a router into each city, and the scheduler into the centre."""
    link = area.links[FAR]
    fleet.settings["scheduler-a"] = {
        "admin_host": ANY,
        "control_host": ANY,
        "liveness": {"suspect_after_s": 3.0, "lost_after_s": 8.0, "grace_s": 12.0},
    }
    fleet.prefixes["scheduler-a"] = area.prefix(CENTRE)
    fleet.hosts["scheduler-a"] = area.access[CENTRE]
    for city, address in ((CENTRE, link.first), (FAR, link.second)):
        for part in (f"node-{city}", f"router-{city}"):
            fleet.prefixes[part] = area.prefix(city)
            fleet.hosts[part] = area.access[city]
            scheduler = f"http://{link.first}:{fleet.ports['control-a']}"
            fleet.settings[part] = {"schedulers": [scheduler]}
        fleet.settings[f"node-{city}"] |= {
            "address": f"http://{address}:{fleet.ports[f'node-{city}']}",
            "listen_host": ANY,
        }
        fleet.settings[f"router-{city}"] |= {
            "host": ANY,
            "connect_timeout_s": 1.0,
            "first_byte_timeout_s": 3.0,
            "stream_idle_timeout_s": 3.0,
            "probe_timeout_s": 1.0,
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cities() -> AsyncIterator[tuple[Fleet, WideArea]]:
    async with a_wide_area((CENTRE, FAR)) as area, a_fleet(comes_up=False) as fleet:
        settings_of(area, fleet)
        area.links[FAR].set(delay_ms=DELAY_MS)
        await fleet.up()
        await fleet.deploy(replicas=2)
        fleet.note_baseline()
        yield fleet, area


async def test_a_city_that_is_cut_off_serves_its_clients_and_rejoins(
    cities: tuple[Fleet, WideArea],
) -> None:
    fleet, area = cities
    before = fleet.engine_pids()
    leaked = await fleet.ask("POST", "/v1/keys", {"tenant_id": "leaked"})
    await fleet.routers_know()
    async with (
        under_load(fleet, [CENTRE], streams=4) as here,
        under_load(fleet, [FAR], streams=4, creates_keys=False) as there,
    ):
        await wait_ended(here, 8)
        await wait_ended(there, 8)
        area.links[FAR].set(delay_ms=DELAY_MS, loss=1.0)

        async def is_replaced() -> bool:
            status = await fleet.ask("GET", "/v1/status")
            rows = (await fleet.ask("GET", "/v1/placements"))["data"]
            warm = [row for row in rows if row["pop"] == CENTRE and row["state"] == "warm"]
            silent = (status["nodes_ready"], status["routers_ready"]) == (1, 1)
            return silent and len(warm) == 2

        await until("its replica is placed in the other city", is_replaced)
        await fleet.ask("DELETE", f"/v1/keys/{leaked['key_id']}")
        moved = len(there.ended)
        await wait_ended(here, 20)
        await wait_ended(there, 20)
        assert {ended.node for ended in there.ended[moved:]} == {f"{FAR}-1"}
        assert fleet.engine_pids()[f"node-{FAR}"] == before[f"node-{FAR}"]
        area.links[FAR].set(delay_ms=DELAY_MS)
        await until("the fleet is whole", lambda: is_whole(fleet), WHOLE_AGAIN_S)
        await wait_ended(there, 8)
        await wait_ended(here, 8)
    sent = {CENTRE: len(here.ended), FAR: len(there.ended)}
    await until("a key revoked meanwhile is refused", lambda: is_refused(fleet, leaked["key"]))
    await check_nothing_is_doubled(fleet, sent)
    here.ended += there.ended
    assert not here.failures(), here.failures()
    await invariants(fleet, here)


async def is_whole(fleet: Fleet) -> bool:
    """Return whether all are heard, and one replica runs in each city."""
    try:
        status = await fleet.ask("GET", "/v1/status")
        rows = (await fleet.ask("GET", "/v1/placements"))["data"]
    except AdminError:
        return False
    heard = (status["nodes_ready"], status["routers_ready"]) == (2, 2)
    running = sorted((row["pop"], row["state"], row["ending"]) for row in rows)
    one_each = running == [(city, "warm", False) for city in sorted(CITIES)]
    return heard and one_each and fleet.engine_processes() == 2


async def is_refused(fleet: Fleet, key: str) -> bool:
    """Return whether the router of the city that was cut off refuses a key."""
    async with aiohttp.ClientSession() as http:
        return (await one_stream(fleet, http, FAR, 1, key)).how == "refused"


async def check_nothing_is_doubled(fleet: Fleet, sent: dict[str, int]) -> None:
    """Check that the far node was lost once, and each request counts once as demand of its city."""
    kinds = Counter[str]()

    async def is_back() -> bool:
        nonlocal kinds
        events = await asyncio.to_thread(fleet.api().list, "/v1/events")
        kinds = Counter(row["kind"] for row in events)
        return kinds["node.back"] > 0

    await until("the node's return is an event", is_back)
    ended = (kinds["node.lost"], kinds["node.back"], kinds["replica.ended"])
    assert ended == (1, 1, 1), kinds
    counted: dict[str, int] = {}

    async def is_counted() -> bool:
        nonlocal counted
        connection = await asyncpg.connect(fleet.dsn())
        rows = await connection.fetch("SELECT pop, sum(requests) AS n FROM demand GROUP BY pop")
        await connection.close()
        counted = {row["pop"]: row["n"] for row in rows}
        return all(counted.get(city, 0) >= requests for city, requests in sent.items())

    await until("each request counts as demand", is_counted)
    assert counted == sent
