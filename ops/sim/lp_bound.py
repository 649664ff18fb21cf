"""A bound that no plan of the planet can be below: the LP of each deployment, for HiGHS.

Deployments are bound apart, as if each had all devices to itself, and seats may be fractions;
spread is left out. All that makes the bound lower, so the planner is nearer to the best than to it.
Columns (which site may serve which city) come as they are needed: when no
column is left that could lower the sum, the LP over all of them is solved.
"""

from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, vstack

from scheduler.decide.flow import Floats, Ints
from scheduler.decide.score import ABSENT, UNSERVED_MS, start_cost
from scheduler.decide.start_time import (
    DISK_BYTES_PER_S,
    ENGINE_START_S,
    WAN_FAR_BYTES_PER_S,
)
from scheduler.decide.wish import Wish

NEAR: Final = 10
ROUNDS_MAX: Final = 12


class Bound(NamedTuple):
    """The bound of one deployment and what the plan comes to."""

    name: str
    bound: float
    planned: float


def bound_of(wish: Wish) -> Bound:
    """Return the LP bound of one wish beside its cost in the plan."""
    sites = np.flatnonzero(wish.rooms > 0)
    fixed = np.full(len(sites), _seat_cost(wish))
    value = _solve(wish, sites, fixed) if len(wish.cities) else wish.least * float(fixed.min())
    return Bound(str(wish.name), value, wish.cost())


def _seat_cost(wish: Wish) -> float:
    """Return the least that a seat of an empty fleet can cost: no queue, weights held nowhere."""
    load_s = ENGINE_START_S + wish.model.weights_bytes / DISK_BYTES_PER_S
    fetch_s = wish.model.artifact.size_bytes / WAN_FAR_BYTES_PER_S
    return wish.hold + start_cost(load_s + fetch_s)


def _solve(wish: Wish, sites: Ints, fixed: Floats) -> float:
    """Solve by column generation; the answer is a bound also where the rounds run out."""
    load, unit = wish.flow.load, wish.flow.unit
    far = wish.flow.far[:, sites]
    rooms = wish.rooms[sites]
    paid = (unit * load)[:, None] * far
    lost = unit * load * UNSERVED_MS
    near = np.argsort(far, axis=1)[:, :NEAR]
    chosen = np.zeros(far.shape, dtype=bool)
    np.put_along_axis(chosen, near, True, axis=1)
    best = 0.0
    for _ in range(ROUNDS_MAX):
        cities, places = np.nonzero(chosen)
        answer, v, used = _restricted(paid, lost, load, rooms, fixed, cities, places, wish.least)
        # For any v: sum v + sum over sites of (seats that could ever be) x min(0, cost - knapsack).
        worth = _knapsacks(v, paid, load, rooms)
        most = np.ceil(load.sum() / rooms) + 1
        best = max(best, float(v.sum() + (most * np.minimum(0.0, fixed - worth)).sum()))
        reduced = paid + load[:, None] * used[None, :] - v[:, None]
        wanted = (reduced < -1e-6 * np.maximum(1.0, np.abs(v))[:, None]) & ~chosen
        if not wanted.any() or best >= answer * (1 - 1e-4):
            break
        chosen |= wanted
    absent = ABSENT * wish.weight
    return min(best, float(lost.sum()) + absent)


def _restricted(
    paid: Floats,
    lost: Floats,
    load: Floats,
    rooms: Floats,
    fixed: Floats,
    cities: Ints,
    places: Ints,
    least: int,
) -> tuple[float, Floats, Floats]:
    """Return the value of the LP over some columns, the dual of each city, the price of room."""
    columns, count, sites = len(cities), len(load), len(rooms)
    x = np.arange(columns)
    cost = np.concatenate((paid[cities, places], lost, fixed))
    serve = coo_matrix(
        (np.ones(columns + count), (np.r_[cities, np.arange(count)], np.arange(columns + count))),
        shape=(count, columns + count + sites),
    )
    seat = columns + count + places
    over = coo_matrix(
        (np.r_[np.ones(columns), -np.ones(columns)], (np.r_[x, x], np.r_[x, seat])),
        shape=(columns, columns + count + sites),
    )
    every = columns + count + np.arange(sites)
    room = coo_matrix(
        (
            np.r_[load[cities], -rooms, -np.ones(sites)],
            (
                np.r_[places, np.arange(sites), np.full(sites, sites)],
                np.r_[x, every, every],
            ),
        ),
        shape=(sites + 1, columns + count + sites),
    )
    limits = np.r_[np.zeros(columns + sites), -float(min(least, 1))]
    answer = linprog(
        cost,
        A_ub=vstack((over, room)).tocsr(),
        b_ub=limits,
        A_eq=serve.tocsr(),
        b_eq=np.ones(count),
        bounds=(0, None),
        method="highs",
    )
    prices = -np.asarray(answer.ineqlin.marginals)[columns : columns + sites]
    return float(answer.fun), np.asarray(answer.eqlin.marginals), prices


def _knapsacks(v: Floats, paid: Floats, load: Floats, rooms: Floats) -> Floats:
    """Return for each site the most that one seat could earn of the cities' duals."""
    worth = np.zeros(len(rooms))
    for site, room in enumerate(rooms):
        earned = v - paid[:, site]
        cities = np.flatnonzero(earned > 0)
        order = cities[np.argsort(-earned[cities] / load[cities], kind="stable")]
        before = np.cumsum(load[order]) - load[order]
        part = np.clip((room - before) / load[order], 0.0, 1.0)
        worth[site] = float(earned[order] @ part)
    return worth
