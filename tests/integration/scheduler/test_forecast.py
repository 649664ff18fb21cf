"""The forecast's duty on a real Postgres: it learns what ended, and a new term goes on from it."""

from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from isochrone.wire.ids import Epoch, PopId
from scheduler.decide.demand import slot_of
from scheduler.decide.membership import LivenessLimits, NodeContact
from scheduler.planner.demand_forecaster import DemandForecaster
from scheduler.planner.server import PlannerServer
from scheduler.store.forecast import read_clock
from scheduler.store.pool import Pool, using
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


HEARD = NodeContact(acting_for_s=99.0)


@pytest.fixture(autouse=True)
def not_far_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weeks of slots are asked for one by one, most of them empty here."""
    monkeypatch.setattr(
        "scheduler.planner.demand_forecaster.CATCH_UP_FROM_NOTHING_SLOTS", SLOTS_BACK + 5
    )
    # A machine may pause for seconds.
    monkeypatch.setattr("scheduler.planner.demand_forecaster.LEARN_S", 60.0)


async def test_what_ended_is_learned_and_the_next_term_goes_on_from_it(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(pool)
    async with using(pool) as connection:
        await connection.execute(ASKED, SLOTS_BACK * 10)
    server = PlannerServer(pool, LivenessLimits())
    forecast = server.forecast
    # Nor does a planner have one that was killed within a term.
    long_ago = NodeContact(acting_for_s=9_999.0)
    assert not (await server.cluster_state(long_ago)).is_forecast_known
    first = await forecast.learn(Epoch(1))
    assert (first.series, first.is_new, first.is_behind) == (1, True, False)
    assert SLOTS_BACK - 2 <= first.slots <= SLOTS_BACK + 1
    (row,) = forecast.soon
    assert (row.deployment_id, row.pop) == ("d", "ams")
    assert 9.0 < row.requests_per_s < 12.0
    assert await forecast.learn(Epoch(1)) == replace(first, slots=0, saved=0, is_new=False)
    picture = await server.cluster_state(HEARD)
    assert picture.is_forecast_known
    assert [(r.pop, r.requests_per_s >= 9.0) for r in picture.demand] == [(PopId("ams"), True)]
    # Saved in turns: after every series had its turn, nothing of the minutes is needed.
    for turn in range(6):
        await forecast._save(turn)
    async with using(pool) as connection:
        await connection.execute("TRUNCATE demand")
    later = DemandForecaster(pool)
    again = await later.learn(Epoch(2))
    assert (again.slots, again.series, again.is_new) == (0, 1, True)
    assert later.soon == [row]
    assert later.is_known
    # A term whose forecast cannot be made does not keep what it would need for ever.
    with pytest.raises(TimeoutError), monkeypatch.context() as patched:
        patched.setattr("scheduler.planner.demand_forecaster.read_series", fail)
        await later.learn(Epoch(3))
    assert not later.is_known
    monkeypatch.setattr("scheduler.planner.demand_forecaster.FORECAST_WAIT_S", 0.0)
    assert later.is_known


async def fail(*_: Any) -> None:
    raise TimeoutError


async def test_a_clock_that_was_years_ahead_leaves_nothing_behind(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(pool)
    async with using(pool) as connection:
        await connection.execute(ASKED, SLOTS_BACK * 10)
        ahead = ASKED.replace("- make", "+ interval '3650 days' - make")
        await connection.execute(ahead, 20)
        now_s = await read_clock(connection)

    async def years_ahead(_: object) -> float:
        return now_s + 3650 * 86_400.0

    server = PlannerServer(pool, LivenessLimits())
    await server.forecast.learn(Epoch(1))
    with monkeypatch.context() as patched:
        patched.setattr("scheduler.planner.demand_forecaster.read_clock", years_ahead)
        server.forecast._next_slot = slot_of(await years_ahead(None)) - 3
        assert (await server.forecast.learn(Epoch(1))).slots
        for turn in range(6):
            await server.forecast._save(server.forecast._next_slot + turn)
    again = await server.forecast.learn(Epoch(1))
    assert (again.series, again.is_new) == (1, True)
    assert again.slots >= SLOTS_BACK - 2
    # What was counted in minutes to come is no demand of now.
    (row,) = (await server.cluster_state(HEARD)).demand
    assert 9.0 < row.requests_per_s < 12.0


async def test_what_takes_long_to_learn_is_learned_a_part_at_a_time(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(pool)
    async with using(pool) as connection:
        await connection.execute(ASKED, 50)
    monkeypatch.setattr("scheduler.planner.demand_forecaster.LEARN_S", 0.0)
    forecast = DemandForecaster(pool)
    behind = await forecast.learn(Epoch(1))
    assert (behind.is_behind, behind.is_new, forecast.soon) == (True, False, ())
    monkeypatch.setattr("scheduler.planner.demand_forecaster.LEARN_S", 60.0)
    level = await forecast.learn(Epoch(1))
    assert (level.is_behind, level.is_new, len(forecast.soon)) == (False, True, 1)


async def test_one_slot_of_many_series_is_learned_a_part_at_a_time(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be learned in one call, which the scheduler gave up on after two minutes."""
    await begun(pool)
    async with using(pool) as connection:
        for number in range(6):
            of_one = ASKED.replace("'d', 'ams'", f"'d{number}', 'ams'")
            await connection.execute(of_one, 30)
    whole = DemandForecaster(pool)
    await whole.learn(Epoch(1))
    assert len(whole.soon) == 6
    async with using(pool) as connection:
        await connection.execute("TRUNCATE demand_series")
    clock = count()
    monkeypatch.setattr("scheduler.planner.demand_forecaster.monotonic", lambda: next(clock))
    monkeypatch.setattr("scheduler.planner.demand_forecaster.LEARN_S", 4.0)
    parts = DemandForecaster(pool)
    calls, slots, is_behind = 0, 0, True
    while is_behind:
        learned = await parts.learn(Epoch(2))
        is_behind, slots, calls = learned.is_behind, slots + learned.slots, calls + 1
        assert learned.slots <= 1
        assert learned.is_new is not is_behind
        assert (parts.soon == ()) is is_behind
    assert calls > slots > 0
    assert parts.soon == whole.soon


async def test_a_clock_that_is_set_ahead_has_no_years_of_slots_read(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(pool)
    async with using(pool) as connection:
        now_s = await read_clock(connection)
    forecast = DemandForecaster(pool)
    await forecast.learn(Epoch(1))

    async def years_ahead(_: object) -> float:
        return now_s + 3650 * 86_400.0

    slots_read: list[int] = []

    async def nothing_known(_: object, slot: int) -> None:
        slots_read.append(slot)

    monkeypatch.setattr("scheduler.planner.demand_forecaster.read_clock", years_ahead)
    monkeypatch.setattr("scheduler.planner.demand_forecaster.read_slot", nothing_known)
    learned = await forecast.learn(Epoch(1))
    assert not learned.is_behind
    assert len(slots_read) <= SLOTS_BACK + 6
    assert slots_read[-1] >= slot_of(await years_ahead(None)) - 2


async def test_a_flash_crowd_is_in_the_picture_as_soon_as_it_is_counted(pool: Pool) -> None:
    await begun(pool)
    async with using(pool) as connection:
        await connection.execute(ASKED, SLOTS_BACK * 10)
    server = PlannerServer(pool, LivenessLimits())
    await server.forecast.learn(Epoch(1))
    crowd = a_demand(a_row(requests=60_000, prompt_tokens=600_000, output_tokens=60_000))
    assert await counted(pool, crowd) == 0
    (row,) = (await server.cluster_state(HEARD)).demand
    assert row.requests_per_s > 400, "sixty thousand in at most two minutes"
