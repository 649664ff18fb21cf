"""Demand rows read as a table have the columns that they have read one by one."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, PopId
from scheduler.decide.cluster import RATES, DemandRate
from scheduler.decide.demand import demand_columns
from scheduler.decide.demand.demand_columns import DemandColumns, read_columns

INDEX = {PopId(pop): number for number, pop in enumerate(("ams", "iad", "ümlaut", "long" * 10))}


def a_row(deployment: str, pop: str, *rates: float) -> DemandRate:
    return DemandRate(
        deployment_id=DeploymentId(deployment),
        pop=PopId(pop),
        **dict(zip(RATES, rates, strict=False)),
    )


def assert_equal(columns: DemandColumns, rows: list[DemandRate]) -> None:
    assert [columns.names[number] for number in columns.number] == [r.deployment_id for r in rows]
    assert sorted(columns.names) == sorted({row.deployment_id for row in rows})
    assert columns.city.tolist() == [INDEX.get(row.pop, -1) for row in rows]
    for name, column in zip(RATES, columns.rates, strict=True):
        np.testing.assert_array_equal(column, [float(getattr(row, name)) for row in rows])
        assert column.dtype == np.float64


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(
        st.builds(
            a_row,
            st.sampled_from(("d1", "d2", "dé", "d" * 40, "d" * 300, "")),
            st.sampled_from((*INDEX, "nowhere")),
            st.floats(),
            st.floats(),
            st.one_of(st.floats(), st.integers(0, 9)),
        ),
        max_size=20,
    )
)
def test_columns_are_those_of_the_rows_whatever_their_names_and_rates(
    rows: list[DemandRate],
) -> None:
    assert_equal(read_columns(rows, INDEX), rows)


@pytest.mark.parametrize("count", [1, 15, 16, demand_columns.CHUNK + 1])
@pytest.mark.parametrize("name", ["d{}", "deployment{}"])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_rows_of_one_length_are_read_as_a_table(
    count: int, name: str, is_sorted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        a_row(name.format(at % 3), ("ams", "iad", "xyz")[at // 3 % 3], 0.1 + 0.2, -0.0, 1e300)
        for at in range(count)
    ]
    if is_sorted:
        rows.sort(key=lambda row: row.deployment_id)
    monkeypatch.setattr(demand_columns, "_read_rows", None)
    assert_equal(read_columns(rows, INDEX), rows)


@pytest.mark.parametrize(
    "others",
    [
        # The second row is longer by what the third is shorter: in a city's name, in a
        # deployment's, or by a whole number, which takes eight bytes less.
        (a_row("d1", "iada", 1.0, 2.0, 3.0), a_row("d1", "ia", 1.0, 2.0, 3.0)),
        (a_row("d10", "ams", 1.0, 2.0, 3.0), a_row("d", "ams", 1.0, 2.0, 3.0)),
        (a_row("d1", "iad" + 8 * "x", 1, 2.0, 3.0), a_row("d1", "iad", 1.0, 2.0, 3.0)),
        (a_row("d1", "iad" + 8 * "x", 1.0, 2.0, 3.0), a_row("d1", "iad", 1.0, 2.0, 3)),
    ],
)
def test_rows_that_only_add_up_to_one_length_are_read_one_by_one(
    others: tuple[DemandRate, DemandRate],
) -> None:
    rows = [a_row("d1", "ams", 1.0, 2.0, 3.0), *others]
    assert len(msgspec.msgpack.encode(rows)) == 1 + 3 * len(msgspec.msgpack.encode(rows[0]))
    assert_equal(read_columns(rows, INDEX), rows)


def test_numbers_of_numpy_are_read() -> None:
    rows = [a_row("d1", "ams", np.float64(1.5), 2.0, 3.0)]
    assert_equal(read_columns(rows, INDEX), rows)
