"""Which seat serves which city's load for one deployment: the cheapest assignment found, in arrays.

A row is an amount of one city's load and the site that serves it (or nobody: UNSERVED). It costs
`unit[city] * ms * amount`, the unit being requests per load, weighted by priority.
Rule: no row would rather be at a site that has room. Each change restores this, so what a further
seat saves is read off the rows, and what a lost one costs is what its rows pay elsewhere.
"""

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

UNSERVED: Final = -1
EPSILON: Final = 1e-9
CHAIN_MAX: Final = 24
"""How many sites one change may pass room on to, from each to the next."""

EFFORT: Final = 60_000
"""How many (row, site) pairs one change may look at again to find exchanges that save."""

PAIRS_MAX: Final = 2_000
"""Beyond so many pairs of city and site no exchange is sought: among that many the greedy
assignment is close to the best, and each look would take milliseconds."""


NO_FLOATS: Final[Floats] = np.zeros(0)


class LoadAssignment:
    """One deployment's demand, assigned. `far` is ms from each asking city to each site."""

    def __init__(
        self, requests: Floats, load: Floats, far: Floats, rooms: Floats, unserved_ms: float
    ) -> None:
        self.load = np.maximum(load, EPSILON)
        self.unit = requests / self.load
        self.far = far
        self.unserved_ms = unserved_ms
        self.room = np.zeros(far.shape[1])
        self.free = np.zeros(far.shape[1])
        self._city: Ints = np.arange(len(load))
        self._site: Ints = np.full(len(load), UNSERVED)
        self._amount: Floats = self.load.copy()
        self._ms: Floats = np.full(len(load), unserved_ms)
        # What one unit of room more at each site is worth by what could follow it in.
        self._worth: Floats = NO_FLOATS
        if rooms.any():
            self._seat_all(rooms)

    def cost(self) -> float:
        """Return the weighted ms x requests/s of everything asked."""
        return float((self.unit[self._city] * self._ms) @ self._amount)

    def unserved(self) -> float:
        """Return the load that finds no room."""
        return float(self._amount[self._site == UNSERVED].sum())

    def used(self) -> Floats:
        """Return the load that each site serves."""
        return self.room - self.free

    def latencies(self) -> tuple[Floats, Floats]:
        """Return ms and requests/s of every row that is served."""
        served = self._site != UNSERVED
        return self._ms[served], (self.unit[self._city] * self._amount)[served]

    @property
    def is_tight(self) -> bool:
        """Say whether room at some full site is worth something: `gain` then guesses too high."""
        return len(self._worth) > 0 and bool(self._worth.any())

    def copy(self) -> "LoadAssignment":
        """Return one that changes apart from this one. Rows are replaced, never written into."""
        twin = object.__new__(LoadAssignment)
        twin.__dict__.update(self.__dict__)
        twin.room, twin.free = self.room.copy(), self.free.copy()
        return twin

    def gain(self, site: int, room: float) -> float:
        """Return what more room at a site would save at once."""
        saved = self.unit[self._city] * (self._ms - self.far[self._city, site])
        if self.is_tight:
            saved += self._worth[self._site]
        better = (saved > EPSILON) & (self._site != site)
        if not better.any():
            return 0.0
        saved, amount = saved[better], self._amount[better]
        room += self.free[site]
        if amount.sum() <= room:
            return float(saved @ amount)
        order = np.argsort(-saved)
        amount = amount[order]
        before = np.cumsum(amount) - amount
        return float(saved[order] @ np.clip(room - before, 0.0, amount))

    def bounds(self, sites: Ints, rooms: Floats) -> Floats:
        """Return for each of `sites` at least what `gain` would say with the room of a seat."""
        # In place: at the size of a planet, fresh memory costs more than the arithmetic.
        saved = self.far[self._city]
        if len(sites) < saved.shape[1]:
            saved = saved[:, sites]
        np.subtract(self._ms[:, None], saved, out=saved)
        saved *= self.unit[self._city][:, None]
        if self.is_tight:
            saved += self._worth[self._site][:, None]
        np.maximum(saved, 0.0, out=saved)
        limited: Floats = np.minimum(self._amount @ saved, saved.max(axis=0) * rooms)
        return limited

    def add(self, site: int, room: float) -> None:
        """Give a site more room; what would rather be there moves, and frees room in its turn."""
        self.room[site] += room
        self.free[site] += room
        self._attract(site)
        self._exchange()

    def remove(self, site: int, room: float) -> None:
        """Take room from a site; what it no longer holds goes where it costs least."""
        self.room[site] = max(0.0, self.room[site] - room)
        self.free[site] -= room
        self._expel(site)
        self._exchange()

    def gain_exactly(self, site: int, room: float) -> float:
        """Return what more room at a site saves once everything has settled anew."""
        if not self.is_tight:
            return self.gain(site, room)
        with_it = self.copy()
        with_it.add(site, room)
        return self.cost() - with_it.cost()

    def loss(self, site: int, room: float) -> float:
        """Return what a seat less at a site would cost."""
        amounts, more, to = self._sent_on(site, room)
        moved = to != UNSERVED
        if (np.bincount(to[moved], amounts[moved], len(self.free)) <= self.free).all():
            return float(more @ amounts)
        without = self.copy()
        without.remove(site, room)
        return without.cost() - self.cost()

    def losses_at_least(self) -> Floats:
        """Return for each site at most what losing it would cost: as if each neighbour had room."""
        open_sites = np.flatnonzero(self.room > 0)
        rows = np.flatnonzero(self._site != UNSERVED)
        if not len(rows):
            return np.zeros(len(self.room))
        ms = self.far[self._city[rows][:, None], open_sites]
        ms = np.where(open_sites[None, :] == self._site[rows][:, None], self.unserved_ms, ms)
        paid = self.unit[self._city[rows]] * self._amount[rows]
        more = paid * np.maximum(0.0, ms.min(axis=1) - self._ms[rows])
        return np.bincount(self._site[rows], more, len(self.room)).astype(np.float64)

    def loss_at_least(self, site: int, room: float) -> float:
        """Return at most what a seat less at a site would cost: as if every neighbour had room."""
        amounts, more, _ = self._sent_on(site, room)
        return float(more @ amounts)

    def _sent_on(self, site: int, room: float) -> tuple[Floats, Floats, Ints]:
        """Return what a seat less sends on, what each pays more, and to which nearest site."""
        over = self.used()[site] - (self.room[site] - room)
        if over <= EPSILON:
            return NO_FLOATS, NO_FLOATS, np.zeros(0, dtype=np.int64)
        rows = np.flatnonzero(self._site == site)
        others = np.flatnonzero(self.room > 0)
        to, ms = self._nearest(rows, others[others != site])
        more = self.unit[self._city[rows]] * np.maximum(0.0, ms - self._ms[rows])
        order = np.argsort(more, kind="stable")
        amount = self._amount[rows][order]
        before = np.cumsum(amount) - amount
        amounts = np.clip(over - before, 0.0, amount)
        sent = amounts > 0
        return amounts[sent], more[order][sent], to[order][sent]

    def _nearest(self, rows: Ints, sites: Ints) -> tuple[Ints, Floats]:
        """Return the nearest of some sites for each row, and how far; UNSERVED if that is less."""
        if not len(sites):
            return np.full(len(rows), UNSERVED), np.full(len(rows), self.unserved_ms)
        near = self.far[self._city[rows][:, None], sites]
        best = near.argmin(axis=1)
        found = near[np.arange(len(rows)), best]
        to = np.where(found < self.unserved_ms, sites[best], UNSERVED)
        return to, np.minimum(found, self.unserved_ms)

    def _seat_all(self, rooms: Floats) -> None:
        """Send every city to its nearest site, then from those that are too full to others."""
        self.room, self.free = rooms.copy(), rooms.copy()
        open_sites = np.flatnonzero(rooms > 0)
        near = self.far[:, open_sites]
        nearest = near.argmin(axis=1)
        self._site = open_sites[nearest]
        self._ms = near[np.arange(len(near)), nearest]
        np.subtract.at(self.free, self._site, self._amount)
        # What is sent on goes to the nearest that has room, and room only shrinks meanwhile: in the
        # end nobody would rather be where room is left.
        for site in np.flatnonzero(self.free < -EPSILON):
            self._expel(int(site))
        self._exchange()

    def _exchange(self) -> None:
        """Move rows round in rings and chains of sites while that saves and effort is left."""
        self._worth = NO_FLOATS
        full = np.flatnonzero((self.room > 0) & (self.free <= EPSILON))
        # What rounding leaves of a room that was taken away looks full, where nobody asks too.
        if not len(full) or not len(self._city) or self.far.size > PAIRS_MAX:
            return
        sites = np.append(np.flatnonzero(self.room > 0), UNSERVED)
        self._worth = np.zeros(len(self.room) + 1)
        for _ in range(max(1, EFFORT // (len(self._city) * len(sites)))):
            worth, chain = self._best_chain(sites)
            if len(chain) < 2:
                self._worth[sites] = worth
                return
            rows = np.array([self._row_for(a, b) for a, b in pairwise(chain)])
            amount = self._amount[rows].min()
            if chain[0] != chain[-1] and chain[-1] != UNSERVED:
                amount = min(amount, self.free[chain[-1]])
            self._move(rows, np.full(len(rows), amount), np.array(chain[1:]))

    def _best_chain(self, sites: Ints) -> tuple[Floats, list[int]]:
        """Return the worth of room at each site, and a chain or ring of sites that saves."""
        count = len(sites)
        order = np.argsort(self._site, kind="stable")
        at, starts = np.unique(self._site[order], return_index=True)
        far = np.full((len(order), count), self.unserved_ms)
        far[:, :-1] = self.far[self._city[order][:, None], sites[:-1]]
        saved = self.unit[self._city[order]][:, None] * (self._ms[order][:, None] - far)
        # steps[a, b]: the most that a unit of load saves by going from site a to site b.
        steps = np.full((count, count), -np.inf)
        most = np.maximum.reduceat(saved, starts, axis=0)
        # A site that has lost its room may keep a crumb below EPSILON: it takes no part.
        known = np.isin(at, sites)
        steps[np.searchsorted(sites[:-1], at[known]) - (at[known] == UNSERVED)] = most[known]
        np.fill_diagonal(steps, -np.inf)
        has_room = np.append(self.free[sites[:-1]] > EPSILON, True)
        worth, before = np.zeros(count), np.full(count, -1)
        for _ in range(count):
            through = worth[:, None] + steps
            best = through.argmax(axis=0)
            found = through[best, np.arange(count)]
            better = found > worth + 1e-7
            if not better.any():
                return worth, []
            worth = np.where(better, found, worth)
            before = np.where(better, best, before)
            ends = np.flatnonzero(has_room & (worth > 1e-7))
            if len(ends):
                end = int(ends[worth[ends].argmax()])
                return worth, [int(sites[i]) for i in _walk(before, end)]
        return worth, [int(sites[i]) for i in _walk(before, int(worth.argmax()))]

    def _row_for(self, left: int, to: int) -> int:
        rows = np.flatnonzero(self._site == left)
        ms = self.far[self._city[rows], to] if to != UNSERVED else self.unserved_ms
        return int(rows[(self.unit[self._city[rows]] * (self._ms[rows] - ms)).argmax()])

    def _attract(self, site: int) -> None:
        waiting = [site]
        for _ in range(CHAIN_MAX):
            if not waiting:
                return
            for freed in self._pull(waiting.pop(0)):
                if freed not in waiting:
                    waiting.append(freed)

    def _pull(self, site: int) -> list[int]:
        """Move what gains most by `site` into its room; return sites that were full till now."""
        if self.free[site] <= EPSILON:
            return []
        saved = self.unit[self._city] * (self._ms - self.far[self._city, site])
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
        """Move what is over a site's room to where it costs least, until nothing is over."""
        while self.free[site] < -EPSILON:
            rows = np.flatnonzero(self._site == site)
            if not len(rows):
                self.free[site] = 0.0
                return
            to, ms = self._nearest(rows, np.flatnonzero(self.free > EPSILON))
            more = self.unit[self._city[rows]] * (ms - self._ms[rows])
            self._expel_cheapest(site, rows, to, np.argsort(more, kind="stable"))

    def _expel_cheapest(self, site: int, rows: Ints, to: Ints, order: Ints) -> None:
        """Move rows in order while their targets have room; stop at the first that has not."""
        over = -float(self.free[site])
        rows, to = rows[order], to[order]
        room: dict[int, float] = {}
        amounts: list[float] = []
        # Plain numbers: one by one they are read in a fraction of the time that an array's are.
        for held, target in zip(self._amount[rows].tolist(), to.tolist(), strict=True):
            amount = min(over, held)
            if target != UNSERVED:
                left = room.get(target, float(self.free[target]))
                amount = min(amount, left)
                room[target] = left - amount
            amounts.append(amount)
            over -= amount
            if over <= EPSILON or room.get(target, np.inf) <= EPSILON:
                break
        moved = len(amounts)
        self._move(rows[:moved], np.array(amounts), to[:moved])

    def _move(self, rows: Ints, amounts: Floats, to: Ints) -> None:
        """Send `amounts` of `rows` to sites; what is left of a row stays as a row."""
        city, site, amount, ms = (
            a.copy() for a in (self._city, self._site, self._amount, self._ms)
        )
        rest = amount[rows] - amounts
        stays = rest > EPSILON
        held = rows[stays]
        old = site[rows]
        np.add.at(self.free, old[old != UNSERVED], amounts[old != UNSERVED])
        np.subtract.at(self.free, to[to != UNSERVED], amounts[to != UNSERVED])
        parts = (city[held], site[held], rest[stays], ms[held])
        site[rows], amount[rows] = to, amounts
        ms[rows] = np.where(to == UNSERVED, self.unserved_ms, self.far[city[rows], to])
        self._city = np.concatenate((city, parts[0]))
        self._site = np.concatenate((site, parts[1]))
        self._amount = np.concatenate((amount, parts[2]))
        self._ms = np.concatenate((ms, parts[3]))
        if len(self._city) > 2 * len(self.load) + len(self.room):
            self._merge()

    def _merge(self) -> None:
        """Make one row of the rows of one city at one site."""
        key = self._city * (len(self.room) + 1) + self._site + 1
        _, first, of = np.unique(key, return_index=True, return_inverse=True)
        self._amount = np.bincount(of, weights=self._amount).astype(np.float64)
        self._city, self._site, self._ms = self._city[first], self._site[first], self._ms[first]


def _walk(before: Ints, end: int) -> list[int]:
    """Return the chain that leads to `end`, or the ring that it runs into."""
    chain = [end]
    while before[chain[-1]] >= 0:
        step = int(before[chain[-1]])
        if step in chain:
            ring = chain[chain.index(step) :]
            return [step, *reversed(ring)]
        chain.append(step)
    return chain[::-1]
