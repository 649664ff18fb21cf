"""Chooses one layout of each deployment so that all fit and the sum of their costs is least.

Branch and bound: the deployments with the largest replicas choose first. Prices of the sites'
memory and devices give a lower bound of what the others will cost (Lagrangian relaxation with a
subgradient): at any prices each deployment chooses by itself, and the sum of the costs with prices,
less the price of all that is free, is a lower bound. The price of a site rises if the layouts take
more of it than is free. Each choice is followed by a search for new prices, because it takes memory
and devices from the others.

At each of these choices, the rest is chosen greedily at the prices, and all layouts are improved,
one or two deployments at a time. Most of the cheapest combinations are found this way.

The bound is as good as the search for layouts (`layouts.py`), which is not exact. So the result is
not proved to be the cheapest.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Final, NamedTuple

import numpy as np

from scheduler.decide.arrays import Floats
from scheduler.decide.placement.search.draft import IMPROVEMENT_MIN
from scheduler.decide.placement.search.layouts import ROUNDING, DeploymentLayouts, Layout
from scheduler.decide.placement.search.packing import SitePacking

SMALL_MAX: Final = 300
"""How many layouts of each deployment are evaluated at first, those with fewest replicas."""

PRICED_MAX: Final = 3_000
EVALUATIONS_MAX: Final = 6_000
"""Once this many layouts are evaluated, prices only choose among those that are known, and
combinations are no longer improved."""

CHOICES_MAX: Final = 150
"""How many partial choices get prices of their own."""

PRICES_MAX: Final = 20
"""How many prices are tried for each of them."""

STEPS_KEPT_MAX: Final = 3
"""After this many prices without a better bound, the steps are halved."""


class Combination(NamedTuple):
    """A layout of each deployment, and the sum of their costs."""

    cost: float
    layouts: tuple[Layout, ...]


class _Bound(NamedTuple):
    """A lower bound of what some deployments cost together, and the prices that give it."""

    cost: float
    prices: Floats


class LayoutChoice:
    """Chooses among the layouts of some deployments, in their order, for less than `below`.

    It ends after about `attempts_max` attempts of the search.
    """

    def __init__(
        self,
        layouts: Sequence[DeploymentLayouts],
        packings: Sequence[SitePacking],
        below: float,
        attempts_max: int,
    ) -> None:
        self._attempts_max = attempts_max
        self._layouts = layouts
        self._packings = packings
        self._below = below - IMPROVEMENT_MIN
        self._found: list[Combination] = []
        self._chosen: list[Layout] = [(0,) * len(packings)] * len(layouts)
        self._choices = 0
        self._improved: set[tuple[Layout, ...]] = set()

    @property
    def attempts(self) -> int:
        """The work that was done, in attempts of the search: about a millisecond each."""
        return self._evaluations // 4 + 5 * self._choices

    @property
    def _is_over(self) -> bool:
        return self.attempts >= self._attempts_max

    @property
    def _evaluations(self) -> int:
        return sum(layouts.evaluations for layouts in self._layouts)

    def run(self) -> list[Combination]:
        """Return the combinations found, each cheaper than those found before it, the cheapest
        first."""
        for layouts in self._layouts:
            layouts.evaluate_small(SMALL_MAX)
        resources = 2 * len(self._packings)
        self._descend(0, np.ones(resources), 0.0, np.zeros(resources))
        return self._found[::-1]

    def _descend(self, number: int, free: Floats, cost: float, prices: Floats) -> None:
        """Choose the layouts of deployment `number` and those after it, while those before it cost
        `cost` and leave a share `free` of each site's memory and of its devices."""
        if self._choices >= CHOICES_MAX or self._is_over:
            return
        self._choices += 1
        bound = self._lower_bound(number, free, self._below - cost, prices)
        if cost + bound.cost >= self._below:
            return
        prices = bound.prices
        self._dive(number, free, prices)
        if number == len(self._layouts) - 1:
            return
        later = range(number + 1, len(self._layouts))
        others = cost - float(prices @ free)
        others += sum(self._cheapest(other, free, prices).cost for other in later)
        known = self._layouts[number].known()
        for row, reduced in self._fitting(number, free, prices):
            if others + reduced >= self._below:
                return
            if self._choose(number, tuple(known.counts[row].tolist())):
                left = free - known.used[row]
                self._descend(number + 1, left, cost + float(known.costs[row]), prices)
                self._choose(number, (0,) * len(self._packings))

    def _lower_bound(self, number: int, free: Floats, upper: float, prices: Floats) -> _Bound:
        """Return the largest bound found of the costs of deployment `number` and those after it."""
        best, step, worse = _Bound(-np.inf, prices), 1.0, 0
        for _ in range(PRICES_MAX):
            value, over = -float(prices @ free), -free
            for other in range(number, len(self._layouts)):
                cheapest = self._cheapest(other, free, prices, improve=True)
                value += cheapest.cost
                over = over + self._layouts[other].used(cheapest.layouts[0])
            worse += 1
            if value > best.cost:
                best, worse = _Bound(value, prices), 0
            if best.cost >= upper:
                break
            if worse >= STEPS_KEPT_MAX:
                step, worse, prices = step / 2, 0, best.prices
            over[(prices <= 0) & (over < 0)] = 0.0
            norm = float(over @ over)
            if norm < ROUNDING:
                break
            prices = np.maximum(0.0, prices + step * (upper - value) / norm * over)
        return best

    def _cheapest(
        self, number: int, free: Floats, prices: Floats, improve: bool = False
    ) -> Combination:
        """Return the cheapest layout of one deployment at some prices that fits by itself."""
        layouts = self._layouts[number]
        known = layouts.known()
        reduced = known.costs + known.used @ prices
        reduced[(known.used > free + ROUNDING).any(axis=1)] = np.inf
        row = int(reduced.argmin())
        layout, cost = tuple(known.counts[row].tolist()), float(reduced[row])
        if improve and self._evaluations < PRICED_MAX and not self._is_over:
            most = layouts.most_in(free)
            layout = layouts.improve(layout, layouts.replica_prices(prices), most)
            cost = layouts.cost(layout) + float(layouts.used(layout) @ prices)
        return Combination(cost, (layout,))

    def _fitting(self, number: int, free: Floats, prices: Floats) -> list[tuple[int, float]]:
        """Return the rows of the known layouts that fit, and their costs with prices, the cheapest
        first."""
        known = self._layouts[number].known()
        fitting = np.flatnonzero((known.used <= free + ROUNDING).all(axis=1))
        reduced = known.costs[fitting] + known.used[fitting] @ prices
        order = np.argsort(reduced, kind="stable")
        return list(zip(fitting[order].tolist(), reduced[order].tolist(), strict=True))

    def _dive(self, number: int, free: Floats, prices: Floats) -> None:
        """Let each deployment from `number` on take its cheapest layout at some prices that still
        fits, then improve all. Note the result if it is the cheapest so far."""
        before = list(self._chosen)
        for other in range(number, len(self._layouts)):
            free = self._take_cheapest(other, free, prices)
        self._improve_all()
        cost = self._cost()
        if cost < self._below:
            self._below = cost - IMPROVEMENT_MIN
            self._found.append(Combination(cost, tuple(self._chosen)))
        self._chosen = before

    def _improve_all(self) -> None:
        """Improve the chosen layouts until no change of one or two lowers the cost."""
        if tuple(self._chosen) in self._improved:
            return
        self._improved.add(tuple(self._chosen))
        while self._evaluations < EVALUATIONS_MAX and not self._is_over:
            if not (self._improve_each() or self._improve_pairs()):
                break
        self._improved.add(tuple(self._chosen))

    def _take_cheapest(self, number: int, free: Floats, prices: Floats) -> Floats:
        """Choose a deployment's cheapest layout that fits; return what it leaves free."""
        known = self._layouts[number].known()
        for row, _ in self._fitting(number, free, prices):
            if self._choose(number, tuple(known.counts[row].tolist())):
                return np.asarray(free - known.used[row], np.float64)
        return free

    def _cost(self) -> float:
        return sum(
            each.cost(layout) for each, layout in zip(self._layouts, self._chosen, strict=True)
        )

    def _free_shares(self) -> Floats:
        """Return the share of each resource that all chosen layouts leave free."""
        used = [each.used(self._chosen[number]) for number, each in enumerate(self._layouts)]
        return np.asarray(1.0 - np.sum(used, axis=0), np.float64)

    def _improve_pairs(self) -> bool:
        """Let one deployment improve as if another had no replicas, and that one choose again in
        what is left; return whether that lowers the cost for any two."""
        no_prices, none = np.zeros(2 * len(self._packings)), (0,) * len(self._packings)
        for first, second in permutations(range(len(self._layouts)), 2):
            before, cost = list(self._chosen), self._cost()
            self._choose(second, none)
            if self._improve(first):
                self._take_cheapest(second, self._free_shares(), no_prices)
                self._improve(second)
                if self._cost() < cost - IMPROVEMENT_MIN:
                    return True
            self._chosen = before
        return False

    def _improve_each(self) -> bool:
        """Improve each deployment's layout in what the others leave free; return whether one
        changed."""
        changed = [self._improve(number) for number in range(len(self._layouts))]
        return any(changed)

    def _improve(self, number: int) -> bool:
        layouts, chosen = self._layouts[number], self._chosen[number]
        free = self._free_shares() + layouts.used(chosen)
        no_prices = np.zeros(len(self._packings))
        layout = layouts.improve(chosen, no_prices, layouts.most_in(free))
        return layout != chosen and self._choose(number, layout)

    def _choose(self, number: int, layout: Layout) -> bool:
        """Choose a deployment's layout, if it fits on devices beside those that are chosen; return
        whether it does."""
        before = self._chosen[number]
        self._chosen[number] = layout
        for site, packing in enumerate(self._packings):
            counts = tuple(each[site] for each in self._chosen)
            if layout[site] and packing.pack(counts) is None:
                self._chosen[number] = before
                return False
        return True
