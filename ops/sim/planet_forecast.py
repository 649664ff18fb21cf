"""The production forecast in the planet's week: demand that placement plans for.

The forecast is linear: twice the demand gives twice the forecast. In the simulated week a city's
demand for its models has fixed shares, except for the model of the flash crowd and the new one. So
three series per city (those two, and all others together) give the same as one per model.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from isochrone.wire.ids import DeploymentId
from ops.sim.planet_world import OUTPUT_TOKENS, PROMPT_TOKENS, PlanetWorld
from scheduler.decide.arrays import Floats
from scheduler.decide.demand import FleetForecast, SlotDemand
from scheduler.decide.demand.series_forecast import SLOT_S, WEEK_SLOTS

SLOT_MIN: Final = SLOT_S // 60
GRACE_MIN: Final = 2
"""A slot is learned this long after its end; the scheduler waits 75 s."""

FIRST_SLOT: Final = 10 * WEEK_SLOTS
"""The slot of minute 0: a Monday at 00:00 UTC, late enough that no slot number is negative."""

OTHERS: Final = DeploymentId("others")


class PlanetForecast:
    """Forecasts of every city. The deployments `apart` have series of their own.

    `rates` are the forecast requests/s by city and deployment.
    """

    def __init__(self, world: PlanetWorld, apart: Sequence[int]) -> None:
        self._world = world
        self._apart = tuple(apart)
        self._forecast = FleetForecast({pop.pop: pop.longitude for pop in world.pops})
        self._slot = np.zeros((len(world.pops), 1 + len(apart)))
        self._minutes = 0
        self._due: Floats | None = None
        self.rates: Floats = np.zeros_like(world.share)
        rest = world.share.copy()
        rest[:, self._apart] = 0.0
        self._shares = rest / rest.sum(axis=1, keepdims=True)

    def learn_before(self, days: int, unborn: int) -> None:
        """Learn the `days` before minute 0, with other noise than the simulated week.

        The deployment `unborn` has no demand yet.
        """
        noise = self._world.noise
        for minute in range(-days * 24 * 60, 0):
            if minute % 2 == 0:
                ratio = noise[(minute + len(noise) // 2) % len(noise)] / noise[minute % len(noise)]
                demand = self._world.requests(minute) * ratio[:, None]
                demand[:, unborn] = 0.0
                self.observe(minute, demand, 2)

    def observe(self, minute: int, demand: Floats, minutes: int = 1) -> None:
        """Count demand of some minutes; learn each slot after its end, and renew the forecast."""
        if self._due is not None and minute % SLOT_MIN == GRACE_MIN:
            self._learn(FIRST_SLOT + minute // SLOT_MIN - 1, self._due)
            self._due = None
        rest = demand.sum(axis=1) - demand[:, self._apart].sum(axis=1)
        self._slot += minutes * np.column_stack((rest, demand[:, self._apart]))
        self._minutes += minutes
        if (minute + minutes) % SLOT_MIN == 0:
            self._due = self._slot / self._minutes
            self._slot, self._minutes = np.zeros_like(self._slot), 0

    def _learn(self, slot: int, requests: Floats) -> None:
        """Learn one slot of every city, and renew the forecast."""
        names = [OTHERS, *(DeploymentId(f"d{number:03d}") for number in self._apart)]
        forecast = np.zeros_like(requests)
        for city, pop in enumerate(self._world.pops):
            for column, name in enumerate(names):
                rate = float(requests[city, column])
                demand = SlotDemand(
                    requests_per_s=rate,
                    prompt_tokens_per_s=rate * PROMPT_TOKENS,
                    uncached_tokens_per_s=rate * PROMPT_TOKENS,
                    output_tokens_per_s=rate * OUTPUT_TOKENS,
                )
                self._forecast.learn(slot, (name, pop.pop), demand)
                found = self._forecast.forecast((name, pop.pop))
                forecast[city, column] = found.requests_per_s if found else 0.0
        self.rates = self._shares * forecast[:, :1]
        self.rates[:, self._apart] = forecast[:, 1:]
