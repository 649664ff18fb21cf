"""Forecasts of one series follow seasons where there are any, else the level."""

import random
from math import isfinite, nan, pi, sin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.decide.demand.series_forecast import (
    DAY_SLOTS,
    HORIZONS,
    VALUE_MAX,
    Series,
    borrow_shape,
    deserialize,
    forecast,
    observe,
    serialize,
)

HOUR = HORIZONS.index(6)


def daily(slot: int, shift: int = 0) -> float:
    """A day's wave between 200 and 1800 tokens/s."""
    return 1000 + 800 * sin(2 * pi * (slot - shift) / DAY_SLOTS)


def learned_series(days: float, values_at=daily, seed: int = 1) -> Series:  # type: ignore[no-untyped-def]
    rng = random.Random(seed)
    series = Series(0, values_at(0))
    for slot in range(1, int(days * DAY_SLOTS)):
        observe(series, slot, values_at(slot) * rng.uniform(0.95, 1.05))
    return series


def test_a_daily_wave_is_forecast_where_the_level_alone_would_lag() -> None:
    series = learned_series(4.0)
    missed = lagged = 0.0
    for slot in range(series.slot + 1, series.slot + 1 + DAY_SLOTS):
        observe(series, slot, daily(slot))
        missed += abs(forecast(series, HOUR) - daily(slot + HORIZONS[HOUR]))
        lagged += abs(daily(slot) - daily(slot + HORIZONS[HOUR]))
    assert missed < 0.6 * lagged


def test_a_quantile_is_above_about_its_share_of_values() -> None:
    rng = random.Random(3)
    series = Series(0, 1000.0)
    above = 0
    for slot in range(1, 1500):
        quantile = forecast(series, 0)
        value = 1000 * rng.lognormvariate(0, 0.3)
        above += slot >= 500 and value <= quantile
        observe(series, slot, value)
    assert above / 1000 == pytest.approx(0.9, abs=0.03)


def test_traffic_without_a_season_is_forecast_near_its_level() -> None:
    rng = random.Random(5)
    walk = [1000.0]
    for _ in range(5 * DAY_SLOTS):
        walk.append(walk[-1] * rng.lognormvariate(0, 0.05))
    series = Series(0, walk[0])
    misses = []
    for slot in range(1, len(walk) - 1):
        observe(series, slot, walk[slot])
        misses.append(forecast(series, 0) / walk[slot])
    # The 0.9 quantile of one step of this walk is 1.066 times the level.
    assert sum(misses[DAY_SLOTS:]) / len(misses[DAY_SLOTS:]) == pytest.approx(1.07, abs=0.05)


def test_a_flash_crowd_is_not_forecast_again_the_day_after() -> None:
    series = learned_series(6.0, lambda slot: 1000.0)
    for slot in range(series.slot + 1, series.slot + 4):
        observe(series, slot, 20_000.0)
    assert forecast(series, 0) > 5_000, "during the crowd the level counts"
    crowd = series.slot
    for slot in range(crowd + 1, crowd + DAY_SLOTS):
        observe(series, slot, 1000.0)
    assert forecast(series, 0) < 2_000


def test_a_new_series_borrows_the_shape_of_donors_shifted_by_time_zone() -> None:
    donor = learned_series(5.0)
    shift = 36  # six hours later
    missed = {True: 0.0, False: 0.0}
    for borrows in missed:
        series = Series(donor.slot, daily(donor.slot, shift) / 10)
        if borrows:
            borrow_shape(series, [(donor, shift)])
        for slot in range(donor.slot + 1, donor.slot + DAY_SLOTS):
            value = daily(slot, shift) / 10
            missed[borrows] += abs(forecast(series, HOUR) - daily(slot + 5, shift) / 10)
            observe(series, slot, value)
    assert missed[True] < 0.7 * missed[False]


def test_borrowing_without_experienced_donors_changes_nothing() -> None:
    series = Series(10, 5.0)
    before = serialize(series)
    borrow_shape(series, [])
    borrow_shape(series, [(Series(10, 7.0), 0)])
    assert serialize(series) == before


def test_a_serialized_series_continues_bit_for_bit() -> None:
    series = learned_series(1.5)
    again = deserialize(serialize(series))
    assert again is not None
    for slot in range(series.slot + 1, series.slot + 50):
        observe(series, slot, daily(slot))
        observe(again, slot, daily(slot))
        assert [forecast(series, h) for h in range(3)] == [forecast(again, h) for h in range(3)]


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x93\x01\x02\x03", serialize(Series(1, 1.0))[:-9]]
)
def test_an_invalid_state_is_rejected(data: bytes) -> None:
    assert deserialize(data) is None


def test_a_gap_is_unknown_and_not_zero() -> None:
    series = learned_series(3.0, lambda slot: 1000.0)
    level = forecast(series, HOUR)
    observe(series, series.slot + 100, 1000.0)
    assert forecast(series, HOUR) == pytest.approx(level, rel=0.02)


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(
        st.floats(min_value=0, max_value=1e18)
        | st.sampled_from([nan, -1.0, float("inf"), 0.0, 0.0]),
        max_size=60,
    ),
    steps=st.lists(st.integers(-2, 400), min_size=60, max_size=60),
    first=st.floats(min_value=1e-12, max_value=1e18),
)
def test_forecasts_are_finite_and_not_negative_for_any_input(
    values: list[float], steps: list[int], first: float
) -> None:
    series = Series(1000, first, (0.5, 0.99))
    slot = 1000
    for value, step in zip(values, steps, strict=False):
        before, slot = series.slot, series.slot + step
        taken = observe(series, slot, value)
        assert taken == (step > 0 and value >= 0 and isfinite(value))
        assert series.slot == (slot if taken else before)
    quantile = [forecast(series, h, q) for h in range(len(HORIZONS)) for q in range(2)]
    assert all(0 <= one <= VALUE_MAX for one in quantile)


def test_a_series_that_went_to_zero_is_forecast_near_zero() -> None:
    series = learned_series(3.0, lambda slot: 1000.0)
    for slot in range(series.slot + 1, series.slot + 2 * DAY_SLOTS):
        observe(series, slot, 0.0)
    assert forecast(series, HOUR) < 20
