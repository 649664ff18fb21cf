"""Lagrange's bound of seating one deployment: cities are given prices, sites earn them.

That a city is served once is given a price, what the city would pay. With prices every site is a
knapsack of its own, solved exactly, seats whole; and whatever the prices are, the sum is a bound.
They are raised by subgradients, as far as the rounds allow. At the best prices the bound is never
below that of the linear program, in which seats are fractions.
"""

from typing import Final, NamedTuple

import numpy as np

from scheduler.decide.flow import Floats, Ints

SHRINK: Final = 0.7
PATIENCE: Final = 15
"""Rounds without a better bound after which steps shrink."""


class Looked(NamedTuple):
    """What some prices say of one deployment: a bound, how often each city is served, seats."""

    value: float
    served: Floats
    seats: Floats


class Terms(NamedTuple):
    """What one deployment pays and needs: rows are cities, columns sites.

    `paid` is what serving all of a city from a site costs, `lost` what not serving it costs,
    `fixed` what a seat costs at each site, `room` the load it carries, `needs` (a row each) what it
    takes there of what deployments share, `pops` the PoP each is in. In fewer PoPs than `apart`,
    `one_pop` is paid besides; with no seat at all, `none` is all that is paid.
    """

    load: Floats
    paid: Floats
    lost: Floats
    room: Floats
    fixed: Floats
    needs: Floats
    sites: Ints
    pops: Ints
    apart: int
    one_pop: float
    none: float


class Side:
    """One deployment, and the prices of its cities."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._prices = self._best_prices = _first_prices(terms)
        self.begin()

    def begin(self, shared: Floats | None = None) -> None:
        """Take the prices of what is shared (rows as `needs`, columns all sites); begin anew."""
        terms = self._terms
        self._fixed = terms.fixed
        if shared is not None:
            self._fixed = terms.fixed + (shared[:, terms.sites] * terms.needs).sum(axis=0)
        self._few = self._in_one_or_none()
        self.best = Looked(-np.inf, self._terms.load, np.zeros(len(self._terms.sites)))
        self._prices, self._theta, self._waited = self._best_prices, 1.0, 0
        self._turn = np.zeros(len(self._terms.load))

    def climb(self, goal: float, rounds: int) -> None:
        """Raise the bound by steps along the subgradient of the cities' prices."""
        for _ in range(rounds):
            looked = self.look()
            if looked.value > self.best.value:
                better = looked.value > self.best.value + 1e-5 * abs(self.best.value)
                self.best, self._best_prices = looked, self._prices
                self._waited = 0 if better else self._waited + 1
            else:
                self._waited += 1
            if self._waited >= PATIENCE:
                self._theta, self._waited, self._prices = self._theta * SHRINK, 0, self._best_prices
                self._turn = np.zeros(len(self._terms.load))
                looked = self.best
            slope = 1.0 - looked.served
            slope[(self._prices >= self._terms.lost) & (slope > 0)] = 0.0
            self._turn = 0.6 * self._turn + slope
            steep = float((self._terms.lost * slope) @ self._turn)
            if steep <= 0:
                self._turn = slope
                steep = float((self._terms.lost * slope) @ slope)
            if steep <= 1e-9 or self._theta < 1e-3:
                return
            step = self._theta * max(goal - looked.value, 1e-4 * abs(goal)) / steep
            self._prices = np.clip(
                self._prices + step * self._terms.lost * self._turn, 0.0, self._terms.lost
            )

    @property
    def few(self) -> float:
        """Return the least of having all replicas in one PoP, and of having none."""
        return self._few.value

    def add_use(self, use: Floats) -> None:
        """Add what the seats of the best bound take of what is shared."""
        use[:, self._terms.sites] += self._terms.needs * self.best.seats

    def look(self) -> Looked:
        """Return the bound at prices: the least of living in two PoPs, in one, in none."""
        nets, seats, parts = self._knapsacks(self._prices)
        held = self._held(nets)
        value = float(self._prices.sum() + nets[held].sum())
        if value >= self._few.value:
            return self._few
        counts = np.zeros(len(nets))
        counts[held] = seats[held]
        return Looked(value, parts[:, held].sum(axis=1), counts)

    def _held(self, nets: Floats) -> Ints:
        """Return the sites that pay, and the next best where those are in too few PoPs."""
        order, pops = np.argsort(nets, kind="stable"), self._terms.pops
        held = [int(site) for site in order[nets[order] < 0]]
        apart = {int(pops[site]) for site in held}
        for site in order[len(held) :]:
            if len(apart) >= self._terms.apart:
                break
            if int(pops[site]) not in apart:
                apart.add(int(pops[site]))
                held.append(int(site))
        return np.array(held, dtype=np.int64)

    def _in_one_or_none(self) -> Looked:
        """Return the least of having all replicas in one PoP, and of having none."""
        terms, counts = self._terms, np.zeros(len(self._terms.sites))
        best, served = terms.none, np.ones(len(terms.load))
        nets, seats, _ = self._knapsacks(terms.lost)
        for pop in np.unique(terms.pops):
            there = np.flatnonzero(terms.pops == pop)
            first = there[int(nets[there].argmin())]
            value = float(terms.lost.sum() + nets[first])
            if len(there) > 1:
                # Which classes share the load is left open: each unit takes the cheapest there is.
                cheapest = float((self._fixed[there] / terms.room[there]).min())
                paid = np.minimum(terms.lost, terms.paid[:, first] + terms.load * cheapest)
                value = min(value, float(paid.sum()))
            if value + terms.one_pop < best:
                best, counts = value + terms.one_pop, np.zeros(len(nets))
                counts[first] = seats[first]
        return Looked(best, served, counts)

    def _knapsacks(self, prices: Floats) -> tuple[Floats, Floats, Floats]:
        """Return for each site its cost less what it earns with its best number of seats (one at
        least), that number, and the part of each city that it serves."""
        load, rooms, fixed = self._terms.load, self._terms.room, self._fixed
        earned = np.maximum(prices[:, None] - self._terms.paid, 0.0)
        wanted = load @ (earned > 0)
        nets, seats = fixed - earned.sum(axis=0), np.ones(len(rooms))
        parts = (earned > 0).astype(float)
        for site in np.flatnonzero(wanted > rooms):
            order = np.argsort(-earned[:, site] / load, kind="stable")
            upto = np.concatenate(([0.0], np.cumsum(load[order])))
            worth = np.concatenate(([0.0], np.cumsum(earned[order, site])))
            counts = np.arange(1, int(np.ceil(wanted[site] / rooms[site])) + 1)
            net = counts * fixed[site] - np.interp(counts * rooms[site], upto, worth)
            best = int(net.argmin())
            nets[site], seats[site] = net[best], counts[best]
            taken = np.clip(counts[best] * rooms[site] - upto[:-1], 0.0, load[order])
            parts[order, site] *= taken / load[order]
        return nets, seats, parts


def _first_prices(terms: Terms) -> Floats:
    """Return a little more than the third nearest site would cost: near where most prices end."""
    near = np.sort(terms.paid, axis=1)
    if not near.size:
        return terms.lost
    return np.asarray(np.minimum(terms.lost, 1.2 * near[:, min(2, near.shape[1] - 1)]))
