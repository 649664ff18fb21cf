"""What all cities will ask: newcomers borrow from neighbours, and demand is raised to it."""

from math import pi, sin

import pytest

from isochrone.wire.ids import DeploymentId, PopId
from scheduler.decide.cluster import DemandRate
from scheduler.decide.demand.demand_rates import raise_to_forecast
from scheduler.decide.demand.fleet_forecast import (
    FORGET_SLOTS,
    FleetForecast,
    SeriesKey,
    SlotDemand,
    slot_of,
)
from scheduler.decide.demand.series_forecast import DAY_SLOTS

LONGITUDES = {PopId("ams"): 5.0, PopId("iad"): -77.0, PopId("sin"): 104.0, PopId("akl"): 175.0}


def key(pop: str, deployment: str = "d") -> SeriesKey:
    return DeploymentId(deployment), PopId(pop)


def a_slot(requests: float) -> SlotDemand:
    return SlotDemand(requests, 120 * requests, 100 * requests, 50 * requests)


def wave(slot: int, longitude: float) -> float:
    """Ten requests/s about noon there, one at night."""
    return 5.5 + 4.5 * sin(2 * pi * (slot / DAY_SLOTS + longitude / 360))


def a_rate(pop: str, requests: float, **fields: float) -> DemandRate:
    return DemandRate(
        deployment_id=DeploymentId("d"),
        pop=PopId(pop),
        requests_per_s=requests,
        uncached_tokens_per_s=100 * requests,
        output_tokens_per_s=50 * requests,
        **fields,
    )


def taught(days: float, *pops: str) -> FleetForecast:
    outlook = FleetForecast(LONGITUDES)
    for slot in range(int(days * DAY_SLOTS)):
        for pop in pops:
            outlook.learn(slot, key(pop), a_slot(wave(slot, LONGITUDES[PopId(pop)])))
    return outlook


def test_what_is_foretold_is_made_of_what_was_asked() -> None:
    outlook = FleetForecast(LONGITUDES)
    for slot in range(DAY_SLOTS):
        outlook.learn(slot, key("ams"), a_slot(8.0))
    row = outlook.foretell(key("ams"))
    assert row is not None
    assert row.requests_per_s == pytest.approx(8.0, rel=0.02)
    assert row.uncached_tokens_per_s == pytest.approx(800.0, rel=0.02)
    assert row.output_tokens_per_s == pytest.approx(400.0, rel=0.02)
    assert outlook.foretell(key("sin")) is None


def test_a_newcomer_rises_with_its_morning_as_its_neighbour_did() -> None:
    morning = 5 * DAY_SLOTS + 40  # early in Washington, afternoon in Amsterdam
    alone, beside = FleetForecast(LONGITUDES), taught(5.0, "ams")
    for slot in range(5 * DAY_SLOTS, morning):
        beside.learn(slot, key("ams"), a_slot(wave(slot, 5.0)))
    risen = []
    for outlook in (alone, beside):
        for slot in range(morning, morning + 3):
            outlook.learn(slot, key("iad"), a_slot(wave(slot, -77.0)))
        row = outlook.foretell(key("iad"))
        assert row is not None
        risen.append(row.requests_per_s)
    later = wave(morning + 2 + 6, -77.0)
    assert abs(risen[1] - later) < abs(risen[0] - later)


def test_what_is_saved_goes_on_elsewhere_as_here() -> None:
    here = taught(2.0, "ams")
    there = FleetForecast(LONGITUDES)
    slot, state = here.saved(key("ams"))
    assert slot == 2 * DAY_SLOTS - 1
    assert there.restore(key("ams"), state)
    assert not there.restore(key("sin"), state[:-5])
    for outlook in (here, there):
        outlook.learn(slot + 1, key("ams"), a_slot(3.0))
    assert here.foretell(key("ams")) == there.foretell(key("ams"))


def test_nothing_is_begun_by_zero_and_what_asks_nothing_for_long_is_forgotten() -> None:
    outlook = FleetForecast(LONGITUDES)
    outlook.learn(1, key("ams"), SlotDemand())
    assert len(outlook) == 0
    outlook.learn(2, key("ams"), a_slot(1.0))
    for slot in range(3, 6 * DAY_SLOTS):
        outlook.learn(slot, key("ams"), SlotDemand())
    row = outlook.foretell(key("ams"))
    assert row is None or row.requests_per_s < 0.01
    outlook.learn(FORGET_SLOTS + 10, key("ams"), SlotDemand())
    assert outlook.known() == []


def test_demand_is_raised_to_what_is_foretold_and_never_lowered() -> None:
    now = (a_rate("ams", 2.0), a_rate("iad", 9.0), a_rate("akl", 2.0, refused_per_s=2.0))
    told = [a_rate("ams", 5.0), a_rate("iad", 3.0), a_rate("sin", 1.0)]
    rows = {row.pop: row for row in raise_to_forecast(now, told)}
    assert rows[PopId("ams")] == a_rate("ams", 5.0)
    assert rows[PopId("iad")] == a_rate("iad", 9.0), "a flash crowd is answered by its level"
    assert rows[PopId("sin")] == a_rate("sin", 1.0)
    assert rows[PopId("akl")] == a_rate("akl", 4.0), "the refused asked too"
    refused = DemandRate(deployment_id=DeploymentId("d"), pop=PopId("sin"), refused_per_s=0.5)
    assert raise_to_forecast((refused,), []) == (refused,)


def test_a_slot_is_ten_minutes() -> None:
    assert (slot_of(0.0), slot_of(599.9), slot_of(600.0)) == (0, 0, 1)
