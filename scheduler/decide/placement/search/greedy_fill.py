"""Adds replicas to a draft by lazy greedy search on marginal gain.

Rule 1: every step lowers the sum of score.py, so the search ends. Ties go by number, so the same
draft gives the same result.
Rule 2: a gain without a free slot is noted as blocked, and left to swap.py.

Lazy greedy: the heap holds for each deployment the largest of its gains, or an upper bound of it,
which is computed exactly only when it reaches the top (Minoux 1978). The bounds of all sites of a
deployment are computed at once.
"""

from collections.abc import Sequence
from enum import Enum, StrEnum, auto
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from scheduler.decide.arrays import NO_FLOATS, Floats
from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.placement.score import START, START_PER_S
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import Gain, PlacementDraft
from scheduler.decide.placement.search.load_assignment import EPSILON

Entry = tuple[float, float, float, int, int]
"""An entry of the heap: -tier, -first key, -second key, deployment number, site."""


class FillOrder(StrEnum):
    """The order within a tier: by savings per byte, by savings, or by size."""

    DENSITY = "density"
    WORTH = "worth"
    SIZE = "size"


def fill(
    draft: PlacementDraft,
    order: FillOrder = FillOrder.DENSITY,
    only: Sequence[DeploymentState] | None = None,
    start_discount: float = 0.0,
) -> None:
    """Add the best replica again and again, until none lowers the cost or no start is left.

    `only` limits it to some deployments. A start counts `start_discount` less than it costs; START
    is the most.
    """
    _GreedyFill(draft, order, start_discount).run(draft.states if only is None else only)


def keep_first(draft: PlacementDraft, starts_max: int) -> None:
    """Let the draft start `starts_max` replicas at most: those that a fill would take first.

    The others are removed, for later plans to start.
    """
    draft.limit_starts(starts_max)
    if not draft.exceeds_starts:
        return
    left = [replica for state in draft.states for replica in state.new_replicas()]
    for replica in left:
        draft.remove(replica)
    while left and draft.has_starts_left:
        first = min(left, key=_entry_of)
        left.remove(first)
        draft.add(first)


class Known(Enum):
    """How exactly a gain is known: an upper bound, all but the slot, or with the best free slot."""

    BOUND = auto()
    SAVINGS = auto()
    SLOT = auto()


class _SiteGains:
    """The gain of one more replica of a deployment at each site, or an upper bound of it.

    A gain is -inf where there is no slot. Valid until the deployment's replicas change.
    """

    def __init__(
        self, draft: PlacementDraft, state: DeploymentState, start_discount: float
    ) -> None:
        """Compute the bounds as if each start cost START less the discount only."""
        needs = state.needs
        required = state.needs_by_site()
        costs = needs.hold_cost + START - start_discount
        # A replica that saves no more than this does not pay at any site.
        least = max(0.0, costs - float(required.worths.max(initial=0.0)))
        nets = state.gain_upper_bounds(least) + required.worths - costs
        nets[(needs.site_capacity <= 0) | (nets <= 0)] = -inf
        is_free = draft.has_free_devices(state)
        draft.blocked.note_all(state, np.where(is_free, -inf, nets))
        nets[~is_free] = -inf
        self._state, self._nets = state, nets
        self._tiers, self._worths = required
        self._has_tiers = bool((required.tiers != required.tiers[:1]).any())
        self._start_costs = NO_FLOATS
        self._start_discount = start_discount
        self._known: dict[int, Known] = {}

    @property
    def has_any(self) -> bool:
        """Say whether a replica may pay at any site."""
        return bool((self._nets > EPSILON).any())

    def lower_to(self, start_costs: Floats) -> None:
        """Lower the bounds to starts that cost at least `start_costs`, which are kept and updated.

        A fill only takes slots, so that no start becomes cheaper while it lasts.
        """
        self._nets -= start_costs - START
        self._start_costs = start_costs

    def known(self, site: int) -> Known:
        """Return how exactly the gain at a site is known."""
        return self._known.get(site, Known.BOUND)

    def learn_savings(self, site: int) -> None:
        """Replace the bound of a site by the gain there with the soonest start."""
        net = self._state.saves_at(site) + float(self._worths[site])
        net -= self._state.needs.hold_cost + START
        net -= float(self._start_costs[site]) - START - self._start_discount
        self._nets[site] = net if net > EPSILON else -inf
        self._known[site] = Known.SAVINGS

    def lose_slot(self, site: int) -> float:
        """Note that the devices of a site have been taken; return a bound of what is lost there."""
        lost = float(self._nets[site] + self._start_costs[site]) - START
        self._nets[site] = -inf
        return lost

    def learn_slot(self, site: int, gain: Gain | None) -> None:
        """Replace the gain at a site by that with the best free slot; None if there is no slot."""
        self._known[site] = Known.SLOT
        net = -inf if gain is None or gain.candidate is None else gain.net + self._start_discount
        self._nets[site] = net if net > EPSILON else -inf
        if gain is not None and gain.candidate is not None:
            self._start_costs[site] = gain.candidate.start_cost

    def best(self, order: FillOrder) -> list[Entry]:
        """Return the entry of the largest gain; [] without any."""
        nets, tiers = self._nets, self._tiers
        site = int(nets.argmax())
        if self._has_tiers:
            highest = tiers[nets > -inf].max(initial=0)
            site = int(np.where(tiers == highest, nets, -inf).argmax())
        net = float(nets[site])
        return [_entry(self._state, site, net, int(tiers[site]), order)] if net > EPSILON else []


def _entry(state: DeploymentState, site: int, net: float, tier: int, order: FillOrder) -> Entry:
    size_gib = state.needs.memory_bytes / GIB
    if tier > 0:
        # Large replicas first, while devices are empty; among sites, the one that saves most.
        first = state.needs.weight * 1e9 + size_gib
    elif order is FillOrder.DENSITY:
        first = net / (size_gib + 1.0)
    else:
        first = net if order is FillOrder.WORTH else size_gib
    return (-float(tier), -first, -round(net, 3), state.number, site)


def _entry_of(replica: PlannedReplica) -> Entry:
    """Return the entry of a replica that was removed from its deployment."""
    state, site = replica.state, replica.site
    need = state.need_at(site)
    net = state.saves_at(site) + need.worth - replica.hold_cost - replica.start_cost
    return _entry(state, site, net, need.tier, FillOrder.DENSITY)


class _GreedyFill:
    def __init__(self, draft: PlacementDraft, order: FillOrder, start_discount: float) -> None:
        self._draft = draft
        self._order = order
        self._start_discount = start_discount
        self._bids: dict[int, _SiteGains] = {}
        self._start_costs: dict[int, Floats] = {}

    def run(self, states: Sequence[DeploymentState]) -> None:
        draft, order = self._draft, self._order
        heap = [entry for state in states for entry in self._offer(state)]
        heapify(heap)
        while heap and draft.has_starts_left:
            *_, number, site = heappop(heap)
            state, bids = draft.states[number], self._bids[number]
            known = bids.known(site)
            if known is not Known.SLOT and not draft.has_free_devices_at(state, site):
                draft.blocked.note(state, site, bids.lose_slot(site))
                following = bids.best(order)
            elif known is Known.BOUND:
                bids.learn_savings(site)
                following = bids.best(order)
            elif known is Known.SAVINGS or (gain := self._gain_at(state, site)) is None:
                bids.learn_slot(site, self._gain_at(state, site))
                following = bids.best(order)
            else:
                draft.take(state, gain)
                # A second replica at the same site may gain almost as much.
                following = self._offer(state)
            for entry in following:
                heappush(heap, entry)
        # No start is left. What could have had devices that new replicas took may be worth more:
        # if no swap looked at it, it would preempt them later, and they would start again first.
        for *_, number, site in heap:
            state = draft.states[number]
            if not draft.has_free_devices_at(state, site):
                draft.blocked.note(state, site, self._bids[number].lose_slot(site))

    def _gain_at(self, state: DeploymentState, site: int) -> Gain | None:
        return self._draft.free_gain_at(state, site, start_discount=self._start_discount)

    def _offer(self, state: DeploymentState) -> list[Entry]:
        """Compute the bounds of a deployment; return the entry of the largest, if any may pay."""
        if state.is_full or not len(state.needs.sites.numbers):
            return []
        least = state.needs.hold_cost + START - self._start_discount
        if state.requirements_met() and (state.gain_upper_bounds(least) <= least).all():
            self._draft.blocked.forget(state)
            return []
        bids = self._bids[state.number] = _SiteGains(self._draft, state, self._start_discount)
        if not bids.has_any:
            return []
        if state.number not in self._start_costs:
            start_s = self._draft.fleet.start_bounds.start_s(state.needs.model)
            self._start_costs[state.number] = START + START_PER_S * start_s
        bids.lower_to(self._start_costs[state.number])
        return bids.best(self._order)
