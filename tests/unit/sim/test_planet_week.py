"""The week's summary: churn divided into growth and turnover."""

import csv

import pytest

from ops.sim.planet_week import TABLE, churn_of


def test_growth_is_the_net_change_and_turnover_the_rest() -> None:
    hours = [
        {"starts": 7, "endings": 1, "replicas": 100},
        {"starts": 1, "endings": 3, "replicas": 100},
    ]
    churn = churn_of(hours)
    assert churn.growth == pytest.approx(100 * 4 / 200)
    assert churn.turnover == pytest.approx(100 * 8 / 200)


def test_the_committed_week_grows_on_its_first_day_and_turns_over_little() -> None:
    with TABLE.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    first, second = churn_of(rows[1:24]), churn_of(rows[24:48])
    assert first.growth > 0.9
    assert first.turnover < 0.25
    assert second.growth + second.turnover < 0.3
