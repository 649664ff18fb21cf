"""A sum that no plan of an empty fleet can be below, and how far the planet's first plan is above.

    python -m ops.sim.planet_bound --data ../shared/data

Each deployment has Lagrange's bound (`dual.py`); what they share, the memory of the sites and their
devices, has prices too, raised where the deployments' best seats would not fit.

Counted: waiting, unserved load, seats with the time that the first start on an idle node takes,
minima, absence, the life in one PoP only, the memory of each site, and that a device holds one
replica only that takes more than half of it. Left out, so that the bound is
lower than the best plan: which replicas fit on which device of a site, the queue of a node that
starts several at once, PoPs kept warm, all of a minimum but the first two.
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
from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.cluster import ClusterState
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.planner import PlanLimits
from scheduler.decide.placement.score import (
    ABSENT,
    MISSING,
    MISSING_SPREAD,
    ONE_POP_MS,
    UNSERVED_MS,
)
from scheduler.decide.placement.search.deployment_state import DeploymentState
from scheduler.decide.placement.search.load_assignment import Floats, Ints

TABLE: Final = Path(__file__).parent / "planet_bound.csv"
ALONE_ROUNDS: Final = 200
PRICE_ROUNDS: Final = 40
BETWEEN_ROUNDS: Final = 8
LAST_ROUNDS: Final = 200
LARGE_GIB: Final = 250
STEP: Final = 0.3
"""The part of what is left to the plan by which the first step of the shared prices aims to raise
the bound."""


def terms_of(wish: DeploymentState, ground: FleetCapacity) -> DeploymentTerms:
    """Return what a deployment pays and needs on a fleet that holds nothing yet."""
    sites = np.flatnonzero(wish.rooms > 0)
    offers = [
        ground.offer(int(site), wish.nodes_of[int(site)], wish.deployment, wish.model)
        for site in sites
    ]
    starts = np.array([offered.cost if offered else np.inf for offered in offers])
    whole = wish.flow.unit * wish.flow.load
    lost = whole * UNSERVED_MS
    spread = ONE_POP_MS * wish.requests_per_s + MISSING_SPREAD * (wish.least >= 2)
    one_pop = wish.weight * spread * (wish.most >= 2)
    lacking = ABSENT * wish.is_asked_for + MISSING * wish.least
    return DeploymentTerms(
        load=wish.flow.load,
        paid=whole[:, None] * wish.flow.far[:, sites],
        lost=lost,
        room=wish.rooms[sites],
        fixed=wish.hold + starts,
        needs=needs_of(wish, ground, sites),
        sites=sites,
        pops=np.array([ground.far.index[ground.sites[int(site)].pop] for site in sites]),
        most=wish.most,
        apart=min(2, wish.most),
        one_pop=one_pop,
        none=float(lost.sum()) + wish.weight * lacking + one_pop,
    )


def needs_of(wish: DeploymentState, ground: FleetCapacity, sites: Ints) -> Floats:
    """Return what a seat takes of a site: GiB, and devices that it has more than half of."""
    count = wish.deployment.engine.devices
    each = wish.memory_bytes / count
    largest = np.array([largest_bytes(ground, int(site)) for site in sites])
    halves = np.where(each > largest / 2, float(count), 0.0)
    return np.stack((np.full(len(sites), wish.memory_bytes / GIB), halves))


def largest_bytes(ground: FleetCapacity, site: int) -> int:
    """Return the memory of the largest device of a site."""
    nodes = ground.sites[site].nodes
    return max(d.memory_bytes for node_id in nodes for d in ground.nodes[node_id].devices)


def shared_by(ground: FleetCapacity) -> Floats:
    """Return what each site has: GiB, and devices."""
    has = np.zeros((2, len(ground.sites)))
    for site in ground.sites:
        for node_id in site.nodes:
            devices = ground.nodes[node_id].devices
            has[0, site.index] += sum(device.memory_bytes for device in devices) / GIB
            has[1, site.index] += len(devices)
    return has


def raise_all(sides: Sequence[DeploymentBound], goals: Sequence[float], has: Floats) -> Floats:
    """Raise the prices of cities and of what is shared in turn; return those of what is shared."""
    for side, goal in zip(sides, goals, strict=True):
        side.climb(goal, ALONE_ROUNDS)
    prices = best_prices = turn = np.zeros_like(has)
    best, theta = -np.inf, 1.0
    for _ in range(PRICE_ROUNDS):
        value = total(sides, prices, has)
        if value > best:
            best, best_prices = value, prices
        else:
            theta *= 0.8
        use = np.zeros_like(has)
        for side in sides:
            side.add_use(use)
        # A device's share, so that rows of different measure step alike.
        over = use / has - 1.0
        over[(prices <= 0) & (over < 0)] = 0.0
        turn = 0.5 * turn + over
        steep = float((over * turn).sum())
        if steep <= 0:
            break
        step = theta * STEP * max(sum(goals) - value, 1e-3 * abs(best))
        prices = np.maximum(0.0, prices + step / steep * turn / has)
        for side, goal in zip(sides, goals, strict=True):
            side.begin(prices)
            side.climb(max(goal, 1.02 * side.best.value), BETWEEN_ROUNDS)
    for side, goal in zip(sides, goals, strict=True):
        side.begin(best_prices)
        side.climb(goal, LAST_ROUNDS)
    return best_prices


def total(sides: Sequence[DeploymentBound], prices: Floats, has: Floats) -> float:
    """Return the bound of all, less what the shared is worth at its prices."""
    return sum(side.best.value for side in sides) - float((prices * has).sum())


class BoundRow(NamedTuple):
    """One deployment: its bound at the prices of what is shared, its part of the plan's sum.

    That is counted with the smallest starting first on each node (`recount.py`); `queue` is what
    those pay in it who wait for others.
    """

    deployment: str
    gib: float
    sites: int
    seats: int
    bound: float
    planned: float
    queue: float
    above_percent: float


class BoundReport(NamedTuple):
    """A row a deployment, what is shared at its prices (to be taken from their bounds), and the
    plan's sum as the search counts it."""

    rows: list[BoundRow]
    shared: float
    searched: float


def judged(cluster: ClusterState, limits: PlanLimits) -> BoundReport:
    """Return how far a first plan is above what no plan can be below."""
    search, _ = run_search(cluster, limits)
    plan = recost(cluster, slots_of(search))
    empty = recost(cluster, [])
    terms = [terms_of(wish, empty.ground) for wish in empty.wishes]
    sides, has = [DeploymentBound(one) for one in terms], shared_by(empty.ground)
    prices = raise_all(sides, [wish.cost() for wish in plan.wishes], has)
    rows = []
    for wish, one, side in zip(plan.wishes, terms, sides, strict=True):
        place = {int(site): number for number, site in enumerate(one.sites)}
        idle = sum(float(one.fixed[place[s.site]]) for s in wish.seats)
        bound, planned = side.best.value, wish.cost()
        rows.append(
            BoundRow(
                deployment=str(wish.name),
                gib=round(wish.memory_bytes / GIB, 1),
                sites=len(one.sites),
                seats=len(wish.seats),
                bound=round(bound, 1),
                planned=round(planned, 1),
                queue=round(sum(s.hold + s.start for s in wish.seats) - idle, 1),
                above_percent=round(100 * (planned / bound - 1), 2) if bound > 0 else 0.0,
            )
        )
    return BoundReport(rows, float((prices * has).sum()), total_cost(search))


def main() -> None:
    """Bound the planet's first plan and write the table."""
    parser = world_parser(__doc__)
    parser.add_argument("--effort", type=int, default=FIRST.effort)
    parser.add_argument("--out", type=Path, default=TABLE)
    given = parser.parse_args()
    planet = Planet(draw(given.data, given.seed), given.seed)
    planet.ask()
    limits = msgspec.structs.replace(FIRST, effort=given.effort)
    rows, shared, searched = judged(planet.picture(), limits)
    with given.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(BoundRow._fields)
        writer.writerows(rows)
    for name, some in (
        (f"over {LARGE_GIB} GiB", [row for row in rows if row.gib > LARGE_GIB]),
        ("others", [row for row in rows if row.gib <= LARGE_GIB]),
        (f"all, less {shared:.0f} for what is shared", rows),
    ):
        bound = sum(row.bound for row in some) - (shared if some is rows else 0.0)
        planned, queue = sum(row.planned for row in some), sum(row.queue for row in some)
        print(
            f"{len(some)} {name}: bound {bound:.0f}, planned {planned:.0f}, "
            f"{100 * (planned / bound - 1):.2f} % above, {100 * queue / bound:.2f} % is queues"
        )
    print(f"as the search counts its queues: {searched:.0f}, {100 * (searched / bound - 1):.2f} %")


if __name__ == "__main__":
    main()
