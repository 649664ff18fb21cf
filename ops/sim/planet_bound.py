"""A lower bound of the cost of any plan on an empty fleet, and the gap of the planet's first plan.

    python -m ops.sim.planet_bound --data ../shared/data

Each deployment has a Lagrangian bound (`lagrangian_bound.py`). The memory and devices of the sites,
which deployments share, have prices too. Prices rise where the deployments' best slots do not fit.

The bound includes latency, unserved load, the costs of replicas with the time of a first start on
an idle node, minima, absence, replicas in one PoP only, the memory of each site, and that a device
holds at most one replica that takes more than half of it. It leaves out, and so is below the best
plan: which replicas fit together on a device, load queues of a node that starts several replicas,
PoPs kept warm, and minima above two.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ops.sim.lagrangian_bound import DeploymentBound, DeploymentTerms
from ops.sim.optimality_gap import run_search, total_cost
from ops.sim.planet import FIRST, Planet
from ops.sim.planet_world import draw, world_parser
from ops.sim.recost import recost, slots_of
from scheduler.decide.arrays import Floats, Ints
from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.cluster import ClusterState
from scheduler.decide.placement import PlanLimits
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.score import (
    ABSENT,
    MISSING,
    MISSING_SPREAD,
    ONE_POP_MS,
    UNSERVED_MS,
)
from scheduler.decide.placement.search.deployment_needs import DeploymentNeeds
from scheduler.decide.placement.search.deployment_state import DeploymentState
from scheduler.decide.placement.search.draft import PlacementDraft

TABLE: Final = Path(__file__).parent / "planet_bound.csv"
ALONE_ROUNDS: Final = 200
PRICE_ROUNDS: Final = 40
BETWEEN_ROUNDS: Final = 8
LAST_ROUNDS: Final = 200
LARGE_GIB: Final = 250
STEP: Final = 0.3
"""The share of the gap between bound and plan that the first step of the shared prices aims at."""


def terms_of(state: DeploymentState, draft: PlacementDraft) -> DeploymentTerms:
    """Return what a deployment pays and takes on an empty fleet."""
    needs, fleet = state.needs, draft.fleet
    sites = np.flatnonzero(needs.site_capacity > 0)
    candidates = [
        draft.ledger.best_candidate(int(site), needs.eligible_nodes[int(site)], needs)
        for site in sites
    ]
    starts = np.array([found.start_cost if found else np.inf for found in candidates])
    cost_per_ms = state.assignment.unit * state.assignment.load
    unserved_cost = cost_per_ms * UNSERVED_MS
    spread = ONE_POP_MS * needs.total_requests_per_s + MISSING_SPREAD * (needs.replicas_min >= 2)
    one_pop_cost = needs.weight * spread * (needs.replicas_max >= 2)
    lacking = ABSENT * needs.has_demand + MISSING * needs.replicas_min
    return DeploymentTerms(
        load=state.assignment.load,
        serve_cost=cost_per_ms[:, None] * state.needs.latency_ms[:, sites],
        unserved_cost=unserved_cost,
        capacity=needs.site_capacity[sites],
        fixed_cost=needs.hold_cost + starts,
        use=site_use(needs, fleet, sites),
        sites=sites,
        pops=np.array([fleet.distances.index[fleet.sites[int(site)].pop] for site in sites]),
        replicas_max=needs.replicas_max,
        pops_min=min(2, needs.replicas_max),
        one_pop_cost=one_pop_cost,
        empty_cost=float(unserved_cost.sum()) + needs.weight * lacking + one_pop_cost,
    )


def site_use(needs: DeploymentNeeds, fleet: FleetCapacity, sites: Ints) -> Floats:
    """Return what a replica takes of each site: a row of GiB, and a row of devices of which it
    takes more than half."""
    count = needs.deployment.engine.devices
    each = needs.memory_bytes / count
    largest = np.array([largest_device_bytes(fleet, int(site)) for site in sites])
    halves = np.where(each > largest / 2, float(count), 0.0)
    return np.stack((np.full(len(sites), needs.memory_bytes / GIB), halves))


def largest_device_bytes(fleet: FleetCapacity, site: int) -> int:
    """Return the memory of the largest device of a site."""
    nodes = fleet.sites[site].nodes
    return max(d.memory_bytes for node_id in nodes for d in fleet.nodes[node_id].devices)


def site_resources(fleet: FleetCapacity) -> Floats:
    """Return what each site has: a row of GiB, and a row of devices."""
    has = np.zeros((2, len(fleet.sites)))
    for site in fleet.sites:
        for node_id in site.nodes:
            devices = fleet.nodes[node_id].devices
            has[0, site.index] += sum(device.memory_bytes for device in devices) / GIB
            has[1, site.index] += len(devices)
    return has


def raise_prices(bounds: Sequence[DeploymentBound], goals: Sequence[float], has: Floats) -> Floats:
    """Raise the prices of cities and of shared resources in turn; return those of the resources."""
    for bound, goal in zip(bounds, goals, strict=True):
        bound.climb(goal, ALONE_ROUNDS)
    prices = best_prices = direction = np.zeros_like(has)
    best, theta = -np.inf, 1.0
    for _ in range(PRICE_ROUNDS):
        value = total_bound(bounds, prices, has)
        if value > best:
            best, best_prices = value, prices
        else:
            theta *= 0.8
        use = np.zeros_like(has)
        for bound in bounds:
            bound.add_use(use)
        # In shares of what a site has, so that GiB and devices take equal steps.
        over = use / has - 1.0
        over[(prices <= 0) & (over < 0)] = 0.0
        direction = 0.5 * direction + over
        steep = float((over * direction).sum())
        if steep <= 0:
            break
        step = theta * STEP * max(sum(goals) - value, 1e-3 * abs(best))
        prices = np.maximum(0.0, prices + step / steep * direction / has)
        for bound, goal in zip(bounds, goals, strict=True):
            bound.begin(prices)
            bound.climb(max(goal, 1.02 * bound.best.value), BETWEEN_ROUNDS)
    for bound, goal in zip(bounds, goals, strict=True):
        bound.begin(best_prices)
        bound.climb(goal, LAST_ROUNDS)
    return best_prices


def total_bound(bounds: Sequence[DeploymentBound], prices: Floats, has: Floats) -> float:
    """Return the bound of all deployments, less what the shared resources are worth."""
    return sum(bound.best.value for bound in bounds) - float((prices * has).sum())


class BoundRow(NamedTuple):
    """One deployment: its bound at the prices of shared resources, and its part of the plan's cost.

    The cost is counted with the smallest model starting first on each node (`recost.py`); `queue`
    is the part of it that replicas pay because others load before them.
    """

    deployment: str
    gib: float
    sites: int
    replicas: int
    bound: float
    planned: float
    queue: float
    above_percent: float


class BoundReport(NamedTuple):
    """One row per deployment, the value of shared resources (to be subtracted from the sum of
    bounds), and the plan's cost as the search counts it."""

    rows: list[BoundRow]
    shared: float
    searched: float


def bound_report(cluster: ClusterState, limits: PlanLimits) -> BoundReport:
    """Return how far the plan of an empty fleet is above the lower bound."""
    draft, _ = run_search(cluster, limits)
    plan = recost(cluster, slots_of(draft))
    empty = recost(cluster, [])
    terms = [terms_of(state, empty) for state in empty.states]
    bounds, has = [DeploymentBound(each) for each in terms], site_resources(empty.fleet)
    prices = raise_prices(bounds, [state.cost() for state in plan.states], has)
    rows = []
    for state, term, deployment_bound in zip(plan.states, terms, bounds, strict=True):
        number_of = {int(site): number for number, site in enumerate(term.sites)}
        idle = sum(float(term.fixed_cost[number_of[r.site]]) for r in state.replicas)
        bound, planned = deployment_bound.best.value, state.cost()
        paid = sum(replica.hold_cost + replica.start_cost for replica in state.replicas)
        rows.append(
            BoundRow(
                deployment=str(state.deployment_id),
                gib=round(state.needs.memory_bytes / GIB, 1),
                sites=len(term.sites),
                replicas=len(state.replicas),
                bound=round(bound, 1),
                planned=round(planned, 1),
                queue=round(paid - idle, 1),
                above_percent=round(100 * (planned / bound - 1), 2) if bound > 0 else 0.0,
            )
        )
    return BoundReport(rows, float((prices * has).sum()), total_cost(draft))


def main() -> None:
    """Bound the planet's first plan and write the table."""
    parser = world_parser(__doc__)
    parser.add_argument("--effort", type=int, default=FIRST.effort)
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    planet = Planet(draw(args.data, args.seed), args.seed)
    planet.observe_demand()
    limits = msgspec.structs.replace(FIRST, effort=args.effort)
    rows, shared, searched = bound_report(planet.cluster_state(), limits)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(BoundRow._fields)
        writer.writerows(rows)
    for name, group in (
        (f"over {LARGE_GIB} GiB", [row for row in rows if row.gib > LARGE_GIB]),
        ("others", [row for row in rows if row.gib <= LARGE_GIB]),
        (f"all, less {shared:.0f} for shared resources", rows),
    ):
        bound = sum(row.bound for row in group) - (shared if group is rows else 0.0)
        planned, queue = sum(row.planned for row in group), sum(row.queue for row in group)
        print(
            f"{len(group)} {name}: bound {bound:.0f}, planned {planned:.0f}, "
            f"{100 * (planned / bound - 1):.2f} % above, {100 * queue / bound:.2f} % is queues"
        )
    print(f"as the search counts its queues: {searched:.0f}, {100 * (searched / bound - 1):.2f} %")


if __name__ == "__main__":
    main()
