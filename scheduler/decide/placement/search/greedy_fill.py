"""Adds replicas to a draft by lazy greedy search on marginal gain.

Rule 1: every step lowers the sum of score.py, so the search ends. Ties go by number, so it repeats.
Rule 2: a gain without a free slot is noted as blocked, and left to swap.py.

Lazy greedy: the heap holds upper bounds of gains, which are computed exactly only when they reach
the top (Minoux 1978).
"""

from collections.abc import Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush

import numpy as np

from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.placement.score import START
from scheduler.decide.placement.search.deployment_state import DeploymentState, Need
from scheduler.decide.placement.search.draft import PlacementDraft
from scheduler.decide.placement.search.load_assignment import EPSILON

Entry = tuple[float, float, float, int, int, int]
"""Of the heap: -tier, -first key, -second key, deployment number, site, and the version of the
deployment's state that the gain was read at; the complement of the version marks a bound."""


class FillOrder(StrEnum):
    """The order within a tier: by savings per byte, by savings, or by size."""

    DENSITY = "density"
    WORTH = "worth"
    SIZE = "size"


def fill(
    draft: PlacementDraft,
    order: FillOrder = FillOrder.DENSITY,
    only: Sequence[DeploymentState] | None = None,
) -> None:
    """Add the best replica again and again, until none lowers the cost or no start is left.

    `only` limits it to some deployments.
    """
    _GreedyFill(draft, order).run(draft.states if only is None else only)


class _GreedyFill:
    def __init__(self, draft: PlacementDraft, order: FillOrder) -> None:
        self._draft = draft
        self._order = order

    def run(self, states: Sequence[DeploymentState]) -> None:
        draft = self._draft
        heap: list[Entry] = []
        for state in states:
            heap.extend(self._bounds(state))
        heapify(heap)
        while heap and draft.has_starts_left:
            _, _, _, number, site, version = heappop(heap)
            state = draft.states[number]
            if state.is_full:
                continue
            if version not in (state.version, ~state.version):
                # All bounds of a state are computed at once, so most need no exact gain.
                bound = self._bound(state, site)
                if bound is None or (heap and bound > heap[0]):
                    if bound:
                        heappush(heap, bound)
                    continue
            gain = draft.free_gain_at(state, site)
            if gain is None or gain.net <= EPSILON:
                continue
            version_read = state.version
            if version == version_read:
                draft.take(state, gain)
            # A second replica at the same site may gain almost as much.
            heappush(heap, self._entry(state, site, gain.need, gain.net, version_read))

    def _bounds(self, state: DeploymentState) -> list[Entry]:
        """Return an entry with an upper bound for each site that may lower the cost."""
        needs = state.needs
        if not needs.site_capacity.any() or state.is_full:
            return []
        most_needed = max((state.need_in(pop).worth for pop in state.most_needed_pops()), default=0)
        may_pay = (needs.site_capacity > 0) & (
            state.gain_upper_bounds() + most_needed > needs.hold_cost + START
        )
        bounds = (self._bound(state, int(site)) for site in np.flatnonzero(may_pay))
        return [bound for bound in bounds if bound]

    def _bound(self, state: DeploymentState, site: int) -> Entry | None:
        """Return an entry with an upper bound of the gain at a site, or None if it cannot pay."""
        need = self._draft.need_at(state, site)
        net = float(state.gain_upper_bounds()[site]) + need.worth - state.needs.hold_cost - START
        return self._entry(state, site, need, net, ~state.version) if net > 0 else None

    def _entry(
        self, state: DeploymentState, site: int, need: Need, net: float, version: int
    ) -> Entry:
        size_gib = state.needs.memory_bytes / GIB
        if need.tier > 0:
            # Large replicas first, while devices are empty; among sites, the one that saves most.
            first, second = state.needs.weight * 1e9 + size_gib, net
        elif self._order is FillOrder.DENSITY:
            first, second = net / (size_gib + 1.0), net
        elif self._order is FillOrder.WORTH:
            first, second = net, net
        else:
            first, second = size_gib, net
        return (-float(need.tier), -first, -round(second, 3), state.number, site, version)
