"""Replicas that would lower the cost at sites whose devices are full.

The fill notes them, and `swap.py` tries the largest. A large fleet has hundreds of thousands of
them, of which a plan tries a dozen: they are noted by upper bounds, one array per deployment, and
computed exactly only when they are the largest (lazy greedy, as in `greedy_fill.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf

import msgspec
import numpy as np

from scheduler.decide.arrays import Floats
from scheduler.decide.placement.search.deployment_state import DeploymentState


class BlockedGain(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that would lower the cost by `net`, at a site whose devices are full."""

    state: DeploymentState
    site: int
    net: float


class BlockedGains:
    """Upper bounds of the blocked gains of each deployment, by site."""

    def __init__(self) -> None:
        self._states: dict[int, DeploymentState] = {}
        self._bounds: dict[int, Floats] = {}

    def note(self, state: DeploymentState, site: int, net: float) -> None:
        """Note that a replica of a deployment found no slot at a site."""
        if state.number not in self._bounds:
            self.note_all(state, np.full(len(state.needs.site_capacity), -inf))
        self._bounds[state.number][site] = net

    def note_all(self, state: DeploymentState, bounds: Floats) -> None:
        """Replace the gains of a deployment; `bounds` has -inf where nothing is blocked."""
        self._states[state.number] = state
        self._bounds[state.number] = bounds

    def forget(self, state: DeploymentState) -> None:
        """Forget the gains of a deployment."""
        self._states.pop(state.number, None)
        self._bounds.pop(state.number, None)

    def clear(self) -> None:
        """Forget all."""
        self._states.clear()
        self._bounds.clear()

    def drain(
        self,
        states: Iterable[DeploymentState],
        more: Iterable[BlockedGain],
        net_at: Callable[[DeploymentState, int], float],
    ) -> Iterator[BlockedGain]:
        """Forget all gains, and return those of `states` and `more`, the largest first.

        `net_at` computes a gain as the draft is when its turn comes.
        """
        bounds = {s.number: self._bounds[s.number] for s in states if s.number in self._bounds}
        by_number = dict(self._states)
        self.clear()
        # The largest of each deployment only: minus its gain, number, site, and the gain if exact.
        heap: list[tuple[float, int, int, BlockedGain | None]] = []
        for gain in more:
            if gain.state.number in bounds:
                bounds[gain.state.number][gain.site] = -inf
            heap.append((-gain.net, gain.state.number, gain.site, gain))
        for number in bounds:
            heap.extend(_largest(number, bounds[number]))
        heapify(heap)
        while heap:
            _, number, site, exact = heappop(heap)
            if exact is None:
                state = by_number[number]
                bounds[number][site] = -inf
                net = net_at(state, site)
                exact = BlockedGain(state=state, site=site, net=net)
                for following in _largest(number, bounds[number]):
                    heappush(heap, following)
                if net <= 0:
                    continue
                if heap and heap[0] < (-net, number, site):
                    heappush(heap, (-net, number, site, exact))
                    continue
            yield exact


def _largest(number: int, bounds: Floats) -> list[tuple[float, int, int, BlockedGain | None]]:
    site = int(bounds.argmax()) if len(bounds) else 0
    return [(-float(bounds[site]), number, site, None)] if bounds.max(initial=-inf) > 0 else []
