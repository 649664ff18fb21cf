"""Fair queueing: the order of requests that wait for capacity, fair between tenants.

Rule 1: a tenant's own requests keep their order. Between tenants, the one that was given the fewest
tokens while it waited goes first (virtual time), so a tenant that floods waits behind its own
requests.
Rule 2: a tenant that comes back after a pause starts level with the others: unused service is not
saved up. Each other tenant passes it at most once before its own turn.
Rule 3: only served requests are charged. A request that leaves or is refused costs its tenant
nothing.
Rule 4: depth is bounded. When the queue is full, the tenant with most waiting requests loses its
newest to a tenant with fewer; otherwise the new request is refused.
Rule 5: bytes are bounded too. A tenant may have no more bytes waiting than are still free: one
tenant alone gets half, and a later tenant finds capacity whatever the others sent.

Requests that may use the same replicas are a lane: those of a deployment, or of keys limited to the
same regions in it. Every operation takes O(log n) of the waiting tenants.
"""

import heapq
from collections import OrderedDict
from itertools import takewhile
from typing import Final, Generic, TypeVar

from isochrone.wire.ids import TenantId
from router.decide.admission.retry_after import RETRY_AFTER_UNKNOWN_S, DrainRate

LANES_MAX: Final = 1024
"""Past this many lanes, those without waiting requests are dropped with their drain rates."""

_STALE_MIN: Final = 64
"""The stale entries that are tolerated before a heap or a dict of tenants is rebuilt."""


class QueueFull(Exception):
    """The queue is full, and no other tenant has more requests waiting than this one."""


class BytesFull(Exception):
    """The tenant's waiting bodies would be more bytes than are still free."""


class Ticket:
    """One waiting request: its lane and tenant, the tokens it needs, the bytes of its body."""

    __slots__ = ("bytes", "lane", "number", "tenant", "tokens")

    def __init__(self, lane: str, tenant: TenantId, tokens: int, size_bytes: int = 0) -> None:
        self.lane = lane
        self.tenant = tenant
        self.tokens = max(1, tokens)
        self.bytes = size_bytes
        self.number = 0


T = TypeVar("T", bound=Ticket)


class _Flow(Generic[T]):
    """One tenant's tickets in one lane. `given` is its virtual time, in tokens."""

    def __init__(self, lane: "_Lane[T]", tenant: TenantId) -> None:
        self.lane = lane
        self.tenant = tenant
        self.given = 0
        self.bytes = 0
        self.tickets: OrderedDict[int, T] = OrderedDict()


class _Lane(Generic[T]):
    """The flows of one deployment. `now` is the virtual time of the last ticket served."""

    def __init__(self) -> None:
        self.flows: dict[TenantId, _Flow[T]] = {}
        self.heap: list[tuple[int, int, _Flow[T]]] = []
        """(virtual time, number of the first ticket, flow), stale if the flow has moved."""
        self.now = 0
        self.tokens = 0
        self.drain = DrainRate()

    def first(self) -> _Flow[T] | None:
        """Return the flow whose turn it is, removing stale entries before it."""
        heap = self.heap
        while heap:
            given, number, flow = heap[0]
            if flow.given == given and number in flow.tickets:
                return flow
            heapq.heappop(heap)
        return None

    def offer(self, flow: _Flow[T]) -> None:
        """Let a flow's first ticket compete for the next turn."""
        if flow.tickets:
            heapq.heappush(self.heap, (flow.given, next(iter(flow.tickets)), flow))
        if len(self.heap) > _STALE_MIN + 4 * len(self.flows):
            self.heap = [
                (flow.given, next(iter(flow.tickets)), flow)
                for flow in self.flows.values()
                if flow.tickets
            ]
            heapq.heapify(self.heap)

    def drop_idle_flows(self) -> None:
        """Drop tenants without tickets whose virtual time is not ahead of the lane's."""
        if not self.heap:
            self.flows.clear()
        elif len(self.flows) > _STALE_MIN + 2 * len(self.heap):
            self.flows = {
                tenant: flow
                for tenant, flow in self.flows.items()
                if flow.tickets or flow.given > self.now
            }


class FairQueue(Generic[T]):
    """All lanes: at most `depth_max` tickets, with bodies of at most `bytes_max` together."""

    def __init__(self, depth_max: int, bytes_max: int) -> None:
        """Start empty."""
        self.depth = 0
        self.bytes = 0
        self._depth_max = depth_max
        self._bytes_max = bytes_max
        self._lanes: dict[str, _Lane[T]] = {}
        self._last_number = 0
        self._flows_by_length: dict[int, OrderedDict[_Flow[T], None]] = {}
        self._longest = 0

    def push(self, ticket: T) -> T | None:
        """Add a ticket. Return the ticket that was ousted for it; raise QueueFull or BytesFull."""
        ousted = self._make_space(ticket)
        flow = self._get_or_create_flow(ticket)
        if not flow.tickets:
            flow.given = max(flow.given, flow.lane.now)
        self._last_number += 1
        ticket.number = self._last_number
        self._insert(flow, ticket)
        if len(flow.tickets) == 1:
            flow.lane.offer(flow)
        return ousted

    def put_back(self, ticket: T) -> T | None:
        """Return a ticket that was taken to its old place, uncharged: it was refused after all.

        Return the ousted ticket and raise as `push` does.
        """
        ousted = self._make_space(ticket)
        flow = self._get_or_create_flow(ticket)
        # Behind a tenant that has just come: a node refuses one tenant and may admit another.
        flow.given = max(flow.lane.now + 1, flow.given - ticket.tokens)
        self._insert(flow, ticket)
        # Ahead of the tenant's later tickets, behind its earlier ones that were put back before.
        earlier = list(takewhile(lambda number: number < ticket.number, flow.tickets))
        for number in (ticket.number, *reversed(earlier)):
            flow.tickets.move_to_end(number, last=False)
        flow.lane.offer(flow)
        return ousted

    def head(self, name: str) -> T | None:
        """Return the ticket whose turn it is, None if the lane is empty."""
        lane = self._lanes.get(name)
        flow = lane.first() if lane is not None else None
        return next(iter(flow.tickets.values())) if flow is not None else None

    def has_waiting(self, name: str, tenant: TenantId) -> bool:
        """Return whether a tenant has tickets in the lane."""
        lane = self._lanes.get(name)
        flow = lane.flows.get(tenant) if lane is not None else None
        return flow is not None and bool(flow.tickets)

    def take(self, ticket: T, now_s: float) -> None:
        """Remove a ticket that got capacity, and charge its tenant."""
        lane = self._lanes[ticket.lane]
        flow = lane.flows[ticket.tenant]
        self._extract(flow, ticket)
        lane.now = max(lane.now, flow.given)
        flow.given += ticket.tokens
        lane.offer(flow)
        lane.drain.record_start(ticket.tokens, now_s, is_still_full=lane.first() is not None)
        lane.drop_idle_flows()

    def remove(self, ticket: T) -> None:
        """Remove a ticket without charge. Do nothing if it is not in the queue."""
        lane = self._lanes.get(ticket.lane)
        flow = lane.flows.get(ticket.tenant) if lane is not None else None
        if lane is None or flow is None or ticket.number not in flow.tickets:
            return
        was_first = next(iter(flow.tickets)) == ticket.number
        self._extract(flow, ticket)
        if was_first:
            lane.offer(flow)
        lane.first()
        lane.drop_idle_flows()

    def note_full(self, name: str, now_s: float) -> None:
        """Note that a request found no capacity."""
        self._get_or_create_lane(name).drain.record_full(now_s)

    def has_lane(self, name: str) -> bool:
        """Return whether the lane was full recently."""
        return name in self._lanes

    def note_started(self, ticket: T, now_s: float) -> None:
        """Note that a request found capacity without waiting."""
        lane = self._lanes.get(ticket.lane)
        if lane is not None:
            lane.drain.record_start(ticket.tokens, now_s, is_still_full=lane.first() is not None)

    def retry_after_s(self, name: str, tokens: int, now_s: float) -> float:
        """Return when a request of `tokens` that came now would be served, by the drain rate."""
        lane = self._lanes.get(name)
        if lane is None:
            return RETRY_AFTER_UNKNOWN_S
        return lane.drain.wait_s(lane.tokens + tokens, now_s)

    def _make_space(self, ticket: T) -> T | None:
        """Check both bounds for a new ticket; return the ticket ousted for it, if any."""
        lane = self._lanes.get(ticket.lane)
        flow = lane.flows.get(ticket.tenant) if lane is not None else None
        waiting_bytes = flow.bytes if flow is not None else 0
        if waiting_bytes + ticket.bytes > self._bytes_max - self.bytes:
            raise BytesFull
        if self.depth < self._depth_max:
            return None
        if (len(flow.tickets) if flow is not None else 0) + 1 >= self._longest:
            raise QueueFull
        longest = next(iter(self._flows_by_length[self._longest]))
        ousted = next(reversed(longest.tickets.values()))
        self.remove(ousted)
        return ousted

    def _get_or_create_flow(self, ticket: T) -> _Flow[T]:
        lane = self._get_or_create_lane(ticket.lane)
        flow = lane.flows.get(ticket.tenant)
        if flow is None:
            flow = lane.flows[ticket.tenant] = _Flow(lane, ticket.tenant)
        return flow

    def _get_or_create_lane(self, name: str) -> _Lane[T]:
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= LANES_MAX:
                self._lanes = {key: old for key, old in self._lanes.items() if old.tokens}
            lane = self._lanes[name] = _Lane()
        return lane

    def _insert(self, flow: _Flow[T], ticket: T) -> None:
        self._index_length(flow, len(flow.tickets), len(flow.tickets) + 1)
        flow.tickets[ticket.number] = ticket
        flow.lane.tokens += ticket.tokens
        flow.bytes += ticket.bytes
        self.bytes += ticket.bytes
        self.depth += 1

    def _extract(self, flow: _Flow[T], ticket: T) -> None:
        self._index_length(flow, len(flow.tickets), len(flow.tickets) - 1)
        del flow.tickets[ticket.number]
        flow.lane.tokens -= ticket.tokens
        flow.bytes -= ticket.bytes
        self.bytes -= ticket.bytes
        self.depth -= 1

    def _index_length(self, flow: _Flow[T], before: int, after: int) -> None:
        """Move a flow in the index of flows by length, and keep the greatest length."""
        if before:
            flows = self._flows_by_length[before]
            del flows[flow]
            if not flows:
                del self._flows_by_length[before]
        if after:
            self._flows_by_length.setdefault(after, OrderedDict())[flow] = None
        self._longest = max(self._longest, after)
        if self._longest and self._longest not in self._flows_by_length:
            self._longest -= 1
