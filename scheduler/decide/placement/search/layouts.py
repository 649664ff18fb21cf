"""Layouts of one deployment: how many replicas this plan would start at each site, and the cost.

Deployments affect each other only by the memory and devices that they compete for: the cost of a
layout is that of its deployment alone. So at given prices of memory and devices, each deployment
can look for its best layout by itself. All layouts whose cost became known on the way are kept.

Load queues of nodes are left out: each start costs as much as the first on its site.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from isochrone.wire.ids import PopId
from scheduler.decide.arrays import Floats, Ints
from scheduler.decide.placement.search.deployment_state import DeploymentState
from scheduler.decide.placement.search.draft import IMPROVEMENT_MIN
from scheduler.decide.placement.search.load_assignment import LoadAssignment

Layout = tuple[int, ...]
"""How many replicas at each site."""

ADDED_MAX: Final = 3
"""At how many sites one more replica is tried, the most promising first."""

ROUNDING: Final = 1e-9


class LayoutSite(NamedTuple):
    """A site as a deployment sees it: its number in the fleet, its PoP, how many replicas fit if
    there are no others, and what the first start costs."""

    number: int
    pop: PopId
    most: int
    start_cost: float


class KnownLayouts(NamedTuple):
    """All layouts whose cost is known, one row for each: the replicas at each site, the cost, and
    the share of each resource that they take."""

    counts: Ints
    costs: Floats
    used: Floats


class DeploymentLayouts:
    """The layouts of a deployment, beside the replicas that it keeps in each of them.

    `use` is the share that one replica at a site takes of the site's memory and, in a second row,
    of its devices. Vectors of resources have the memory of all sites first, then the devices.
    """

    def __init__(self, state: DeploymentState, sites: Sequence[LayoutSite], use: Floats) -> None:
        self._needs = state.needs
        self._state = state
        self._use = use
        self._sites: Ints = np.array([site.number for site in sites], np.int64)
        self._site_pops = [site.pop for site in sites]
        self._most: Ints = np.array([site.most for site in sites], np.int64)
        self._kept_pops = state.pops()
        self._kept_capacity = state.assignment.capacity.copy()
        self._new_max = max(0, state.needs.replicas_max - len(state.replicas))
        self._capacity = state.needs.site_capacity[self._sites]
        self._replica_costs = state.needs.hold_cost + np.array([s.start_cost for s in sites])
        self._latency_ms = state.latency_ms(self._sites)
        self._costs: dict[Layout, float] = {}
        self._assignments: dict[Layout, LoadAssignment] = {}
        self._known = KnownLayouts(
            np.zeros((0, len(sites)), np.int64), np.zeros(0), np.zeros((0, use.size))
        )

    @property
    def evaluations(self) -> int:
        """The number of layouts whose cost is known."""
        return len(self._costs)

    def known(self) -> KnownLayouts:
        """Return all layouts whose cost is known, in the order in which they were found."""
        if len(self._known.costs) != len(self._costs):
            counts = np.array(list(self._costs), np.int64)
            used = (counts[:, None, :] * self._use).reshape(len(counts), -1)
            self._known = KnownLayouts(counts, np.array(list(self._costs.values())), used)
        return self._known

    def used(self, layout: Layout) -> Floats:
        """Return the share of each resource that a layout takes."""
        return (self._use * layout).ravel()

    def replica_prices(self, prices: Floats) -> Floats:
        """Return the price of a replica at each site, at `prices` of all of each resource."""
        return np.asarray((self._use * prices.reshape(2, -1)).sum(axis=0), np.float64)

    def most_in(self, free: Floats) -> Ints:
        """Return how many replicas fit each site at most, in the share `free` of its resources."""
        shares = np.maximum(self._use, ROUNDING)
        fitting = np.floor((free.reshape(2, -1) + ROUNDING) / shares)
        fitting[self._use <= 0] = np.inf
        most: Ints = np.minimum(self._most, fitting.min(axis=0).clip(0)).astype(np.int64)
        return most

    def cost(self, layout: Layout) -> float:
        """Return the deployment's part of the plan's cost with a layout."""
        if layout not in self._costs:
            self._costs[layout] = (
                self._assignment(layout).cost()
                + self._needs.requirement_cost(self._pops(layout))
                + float(self._replica_costs @ layout)
            )
        return self._costs[layout]

    def evaluate_small(self, evaluations_max: int) -> None:
        """Evaluate the layouts in which each replica pays, those with fewest replicas first.

        A replica saves less the more others there are. So a layout with one that does not pay is
        not needed: the same layout without it costs less and takes less.
        """
        none = (0,) * len(self._sites)
        level = {none: self.cost(none)}
        free = np.zeros(len(self._sites))
        while level:
            following: dict[Layout, float] = {}
            for layout, cost in level.items():
                for other in self._with_one_more(layout, free, self._most, len(self._sites)):
                    if self.evaluations >= evaluations_max:
                        return
                    if self.cost(other) < cost - IMPROVEMENT_MIN:
                        following[other] = self.cost(other)
            level = following

    def improve(self, layout: Layout, prices: Floats, most: Ints) -> Layout:
        """Return a layout that costs no more with `prices` for each replica at a site.

        Replicas are added, and others are tried in the place of one and of all at each site, as
        long as that lowers the sum. `most` limits the replicas at each site.
        """
        layout = self._filled(layout, prices, most)
        value = self._value(layout, prices)
        improved = True
        while improved:
            improved = False
            for other in self._replaced(layout, prices, most):
                if self._value(other, prices) < value - IMPROVEMENT_MIN:
                    layout = self._filled(other, prices, most)
                    value = self._value(layout, prices)
                    improved = True
                    break
        return layout

    def _replaced(self, layout: Layout, prices: Floats, most: Ints) -> Iterator[Layout]:
        """Return the layouts with one replica less at a site, or none there, filled elsewhere."""
        for site in np.flatnonzero(layout).tolist():
            for left in dict.fromkeys((layout[site] - 1, 0)):
                limited = most.copy()
                limited[site] = left
                without = (*layout[:site], left, *layout[site + 1 :])
                yield self._filled(without, prices, limited)

    def _filled(self, layout: Layout, prices: Floats, most: Ints) -> Layout:
        """Add one replica after another where it lowers the cost with `prices` most."""
        value = self._value(layout, prices)
        while True:
            best = layout
            for other in self._with_one_more(layout, prices, most, ADDED_MAX):
                other_value = self._value(other, prices)
                if other_value < value - IMPROVEMENT_MIN:
                    best, value = other, other_value
            if best is layout:
                return layout
            layout = best

    def _with_one_more(
        self, layout: Layout, prices: Floats, most: Ints, sites_max: int
    ) -> Iterator[Layout]:
        """Return the layouts with another replica where that may pay, the most promising first."""
        if sum(layout) >= self._new_max:
            return
        needs = self._needs
        gains = np.zeros(len(self._sites))
        if len(needs.cities):
            gains = self._assignment(layout).gain_upper_bounds(self._latency_ms, self._capacity)
        pops = self._pops(layout)
        unmet = needs.requirement_cost(pops)
        met = {
            pop: unmet - needs.requirement_cost([*pops, pop])
            for pop in dict.fromkeys(self._site_pops)
        }
        nets = gains + [met[pop] for pop in self._site_pops] - self._replica_costs - prices
        nets[np.array(layout) >= most] = -np.inf
        for site in np.argsort(-nets, kind="stable")[:sites_max].tolist():
            if nets[site] <= 0:
                return
            yield (*layout[:site], layout[site] + 1, *layout[site + 1 :])

    def _value(self, layout: Layout, prices: Floats) -> float:
        return self.cost(layout) + float(prices @ layout)

    def _pops(self, layout: Layout) -> list[PopId]:
        """Return the PoP of each replica, kept or new."""
        pops = list(self._kept_pops)
        for pop, count in zip(self._site_pops, layout, strict=True):
            pops += [pop] * count
        return pops

    def _assignment(self, layout: Layout) -> LoadAssignment:
        if layout not in self._assignments:
            self._assignments[layout] = self._reassigned(layout)
        return self._assignments[layout]

    def _reassigned(self, layout: Layout) -> LoadAssignment:
        """Return the assignment with a layout, from that of a layout with one replica less if
        known."""
        for site in np.flatnonzero(layout).tolist():
            fewer = (*layout[:site], layout[site] - 1, *layout[site + 1 :])
            if fewer in self._assignments:
                assignment = self._assignments[fewer].copy()
                assignment.add_capacity(int(self._sites[site]), float(self._capacity[site]))
                return assignment
        capacity = self._kept_capacity.copy()
        capacity[self._sites] += self._capacity * layout
        return self._state.assignment_of(capacity)
