"""Forecasts of all series: new ones borrow from neighbours, and demand is raised to them."""

from collections.abc import Iterator
from math import pi, sin

import pytest

from isochrone.wire.ids import DeploymentId, PopId
from scheduler.decide.cluster import DemandRate
from scheduler.decide.demand import (
    FORGET_SLOTS,
    FleetForecast,
    SeriesKey,
    SlotDemand,
    fleet_forecast,
    slot_of,
)
from scheduler.decide.demand.demand_rates import raise_to_forecast
from scheduler.decide.demand.series_forecast import DAY_SLOTS

LONGITUDES = {PopId("ams"): 5.0, PopId("iad"): -77.0, PopId("sin"): 104.0, PopId("akl"): 175.0}


def key(pop: str, deployment: str = "d") -> SeriesKey:
    return DeploymentId(deployment), PopId(pop)


def a_slot(requests: float) -> SlotDemand:
    return SlotDemand(requests, 120 * requests, 100 * requests, 50 * requests)


def wave(slot: int, longitude: float) -> float:
    """Return ten requests/s around local noon, one at night."""
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


def learned_forecast(days: float, *pops: str) -> FleetForecast:
    forecasts = FleetForecast(LONGITUDES)
    for slot in range(int(days * DAY_SLOTS)):
        for pop in pops:
            forecasts.learn(slot, key(pop), a_slot(wave(slot, LONGITUDES[PopId(pop)])))
    return forecasts


def test_a_forecast_has_the_mix_of_past_demand() -> None:
    forecasts = FleetForecast(LONGITUDES)
    for slot in range(DAY_SLOTS):
        forecasts.learn(slot, key("ams"), a_slot(8.0))
    row = forecasts.forecast(key("ams"))
    assert row is not None
    assert row.requests_per_s == pytest.approx(8.0, rel=0.02)
    assert row.uncached_tokens_per_s == pytest.approx(800.0, rel=0.02)
    assert row.output_tokens_per_s == pytest.approx(400.0, rel=0.02)
    assert forecasts.forecast(key("sin")) is None


def test_of_too_many_series_the_smallest_is_not_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_forecast, "SERIES_MAX", 2)
    forecasts = FleetForecast(LONGITUDES)
    for slot, pop, requests in ((0, "iad", 1.0), (1, "ams", 5.0), (2, "sin", 3.0), (3, "akl", 0.5)):
        demand = {key(pop): a_slot(requests)}
        for new in forecasts.admit_new(demand):
            forecasts.learn(slot, new, demand[new])
    assert [pop for pop in LONGITUDES if forecasts.forecast(key(pop)) is not None] == ["ams", "sin"]
    assert not forecasts.restore(key("akl"), forecasts.serialized(key("ams"))[1])


def test_a_slot_replaces_a_limited_number_of_series_by_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Demand that moves all the time must not take longer to learn than a slot."""
    monkeypatch.setattr(fleet_forecast, "SERIES_MAX", 6)
    monkeypatch.setattr(fleet_forecast, "REPLACED_PER_SLOT_MAX", 2)
    forecasts = FleetForecast(LONGITUDES)
    first = {key("ams", f"d{number}"): a_slot(number) for number in range(1, 5)}
    assert forecasts.admit_new(first) == [key("ams", f"d{number}") for number in (4, 3, 2, 1)]
    for new in first:
        forecasts.learn(0, new, first[new])
    # Two more fit, and two are replaced: d1 and d2.
    second = {key("iad", f"d{number}"): a_slot(number) for number in range(1, 10)}
    new_keys = forecasts.admit_new(second)
    assert new_keys == [key("iad", f"d{number}") for number in (9, 8, 7, 6)]
    for new in (*new_keys, *second):
        forecasts.learn(1, new, second[new])
    assert len(forecasts) == 6, "the others have no room"
    assert {key("ams", "d3"), key("ams", "d4")} < set(forecasts.sorted_keys())
    # No new one is larger than the smallest.
    assert forecasts.admit_new({key("sin"): a_slot(2.0), key("akl"): SlotDemand()}) == []
    assert len(forecasts) == 6


class NotWalked(dict[SeriesKey, object]):
    """A mapping that nothing may go through from one end to the other."""

    def __iter__(self) -> Iterator[SeriesKey]:
        raise AssertionError("all series are looked at")


def test_a_new_series_looks_only_at_those_it_may_borrow_from() -> None:
    """With twenty thousand series this took the planner a minute for one slot."""
    forecasts = learned_forecast(1.1, "ams", "sin")
    for slot in range(DAY_SLOTS, 2 * DAY_SLOTS + 8):
        forecasts.learn(slot, key("akl", "other"), a_slot(3.0))
    forecasts._known = NotWalked(forecasts._known)  # type: ignore[assignment]
    now = 2 * DAY_SLOTS + 8
    # Of the same deployment, then of the same city; a series with a past begins with its shape.
    for new in (key("iad"), key("akl", "third"), key("iad", "alone")):
        forecasts.learn(now, new, a_slot(2.0))
    observed = {new: known.series.observed for new, known in forecasts._known.items()}
    assert observed[key("iad")] == observed[key("akl", "third")] == DAY_SLOTS // 2
    assert observed[key("iad", "alone")] == 1


def test_a_new_series_rises_in_its_morning_like_its_neighbour() -> None:
    morning = 5 * DAY_SLOTS + 40  # early in Washington, afternoon in Amsterdam
    alone, beside = FleetForecast(LONGITUDES), learned_forecast(5.0, "ams")
    for slot in range(5 * DAY_SLOTS, morning):
        beside.learn(slot, key("ams"), a_slot(wave(slot, 5.0)))
    risen = []
    for forecasts in (alone, beside):
        for slot in range(morning, morning + 3):
            forecasts.learn(slot, key("iad"), a_slot(wave(slot, -77.0)))
        row = forecasts.forecast(key("iad"))
        assert row is not None
        risen.append(row.requests_per_s)
    later = wave(morning + 2 + 6, -77.0)
    assert abs(risen[1] - later) < abs(risen[0] - later)


def test_a_stored_series_continues_alike_elsewhere() -> None:
    here = learned_forecast(2.0, "ams")
    there = FleetForecast(LONGITUDES)
    slot, state = here.serialized(key("ams"))
    assert slot == 2 * DAY_SLOTS - 1
    assert there.restore(key("ams"), state)
    assert not there.restore(key("sin"), state[:-5])
    for forecasts in (here, there):
        forecasts.learn(slot + 1, key("ams"), a_slot(3.0))
    assert here.forecast(key("ams")) == there.forecast(key("ams"))


def test_zero_demand_begins_no_series_and_idle_series_are_forgotten() -> None:
    forecasts = FleetForecast(LONGITUDES)
    forecasts.learn(1, key("ams"), SlotDemand())
    assert len(forecasts) == 0
    forecasts.learn(2, key("ams"), a_slot(1.0))
    for slot in range(3, 6 * DAY_SLOTS):
        forecasts.learn(slot, key("ams"), SlotDemand())
    row = forecasts.forecast(key("ams"))
    assert row is None or row.requests_per_s < 0.01
    forecasts.learn(FORGET_SLOTS + 10, key("ams"), SlotDemand())
    assert forecasts.sorted_keys() == []


def test_demand_is_raised_to_the_forecast_and_never_lowered() -> None:
    now = (a_rate("ams", 2.0), a_rate("iad", 9.0), a_rate("akl", 2.0, refused_per_s=2.0))
    forecast_rows = [a_rate("ams", 5.0), a_rate("iad", 3.0), a_rate("sin", 1.0)]
    rows = {row.pop: row for row in raise_to_forecast(now, forecast_rows)}
    assert rows[PopId("ams")] == a_rate("ams", 5.0)
    assert rows[PopId("iad")] == a_rate("iad", 9.0), "a flash crowd counts by its current level"
    assert rows[PopId("sin")] == a_rate("sin", 1.0)
    assert rows[PopId("akl")] == a_rate("akl", 4.0), "refused requests count"
    refused = DemandRate(deployment_id=DeploymentId("d"), pop=PopId("sin"), refused_per_s=0.5)
    assert raise_to_forecast((refused,), []) == (refused,)


def test_each_rate_is_raised_by_itself_and_rows_are_in_order() -> None:
    names = ("requests_per_s", "uncached_tokens_per_s", "output_tokens_per_s")

    def a_row(pop: str, *rates: float) -> DemandRate:
        values = dict(zip(names, rates, strict=True))
        return DemandRate(deployment_id=DeploymentId("d"), pop=PopId(pop), **values)

    now = (a_row("sin", 2.0, 10.0, 1.0), a_row("iad", 1.0, 1.0, 1.0))
    soon = (a_row("sin", 1.0, 20.0, 3.0), a_row("ams", 4.0, 5.0, 6.0))
    assert raise_to_forecast(now, soon) == (soon[1], now[1], a_row("sin", 2.0, 20.0, 3.0))


def test_a_slot_is_ten_minutes() -> None:
    assert (slot_of(0.0), slot_of(599.9), slot_of(600.0)) == (0, 0, 1)
