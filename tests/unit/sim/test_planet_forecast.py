"""One forecast a city can stand for all its models: twice the demand is twice the forecast."""

from math import sin, tau

import pytest

from isochrone.wire.ids import DeploymentId, PopId
from scheduler.decide.demand import FleetForecast, SlotDemand
from scheduler.decide.demand.series_forecast import DAY_SLOTS


@pytest.mark.parametrize("times", [0.01, 2.0, 300.0])
def test_a_forecast_scales_with_the_learned_demand(times: float) -> None:
    def told(scale: float) -> list[float]:
        outlook, key = FleetForecast({PopId("ams"): 4.8}), (DeploymentId("d"), PopId("ams"))
        rates = []
        for slot in range(10 * DAY_SLOTS, 11 * DAY_SLOTS + 40):
            rate = scale * (1.5 + sin(tau * slot / DAY_SLOTS) + 0.1 * (slot * 7919 % 13 - 6) / 6)
            outlook.learn(slot, key, SlotDemand(rate, 700 * rate, 700 * rate, 250 * rate))
            found = outlook.forecast(key)
            assert found is not None
            rates.append(found.requests_per_s)
        return rates

    assert told(times) == pytest.approx([times * rate for rate in told(1.0)], rel=1e-3)
