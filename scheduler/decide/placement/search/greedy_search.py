"""Where further replicas should be: lazily greedy by marginal gain.

Rule 1: every step lowers the sum of score.py, so the search ends; ties go by name, so it repeats.
Rule 2: what finds no room is noted as blocked, and left to exchange.py.
"""

from collections.abc import Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush

import msgspec
import numpy as np

from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.placement.fleet.fleet_capacity import Candidate, FleetCapacity
from scheduler.decide.placement.score import START
from scheduler.decide.placement.search.deployment_state import DeploymentState, Need, PlannedReplica
from scheduler.decide.placement.search.load_assignment import EPSILON

Entry = tuple[float, float, float, int, int, int]
"""-tier, -first key, -second key, wish, site, the wish's stamp when its worth was last read; where
that was only guessed, the stamp's complement."""


class FillOrder(StrEnum):
    """Which of two seats of one tier goes first: what saves most per byte, most, or is largest."""

    DENSITY = "density"
    WORTH = "worth"
    SIZE = "size"


class BlockedGain(msgspec.Struct, frozen=True, kw_only=True):
    """A seat that would pay, at a site whose devices are full."""

    wish: DeploymentState
    site: int
    net: float


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """What a seat more at a site saves, less what it costs. Without an offer, the site is full."""

    need: Need
    saves: float
    net: float
    site: int
    offered: Candidate | None


class GreedySearch:
    """The seats sought in one plan: `wishes` are changed in place, by at most `starts_max`."""

    def __init__(
        self, ground: FleetCapacity, wishes: Sequence[DeploymentState], starts_max: int
    ) -> None:
        self.ground = ground
        self.wishes = wishes
        self.blocked: dict[tuple[int, int], BlockedGain] = {}
        self._left = starts_max
        self._order = FillOrder.DENSITY
        for number, wish in enumerate(wishes):
            wish.number = number
        self._site_pops = [site.pop for site in ground.sites]

    def largest_first(self) -> list[DeploymentState]:
        """Return every wish, the largest first: few other places can take those."""
        return sorted(self.wishes, key=lambda wish: -wish.memory_bytes)

    @property
    def has_starts_left(self) -> bool:
        """Say whether this plan may start one more."""
        return self._left > 0

    def fill(
        self, order: FillOrder = FillOrder.DENSITY, only: Sequence[DeploymentState] | None = None
    ) -> None:
        """Take the seat that is worth most, again and again, until none pays or none is left."""
        self._order = order
        heap: list[Entry] = []
        for wish in self.wishes if only is None else only:
            heap.extend(self._guesses(wish))
        heapify(heap)
        while heap and self._left > 0:
            _, _, _, number, site, stamp = heappop(heap)
            wish = self.wishes[number]
            if len(wish.seats) >= wish.most:
                continue
            if stamp not in (wish.stamp, ~wish.stamp):
                # All of a wish are guessed at once: most then need no closer look.
                guessed = self._guess(wish, site)
                if guessed is None or (heap and guessed > heap[0]):
                    if guessed:
                        heappush(heap, guessed)
                    continue
            worth = self.worth(wish, site)
            if worth is None or worth.net <= EPSILON:
                continue
            stamp_read = wish.stamp
            if stamp == stamp_read:
                self.take(wish, worth)
            # Pushed again with what it was worth: a second seat here may be worth almost as much.
            heappush(heap, self._key(wish, site, worth.need, worth.net, stamp_read))

    def take(
        self, wish: DeploymentState, worth: Gain, waits: bool = False, reason: str = ""
    ) -> None:
        """Seat a replica that this plan would start, or that `waits` for what ends there."""
        seated = self._seated(wish, worth, waits, reason)
        self.occupy(seated)
        wish.add(seated)

    def untake(self, seated: PlannedReplica) -> None:
        """Take back a seat that this plan would have started, or ask a standing one to end."""
        self.release(seated)
        seated.wish.drop(seated)

    def occupy(self, seated: PlannedReplica) -> None:
        """Take a seat's memory on the ground."""
        if seated.seat:
            self.ground.take(seated.seat, seated.wish.deployment, seated.wish.model)
            self._left -= 1
        elif seated.placement:
            self.ground.let_go(seated.placement, -1)

    def release(self, seated: PlannedReplica) -> None:
        """Give a seat's memory back: at once if nothing runs there yet, else when it has ended."""
        if seated.seat:
            self.ground.give_back(seated.seat, seated.wish.deployment, seated.wish.model)
            self._left += 1
        elif seated.placement:
            self.ground.let_go(seated.placement, 1)

    def worth(self, wish: DeploymentState, site: int, soon: bool = False) -> Gain | None:
        """Return what a seat more at a site is worth; None, noted as blocked, if it is full.

        `soon` counts as free what is about to end.
        """
        worth = self.worth_to(wish, site, soon, need_be_paid=True)
        if worth.offered is not None:
            return worth
        if worth.net > START and not soon:
            blocked = BlockedGain(wish=wish, site=site, net=worth.net - START)
            self.blocked[wish.number, site] = blocked
        return None

    def worth_to(
        self, wish: DeploymentState, site: int, soon: bool = False, need_be_paid: bool = False
    ) -> Gain:
        """Return what a seat more at a site is worth to a wish, whether or not one is free."""
        need = wish.need(self._site_pops[site])
        saves = wish.flow.gain_exactly(site, float(wish.rooms[site]))
        net = saves + need.worth - wish.hold
        # What would not pay even with its weights at hand needs no seat looked for.
        offered = None
        if net > START or not need_be_paid:
            offered = self.ground.offer(
                site, wish.nodes_of[site], wish.deployment, wish.model, soon
            )
        net -= offered.cost if offered else 0.0
        return Gain(need=need, saves=saves, net=net, site=site, offered=offered)

    def _seated(
        self, wish: DeploymentState, worth: Gain, waits: bool, reason: str
    ) -> PlannedReplica:
        """Return the seat that an offer would become, with the reason for it."""
        offered = worth.offered
        assert offered is not None
        pop = self._site_pops[worth.site]
        saves = f"saves {worth.saves / wish.weight:.0f} ms x requests/s in {pop}"
        if not reason and worth.need.tier >= 2:
            reason = worth.need.reason
        elif not reason and worth.need.worth > worth.saves and worth.need.reason:
            reason = f"{worth.need.reason}; {saves}"
        return PlannedReplica(
            wish=wish,
            pop=pop,
            site=worth.site,
            room=float(wish.rooms[worth.site]),
            hold=wish.hold,
            seat=offered.seat,
            start=offered.cost,
            reason=reason or f"demand: {saves}",
            waits=waits,
        )

    def _guesses(self, wish: DeploymentState) -> list[Entry]:
        """Return an entry for each site that may pay, with at least what it is worth."""
        if not wish.rooms.any() or len(wish.seats) >= wish.most:
            return []
        most_needed = max((wish.need(pop).worth for pop in wish.needed_in()), default=0)
        may_pay = (wish.rooms > 0) & (wish.saves_at_least() + most_needed > wish.hold + START)
        guesses = (self._guess(wish, int(site)) for site in np.flatnonzero(may_pay))
        return [guess for guess in guesses if guess]

    def _guess(self, wish: DeploymentState, site: int) -> Entry | None:
        """Return an entry with at least what a seat more at a site is worth, if it may pay."""
        need = wish.need(self._site_pops[site])
        net = float(wish.saves_at_least()[site]) + need.worth - wish.hold - START
        return self._key(wish, site, need, net, ~wish.stamp) if net > 0 else None

    def _key(self, wish: DeploymentState, site: int, need: Need, net: float, stamp: int) -> Entry:
        """Order seats: the higher tier; there by weight and size, below by what a byte saves."""
        size_gib = wish.memory_bytes / GIB
        if need.tier > 0:
            # The largest first, while devices are whole; among sites of one wish, what saves most.
            first, second = wish.weight * 1e9 + size_gib, net
        elif self._order is FillOrder.DENSITY:
            first, second = net / (size_gib + 1.0), net
        elif self._order is FillOrder.WORTH:
            first, second = net, net
        else:
            first, second = size_gib, net
        return (-float(need.tier), -first, -round(second, 3), wish.number, site, stamp)
