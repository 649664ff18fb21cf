"""Lagrangian lower bound of the cost of one deployment: cities have prices, sites earn them.

Why it is a bound. Let x[i, j] be the part of city i that site j serves, z[i] the part that is not
served, c[j] the replicas at site j. Every plan has z[i] + sum over j of x[i, j] >= 1, so for prices
p >= 0 its cost is at least

    sum of fixed[j] c[j] + serve[i, j] x[i, j] + unserved[i] z[i] + p[i] (1 - z[i] - sum of x[i, j])

The minimum of this over all x, z and c that respect the sites' capacities separates: with
p[i] <= unserved[i], z = 0 is best, and each site takes by itself what earns it most, a knapsack
that is solved exactly with whole replicas. Its gain is concave in c. So where the total number of
replicas is limited from below or above, the cheapest steps of all sites are the cheapest total.
Any p gives a bound; subgradient steps raise it. At the best prices it is at least the bound of the
linear program.

Cases. A few replicas carry no more load than their capacity, and whole replicas leave part of the
last one empty, which prices alone do not see. So the least number of replicas that could carry
everything is a border: plans with at least that many, and plans with fewer, are bounded apart. All
replicas in one PoP, and no replica at all, are further cases. The least of the cases is the bound.
"""

from typing import Final, NamedTuple

import numpy as np

from scheduler.decide.arrays import Floats, Ints

SHRINK: Final = 0.7
PATIENCE: Final = 15
"""Rounds without a better bound after which steps shrink by SHRINK."""


class DualValue(NamedTuple):
    """The result for given prices: a bound, how often each city is served, replicas by site."""

    value: float
    served: Floats
    replicas: Floats


class DeploymentTerms(NamedTuple):
    """Costs and resource use of one deployment. Rows are cities, columns are its sites.

    `serve_cost` is paid to serve all of a city from a site, `unserved_cost` not to serve it,
    `fixed_cost` for a replica at each site, which has `capacity` for load. A replica takes `use` (a
    row for each resource) of what deployments share. `pops` are the PoPs of the sites. At most
    `replicas_max` replicas are allowed. With fewer PoPs than `pops_min`, `one_pop_cost` is paid in
    addition; with no replica at all, only `empty_cost` is paid.
    """

    load: Floats
    serve_cost: Floats
    unserved_cost: Floats
    capacity: Floats
    fixed_cost: Floats
    use: Floats
    sites: Ints
    pops: Ints
    replicas_max: int
    pops_min: int
    one_pop_cost: float
    empty_cost: float


class Knapsacks:
    """The best replicas of each site at given prices.

    `steps[site, n]` is what the n-th replica of a site costs, less what it earns; it rises along a
    row. Rows have at least `length_min` steps.
    """

    def __init__(
        self, terms: DeploymentTerms, fixed: Floats, prices: Floats, length_min: int = 1
    ) -> None:
        self._terms = terms
        self._earned = np.maximum(prices[:, None] - terms.serve_cost, 0.0)
        wanted = terms.load @ (self._earned > 0)
        full = np.flatnonzero(wanted > terms.capacity)
        most = int(np.ceil((wanted / terms.capacity)[full]).max(initial=1.0))
        self.steps: Floats = np.repeat(fixed[:, None], max(most, length_min), axis=1)
        self.steps[:, 0] -= self._earned.sum(axis=0)
        self._order: dict[int, Ints] = {}
        for site in full:
            rows = np.argsort(-self._earned[:, site] / terms.load, kind="stable")
            load_upto = np.concatenate(([0.0], np.cumsum(terms.load[rows])))
            earned = np.concatenate(([0.0], np.cumsum(self._earned[rows, site])))
            capacities = np.arange(self.steps.shape[1] + 1) * terms.capacity[site]
            self.steps[site] = fixed[site] - np.diff(np.interp(capacities, load_upto, earned))
            self._order[int(site)] = rows

    def served(self, counts: Ints) -> Floats:
        """Return how many times each city is served with `counts` replicas at each site."""
        load, parts = self._terms.load, (self._earned > 0) * (counts > 0).astype(float)
        for site, rows in self._order.items():
            before = np.cumsum(load[rows]) - load[rows]
            left = counts[site] * self._terms.capacity[site] - before
            parts[rows, site] *= np.clip(left, 0.0, load[rows]) / load[rows]
        return np.asarray(parts.sum(axis=1))


class ReplicaCountCase:
    """Plans with `count_min` to `count_max` replicas in `pops_min` PoPs, and the cities' prices."""

    def __init__(self, terms: DeploymentTerms, count_min: int, count_max: int) -> None:
        self._terms, self._count_min, self._count_max = terms, count_min, count_max
        self._prices = self._best_prices = np.zeros(0)

    def begin(self, fixed: Floats) -> None:
        """Start again from the best prices so far, with a new cost of a replica at each site."""
        self._fixed = fixed
        if not len(self._best_prices):
            self._best_prices = self._first_prices()
        self._prices, self._theta, self._stalled_rounds = self._best_prices, 1.0, 0
        self._direction = np.zeros(len(self._terms.load))
        self.best = DualValue(-np.inf, np.ones(len(self._terms.load)), np.zeros(len(fixed)))

    def climb(self, goal: float, rounds: int, enough: float = np.inf) -> None:
        """Raise the bound by subgradient steps of the prices, until it reaches `enough`.

        `goal` is the cost of a known plan, for the length of the steps.
        """
        price_max = self._terms.unserved_cost
        for _ in range(rounds):
            found = self.evaluate()
            self._stalled_rounds += 1
            if found.value > self.best.value:
                if found.value > self.best.value + 1e-5 * abs(self.best.value):
                    self._stalled_rounds = 0
                self.best, self._best_prices = found, self._prices
            if self._stalled_rounds >= PATIENCE:
                self._theta, self._stalled_rounds, self._prices = (
                    self._theta * SHRINK,
                    0,
                    self._best_prices,
                )
                self._direction = np.zeros(len(price_max))
                found = self.best
            slope = 1.0 - found.served
            slope[(self._prices >= price_max) & (slope > 0)] = 0.0
            self._direction = 0.6 * self._direction + slope
            steep = float((price_max * slope) @ self._direction)
            if steep <= 0:
                self._direction = slope
                steep = float((price_max * slope) @ slope)
            if steep <= 1e-9 or self._theta < 1e-3 or self.best.value >= enough:
                return
            step = self._theta * max(goal - found.value, 1e-4 * abs(goal)) / steep
            self._prices = np.clip(
                self._prices + step * price_max * self._direction, 0.0, price_max
            )

    def evaluate(self) -> DualValue:
        """Return the bound at the current prices."""
        knapsacks = Knapsacks(self._terms, self._fixed, self._prices, self._count_min)
        counts = self._counts(knapsacks.steps)
        value = float(self._prices.sum()) + _cost_of(knapsacks.steps, counts)
        return DualValue(value, knapsacks.served(counts), counts.astype(float))

    def _counts(self, steps: Floats) -> Ints:
        """Return the cheapest number of replicas at each site."""
        counts = (steps < 0).sum(axis=1)
        wanted = min(max(int(counts.sum()), self._count_min), self._count_max)
        if wanted != counts.sum():
            first = np.argsort(steps, axis=None, kind="stable")[:wanted]
            counts = np.bincount(first // steps.shape[1], minlength=len(steps))
        spread = self._in_more_pops(steps, (steps < 0).sum(axis=1))
        # Each obeys only one of the two limits, so both are bounds.
        return max((counts, spread), key=lambda found: _cost_of(steps, found))

    def _in_more_pops(self, steps: Floats, counts: Ints) -> Ints:
        """Add first replicas until `pops_min` PoPs have one, the cheapest first."""
        pops = self._terms.pops
        present = set(pops[counts > 0].tolist())
        for site in np.argsort(steps[:, 0], kind="stable"):
            if len(present) >= self._terms.pops_min:
                break
            if int(pops[site]) not in present:
                present.add(int(pops[site]))
                counts[site] = 1
        return counts

    def _first_prices(self) -> Floats:
        """Return a start near where most prices end: the cost of the third nearest site, and of
        capacity: its price at the cheapest site, or, if there is too little, the price of going
        without."""
        terms = self._terms
        near = np.sort(terms.serve_cost, axis=1)[:, min(2, terms.serve_cost.shape[1] - 1)]
        capacity_price = float((self._fixed / terms.capacity).min())
        if self._count_max * terms.capacity.max() < terms.load.sum():
            capacity_price = max(
                capacity_price, float(((terms.unserved_cost - near) / terms.load).min())
            )
        return np.asarray(np.clip(near + terms.load * capacity_price, 0.0, terms.unserved_cost))


class DeploymentBound:
    """The bound of one deployment: the least of its cases."""

    def __init__(self, terms: DeploymentTerms) -> None:
        self._terms = terms
        largest = float(terms.capacity.max(initial=0.0))
        border = int(np.ceil(terms.load.sum() / largest - 1e-9)) if largest else 0
        self._cases = []
        if largest and border <= terms.replicas_max:
            self._cases.append(ReplicaCountCase(terms, border, terms.replicas_max))
        if border > max(1, terms.pops_min):
            self._cases.append(ReplicaCountCase(terms, 0, min(border - 1, terms.replicas_max)))
        self.begin()

    def begin(self, shared: Floats | None = None) -> None:
        """Start again with prices of shared resources: rows as `use`, columns all sites."""
        terms, fixed = self._terms, self._terms.fixed_cost
        if shared is not None:
            fixed = fixed + (shared[:, terms.sites] * terms.use).sum(axis=0)
        self._small = _one_pop_or_empty(terms, fixed)
        for case in self._cases:
            case.begin(fixed)

    def climb(self, goal: float, rounds: int) -> None:
        """Raise the bounds of all cases; each only until it is no longer the least."""
        enough = self._small.value
        for case in self._cases:
            case.climb(min(goal, 1.02 * enough), rounds, enough)
            enough = min(enough, case.best.value)

    @property
    def best(self) -> DualValue:
        """The case with the least bound."""
        return min((self._small, *(case.best for case in self._cases)), key=lambda case: case.value)

    def add_use(self, use: Floats) -> None:
        """Add to `use` what the replicas of the best bound take of shared resources."""
        use[:, self._terms.sites] += self._terms.use * self.best.replicas


def _cost_of(steps: Floats, counts: Ints) -> float:
    """Return the cost of `counts` replicas at each site."""
    return float(steps[np.arange(steps.shape[1]) < counts[:, None]].sum())


def _one_pop_or_empty(terms: DeploymentTerms, fixed: Floats) -> DualValue:
    """Return the cheaper of having all replicas in one PoP and having none."""
    best, counts = terms.empty_cost, np.zeros(len(fixed))
    steps = Knapsacks(terms, fixed, terms.unserved_cost).steps
    replicas = np.clip((steps < 0).sum(axis=1), 1, max(1, terms.replicas_max))
    for pop in np.unique(terms.pops):
        at_pop = np.flatnonzero(terms.pops == pop)
        nets = np.array([steps[site, : replicas[site]].sum() for site in at_pop])
        first = at_pop[int(nets.argmin())]
        value = float(terms.unserved_cost.sum() + nets.min())
        if len(at_pop) > 1:
            # How device classes share the load is left open: each unit pays for the cheapest.
            cheapest = float((fixed[at_pop] / terms.capacity[at_pop]).min())
            paid = np.minimum(
                terms.unserved_cost, terms.serve_cost[:, first] + terms.load * cheapest
            )
            value = min(value, float(paid.sum()))
        if value + terms.one_pop_cost < best:
            best, counts = value + terms.one_pop_cost, np.zeros(len(fixed))
            counts[first] = replicas[first]
    return DualValue(best, np.ones(len(terms.load)), counts)
