"""Assigns each city's load to the replicas of one deployment, approximately and cheaply, in arrays.

A row is an amount of one city's load and the site that serves it, or UNSERVED. It costs
`unit[city] * ms * amount`; the unit is requests per load, weighted by priority.

Invariant: no row would be cheaper at a site that has capacity left. Every change restores it, so
the gain of another replica can be read off the rows, and the loss of one is what its rows pay
elsewhere.
"""

from itertools import pairwise
from math import inf
from typing import Final, NamedTuple

import numpy as np

from scheduler.decide.arrays import NO_FLOATS, Floats, Ints

UNSERVED: Final = -1
EPSILON: Final = 1e-9
CHAIN_MAX: Final = 24
"""How many sites one change may pass freed capacity on to, one after another."""

EFFORT: Final = 60_000
"""How many (row, site) pairs one change may examine to find exchanges of rows that lower the
cost."""

PAIRS_MAX: Final = 2_000
"""With more (city, site) pairs than this no exchange is sought: there the greedy assignment is
close to optimal, and each search would take milliseconds."""


class _Displaced(NamedTuple):
    """Rows that lose their site: amounts, the extra cost of a unit of each, and where each goes."""

    amounts: Floats
    extra_cost: Floats
    sites: Ints


class LoadAssignment:
    """One deployment's load, assigned to sites.

    `latency_ms[row, site]` is the round trip, `rows` the row of each city with load (by default its
    own number), `capacity` what the replicas of each site can carry and `free` what is left of it.
    """

    def __init__(
        self,
        requests: Floats,
        load: Floats,
        latency_ms: Floats,
        capacity: Floats,
        unserved_ms: float,
        rows: Ints | None = None,
    ) -> None:
        self.load = np.maximum(load, EPSILON)
        self.unit = requests / self.load
        self._latency_ms = latency_ms
        self._rows: Ints = np.arange(len(load)) if rows is None else rows
        self.unserved_ms = unserved_ms
        self.capacity = np.zeros(latency_ms.shape[1])
        self.free = np.zeros(latency_ms.shape[1])
        self._city: Ints = np.arange(len(load))
        self._site: Ints = np.full(len(load), UNSERVED)
        self._amount: Floats = self.load.copy()
        self._ms: Floats = np.full(len(load), unserved_ms)
        # The worth of one more unit of capacity at each site to rows that could move there.
        self._worth: Floats = NO_FLOATS
        if capacity.any():
            self._assign_all(capacity)

    def cost(self) -> float:
        """Return the weighted ms x requests/s of all load."""
        return float((self.unit[self._city] * self._ms) @ self._amount)

    def unserved(self) -> float:
        """Return the load that no site has capacity for."""
        return float(self._amount[self._site == UNSERVED].sum())

    def used(self) -> Floats:
        """Return the load that each site serves."""
        return self.capacity - self.free

    def shares_at(self, sites: Ints) -> Floats:
        """Return the share of each city's load that some sites serve."""
        rows = np.isin(self._site, sites)
        amounts = np.bincount(self._city[rows], self._amount[rows], len(self.load))
        return np.asarray(amounts / self.load, np.float64)

    def latencies(self) -> tuple[Floats, Floats]:
        """Return ms and requests/s of every row that is served."""
        served = self._site != UNSERVED
        return self._ms[served], (self.unit[self._city] * self._amount)[served]

    @property
    def is_tight(self) -> bool:
        """Say whether capacity at some full site is worth something: `_direct_gain` is then too
        high."""
        return len(self._worth) > 0 and bool(self._worth.any())

    def copy(self) -> "LoadAssignment":
        """Return an independent copy. Rows are shared: they are replaced, never written into."""
        twin = object.__new__(LoadAssignment)
        twin.__dict__.update(self.__dict__)
        twin.capacity, twin.free = self.capacity.copy(), self.free.copy()
        return twin

    def gain(self, site: int, capacity: float) -> float:
        """Return what more capacity at a site saves once the load is assigned again."""
        if not self.is_tight:
            return self._direct_gain(site, capacity)
        after = self.copy()
        after.add_capacity(site, capacity)
        return self.cost() - after.cost()

    def gain_limit(self, nearest_ms: Floats) -> float:
        """Return an upper bound of `gain` at any site: as if each city's load were served in
        `nearest_ms[city]`; inf where that is no bound."""
        if self.is_tight:
            return inf
        city = self._city
        saved = np.maximum(self._ms - nearest_ms[city], 0.0)
        return float((self.unit[city] * self._amount) @ saved)

    def gain_upper_bounds(self, sites: Ints, capacities: Floats, least: float = 0.0) -> Floats:
        """Return for each of `sites` an upper bound of `gain` with one more replica's capacity.

        Where the bound is `least` or less, `least` is returned instead.
        """
        # In place: with tens of thousands of pairs, new arrays cost more than the arithmetic.
        saved = self._latency_ms[self._rows[self._city]]
        if len(sites) < saved.shape[1]:
            saved = saved[:, sites]
        unit = self.unit[self._city]
        np.subtract(self._ms[:, None], saved, out=saved)
        if self.is_tight:
            saved *= unit[:, None]
            saved += self._worth[self._site][:, None]
            unit = np.ones(len(unit))
        np.maximum(saved, 0.0, out=saved)
        # The bound assumes one replica with capacity for all rows; few sites pay even then.
        bounds: Floats = np.maximum((self._amount * unit) @ saved, least)
        pays = np.flatnonzero(bounds > least)
        if len(pays):
            most = saved[:, pays]
            most *= unit[:, None]
            limited = np.minimum(bounds[pays], most.max(axis=0) * capacities[pays])
            bounds[pays] = np.maximum(limited, least)
        return bounds

    def add_capacity(self, site: int, capacity: float) -> None:
        """Add capacity to a site; rows that are cheaper there move, and free capacity in turn."""
        self.capacity[site] += capacity
        self.free[site] += capacity
        self._attract(site)
        self._exchange()

    def remove_capacity(self, site: int, capacity: float) -> None:
        """Remove capacity from a site; the rows it no longer holds go where they cost least."""
        self.capacity[site] = max(0.0, self.capacity[site] - capacity)
        self.free[site] -= capacity
        self._expel(site)
        self._exchange()

    def loss(self, site: int, capacity: float) -> float:
        """Return what the removal of capacity from a site would cost."""
        displaced = self._displaced(site, capacity)
        moved = displaced.sites != UNSERVED
        arriving = np.bincount(displaced.sites[moved], displaced.amounts[moved], len(self.free))
        if (arriving <= self.free).all():
            return float(displaced.extra_cost @ displaced.amounts)
        after = self.copy()
        after.remove_capacity(site, capacity)
        return after.cost() - self.cost()

    def loss_lower_bound(self, site: int, capacity: float) -> float:
        """Return a lower bound of `loss`: as if every nearest site had capacity left."""
        displaced = self._displaced(site, capacity)
        return float(displaced.extra_cost @ displaced.amounts)

    def loss_lower_bounds(self) -> Floats:
        """Return for each site a lower bound of the cost of losing all of its capacity."""
        open_sites = np.flatnonzero(self.capacity > 0)
        rows = np.flatnonzero(self._site != UNSERVED)
        if not len(rows):
            return np.zeros(len(self.capacity))
        ms = self._latency_ms[self._rows[self._city[rows]][:, None], open_sites]
        ms = np.where(open_sites[None, :] == self._site[rows][:, None], self.unserved_ms, ms)
        paid = self.unit[self._city[rows]] * self._amount[rows]
        extra = paid * np.maximum(0.0, ms.min(axis=1) - self._ms[rows])
        return np.bincount(self._site[rows], extra, len(self.capacity)).astype(np.float64)

    def _direct_gain(self, site: int, capacity: float) -> float:
        """Return what more capacity at a site saves by rows that move there, before others follow
        into what they free."""
        saved = self.unit[self._city] * (self._ms - self._latency_ms[self._rows[self._city], site])
        if self.is_tight:
            saved += self._worth[self._site]
        better = (saved > EPSILON) & (self._site != site)
        if not better.any():
            return 0.0
        saved, amount = saved[better], self._amount[better]
        capacity += self.free[site]
        if amount.sum() <= capacity:
            return float(saved @ amount)
        order = np.argsort(-saved)
        amount = amount[order]
        before = np.cumsum(amount) - amount
        return float(saved[order] @ np.clip(capacity - before, 0.0, amount))

    def _displaced(self, site: int, capacity: float) -> _Displaced:
        """Return the rows that a site without `capacity` could not hold: those that lose least,
        each with its nearest other site."""
        excess = self.used()[site] - (self.capacity[site] - capacity)
        if excess <= EPSILON:
            return _Displaced(NO_FLOATS, NO_FLOATS, np.zeros(0, dtype=np.int64))
        rows = np.flatnonzero(self._site == site)
        open_sites = np.flatnonzero(self.capacity > 0)
        nearest, ms = self._nearest(rows, open_sites[open_sites != site])
        extra = self.unit[self._city[rows]] * np.maximum(0.0, ms - self._ms[rows])
        order = np.argsort(extra, kind="stable")
        amount = self._amount[rows][order]
        before = np.cumsum(amount) - amount
        amounts = np.clip(excess - before, 0.0, amount)
        moved = amounts > 0
        return _Displaced(amounts[moved], extra[order][moved], nearest[order][moved])

    def _nearest(self, rows: Ints, sites: Ints) -> tuple[Ints, Floats]:
        """Return each row's nearest of `sites` and its ms; UNSERVED where all are farther than
        `unserved_ms`."""
        if not len(sites):
            return np.full(len(rows), UNSERVED), np.full(len(rows), self.unserved_ms)
        ms = self._latency_ms[self._rows[self._city[rows]][:, None], sites]
        best = ms.argmin(axis=1)
        best_ms = ms[np.arange(len(rows)), best]
        nearest = np.where(best_ms < self.unserved_ms, sites[best], UNSERVED)
        return nearest, np.minimum(best_ms, self.unserved_ms)

    def _assign_all(self, capacity: Floats) -> None:
        """Assign every city to its nearest site, then move load away from overfull sites."""
        self.capacity, self.free = capacity.copy(), capacity.copy()
        open_sites = np.flatnonzero(capacity > 0)
        ms = self._latency_ms[self._rows[:, None], open_sites]
        nearest = ms.argmin(axis=1)
        self._site = open_sites[nearest]
        self._ms = ms[np.arange(len(ms)), nearest]
        np.subtract.at(self.free, self._site, self._amount)
        # Rows go to the nearest site with capacity, and capacity only shrinks meanwhile: in the end
        # no row would be cheaper where capacity is left.
        for site in np.flatnonzero(self.free < -EPSILON):
            self._expel(int(site))
        self._exchange()

    def _exchange(self) -> None:
        """Move rows along chains and rings of sites while that saves and effort is left."""
        self._worth = NO_FLOATS
        full = np.flatnonzero((self.capacity > 0) & (self.free <= EPSILON))
        # Capacity that was removed may leave a rounding error that looks full, without any demand.
        if not len(full) or not len(self._city) or len(self.load) * len(self.capacity) > PAIRS_MAX:
            return
        sites = np.append(np.flatnonzero(self.capacity > 0), UNSERVED)
        self._worth = np.zeros(len(self.capacity) + 1)
        for _ in range(max(1, EFFORT // (len(self._city) * len(sites)))):
            worth, chain = self._best_chain(sites)
            if len(chain) < 2:
                self._worth[sites] = worth
                return
            rows = np.array([self._best_row(a, b) for a, b in pairwise(chain)])
            amount = self._amount[rows].min()
            if chain[0] != chain[-1] and chain[-1] != UNSERVED:
                amount = min(amount, self.free[chain[-1]])
            self._move(rows, np.full(len(rows), amount), np.array(chain[1:]))

    def _best_chain(self, sites: Ints) -> tuple[Floats, list[int]]:
        """Return what capacity is worth at each site, and a chain or ring of sites that saves.

        Bellman-Ford for the most saving walk; [] where none saves.
        """
        count = len(sites)
        order = np.argsort(self._site, kind="stable")
        sites_used, starts = np.unique(self._site[order], return_index=True)
        ms = np.full((len(order), count), self.unserved_ms)
        ms[:, :-1] = self._latency_ms[self._rows[self._city[order]][:, None], sites[:-1]]
        saved = self.unit[self._city[order]][:, None] * (self._ms[order][:, None] - ms)
        # steps[a, b]: the most that one unit of load saves by moving from site a to site b.
        steps = np.full((count, count), -np.inf)
        best_saved = np.maximum.reduceat(saved, starts, axis=0)
        # A site without capacity may keep an amount below EPSILON: it takes no part.
        known = np.isin(sites_used, sites)
        numbers = np.searchsorted(sites[:-1], sites_used[known]) - (sites_used[known] == UNSERVED)
        steps[numbers] = best_saved[known]
        np.fill_diagonal(steps, -np.inf)
        has_free = np.append(self.free[sites[:-1]] > EPSILON, True)
        worth, before = np.zeros(count), np.full(count, -1)
        for _ in range(count):
            through = worth[:, None] + steps
            best = through.argmax(axis=0)
            best_worth = through[best, np.arange(count)]
            better = best_worth > worth + 1e-7
            if not better.any():
                return worth, []
            worth = np.where(better, best_worth, worth)
            before = np.where(better, best, before)
            ends = np.flatnonzero(has_free & (worth > 1e-7))
            if len(ends):
                end = int(ends[worth[ends].argmax()])
                return worth, [int(sites[i]) for i in _walk(before, end)]
        return worth, [int(sites[i]) for i in _walk(before, int(worth.argmax()))]

    def _best_row(self, from_site: int, to_site: int) -> int:
        """Return the row at one site that saves most by moving to another."""
        rows = np.flatnonzero(self._site == from_site)
        city = self._city[rows]
        is_served = to_site != UNSERVED
        ms = self._latency_ms[self._rows[city], to_site] if is_served else self.unserved_ms
        return int(rows[(self.unit[city] * (self._ms[rows] - ms)).argmax()])

    def _attract(self, site: int) -> None:
        """Fill a site's free capacity, then what that frees at other sites, up to CHAIN_MAX."""
        waiting = [site]
        for _ in range(CHAIN_MAX):
            if not waiting:
                return
            for freed in self._pull(waiting.pop(0)):
                if freed not in waiting:
                    waiting.append(freed)

    def _pull(self, site: int) -> list[int]:
        """Move the rows that gain most into a site's free capacity; return sites that were full."""
        if self.free[site] <= EPSILON:
            return []
        saved = self.unit[self._city] * (self._ms - self._latency_ms[self._rows[self._city], site])
        rows = np.flatnonzero((saved > EPSILON) & (self._site != site))
        if not len(rows):
            return []
        rows = rows[np.argsort(-saved[rows], kind="stable")]
        amount = self._amount[rows]
        taken = np.clip(self.free[site] - (np.cumsum(amount) - amount), 0.0, amount)
        rows, taken = rows[taken > 0], taken[taken > 0]
        left = np.unique(self._site[rows])
        full = [int(s) for s in left if s != UNSERVED and self.free[s] <= EPSILON]
        self._move(rows, taken, np.full(len(rows), site))
        return full

    def _expel(self, site: int) -> None:
        """Move what is over a site's capacity to where it costs least."""
        while self.free[site] < -EPSILON:
            rows = np.flatnonzero(self._site == site)
            if not len(rows):
                self.free[site] = 0.0
                return
            targets, ms = self._nearest(rows, np.flatnonzero(self.free > EPSILON))
            extra = self.unit[self._city[rows]] * (ms - self._ms[rows])
            self._expel_cheapest(site, rows, targets, np.argsort(extra, kind="stable"))

    def _expel_cheapest(self, site: int, rows: Ints, targets: Ints, order: Ints) -> None:
        """Move rows in order while their targets have capacity; stop at the first that is full."""
        excess = -float(self.free[site])
        rows, targets = rows[order], targets[order]
        free: dict[int, float] = {}
        amounts: list[float] = []
        # Plain lists: reading elements one by one is several times faster than from an array.
        for row_amount, target in zip(self._amount[rows].tolist(), targets.tolist(), strict=True):
            amount = min(excess, row_amount)
            if target != UNSERVED:
                left = free.get(target, float(self.free[target]))
                amount = min(amount, left)
                free[target] = left - amount
            amounts.append(amount)
            excess -= amount
            if excess <= EPSILON or free.get(target, np.inf) <= EPSILON:
                break
        moved = len(amounts)
        self._move(rows[:moved], np.array(amounts), targets[:moved])

    def _move(self, rows: Ints, amounts: Floats, targets: Ints) -> None:
        """Move `amounts` of `rows` to `targets`; what is left of a row stays as a row."""
        city, site, amount, ms = (
            a.copy() for a in (self._city, self._site, self._amount, self._ms)
        )
        rest = amount[rows] - amounts
        stays = rest > EPSILON
        staying = rows[stays]
        old = site[rows]
        np.add.at(self.free, old[old != UNSERVED], amounts[old != UNSERVED])
        np.subtract.at(self.free, targets[targets != UNSERVED], amounts[targets != UNSERVED])
        parts = (city[staying], site[staying], rest[stays], ms[staying])
        site[rows], amount[rows] = targets, amounts
        ms[rows] = np.where(
            targets == UNSERVED,
            self.unserved_ms,
            self._latency_ms[self._rows[city[rows]], targets],
        )
        self._city = np.concatenate((city, parts[0]))
        self._site = np.concatenate((site, parts[1]))
        self._amount = np.concatenate((amount, parts[2]))
        self._ms = np.concatenate((ms, parts[3]))
        if len(self._city) > 2 * len(self.load) + len(self.capacity):
            self._merge()

    def _merge(self) -> None:
        """Merge the rows of one city at one site."""
        key = self._city * (len(self.capacity) + 1) + self._site + 1
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        self._amount = np.bincount(group, weights=self._amount).astype(np.float64)
        self._city, self._site, self._ms = self._city[first], self._site[first], self._ms[first]


def _walk(before: Ints, end: int) -> list[int]:
    """Return the chain of predecessors that leads to `end`, or the ring that it runs into."""
    chain = [end]
    while before[chain[-1]] >= 0:
        step = int(before[chain[-1]])
        if step in chain:
            ring = chain[chain.index(step) :]
            return [step, *reversed(ring)]
        chain.append(step)
    return chain[::-1]
