"""Decides which generations a vendor engine runs, and which wait on the node, fairly by tenant.

A vendor engine serves first come, first served, so no more are sent to it than it runs at once.
A seat is the place of one generation among those. Further admitted generations wait here, and take
a seat the moment one is free.

Rule 1: the next seat goes to the tenant with fewest seats, and within a tenant to the request whose
first token is due first (isochrone/ttft_order.py). Without objectives this is the order of arrival.
Rule 2: a tenant without a seat may also take one of the spare seats. The engine is started with
this many more than its option says, so that a tenant that floods it still gets all seats of the
option.
Rule 3: requests of the lowest priority (items of batches, flexible requests) wait until no other
request waits. If a request of a client finds no seat, an item is preempted (preemption.py).
Rule 4: those that cannot be preempted leave some seats, which a client's request takes at once.
Rule 5: while clients of other tenants use the engine, a tenant that has its share of the seats gets
the next one only once its last requests have their first token. A step of the engine computes all
new prompts, and every sequence waits for it: when many answers of a flood end together, its next
prompts would otherwise make one long step.
Rule 6: items of batches begin, and end before their prompt is read, by the rules of `item_pace.py`.
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from isochrone.ttft_order import TtftObjective
from nodeagent.decide.requests.item_pace import ItemPace
from nodeagent.decide.requests.preemption import BatchItem, in_order_of_preemption

LEFT_SHARE: Final = 0.0625
"""The share of the seats, at least one, that is left by requests of the lowest priority that cannot
be preempted."""

SPARE_SHARE: Final = 0.125
"""Spare seats, as a share of the seats in the engine's option; at least one."""

STARTING_SHARE: Final = 0.0625
"""The share of the seats, at least one, that such a tenant's requests without a first token may
take."""

ACTIVE_S: Final = 10.0
"""A tenant uses the engine while it has a seat, and for this time after. As long as the embedded
engine's steps stay short after a small tenant's prompt."""

STARTED_AFTER_S: Final = 0.25
"""A request whose answer is not streamed counts as started this long after the time that its
prompt is estimated to take."""


def spare_seats(seats: int) -> int:
    """Return how many seats an engine gets beyond those in its option; 0 if it limits none."""
    return max(1, int(SPARE_SHARE * seats)) if seats else 0


@dataclass(slots=True, eq=False)
class SeatRequest:
    """One generation that waits for a seat or has one. `number` gives the order of arrival."""

    tenant: str
    number: int
    objective: TtftObjective
    yields: bool
    item: BatchItem | None
    is_seated: bool = False
    has_started: bool = False
    """True once its first token has arrived, or should have."""

    @property
    def stays(self) -> bool:
        """True if it has the lowest priority and cannot be preempted."""
        return self.yields and (self.item is None or not self.item.can_be_preempted)


class Seats:
    """The seats of one engine. With `seats_max` 0 there is no limit."""

    def __init__(self, seats_max: int, spare: int = 0) -> None:
        self._seats_max = seats_max
        self._spare = spare
        self._staying_max = max(1, seats_max - max(1, int(LEFT_SHARE * seats_max)))
        self._starting_max = max(1, int(STARTING_SHARE * seats_max))
        self._starting: Counter[str] = Counter()
        """The requests that have a seat and no first token yet, by tenant."""
        self._last_used_s: dict[str, float] = {}
        """When a client's request of each tenant last gave its seat back, the latest last."""
        self._item_pace = ItemPace(seats_max)
        self.next_fill_s: float | None = None
        """When a free seat goes to an item that waits for its turn to begin; None if none does."""
        self._next_number = 0
        self._yielding: set[SeatRequest] = set()
        """Requests of the lowest priority that have a seat."""
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, dict[SeatRequest, None]] = {}
        """Requests by tenant, in order of arrival (a dict used as an ordered set)."""

    def request(
        self,
        tenant: str,
        objective: TtftObjective,
        now_s: float,
        *,
        yields: bool = False,
        item: BatchItem | None = None,
    ) -> SeatRequest:
        """Ask for a seat; the request has it at once if one is free.

        `yields` says that it has the lowest priority; `item` is set for an item of a batch.
        """
        request = SeatRequest(tenant, self._next_number, objective, yields=yields, item=item)
        self._next_number += 1
        self._waiting.setdefault(tenant, {})[request] = None
        self.fill(now_s)
        return request

    def unread_item(self, request: SeatRequest, now_s: float) -> BatchItem | None:
        """Return the item that ends because a client's request has arrived, by Rule 6."""
        may_begin = request.is_seated or self._may_start(request.tenant, now_s)
        is_protected = self._seats_max and may_begin and self._item_pace.may_preempt()
        if request.yields or not is_protected:
            return None
        items = [other.item for other in self._yielding if other.item and not other.has_started]
        endable = [item for item in items if item.can_be_preempted]
        return max(endable, key=lambda item: item.began_s, default=None)

    def item_to_preempt(self, request: SeatRequest, now_s: float) -> BatchItem | None:
        """Return the item whose seat a client's waiting request takes, None if it must wait."""
        if request.is_seated or request.yields or not self._may_start(request.tenant, now_s):
            return None
        items = in_order_of_preemption(
            [other.item for other in self._yielding if other.item is not None]
        )
        return items[0] if items else None

    def record_start(self, request: SeatRequest, now_s: float) -> list[SeatRequest]:
        """Note that a request's first token has arrived, or should have.

        Return the requests that get a seat now.
        """
        if not request.is_seated or request.has_started:
            return []
        self._end_start(request)
        return self.fill(now_s)

    def _end_start(self, request: SeatRequest) -> None:
        request.has_started = True
        self._item_pace.unread_prompts -= not request.yields
        self._starting[request.tenant] -= 1
        if not self._starting[request.tenant]:
            del self._starting[request.tenant]

    def release(self, request: SeatRequest, now_s: float) -> list[SeatRequest]:
        """Give a seat back, or stop waiting for one; return those that have one now."""
        if request.is_seated:
            if not request.has_started:
                self._end_start(request)
                if request.item is not None and request.item.is_preempted:
                    self._item_pace.record_preemption()
            request.is_seated = False
            self._yielding.discard(request)
            self._taken[request.tenant] -= 1
            if not self._taken[request.tenant]:
                del self._taken[request.tenant]
            if self._seats_max and not request.yields:
                self._last_used_s.pop(request.tenant, None)
                self._last_used_s[request.tenant] = now_s
                self._forget_inactive(now_s)
            if request.item is not None and not request.item.is_preempted:
                self._item_pace.record_end(request.item.began_s, now_s)
        elif request in self._waiting.get(request.tenant, ()):
            self._remove(request)
        return self.fill(now_s)

    def fill(self, now_s: float) -> list[SeatRequest]:
        """Give seats to the requests whose turn it is, also to an item that waits for the time
        `next_fill_s`."""
        seated = []
        self.next_fill_s = None
        while ready := [tenant for tenant in self._waiting if self._may_start(tenant, now_s)]:
            tenant = min(ready, key=self._turn_of)
            request = min(
                self._waiting[tenant],
                key=lambda waiting: (
                    waiting.yields,
                    waiting.objective.counts_due_s(now_s),
                    waiting.number,
                ),
            )
            if self._seats_max and not self._has_seat_for(request):
                break
            if self._seats_max and request.item is not None:
                due_s = self._item_pace.due_s(now_s)
                if due_s > now_s:
                    self.next_fill_s = due_s
                    break
            self._remove(request)
            self._taken[tenant] += 1
            self._starting[tenant] += 1
            request.is_seated = True
            if request.yields:
                self._yielding.add(request)
            else:
                self._item_pace.unread_prompts += 1
            if request.item is not None:
                request.item.began_s = now_s
                read_s = now_s + request.objective.prefill_s + STARTED_AFTER_S
                self._item_pace.record_begin(now_s, read_s)
            seated.append(request)
        return seated

    def _may_start(self, tenant: str, now_s: float) -> bool:
        """Return whether a tenant's next request may begin now, by Rule 5."""
        if not self._seats_max or self._starting[tenant] < self._starting_max:
            return True
        others = self._tenants_with_clients(now_s) - {tenant}
        return not others or self._taken[tenant] < self._seats_max / (1 + len(others))

    def _tenants_with_clients(self, now_s: float) -> Set[str]:
        """Return the tenants with requests that do not yield: that wait, run, or ended lately."""
        self._forget_inactive(now_s)
        running = self._taken - Counter(one.tenant for one in self._yielding)
        waiting = {
            tenant
            for tenant, requests in self._waiting.items()
            if not all(request.yields for request in requests)
        }
        return running.keys() | waiting | self._last_used_s.keys()

    def _forget_inactive(self, now_s: float) -> None:
        while self._last_used_s:
            tenant, used_s = next(iter(self._last_used_s.items()))
            if now_s - used_s < ACTIVE_S:
                break
            del self._last_used_s[tenant]

    def _has_seat_for(self, request: SeatRequest) -> bool:
        taken = self._taken.total()
        if request.stays:
            taken_for_good = taken - sum(not other.stays for other in self._yielding)
            if taken_for_good >= self._staying_max:
                return False
        has_spare = not (request.yields or self._taken[request.tenant])
        return taken < self._seats_max + (self._spare if has_spare else 0)

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
