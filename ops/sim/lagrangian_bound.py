"""Lagrange's bound of seating one deployment: cities are given prices, sites earn them.

Why it is a bound. Let x[i, j] be the part of city i that site j serves, z[i] what nobody serves,
c[j] the seats of site j. Every plan has z[i] + sum over j of x[i, j] >= 1, so for prices p >= 0 its
cost is at least

    sum of fixed[j] c[j] + paid[i, j] x[i, j] + lost[i] z[i] + p[i] (1 - z[i] - sum of x[i, j])

of which the least over all x, z and c that keep the sites' rooms falls apart: p[i] <= lost[i] makes
z = 0 best, and each site takes by itself what earns it most, a knapsack that is solved exactly with
whole seats. Its gain is concave in c, so that where the seats are at least or at most so many in
all, the cheapest steps of all sites are the cheapest whole. Whatever p is, the sum is a bound; it
is raised by subgradients. At the best prices it is never below the linear program's.

Cases. Few seats carry no load that is more than their room, and whole seats leave a part of the
last one empty, which prices alone do not see. So the least number whose room could carry
everything is a border: with at least so many seats, and with fewer, are bound apart. Life in one
PoP and having no seat are cases of their own. The least of the cases is the bound.
"""

from typing import Final, NamedTuple

import numpy as np

from scheduler.decide.placement.search.load_assignment import Floats, Ints

SHRINK: Final = 0.7
PATIENCE: Final = 15
"""Rounds without a better bound after which steps shrink."""


class DualValue(NamedTuple):
    """What some prices say of one deployment: a bound, how often each city is served, seats."""

    value: float
    served: Floats
    seats: Floats


class DeploymentTerms(NamedTuple):
    """What one deployment pays and needs: rows are cities, columns sites.

    `paid` is what serving all of a city from a site costs, `lost` what not serving it costs,
    `fixed` what a seat costs at each site, `room` the load it carries, `needs` (a row each) what it
    takes there of what deployments share, `pops` the PoP each is in. There are `most` seats at
    most. In fewer PoPs than `apart`, `one_pop` is paid besides; with no seat at all, `none` is all
    that is paid.
    """

    load: Floats
    paid: Floats
    lost: Floats
    room: Floats
    fixed: Floats
    needs: Floats
    sites: Ints
    pops: Ints
    most: int
    apart: int
    one_pop: float
    none: float


class Knapsacks:
    """What sites earn at some prices: `steps` is what the first, second, ... seat of each costs,
    less what it earns; it rises along a row, which is `least` long or longer."""

    def __init__(
        self, terms: DeploymentTerms, fixed: Floats, prices: Floats, least: int = 1
    ) -> None:
        self._terms = terms
        self._earned = np.maximum(prices[:, None] - terms.paid, 0.0)
        wanted = terms.load @ (self._earned > 0)
        full = np.flatnonzero(wanted > terms.room)
        most = int(np.ceil((wanted / terms.room)[full]).max(initial=1.0))
        self.steps: Floats = np.repeat(fixed[:, None], max(most, least), axis=1)
        self.steps[:, 0] -= self._earned.sum(axis=0)
        self._order: dict[int, Ints] = {}
        for site in full:
            rows = np.argsort(-self._earned[:, site] / terms.load, kind="stable")
            upto = np.concatenate(([0.0], np.cumsum(terms.load[rows])))
            worth = np.concatenate(([0.0], np.cumsum(self._earned[rows, site])))
            rooms = np.arange(self.steps.shape[1] + 1) * terms.room[site]
            self.steps[site] = fixed[site] - np.diff(np.interp(rooms, upto, worth))
            self._order[int(site)] = rows

    def served(self, counts: Ints) -> Floats:
        """Return how often each city is served by so many seats of each site."""
        load, parts = self._terms.load, (self._earned > 0) * (counts > 0).astype(float)
        for site, rows in self._order.items():
            before = np.cumsum(load[rows]) - load[rows]
            room = counts[site] * self._terms.room[site] - before
            parts[rows, site] *= np.clip(room, 0.0, load[rows]) / load[rows]
        return np.asarray(parts.sum(axis=1))


class SeatCountCase:
    """At least `least` and at most `most` seats, in `apart` PoPs; and the prices of the cities."""

    def __init__(self, terms: DeploymentTerms, least: int, most: int) -> None:
        self._terms, self._least, self._most = terms, least, most
        self._prices = self._best_prices = np.zeros(0)

    def begin(self, fixed: Floats) -> None:
        """Take what a seat costs at each site; begin anew from the best prices there were."""
        self._fixed = fixed
        if not len(self._best_prices):
            self._best_prices = self._first_prices()
        self._prices, self._theta, self._waited = self._best_prices, 1.0, 0
        self._turn = np.zeros(len(self._terms.load))
        self.best = DualValue(-np.inf, np.ones(len(self._terms.load)), np.zeros(len(fixed)))

    def climb(self, goal: float, rounds: int, enough: float = np.inf) -> None:
        """Raise the bound by steps along the subgradient of the prices, to `enough` at most."""
        lost = self._terms.lost
        for _ in range(rounds):
            looked = self.look()
            self._waited += 1
            if looked.value > self.best.value:
                if looked.value > self.best.value + 1e-5 * abs(self.best.value):
                    self._waited = 0
                self.best, self._best_prices = looked, self._prices
            if self._waited >= PATIENCE:
                self._theta, self._waited, self._prices = self._theta * SHRINK, 0, self._best_prices
                self._turn = np.zeros(len(lost))
                looked = self.best
            slope = 1.0 - looked.served
            slope[(self._prices >= lost) & (slope > 0)] = 0.0
            self._turn = 0.6 * self._turn + slope
            steep = float((lost * slope) @ self._turn)
            if steep <= 0:
                self._turn = slope
                steep = float((lost * slope) @ slope)
            if steep <= 1e-9 or self._theta < 1e-3 or self.best.value >= enough:
                return
            step = self._theta * max(goal - looked.value, 1e-4 * abs(goal)) / steep
            self._prices = np.clip(self._prices + step * lost * self._turn, 0.0, lost)

    def look(self) -> DualValue:
        """Return the bound at the prices as they are."""
        knapsacks = Knapsacks(self._terms, self._fixed, self._prices, self._least)
        counts = self._counts(knapsacks.steps)
        value = float(self._prices.sum()) + _taken(knapsacks.steps, counts)
        return DualValue(value, knapsacks.served(counts), counts.astype(float))

    def _counts(self, steps: Floats) -> Ints:
        """Return the seats of each site that cost least in all."""
        counts = (steps < 0).sum(axis=1)
        wanted = min(max(int(counts.sum()), self._least), self._most)
        if wanted != counts.sum():
            first = np.argsort(steps, axis=None, kind="stable")[:wanted]
            counts = np.bincount(first // steps.shape[1], minlength=len(steps))
        apart = self._in_more_pops(steps, (steps < 0).sum(axis=1))
        # Each asks for less than both together, so both are bounds.
        return max((counts, apart), key=lambda found: _taken(steps, found))

    def _in_more_pops(self, steps: Floats, counts: Ints) -> Ints:
        """Return the seats with first ones added until enough PoPs have one."""
        pops = self._terms.pops
        held = set(pops[counts > 0].tolist())
        for site in np.argsort(steps[:, 0], kind="stable"):
            if len(held) >= self._terms.apart:
                break
            if int(pops[site]) not in held:
                held.add(int(pops[site]))
                counts[site] = 1
        return counts

    def _first_prices(self) -> Floats:
        """Return near where most prices end: what the third nearest site costs, and room: as much
        as it costs at the cheapest, or where that is too little for all, as it is missed."""
        terms = self._terms
        near = np.sort(terms.paid, axis=1)[:, min(2, terms.paid.shape[1] - 1)]
        room = float((self._fixed / terms.room).min())
        if self._most * terms.room.max() < terms.load.sum():
            room = max(room, float(((terms.lost - near) / terms.load).min()))
        return np.asarray(np.clip(near + terms.load * room, 0.0, terms.lost))


class DeploymentBound:
    """One deployment: the least of its cases."""

    def __init__(self, terms: DeploymentTerms) -> None:
        self._terms = terms
        largest = float(terms.room.max(initial=0.0))
        border = int(np.ceil(terms.load.sum() / largest - 1e-9)) if largest else 0
        self._cases = []
        if largest and border <= terms.most:
            self._cases.append(SeatCountCase(terms, border, terms.most))
        if border > max(1, terms.apart):
            self._cases.append(SeatCountCase(terms, 0, min(border - 1, terms.most)))
        self.begin()

    def begin(self, shared: Floats | None = None) -> None:
        """Take the prices of what is shared (rows as `needs`, columns all sites); begin anew."""
        terms, fixed = self._terms, self._terms.fixed
        if shared is not None:
            fixed = fixed + (shared[:, terms.sites] * terms.needs).sum(axis=0)
        self._few = _in_one_or_none(terms, fixed)
        for case in self._cases:
            case.begin(fixed)

    def climb(self, goal: float, rounds: int) -> None:
        """Raise the bound: the first case, and the others until they are no less."""
        enough = self._few.value
        for case in self._cases:
            case.climb(min(goal, 1.02 * enough), rounds, enough)
            enough = min(enough, case.best.value)

    @property
    def best(self) -> DualValue:
        """Return the least of the cases."""
        return min((self._few, *(case.best for case in self._cases)), key=lambda case: case.value)

    def add_use(self, use: Floats) -> None:
        """Add what the seats of the best bound take of what is shared."""
        use[:, self._terms.sites] += self._terms.needs * self.best.seats


def _taken(steps: Floats, counts: Ints) -> float:
    """Return what so many seats of each site come to."""
    return float(steps[np.arange(steps.shape[1]) < counts[:, None]].sum())


def _in_one_or_none(terms: DeploymentTerms, fixed: Floats) -> DualValue:
    """Return the least of having all replicas in one PoP, and of having none."""
    best, counts = terms.none, np.zeros(len(fixed))
    steps = Knapsacks(terms, fixed, terms.lost).steps
    seats = np.clip((steps < 0).sum(axis=1), 1, max(1, terms.most))
    for pop in np.unique(terms.pops):
        there = np.flatnonzero(terms.pops == pop)
        nets = np.array([steps[site, : seats[site]].sum() for site in there])
        first = there[int(nets.argmin())]
        value = float(terms.lost.sum() + nets.min())
        if len(there) > 1:
            # Which classes share the load is left open: each unit takes the cheapest there is.
            cheapest = float((fixed[there] / terms.room[there]).min())
            paid = np.minimum(terms.lost, terms.paid[:, first] + terms.load * cheapest)
            value = min(value, float(paid.sum()))
        if value + terms.one_pop < best:
            best, counts = value + terms.one_pop, np.zeros(len(fixed))
            counts[first] = seats[first]
    return DualValue(best, np.ones(len(terms.load)), counts)
