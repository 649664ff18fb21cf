"""The production forecast in the planet's week: what placement plans for beside what is asked now.

A forecast of a series times two is twice the forecast of the series, and here a city asks all its
models in fixed shares, but for the model of the flash crowd and the new one. So three series a city
say what one a city and model would: those two, and all the others together.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from isochrone.wire.ids import DeploymentId
from ops.sim.planet_world import OUTPUT_TOKENS, PROMPT_TOKENS, PlanetWorld
from scheduler.decide.demand.fleet_forecast import FleetForecast, SlotDemand
from scheduler.decide.demand.series_forecast import SLOT_S, WEEK_SLOTS
from scheduler.decide.placement.search.load_assignment import Floats

SLOT_MIN: Final = SLOT_S // 60
GRACE_MIN: Final = 2
"""How long after its end a slot is learned: the scheduler waits 75 s."""

FIRST_SLOT: Final = 10 * WEEK_SLOTS
"""The slot of minute 0: any Monday at 00:00 UTC, late enough that none is below zero."""

OTHERS: Final = DeploymentId("others")


class PlanetForecast:
    """What is learned of each city; `apart` are the deployments that have series of their own."""

    def __init__(self, world: PlanetWorld, apart: Sequence[int]) -> None:
        self._world = world
        self._apart = tuple(apart)
        self._outlook = FleetForecast({pop.pop: pop.longitude for pop in world.pops})
        self._slot = np.zeros((len(world.pops), 1 + len(apart)))
        self._minutes = 0
        self._due: Floats | None = None
        self.rates: Floats = np.zeros_like(world.share)
        rest = world.share.copy()
        rest[:, self._apart] = 0.0
        self._shares = rest / rest.sum(axis=1, keepdims=True)

    def learn_before(self, days: int, unborn: int) -> None:
        """Learn days before the first minute, with other noise than those days will have again.

        The deployment `unborn` asks nothing yet.
        """
        noise = self._world.noise
        for minute in range(-days * 24 * 60, 0):
            if minute % 2 == 0:
                other = noise[(minute + len(noise) // 2) % len(noise)] / noise[minute % len(noise)]
                asked = self._world.requests(minute) * other[:, None]
                asked[:, unborn] = 0.0
                self.hear(minute, asked, 2)

    def hear(self, minute: int, asked: Floats, minutes: int = 1) -> None:
        """Count a minute's demand; learn a slot when it is over, and foretell what follows."""
        if self._due is not None and minute % SLOT_MIN == GRACE_MIN:
            self._learn(FIRST_SLOT + minute // SLOT_MIN - 1, self._due)
            self._due = None
        rest = asked.sum(axis=1) - asked[:, self._apart].sum(axis=1)
        self._slot += minutes * np.column_stack((rest, asked[:, self._apart]))
        self._minutes += minutes
        if (minute + minutes) % SLOT_MIN == 0:
            self._due = self._slot / self._minutes
            self._slot, self._minutes = np.zeros_like(self._slot), 0

    def _learn(self, slot: int, asked: Floats) -> None:
        """Learn one slot of every city, and tell."""
        names = [OTHERS, *(DeploymentId(f"d{number:03d}") for number in self._apart)]
        told = np.zeros_like(asked)
        for city, pop in enumerate(self._world.pops):
            for column, name in enumerate(names):
                rate = float(asked[city, column])
                demand = SlotDemand(
                    requests_per_s=rate,
                    prompt_tokens_per_s=rate * PROMPT_TOKENS,
                    uncached_tokens_per_s=rate * PROMPT_TOKENS,
                    output_tokens_per_s=rate * OUTPUT_TOKENS,
                )
                self._outlook.learn(slot, (name, pop.pop), demand)
                found = self._outlook.foretell((name, pop.pop))
                told[city, column] = found.requests_per_s if found else 0.0
        self.rates = self._shares * told[:, :1]
        self.rates[:, self._apart] = told[:, 1:]
