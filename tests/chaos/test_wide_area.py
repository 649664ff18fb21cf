"""A wide-area network that loses packets, becomes slow, or resolves no names, under load.

Two cities with a node each, and their routers and the scheduler in a third: only packets on the
links between them are lost or late. After each fault no request has failed, no node was taken for
lost, no engine was started anew, and the invariants hold.
"""

import re
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from isochrone.cli.client import AdminError
from tests.chaos.invariants import invariants
from tests.chaos.wide_area import USUAL_PORTS, WideArea, a_wide_area
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.load import Load, under_load, wait_ended

pytestmark = pytest.mark.asyncio(loop_scope="module")

HUB = "hub"
ANY = "0.0.0.0"
NEAR_MS = 5.0
FAR_MS = 60.0
"""One way, from the routers to the node in `ams` and to that in `sin`.

The difference, 110 ms there and back, decides how soon requests return to a node that was 150 ms
further away: they do when what its late first tokens have taught the routers has decayed below it,
half of it in 45 s. So 20 s at most here; with a difference of 40 ms it took 90."""

WAIT_S = 300.0
"""For any change: a busy machine needs minutes for what takes seconds."""

PORTS_LEFT = 3
"""To each node, for each router: a quarter of what the requests need."""

RECENT = 20
"""How many answers show which node the routers prefer."""

SHARE_MIN = 0.8


class WideFleet:
    """A fleet whose nodes are behind links, and known by names."""

    def __init__(self, fleet: Fleet, area: WideArea) -> None:
        self.fleet = fleet
        self.area = area
        self.engines: dict[str, int] = {}

    def set_links(self, *, jitter_ms: float = 0.0, loss: float = 0.0) -> None:
        """Have the usual delays, with jitter and loss on both links."""
        for city, delay_ms in (("ams", NEAR_MS), ("sin", FAR_MS)):
            self.area.links[city].set(delay_ms=delay_ms, jitter_ms=jitter_ms, loss=loss)

    async def is_whole(self) -> bool:
        """Return whether all are heard and both replicas are warm."""
        try:
            status = await self.fleet.ask("GET", "/v1/status")
            is_warm = await self.fleet.is_warm(2)
        except AdminError:
            return False
        heard = status["nodes_ready"] == 2 and status["routers_ready"] == 2
        return bool(status["acting"] and heard and is_warm)

    async def prefer(self, load: Load, node: str) -> None:
        """Wait until routers send almost all requests to one node."""

        async def do_prefer() -> bool:
            last = [ended.node for ended in load.ended[-RECENT:]]
            return len(last) == RECENT and last.count(node) >= SHARE_MIN * RECENT

        await until(f"requests go to {node}", do_prefer, WAIT_S)

    async def hold_invariants(self, load: Load) -> None:
        """Mend everything, and check what must hold after each fault."""
        self.area.names.hangs = False
        self.set_links()
        await until("the fleet is whole", self.is_whole, WAIT_S)
        assert not load.failures(), load.failures()
        assert self.fleet.engine_pids() == self.engines
        kinds = Counter(row["kind"] for row in (await self.fleet.ask("GET", "/v1/events"))["data"])
        assert not kinds["node.lost"], kinds
        await invariants(self.fleet, load)


def settings_of(area: WideArea, fleet: Fleet) -> None:
    """Put each part of the fleet into its city, where it knows the others by their names."""
    fleet.settings["scheduler-a"] = {
        "admin_host": ANY,
        "control_host": ANY,
        # Longer than a busy machine stalls: here no node may be taken for lost.
        "liveness": {"suspect_after_s": 10.0, "lost_after_s": 40.0, "grace_s": 40.0},
    }
    hub_parts = ["scheduler-a", *(f"router-{pop}" for pop in CITIES)]
    for part in hub_parts:
        fleet.prefixes[part] = area.prefix(HUB)
        fleet.hosts[part] = area.access[HUB]
    for pop in CITIES:
        link, node = area.links[pop], f"node-{pop}"
        area.names.names[f"scheduler.{pop}.test"] = link.first
        area.names.names[f"{node}.test"] = link.second
        fleet.prefixes[node] = area.prefix(pop)
        fleet.hosts[node] = area.access[pop]
        scheduler = f"http://scheduler.{pop}.test:{fleet.ports['control-a']}"
        fleet.settings[node] = {
            "schedulers": [scheduler],
            "address": f"http://{node}.test:{fleet.ports[node]}",
            "listen_host": ANY,
        }
        fleet.settings[f"router-{pop}"] = {
            "host": ANY,
            "connect_timeout_s": 5.0,
            "first_byte_timeout_s": 15.0,
            "stream_idle_timeout_s": 15.0,
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wide() -> AsyncIterator[WideFleet]:
    async with a_wide_area((HUB, *CITIES)) as area, a_fleet(comes_up=False) as fleet:
        settings_of(area, fleet)
        made = WideFleet(fleet, area)
        made.set_links()
        await fleet.up()
        await fleet.deploy(replicas=2)
        fleet.note_baseline()
        made.engines = fleet.engine_pids()
        yield made


async def test_lost_and_late_packets_cost_no_request_and_no_node(wide: WideFleet) -> None:
    """One packet in a hundred is lost, then one in twenty, with jitter of 100 ms (N4)."""
    async with under_load(wide.fleet, [*CITIES], streams=6) as load:
        await wide.prefer(load, "ams-1")
        for loss, jitter_ms in ((0.01, 20.0), (0.05, 100.0)):
            wide.set_links(jitter_ms=jitter_ms, loss=loss)
            await wait_ended(load, 40, WAIT_S)
    await wide.hold_invariants(load)


async def test_names_that_are_not_resolved_cost_no_request(wide: WideFleet) -> None:
    """Queries for names get no answer while connections must be opened anew (N8)."""
    fleet, names = wide.fleet, wide.area.names
    async with under_load(fleet, [*CITIES], streams=4) as load:
        await wait_ended(load, 8, WAIT_S)
        names.hangs = True
        async with under_load(fleet, [*CITIES], streams=24) as crowd:
            await wait_ended(crowd, 48, WAIT_S)
        assert not crowd.failures(), crowd.failures()
        # Every connection to the nearest node breaks, and its agent comes up without the scheduler.
        await fleet.kill("node-ams")
        await fleet.start_node("ams")
        before = len(load.ended)

        async def answers_again() -> bool:
            return any(ended.node == "ams-1" for ended in load.ended[before:])

        await until("requests go to the node again", answers_again, WAIT_S)
        assert names.unanswered, "no name was asked for"
        logs = (fleet.folder / "logs").glob("router-*.log")
        assert not any("getaddrinfo" in path.read_text() for path in logs)
    load.ended += crowd.ended
    await wide.hold_invariants(load)


async def test_a_router_and_an_agent_without_ports_say_so_and_recover(wide: WideFleet) -> None:
    """Neither a replica nor a request pays for it: requests wait for a connection (R4)."""
    fleet, area = wide.fleet, wide.area
    logs = {part: fleet.folder / "logs" / f"{part}.log" for part in ("router-ams", "node-ams")}
    before = {part: len(path.read_text()) for part, path in logs.items()}

    # An agent whose names are no longer known asks for them first, which takes a port, too.
    lack = re.compile("annot assign requested address|failure in name resolution")

    async def say_so() -> bool:
        said = {part: path.read_text()[before[part] :] for part, path in logs.items()}
        return all(lack.search(text) for text in said.values())

    area.set_ports(HUB, PORTS_LEFT)
    async with under_load(fleet, [*CITIES], streams=8 * PORTS_LEFT, creates_keys=False) as crowd:
        await wait_ended(crowd, 24 * PORTS_LEFT, WAIT_S)
        try:
            # Without a connection to the scheduler, and without a port for another one.
            area.set_ports("ams", 0)
            await fleet.processes.stop("scheduler-a")
            await fleet.start_scheduler("a")
            await until("they say what they lack", say_so, WAIT_S)
            await wait_ended(crowd, PORTS_LEFT, WAIT_S)
        finally:
            # Else the crowd's requests would not end.
            for city in (HUB, "ams"):
                area.set_ports(city, USUAL_PORTS)
    assert not crowd.failures(), crowd.failures()
    await wide.hold_invariants(crowd)


async def test_requests_leave_a_city_that_becomes_far_and_return(wide: WideFleet) -> None:
    """The nearest node is suddenly 150 ms further away, and later as near as before (N5)."""
    async with under_load(wide.fleet, [*CITIES], streams=4) as load:
        await wide.prefer(load, "ams-1")
        wide.area.links["ams"].set(delay_ms=NEAR_MS + 75.0)
        await wide.prefer(load, "sin-1")
        moved = len(load.ended)
        await wait_ended(load, 2 * RECENT, WAIT_S)
        stayed = [ended.node for ended in load.ended[moved:]].count("sin-1")
        assert stayed >= SHARE_MIN * (len(load.ended) - moved), "requests go to and fro"
        # The way becomes short again, and is noticed although requests no longer take it.
        wide.area.links["ams"].set(delay_ms=NEAR_MS)
        await wide.prefer(load, "ams-1")
        returned = len(load.ended)
        await wait_ended(load, 2 * RECENT, WAIT_S)
        stayed = [ended.node for ended in load.ended[returned:]].count("ams-1")
        assert stayed >= SHARE_MIN * (len(load.ended) - returned), "requests go to and fro"
    await wide.hold_invariants(load)
