"""The forecast's duty on a real Postgres: it learns what ended, and a new term goes on from it."""

from typing import Any, cast

from isochrone.wire.ids import ClusterId, PopId
from scheduler.acting import Acting
from scheduler.config import SchedulerConfig
from scheduler.loops.forecast import Forecast
from scheduler.store.lease import hold_lease
from scheduler.store.pool import Pool, transaction, using
from tests.integration.scheduler.test_demand import begun, counted
from tests.unit.scheduler.test_intake import a_demand, a_row

SLOTS_BACK = 40
ASKED = """
INSERT INTO demand (minute, deployment_id, pop, requests, prompt_tokens, uncached_tokens,
                    output_tokens)
SELECT date_trunc('minute', clock_timestamp()) - make_interval(mins => n), 'd', 'ams',
       600, 60000, 60000, 6000
FROM generate_series(1, $1) n
"""


async def an_acting(pool: Pool, holder: str) -> Acting:
    config = cast(Any, SchedulerConfig)(
        name=holder, database_url="", authority=None, admin_token_file=None
    )
    acting = Acting(
        config=config,
        pool=pool,
        reserved=pool,
        intake=pool,
        authority=cast(Any, None),
        cluster_id=ClusterId("c1"),
        # A lease that is timed would run out on a machine that is busy.
        clock=lambda: 0.0,
    )
    async with transaction(pool) as connection:
        await connection.execute("UPDATE lease SET expires_at = '-infinity'")
        lease = await hold_lease(connection, holder)
    assert lease is not None
    acting.renewed(lease, 0.0)
    return acting


async def test_what_ended_is_learned_and_the_next_term_goes_on_from_it(pool: Pool) -> None:
    await begun(pool)
    async with using(pool) as connection:
        await connection.execute(ASKED, SLOTS_BACK * 10)
    acting = await an_acting(pool, "s1")
    forecast = Forecast(acting)
    first = await forecast.run_once()
    assert first.series == 1
    assert SLOTS_BACK - 2 <= first.slots <= SLOTS_BACK + 1
    (row,) = acting.foretold
    assert (row.deployment_id, row.pop) == ("d", "ams")
    assert 9.0 < row.requests_per_s < 12.0
    assert await forecast.run_once() == first._replace(slots=0, saved=0)
    async with transaction(pool, isolation="repeatable_read") as connection:
        picture = await acting.picture(connection)
    assert [(r.pop, r.requests_per_s >= 9.0) for r in picture.demand] == [(PopId("ams"), True)]
    # Saved in turns: after every series had its turn, nothing of the minutes is needed.
    for turn in range(6):
        await forecast._save(turn)
    async with using(pool) as connection:
        await connection.execute("TRUNCATE demand")
    later = await an_acting(pool, "s2")
    again = await Forecast(later).run_once()
    assert (again.slots, again.series) == (0, 1)
    assert later.foretold == [row]


async def test_a_flash_crowd_is_in_the_picture_as_soon_as_it_is_counted(pool: Pool) -> None:
    await begun(pool)
    async with using(pool) as connection:
        await connection.execute(ASKED, SLOTS_BACK * 10)
    acting = await an_acting(pool, "s1")
    await Forecast(acting).run_once()
    crowd = a_demand(a_row(requests=60_000, prompt_tokens=600_000, output_tokens=60_000))
    assert await counted(pool, crowd) == 0
    async with transaction(pool, isolation="repeatable_read") as connection:
        (row,) = (await acting.picture(connection)).demand
    assert row.requests_per_s > 400, "sixty thousand in at most two minutes"
