"""Decides which generations a vendor engine runs, and which wait on the node, fairly by tenant.

A vendor engine serves first come, first served, so no more are sent to it than it runs at once.
Further admitted generations wait here, and take a seat the moment one is free.

Rule 1: the next seat goes to the tenant with fewest seats, and within a tenant to the request whose
first token is due first (isochrone/ttft_order.py). Without objectives this is the order of arrival.
Rule 2: a tenant without a seat may also take one of the spare seats. The engine is started with
this many more than its option says, so that a tenant that floods it still gets all seats of the
option.
Rule 3: requests of the lowest priority (items of batches) wait until no other request waits, and
leave some seats free, which the next request of a client takes at once (batch_sequences.py).
"""

from collections import Counter
from typing import Final

from isochrone.batch_sequences import sequences_for_items
from isochrone.ttft_order import TtftObjective

SPARE_SHARE: Final = 0.125
"""Spare seats, as a share of the seats in the engine's option; at least one."""


def spare_seats(seats: int) -> int:
    """Return how many seats an engine gets beyond those in its option."""
    return max(1, int(SPARE_SHARE * seats))


class SeatRequest:
    """One generation that waits for a seat or has one. `number` gives the order of arrival."""

    __slots__ = ("is_seated", "number", "objective", "tenant", "yields")

    def __init__(self, tenant: str, number: int, objective: TtftObjective, *, yields: bool) -> None:
        self.tenant = tenant
        self.number = number
        self.objective = objective
        self.yields = yields
        self.is_seated = False


class Seats:
    """The seats of one engine. With `seats_max` 0 there is no limit."""

    def __init__(self, seats_max: int, spare: int = 0) -> None:
        self._seats_max = seats_max
        self._spare = spare
        self._yielding_max = sequences_for_items(seats_max)
        self._next_number = 0
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, dict[SeatRequest, None]] = {}
        """Requests by tenant, in order of arrival (a dict used as an ordered set)."""

    def request(
        self, tenant: str, objective: TtftObjective, now_s: float, *, yields: bool = False
    ) -> SeatRequest:
        """Ask for a seat; the request has it at once if one is free.

        `yields` says that it has the lowest priority.
        """
        request = SeatRequest(tenant, self._next_number, objective, yields=yields)
        self._next_number += 1
        self._waiting.setdefault(tenant, {})[request] = None
        self._fill(now_s)
        return request

    def release(self, request: SeatRequest, now_s: float) -> list[SeatRequest]:
        """Give a seat back, or stop waiting for one; return those that have one now."""
        if request.is_seated:
            request.is_seated = False
            self._taken[request.tenant] -= 1
            if not self._taken[request.tenant]:
                del self._taken[request.tenant]
        elif request in self._waiting.get(request.tenant, ()):
            self._remove(request)
        return self._fill(now_s)

    def _fill(self, now_s: float) -> list[SeatRequest]:
        seated = []
        while self._waiting:
            tenant = min(self._waiting, key=self._turn_of)
            request = min(
                self._waiting[tenant],
                key=lambda waiting: (
                    waiting.yields,
                    waiting.objective.counts_due_s(now_s),
                    waiting.number,
                ),
            )
            limit = self._seats_max + (0 if self._taken[tenant] else self._spare)
            if request.yields:
                limit = self._yielding_max
            if self._seats_max and self._taken.total() >= limit:
                break
            self._remove(request)
            self._taken[tenant] += 1
            request.is_seated = True
            seated.append(request)
        return seated

    def _turn_of(self, tenant: str) -> tuple[bool, int, int]:
        """Sort key of the waiting tenants: fewest seats, then the one that waits longest.

        Tenants of which only requests of the lowest priority wait come last.
        """
        waiting = self._waiting[tenant]
        yields = all(request.yields for request in waiting)
        return yields, self._taken[tenant], next(iter(waiting)).number

    def _remove(self, request: SeatRequest) -> None:
        queue = self._waiting[request.tenant]
        del queue[request]
        if not queue:
            del self._waiting[request.tenant]
