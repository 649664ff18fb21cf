"""Bounds how close to the planet's users any placement can be with a given amount of memory.

    python -m ops.sim.latency_bound --data ../shared/data --as-planned

A request counts 0 if a replica within a latency limit serves it, else 1. The Lagrangian bound
(`lagrangian_bound.py`) of the share that counts 1, with memory priced so that the budget and each
site's memory are respected, is a share that no placement is below. Where it exceeds a tenth, no
placement has its p90 within the limit. Demand is the mean of the sampled hours (the share is convex
in demand, so the mean of the hours' shares is no less), replicas serve at full capacity, and all
requests are served. With `--as-planned` the replicas of a deployment must also have capacity, at
any site, for its daily peaks with the planner's headroom. Spread and minima are left out; they only
raise the true share.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ops.sim.compare import SAMPLED_MINUTES, daily_peak, empty_fleet
from ops.sim.lagrangian_bound import DeploymentBound, DeploymentTerms
from ops.sim.planet import FIRST
from ops.sim.planet_bound import site_resources, site_use, total_bound
from ops.sim.planet_world import PlanetWorld, draw, world_parser
from ops.sim.recost import empty_draft
from scheduler.decide.arrays import Floats
from scheduler.decide.placement.score import HEADROOM

ROUNDS: Final = 30
STEPS: Final = 12
LAST_STEPS: Final = 150
STEP: Final = 0.004
"""The share of the bound that the first step of the sites' prices aims at."""

FIRST_PRICE: Final = 8e-7
"""The first price of memory: the share of requests that one GiB is worth."""

UNSERVED: Final = 30.0
"""The cost of an unserved request; a request served from beyond the limit costs 1."""


class LatencyBound(NamedTuple):
    """The least share that is farther than a limit, and the price of memory that shows it."""

    within_ms: float
    far_share: float
    price: float


def terms_at(
    world: PlanetWorld, within_ms: float, as_planned: bool
) -> tuple[list[DeploymentTerms], Floats]:
    """Return the terms of each deployment for a latency limit, and the resources of each site."""
    mean = np.mean([world.requests(minute) for minute in SAMPLED_MINUTES], axis=0)
    peak = daily_peak(world)
    draft = empty_draft(empty_fleet(world, mean), FIRST)
    terms = []
    for number, state in enumerate(draft.states):
        needs = state.needs
        sites = np.flatnonzero(needs.site_capacity > 0)
        share = mean[needs.cities, number] / mean.sum()
        load = state.assignment.load
        serve_cost = share[:, None] * (state.needs.latency_ms[:, sites] > within_ms)
        unserved_cost = share * UNSERVED
        if as_planned:
            # The demand of the peak above the mean, as of a city that is far from no site.
            extra = float(peak[:, number].sum() / mean[:, number].sum()) / HEADROOM - 1.0
            load = np.append(load, extra * load.sum())
            unserved_cost = np.append(unserved_cost, extra * unserved_cost.sum())
            serve_cost = np.vstack((serve_cost, np.zeros(len(sites))))
        terms.append(
            DeploymentTerms(
                load=load,
                serve_cost=serve_cost,
                unserved_cost=unserved_cost,
                capacity=needs.site_capacity[sites] / HEADROOM,
                fixed_cost=np.zeros(len(sites)),
                use=site_use(needs, draft.fleet, sites),
                sites=sites,
                pops=sites,
                replicas_max=needs.replicas_max,
                pops_min=0,
                one_pop_cost=0.0,
                empty_cost=float(unserved_cost.sum()),
            )
        )
    return terms, site_resources(draft.fleet)


def latency_bound(
    terms: Sequence[DeploymentTerms], has: Floats, within_ms: float, budget_gib: float
) -> LatencyBound:
    """Return the best bound found over prices of memory in total and of each site's resources."""
    bounds = [DeploymentBound(each) for each in terms]
    price, site_prices = FIRST_PRICE, np.zeros_like(has)
    best, theta = LatencyBound(within_ms, 0.0, price), 1.0
    for turn in range(ROUNDS):
        prices = site_prices.copy()
        prices[0] += price
        use = np.zeros_like(has)
        for bound in bounds:
            bound.begin(prices)
            bound.climb(0.0, 1)
            bound.climb(1.03 * abs(bound.best.value), LAST_STEPS if turn == ROUNDS - 1 else STEPS)
            bound.add_use(use)
        share = total_bound(bounds, site_prices, has) - price * budget_gib
        if share > best.far_share:
            best = LatencyBound(within_ms, share, price)
        else:
            theta *= 0.75
        over_budget = float(use[0].sum()) / budget_gib - 1.0
        price *= float(np.exp(np.clip(0.5 * theta * over_budget, -0.4, 0.4)))
        over = use / has - 1.0
        over[(site_prices <= 0) & (over < 0)] = 0.0
        steep = float((over**2).sum())
        if steep > 0:
            step = theta * STEP * abs(best.far_share) / steep
            site_prices = np.maximum(0.0, site_prices + step * over / has)
    return best


def main() -> None:
    """Print for each latency limit the least share that is farther."""
    parser = world_parser(__doc__)
    parser.add_argument("--budget-tib", type=float, default=307.8 / 3)
    parser.add_argument("--within-ms", type=float, nargs="*", default=[21.4, 25.0, 30.0])
    parser.add_argument("--as-planned", action="store_true")
    args = parser.parse_args()
    world = draw(args.data, args.seed)
    for within_ms in args.within_ms:
        terms, has = terms_at(world, within_ms, args.as_planned)
        anywhere = sum(float(each.serve_cost.min(axis=1).sum()) for each in terms)
        loaded = sum(float(e.load.sum() / (e.capacity / e.use[0]).max()) for e in terms)
        print(
            f"{100 * anywhere:.2f} % are farther than {within_ms} ms with any amount of memory; "
            f"{loaded / 1024:.1f} TiB are needed to carry the load anywhere"
        )
        found = latency_bound(terms, has, within_ms, args.budget_tib * 1024)
        print(
            f"within {within_ms} ms with {args.budget_tib:.1f} TiB: at least "
            f"{100 * found.far_share:.2f} % are farther (a GiB is priced {found.price:.2e})",
            flush=True,
        )


if __name__ == "__main__":
    main()
