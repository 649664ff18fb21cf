"""Elections while a scheduler's link to Postgres carries one way only, or comes and goes (N3)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg
import pytest

from tests.chaos.cable import Cable, a_cable
from tests.chaos.invariants import check_epochs
from tests.system.harness import Fleet, a_fleet, until

LEASE_S = 3.0
FLAPS = 3
ELECTIONS_MAX = 2
TAKEN_OVER_S = LEASE_S + 12.0


class Rivals:
    """Two schedulers, each with a cable of its own to Postgres."""

    def __init__(
        self, fleet: Fleet, cables: dict[str, Cable], watching: asyncpg.Connection
    ) -> None:
        self.fleet = fleet
        self.cables = cables
        self._watching = watching

    async def epoch(self) -> int:
        """Return the epoch of the last election."""
        return int(await self._watching.fetchval("SELECT epoch FROM lease"))


@pytest.fixture
async def rivals() -> AsyncIterator[Rivals]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(a_fleet(comes_up=False))
        await fleet.start_postgres()
        cables = {}
        for name in ("a", "b"):
            folder = fleet.folder / f"cable-{name}"
            folder.mkdir()
            cables[name] = await stack.enter_async_context(
                a_cable(fleet.folder / "pg" / ".s.PGSQL.5432", at=folder / ".s.PGSQL.5432")
            )
            fleet.settings[f"scheduler-{name}"] = {
                "database_url": f"postgresql://isochrone@/isochrone?host={folder}",
                "lease_ttl_s": LEASE_S,
                "lease_renew_s": 0.3,
            }
        watching = await asyncpg.connect(fleet.dsn())
        stack.push_async_callback(watching.close)
        await fleet.start_scheduler("a")
        await until("a acts", fleet.acts)
        await fleet.start_scheduler("b")
        yield Rivals(fleet, cables, watching)


async def test_a_link_that_carries_one_way_or_flaps_causes_no_further_elections(
    rivals: Rivals,
) -> None:
    fleet, first = rivals.fleet, await rivals.epoch()
    # For ever: the scheduler hears Postgres, and Postgres does not hear it.
    rivals.cables["a"].up.hold()

    async def b_acts() -> bool:
        return await fleet.acts("b")

    await until("the other scheduler acts", b_acts, TAKEN_OVER_S)
    second = await rivals.epoch()
    assert second == first + 1
    await asyncio.sleep(2 * LEASE_S)
    assert (await rivals.epoch(), await b_acts()) == (second, True)
    # Each time for less than a lease; the other's link still carries one way.
    for _ in range(FLAPS):
        rivals.cables["b"].hold()
        await asyncio.sleep(0.5 * LEASE_S)
        rivals.cables["b"].mend()
        await asyncio.sleep(0.2 * LEASE_S)
    rivals.cables["a"].mend()
    await until("one acts", b_acts)
    assert await rivals.epoch() <= first + ELECTIONS_MAX
    check_epochs(fleet)
