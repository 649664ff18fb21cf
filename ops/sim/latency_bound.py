"""How near the planet's users can be at all for so much memory: a bound, whatever the planner.

    python -m ops.sim.latency_bound --data ../shared/data --as-planned

Who is within so many ms of a replica that has room for them counts nothing, who is farther counts
as far. Lagrange's bound (`dual.py`) of the share that stays far, memory being priced so that the
budget and what each site has are kept, is a share that no placement comes below: where it is over a
tenth, no placement has its p90 within those ms. The demand is the mean of the hours sampled (the
share is convex in demand, so the mean of the hours' shares is no less), replicas serve at their
full capacity, and everybody is served. With `--as-planned` the replicas of a deployment must also
have room, wherever they stand, for its day's peaks with the planner's headroom. Left out: spread
and minima, which make the true share larger.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ops.sim.compare import SAMPLED, nothing_held, peak_of_the_day
from ops.sim.lagrangian_bound import DeploymentBound, DeploymentTerms
from ops.sim.planet import FIRST
from ops.sim.planet_bound import needs_of, shared_by, total
from ops.sim.planet_world import PlanetWorld, draw, world_parser
from scheduler.decide.membership.liveness import judge_liveness
from scheduler.decide.placement.planner import DraftPlan
from scheduler.decide.placement.score import HEADROOM
from scheduler.decide.placement.search.load_assignment import Floats

ROUNDS: Final = 30
STEPS: Final = 12
LAST_STEPS: Final = 150
STEP: Final = 0.004
"""The part of the bound by which the first step of the sites' prices aims to raise it."""

FIRST_PRICE: Final = 8e-7
"""The share that a GiB is worth, to begin with."""

UNSERVED: Final = 30.0
"""What a request that nobody serves counts, one that is served from afar being 1."""


class LatencyBound(NamedTuple):
    """What is left far at least, at one distance, and the price of memory that says so."""

    within_ms: float
    far_share: float
    price: float


def terms_at(
    world: PlanetWorld, within_ms: float, as_planned: bool
) -> tuple[list[DeploymentTerms], Floats]:
    """Return by deployment what it counts to be near or far; and what each site has."""
    mean = np.mean([world.requests(minute) for minute in SAMPLED], axis=0)
    peak = peak_of_the_day(world)
    cluster = nothing_held(world, mean)
    search = DraftPlan(cluster, judge_liveness(cluster.nodes, cluster.acting_for_s), FIRST).sought()
    found = []
    for number, wish in enumerate(search.wishes):
        sites = np.flatnonzero(wish.rooms > 0)
        share = mean[wish.cities, number] / mean.sum()
        load, paid = wish.flow.load, share[:, None] * (wish.flow.far[:, sites] > within_ms)
        lost = share * UNSERVED
        if as_planned:
            # What is asked at the peak besides, as of a city that is far from nowhere.
            more = float(peak[:, number].sum() / mean[:, number].sum()) / HEADROOM - 1.0
            load, lost = np.append(load, more * load.sum()), np.append(lost, more * lost.sum())
            paid = np.vstack((paid, np.zeros(len(sites))))
        found.append(
            DeploymentTerms(
                load=load,
                paid=paid,
                lost=lost,
                room=wish.rooms[sites] / HEADROOM,
                fixed=np.zeros(len(sites)),
                needs=needs_of(wish, search.ground, sites),
                sites=sites,
                pops=sites,
                most=wish.most,
                apart=0,
                one_pop=0.0,
                none=float(lost.sum()),
            )
        )
    return found, shared_by(search.ground)


def reached(
    terms: Sequence[DeploymentTerms], has: Floats, within_ms: float, budget_gib: float
) -> LatencyBound:
    """Return the best bound found over prices: of memory anywhere, and of what each site has."""
    sides = [DeploymentBound(one) for one in terms]
    price, at_sites = FIRST_PRICE, np.zeros_like(has)
    best, theta = LatencyBound(within_ms, 0.0, price), 1.0
    for turn in range(ROUNDS):
        prices = at_sites.copy()
        prices[0] += price
        use = np.zeros_like(has)
        for side in sides:
            side.begin(prices)
            side.climb(0.0, 1)
            side.climb(1.03 * abs(side.best.value), LAST_STEPS if turn == ROUNDS - 1 else STEPS)
            side.add_use(use)
        share = total(sides, at_sites, has) - price * budget_gib
        if share > best.far_share:
            best = LatencyBound(within_ms, share, price)
        else:
            theta *= 0.75
        over_budget = float(use[0].sum()) / budget_gib - 1.0
        price *= float(np.exp(np.clip(0.5 * theta * over_budget, -0.4, 0.4)))
        over = use / has - 1.0
        over[(at_sites <= 0) & (over < 0)] = 0.0
        steep = float((over**2).sum())
        if steep > 0:
            step = theta * STEP * abs(best.far_share) / steep
            at_sites = np.maximum(0.0, at_sites + step * over / has)
    return best


def main() -> None:
    """Say for each distance what share is farther at least."""
    parser = world_parser(__doc__)
    parser.add_argument("--budget-tib", type=float, default=307.8 / 3)
    parser.add_argument("--within-ms", type=float, nargs="*", default=[21.4, 25.0, 30.0])
    parser.add_argument("--as-planned", action="store_true")
    given = parser.parse_args()
    world = draw(given.data, given.seed)
    for within_ms in given.within_ms:
        terms, has = terms_at(world, within_ms, given.as_planned)
        anywhere = sum(float(one.paid.min(axis=1).sum()) for one in terms)
        loaded = sum(float(one.load.sum() / (one.room / one.needs[0]).max()) for one in terms)
        print(
            f"{100 * anywhere:.2f} % are farther than {within_ms} ms whatever is held; "
            f"{loaded / 1024:.1f} TiB carry load wherever they stand"
        )
        found = reached(terms, has, within_ms, given.budget_tib * 1024)
        print(
            f"within {within_ms} ms with {given.budget_tib:.1f} TiB: at least "
            f"{100 * found.far_share:.2f} % stay farther (a GiB priced {found.price:.2e})",
            flush=True,
        )


if __name__ == "__main__":
    main()
