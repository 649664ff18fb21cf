"""The bound is below every plan there is: those of small worlds, and all of tiny ones by hand."""

import csv
from itertools import product

import msgspec
import numpy as np
import pytest

from ops.sim.lagrangian_bound import DeploymentBound, DeploymentTerms
from ops.sim.optimality_gap import TABLE, THOROUGH, run_search, total_cost
from ops.sim.planet_bound import raise_prices, site_resources, terms_of, total_bound
from ops.sim.recost import empty_draft, recost, slots_of
from ops.sim.small_worlds import small_world
from scheduler.decide.placement.fleet.latency_table import LatencyTable
from scheduler.decide.placement.search.load_assignment import LoadAssignment

with TABLE.open(newline="") as file:
    OPTIMUM = {int(row["seed"]): float(row["optimum"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("seed", "reached"), [(0, 0.05), (5, 0.9), (6, 0.98), (7, 0.9), (9, 0.9), (44, 0.05)]
)
def test_the_bound_is_below_the_optimum_of_every_small_world(seed: int, reached: float) -> None:
    cluster = small_world(seed)
    draft = empty_draft(cluster, THOROUGH)
    bounds = [DeploymentBound(terms_of(state, draft)) for state in draft.states]
    greedy, _ = run_search(cluster, msgspec.structs.replace(THOROUGH, effort=0))
    has = site_resources(draft.fleet)
    prices = raise_prices(bounds, [state.cost() for state in greedy.states], has)
    # With scarce memory it is far below: it does not see which replicas fit on a device together.
    assert reached <= total_bound(bounds, prices, has) / OPTIMUM[seed] <= 1.0002


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_a_tiny_deployment_is_just_below_its_best_plan(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cities, sites = 5, 4
    load, latency_ms = rng.uniform(0.1, 0.6, cities), rng.uniform(1.0, 60.0, (cities, sites))
    capacity, hold, unserved = np.array([0.5, 0.8, 1.0, 1.5]), 8.0, 500.0

    def cost(counts: tuple[int, ...]) -> float:
        capacities = np.array(counts) * capacity
        latency = LatencyTable(latency_ms)
        assignment = LoadAssignment(load, load, latency, capacities, unserved)
        return assignment.cost() + hold * sum(counts)

    best = min(cost(counts) for counts in product(range(4), repeat=sites) if sum(counts))
    bound = DeploymentBound(
        DeploymentTerms(
            load=load,
            serve_cost=load[:, None] * latency_ms,
            unserved_cost=load * unserved,
            capacity=capacity,
            fixed_cost=np.full(sites, hold),
            use=np.ones((1, sites)),
            sites=np.arange(sites),
            pops=np.arange(sites),
            replicas_max=9,
            pops_min=0,
            one_pop_cost=0.0,
            empty_cost=float(load.sum() * unserved),
        )
    )
    bound.climb(best, 300)
    assert 0.9 * best <= bound.best.value <= best * (1 + 1e-9)


def test_the_bound_counts_the_empty_part_of_the_last_replica() -> None:
    load = np.full(7, 0.3)
    latency_ms = np.add.outer(np.arange(7.0), np.arange(3.0))
    bound = DeploymentBound(
        DeploymentTerms(
            load=load,
            serve_cost=load[:, None] * latency_ms,
            unserved_cost=load * 1e4,
            capacity=np.ones(3),
            fixed_cost=np.full(3, 100.0),
            use=np.ones((1, 3)),
            sites=np.arange(3),
            pops=np.arange(3),
            replicas_max=9,
            pops_min=0,
            one_pop_cost=0.0,
            empty_cost=float(load.sum() * 1e4),
        )
    )
    latency = LatencyTable(latency_ms)
    # A load of 2.1 needs three replicas; the linear program would take 2.1 of them.
    best = min(
        LoadAssignment(load, load, latency, np.array(counts, dtype=float), 1e4).cost()
        + 100.0 * sum(counts)
        for counts in product(range(4), repeat=3)
    )
    assert best > 300
    bound.climb(best, 300)
    assert 0.999 * best <= bound.best.value <= best * (1 + 1e-9)


def test_recosted_slots_are_the_same_slots_with_no_longer_queues() -> None:
    cluster = small_world(6)
    draft, _ = run_search(cluster, msgspec.structs.replace(THOROUGH, effort=0))
    slots = slots_of(draft)
    anew = recost(cluster, slots)
    assert sorted(slots_of(anew)) == sorted(slots)
    assert total_cost(anew) <= total_cost(draft) + 1e-6
    costs = [state.assignment.cost() for state in draft.states]
    assert [state.assignment.cost() for state in anew.states] == pytest.approx(costs, rel=1e-3)
