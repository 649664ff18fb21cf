"""What nearness costs: the memory held against p90, at other prices than the planner's.

    python -m ops.sim.price_sweep --data ../shared/data

Each row plans the same day anew and serves it: the first with the prices of score.py times 4, 2,
1, 1/2 and 1/4. In the others each ms between 30 and 60, where p90 lies, counts `bend` more, a seat
costs by its bytes alone, and who finds no room counts more too, but less in the last. `unplanned`
is the share of requests that found none under the headroom: what is left out costs no memory.
"""

import csv
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

import numpy as np

from ops.sim.compare import fared, peak_of_the_day, planned
from ops.sim.planet_world import PlanetWorld, draw, world_parser
from scheduler.decide.cluster import PopDistance
from scheduler.decide.placement import score
from scheduler.decide.placement.search import deployment_state
from scheduler.decide.placement.search.greedy_search import GreedySearch
from scheduler.decide.placement.search.load_assignment import Floats

TABLE: Final = Path(__file__).parent / "planet_prices.csv"
NEAR_MS: Final = 30.0
FAR_MS: Final = 60.0


class ScorePrices(NamedTuple):
    """What a seat costs, what a GiB of it, how far ms count, and who is not served."""

    hold: float = score.HOLD
    hold_per_gib: float = score.HOLD_PER_GIB
    bend: float = 0.0
    unserved_ms: float = score.UNSERVED_MS

    def felt(self, ms: Floats) -> Floats:
        """Return what distances count."""
        return ms + self.bend * np.clip(ms - NEAR_MS, 0.0, FAR_MS - NEAR_MS)


SWEEP: Final = (
    *(
        ScorePrices(times * score.HOLD, times * score.HOLD_PER_GIB)
        for times in (4, 2, 1, 0.5, 0.25)
    ),
    *(ScorePrices(0.0, per_gib, 16.0, 20_000.0) for per_gib in (8.0, 4.0, 2.0, 1.0)),
    ScorePrices(0.0, 2.0, 16.0, 1_000.0),
)


def distances(world: PlanetWorld, prices: ScorePrices) -> tuple[PopDistance, ...]:
    """Return what the distance of every city to every city with devices counts."""
    ms = prices.felt(score.Distances(world.pops, ()).ms)
    held = {node.pop for node in world.nodes}
    return tuple(
        PopDistance(from_pop=one.pop, to_pop=other.pop, rtt_ms=float(ms[row, column]))
        for row, one in enumerate(world.pops)
        for column, other in enumerate(world.pops)
        if other.pop in held
    )


def unplanned(search: GreedySearch) -> float:
    """Return the percentage of requests that found no room."""
    lacking = sum(
        one.requests_per_s * one.flow.unserved() / float(one.flow.load.sum())
        for one in search.wishes
        if one.is_asked_for
    )
    return round(100 * lacking / sum(one.requests_per_s for one in search.wishes), 2)


def tried(world: PlanetWorld, prices: ScorePrices) -> dict[str, float]:
    """Plan the day's peaks with these prices, and serve the day with the true distances."""
    with (
        patch.object(score, "HOLD", prices.hold),
        patch.object(score, "HOLD_PER_GIB", prices.hold_per_gib),
        patch.object(deployment_state, "UNSERVED_MS", prices.unserved_ms),
    ):
        held, memory, search = planned(world, peak_of_the_day(world), distances(world, prices))
    lacking = {"unplanned_percent": unplanned(search)}
    return prices._asdict() | fared(world, held, memory) | lacking


def main() -> None:
    """Try each price and write the table."""
    parser = world_parser(__doc__)
    parser.add_argument("--out", type=Path, default=TABLE)
    given = parser.parse_args()
    world = draw(given.data, given.seed)
    rows = []
    for prices in SWEEP:
        rows.append(tried(world, prices))
        print(rows[-1], flush=True)
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
