"""The price of low latency in memory: p90 against memory, at other prices than the planner's.

    python -m ops.sim.price_sweep --data ../shared/data

Each row plans the same day again and serves it. The first rows multiply the prices of score.py by
4, 2, 1, 1/2 and 1/4. In the others each ms between 30 and 60, where p90 lies, counts `bend` more, a
replica costs by its bytes alone, and unserved requests cost more, except in the last row.
`unplanned_percent` is the share of requests without capacity in the plan: they cost no memory.
"""

import csv
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

import numpy as np

from ops.sim.compare import daily_peak, evaluate, place_by_planner
from ops.sim.planet_world import PlanetWorld, draw, world_parser
from scheduler.decide.arrays import Floats
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.cluster import PopDistance
from scheduler.decide.placement import score
from scheduler.decide.placement.search import deployment_state
from scheduler.decide.placement.search.draft import PlacementDraft

TABLE: Final = Path(__file__).parent / "planet_prices.csv"
NEAR_MS: Final = 30.0
FAR_MS: Final = 60.0


class ScorePrices(NamedTuple):
    """The prices of a replica, of a GiB of it, of ms, and of unserved requests."""

    hold: float = score.HOLD
    hold_per_gib: float = score.HOLD_PER_GIB
    bend: float = 0.0
    unserved_ms: float = score.UNSERVED_MS

    def priced_ms(self, ms: Floats) -> Floats:
        """Return latencies as they count in the cost."""
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
    """Return the priced latency of every city to every city with devices."""
    ms = prices.priced_ms(Distances(world.pops, ()).ms)
    with_devices = {node.pop for node in world.nodes}
    return tuple(
        PopDistance(from_pop=from_pop.pop, to_pop=to_pop.pop, rtt_ms=float(ms[row, column]))
        for row, from_pop in enumerate(world.pops)
        for column, to_pop in enumerate(world.pops)
        if to_pop.pop in with_devices
    )


def unplanned_percent(draft: PlacementDraft) -> float:
    """Return the percentage of requests without capacity in the plan."""
    lacking = sum(
        state.needs.total_requests_per_s
        * state.assignment.unserved()
        / float(state.assignment.load.sum())
        for state in draft.states
        if state.needs.has_demand
    )
    return round(100 * lacking / sum(state.needs.total_requests_per_s for state in draft.states), 2)


def try_prices(world: PlanetWorld, prices: ScorePrices) -> dict[str, float]:
    """Plan the day's peaks with these prices, and serve the day with the true distances."""
    with (
        patch.object(score, "HOLD", prices.hold),
        patch.object(score, "HOLD_PER_GIB", prices.hold_per_gib),
        patch.object(deployment_state, "UNSERVED_MS", prices.unserved_ms),
    ):
        held, memory, draft = place_by_planner(world, daily_peak(world), distances(world, prices))
    lacking = {"unplanned_percent": unplanned_percent(draft)}
    return prices._asdict() | evaluate(world, held, memory) | lacking


def main() -> None:
    """Try each price and write the table."""
    parser = world_parser(__doc__)
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    world = draw(args.data, args.seed)
    rows = []
    for prices in SWEEP:
        rows.append(try_prices(world, prices))
        print(rows[-1], flush=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
