"""The demand of PoPs with routers that are cut off from all schedulers."""

import pytest

from isochrone.wire.ids import DeploymentId, PopId
from scheduler.decide.cluster import DemandRate
from scheduler.decide.demand.silent_routers import (
    HELD_FOR_S,
    SILENT_AFTER_S,
    RouterSilence,
    held_silences,
    raise_to_last_known,
)


def a_rate(pop: str, requests: float, output: float = 0.0, refused: float = 0.0) -> DemandRate:
    return DemandRate(
        deployment_id=DeploymentId("d"),
        pop=PopId(pop),
        requests_per_s=requests,
        output_tokens_per_s=output,
        refused_per_s=refused,
    )


@pytest.mark.parametrize(
    ("silent_s", "is_held"),
    [
        (-5.0, False),  # the clock was set back
        (SILENT_AFTER_S, False),
        (SILENT_AFTER_S + 1.0, True),
        (HELD_FOR_S, True),
        (HELD_FOR_S + 1.0, False),
    ],
)
def test_demand_is_held_for_a_time(silent_s: float, is_held: bool) -> None:
    row = RouterSilence(PopId("sin"), silent_s)
    assert held_silences([row]) == ((row,) if is_held else ())


def test_the_last_known_demand_is_a_lower_bound_of_each_rate() -> None:
    now = [a_rate("ams", 5.0), a_rate("sin", 1.0, output=90.0, refused=2.0)]
    last_known = [a_rate("sin", 3.0, output=60.0), a_rate("fra", 4.0)]
    assert raise_to_last_known(now, last_known) == (
        a_rate("ams", 5.0),
        a_rate("fra", 4.0),
        a_rate("sin", 3.0, output=90.0, refused=2.0),
    )
    assert raise_to_last_known(now, []) == tuple(now)


def test_of_several_last_known_rates_the_highest_counts() -> None:
    """Two routers of a PoP fell silent one after the other: the second alone had less."""
    last_known = [a_rate("sin", 3.0), a_rate("sin", 1.0, output=70.0)]
    assert raise_to_last_known([a_rate("sin", 0.5)], last_known) == (
        a_rate("sin", 3.0, output=70.0),
    )
