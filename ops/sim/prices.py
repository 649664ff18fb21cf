"""Other prices of distance and memory than the planner's, and what p90 and memory come of them.

    python -m ops.sim.prices --data ../shared/data --rows 0 3

Each row plans the same day anew with a price of a seat, of a GiB, and a shape of distance: bent
(each ms beyond 18 counts `bend` more) or a step (within `step_ms` is near, all else equally far),
which is the greedy answer to the question how many can be near for so much memory.
"""

import argparse
import os
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

import numpy as np

from ops.sim.compare import fared, peak_of_the_day, planned
from ops.sim.planet_world import World, draw
from scheduler.decide import score
from scheduler.decide.cluster import PopDistance
from scheduler.decide.flow import Floats

BENT_AT_MS: Final = 18.0
FAR_MS: Final = 100.0
"""What a step's far side counts."""


class Prices(NamedTuple):
    """What a seat costs, what a GiB of it costs, and how distance counts.

    A distance counts `times` over: so much less do starts count beside it, whose price stays.
    """

    hold: float = score.HOLD
    hold_per_gib: float = score.HOLD_PER_GIB
    bend: float = 0.0
    step_ms: float = 0.0
    times: float = 1.0

    def shaped(self, ms: Floats) -> Floats:
        """Return what distances count."""
        if self.step_ms:
            return self.times * (np.where(ms <= self.step_ms, 0.0, FAR_MS) + ms / FAR_MS)
        return self.times * (ms + self.bend * np.maximum(0.0, ms - BENT_AT_MS))


SWEEP: Final = (
    Prices(),
    Prices(hold_per_gib=0.25),
    Prices(hold=5.0, hold_per_gib=0.1),
    Prices(bend=2.0),
    Prices(hold_per_gib=1.0, bend=8.0),
    Prices(hold=20.0, bend=8.0),
    Prices(bend=8.0),
    Prices(hold=5.0, bend=8.0),
    Prices(hold=1.0, hold_per_gib=1.0, step_ms=21.4),
    Prices(hold=0.0, hold_per_gib=10.0, step_ms=21.4, times=10.0),
    Prices(hold=0.0, hold_per_gib=20.0, step_ms=21.4, times=10.0),
    Prices(hold=0.0, hold_per_gib=5.0, times=5.0),
    Prices(hold=0.0, hold_per_gib=10.0, bend=2.0, times=5.0),
    Prices(hold=0.0, hold_per_gib=20.0, bend=8.0, times=5.0),
)


def distances(world: World, prices: Prices) -> tuple[PopDistance, ...]:
    """Return the shaped distance of every city to every city with devices."""
    ms = prices.shaped(score.Distances(world.pops, ()).ms)
    held = {node.pop for node in world.nodes}
    return tuple(
        PopDistance(from_pop=one.pop, to_pop=other.pop, rtt_ms=float(ms[row, column]))
        for row, one in enumerate(world.pops)
        for column, other in enumerate(world.pops)
        if other.pop in held
    )


def tried(world: World, prices: Prices) -> dict[str, float]:
    """Plan the day with these prices, and serve it with the true distances."""
    with (
        patch.object(score, "HOLD", prices.hold),
        patch.object(score, "HOLD_PER_GIB", prices.hold_per_gib),
    ):
        held, memory, _ = planned(world, peak_of_the_day(world), distances(world, prices))
    return fared(world, held, memory)


def main() -> None:
    """Try each price, a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("ISOCHRONE_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=list(range(len(SWEEP))))
    given = parser.parse_args()
    world = draw(given.data, given.seed)
    for row in given.rows:
        print(SWEEP[row], tried(world, SWEEP[row]), flush=True)


if __name__ == "__main__":
    main()
