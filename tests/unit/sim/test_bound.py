"""The bound is below every plan there is: those of small worlds, and all of tiny ones by hand."""

import csv
from itertools import product

import msgspec
import numpy as np
import pytest

from ops.sim.lagrangian_bound import DeploymentBound, DeploymentTerms
from ops.sim.optimality_gap import TABLE, THOROUGH, run_search, total_cost
from ops.sim.planet_bound import raise_all, shared_by, terms_of, total
from ops.sim.recost import recost, slots_of
from ops.sim.small_worlds import small_world
from scheduler.decide.membership.liveness import judge_liveness
from scheduler.decide.placement.planner import DraftPlan
from scheduler.decide.placement.search.load_assignment import LoadAssignment

with TABLE.open(newline="") as file:
    OPTIMUM = {int(row["seed"]): float(row["optimum"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("seed", "reached"), [(0, 0.05), (5, 0.9), (6, 0.98), (7, 0.9), (9, 0.9), (44, 0.05)]
)
def test_no_optimum_of_a_small_world_is_below_the_bound(seed: int, reached: float) -> None:
    cluster = small_world(seed)
    draft = DraftPlan(cluster, judge_liveness(cluster.nodes, cluster.acting_for_s), THOROUGH)
    search = draft.sought()
    sides = [DeploymentBound(terms_of(wish, search.ground)) for wish in search.wishes]
    greedy, _ = run_search(cluster, msgspec.structs.replace(THOROUGH, effort=0))
    has = shared_by(search.ground)
    prices = raise_all(sides, [wish.cost() for wish in greedy.wishes], has)
    # Under scarcity it is far below: on which device a replica fits is what it does not see.
    assert reached <= total(sides, prices, has) / OPTIMUM[seed] <= 1.0002


@pytest.mark.parametrize("seed", range(4))
def test_of_a_tiny_deployment_the_bound_is_just_below_the_best_of_all_plans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cities, sites = 5, 4
    load, far = rng.uniform(0.1, 0.6, cities), rng.uniform(1.0, 60.0, (cities, sites))
    room, seat, unserved = np.array([0.5, 0.8, 1.0, 1.5]), 8.0, 500.0

    def cost(counts: tuple[int, ...]) -> float:
        rooms = np.array(counts) * room
        return LoadAssignment(load, load, far, rooms, unserved).cost() + seat * sum(counts)

    best = min(cost(counts) for counts in product(range(4), repeat=sites) if sum(counts))
    side = DeploymentBound(
        DeploymentTerms(
            load=load,
            paid=load[:, None] * far,
            lost=load * unserved,
            room=room,
            fixed=np.full(sites, seat),
            needs=np.ones((1, sites)),
            sites=np.arange(sites),
            pops=np.arange(sites),
            most=9,
            apart=0,
            one_pop=0.0,
            none=float(load.sum() * unserved),
        )
    )
    side.climb(best, 300)
    assert 0.9 * best <= side.best.value <= best * (1 + 1e-9)


def test_the_bound_counts_the_empty_part_of_the_last_seat() -> None:
    load = np.full(7, 0.3)
    far = np.add.outer(np.arange(7.0), np.arange(3.0))
    side = DeploymentBound(
        DeploymentTerms(
            load=load,
            paid=load[:, None] * far,
            lost=load * 1e4,
            room=np.ones(3),
            fixed=np.full(3, 100.0),
            needs=np.ones((1, 3)),
            sites=np.arange(3),
            pops=np.arange(3),
            most=9,
            apart=0,
            one_pop=0.0,
            none=float(load.sum() * 1e4),
        )
    )
    # 2.1 loads need three seats; the linear program is content with 2.1 of them.
    best = min(
        LoadAssignment(load, load, far, np.array(counts, dtype=float), 1e4).cost()
        + 100.0 * sum(counts)
        for counts in product(range(4), repeat=3)
    )
    assert best > 300
    side.climb(best, 300)
    assert 0.999 * best <= side.best.value <= best * (1 + 1e-9)


def test_seats_counted_anew_are_the_same_seats_and_wait_no_longer() -> None:
    cluster = small_world(6)
    search, _ = run_search(cluster, msgspec.structs.replace(THOROUGH, effort=0))
    seats = slots_of(search)
    anew = recost(cluster, seats)
    assert sorted(slots_of(anew)) == sorted(seats)
    assert total_cost(anew) <= total_cost(search) + 1e-6
    flows = [wish.flow.cost() for wish in search.wishes]
    assert [wish.flow.cost() for wish in anew.wishes] == pytest.approx(flows, rel=1e-3)
