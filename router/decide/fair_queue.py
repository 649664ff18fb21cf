"""Whose turn it is: requests that wait for room, in an order fair between tenants.

Rule 1: a tenant's own requests keep their order. Between tenants, the one goes first that was given
the fewest tokens while it waited (virtual time): whoever floods, waits behind his own flood.
Rule 2: a tenant that comes after a pause starts level with the others. What it did not use is not
saved up, and a tenant is passed by each other one at most once before its own turn.
Rule 3: only what was served is charged. Who leaves, or is refused, has cost its tenant nothing.
Rule 4: there is a bound. When it is reached, the tenant that waits with most gives up his newest
for one who waits with fewer; otherwise the newcomer is turned away.
Rule 5: bytes are bounded too. A tenant may have no more of them waiting than are still free: one
alone gets half, and whoever comes later finds room whatever the others sent.

Each deployment is a lane of its own: room at one replica is no room for another deployment. Every
operation takes O(log n) of the tenants that wait.
"""

import heapq
from collections import OrderedDict
from itertools import takewhile
from typing import Final, Generic, TypeVar

from isochrone.wire.ids import DeploymentId, TenantId
from router.decide.retry_after import RETRY_AFTER_UNKNOWN_S, DrainRate

LANES_MAX: Final = 1024


class QueueFull(Exception):
    """As many wait already as may, and no one with more than this tenant has."""


class BytesFull(Exception):
    """This tenant's waiting bodies would be more bytes than are still free."""


class Ticket:
    """One waiting request: whose, for what, how many tokens it wants, how many bytes it is."""

    __slots__ = ("bytes", "lane", "number", "tenant", "tokens")

    def __init__(
        self, lane: DeploymentId, tenant: TenantId, tokens: int, size_bytes: int = 0
    ) -> None:
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
    """The flows of one deployment. `now` is the virtual time of the last one served."""

    def __init__(self) -> None:
        self.flows: dict[TenantId, _Flow[T]] = {}
        self.heap: list[tuple[int, int, _Flow[T]]] = []
        self.now = 0
        self.tokens = 0
        self.drain = DrainRate()

    def first(self) -> _Flow[T] | None:
        """Return the flow whose turn it is, dropping what the heap holds of flows that moved."""
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
        if len(self.heap) > 64 + 4 * len(self.flows):
            self.heap = [
                (flow.given, next(iter(flow.tickets)), flow)
                for flow in self.flows.values()
                if flow.tickets
            ]
            heapq.heapify(self.heap)

    def settle(self) -> None:
        """Forget the tenants that wait with nothing and are owed no patience."""
        if not self.heap:
            self.flows.clear()
        elif len(self.flows) > 64 + 2 * len(self.heap):
            self.flows = {
                tenant: flow
                for tenant, flow in self.flows.items()
                if flow.tickets or flow.given > self.now
            }


class FairQueue(Generic[T]):
    """Everyone who waits, in all lanes: at most `depth_max`, with bodies of at most `bytes_max`."""

    def __init__(self, depth_max: int, bytes_max: int) -> None:
        """Begin with nobody waiting."""
        self.depth = 0
        self.bytes = 0
        self._depth_max = depth_max
        self._bytes_max = bytes_max
        self._lanes: dict[DeploymentId, _Lane[T]] = {}
        self._number = 0
        # Flows by how many tickets they hold; `_deepest` is the fullest shelf.
        self._shelves: dict[int, OrderedDict[_Flow[T], None]] = {}
        self._deepest = 0

    def push(self, ticket: T) -> T | None:
        """Take a ticket in. Returns whoever had to make way; raises QueueFull or BytesFull."""
        ousted = self._make_way(ticket)
        flow = self._flow(ticket)
        if not flow.tickets:
            flow.given = max(flow.given, flow.lane.now)
        self._number += 1
        ticket.number = self._number
        self._insert(flow, ticket)
        if len(flow.tickets) == 1:
            flow.lane.offer(flow)
        return ousted

    def put_back(self, ticket: T) -> T | None:
        """The room that `ticket` took was none: it stands where it stood, uncharged.

        As with `push`, someone may have to make way.
        """
        ousted = self._make_way(ticket)
        flow = self._flow(ticket)
        flow.given = max(flow.lane.now, flow.given - ticket.tokens)
        self._insert(flow, ticket)
        # Ahead of the tenant's own that came after it, behind those put back that came before.
        earlier = list(takewhile(lambda number: number < ticket.number, flow.tickets))
        for number in (ticket.number, *reversed(earlier)):
            flow.tickets.move_to_end(number, last=False)
        flow.lane.offer(flow)
        return ousted

    def head(self, deployment_id: DeploymentId) -> T | None:
        """Return whose turn it is; None where nobody waits."""
        lane = self._lanes.get(deployment_id)
        flow = lane.first() if lane is not None else None
        return next(iter(flow.tickets.values())) if flow is not None else None

    def take(self, ticket: T, now_s: float) -> None:
        """The ticket's turn came and it got room: its tenant is charged."""
        lane = self._lanes[ticket.lane]
        flow = lane.flows[ticket.tenant]
        self._pull(flow, ticket)
        lane.now = max(lane.now, flow.given)
        flow.given += ticket.tokens
        lane.offer(flow)
        lane.drain.began(ticket.tokens, now_s, is_still_full=lane.first() is not None)
        lane.settle()

    def remove(self, ticket: T) -> None:
        """The ticket leaves without its turn. Nothing where it does not wait."""
        lane = self._lanes.get(ticket.lane)
        flow = lane.flows.get(ticket.tenant) if lane is not None else None
        if lane is None or flow is None or ticket.number not in flow.tickets:
            return
        was_first = next(iter(flow.tickets)) == ticket.number
        self._pull(flow, ticket)
        if was_first:
            lane.offer(flow)
        lane.first()
        lane.settle()

    def note_full(self, deployment_id: DeploymentId, now_s: float) -> None:
        """Note that a request found no room."""
        self._lane(deployment_id).drain.full(now_s)

    def has_lane(self, deployment_id: DeploymentId) -> bool:
        """Say whether the deployment was ever full, of late."""
        return deployment_id in self._lanes

    def note_started(self, ticket: T, now_s: float) -> None:
        """Note that a request found room without waiting."""
        lane = self._lanes.get(ticket.lane)
        if lane is not None:
            lane.drain.began(ticket.tokens, now_s, is_still_full=lane.first() is not None)

    def retry_after_s(self, deployment_id: DeploymentId, tokens: int, now_s: float) -> float:
        """Return when a request of `tokens` that came now would be served, by the drain so far."""
        lane = self._lanes.get(deployment_id)
        if lane is None:
            return RETRY_AFTER_UNKNOWN_S
        return lane.drain.wait_s(lane.tokens + tokens, now_s)

    def _make_way(self, ticket: T) -> T | None:
        lane = self._lanes.get(ticket.lane)
        flow = lane.flows.get(ticket.tenant) if lane is not None else None
        held_bytes = flow.bytes if flow is not None else 0
        if held_bytes + ticket.bytes > self._bytes_max - self.bytes:
            raise BytesFull
        if self.depth < self._depth_max:
            return None
        if (len(flow.tickets) if flow is not None else 0) + 1 >= self._deepest:
            raise QueueFull
        deepest = next(iter(self._shelves[self._deepest]))
        ousted = next(reversed(deepest.tickets.values()))
        self.remove(ousted)
        return ousted

    def _flow(self, ticket: T) -> _Flow[T]:
        lane = self._lane(ticket.lane)
        flow = lane.flows.get(ticket.tenant)
        if flow is None:
            flow = lane.flows[ticket.tenant] = _Flow(lane, ticket.tenant)
        return flow

    def _lane(self, deployment_id: DeploymentId) -> _Lane[T]:
        lane = self._lanes.get(deployment_id)
        if lane is None:
            if len(self._lanes) >= LANES_MAX:
                self._lanes = {name: old for name, old in self._lanes.items() if old.tokens}
            lane = self._lanes[deployment_id] = _Lane()
        return lane

    def _insert(self, flow: _Flow[T], ticket: T) -> None:
        self._shelve(flow, len(flow.tickets), len(flow.tickets) + 1)
        flow.tickets[ticket.number] = ticket
        flow.lane.tokens += ticket.tokens
        flow.bytes += ticket.bytes
        self.bytes += ticket.bytes
        self.depth += 1

    def _pull(self, flow: _Flow[T], ticket: T) -> None:
        self._shelve(flow, len(flow.tickets), len(flow.tickets) - 1)
        del flow.tickets[ticket.number]
        flow.lane.tokens -= ticket.tokens
        flow.bytes -= ticket.bytes
        self.bytes -= ticket.bytes
        self.depth -= 1

    def _shelve(self, flow: _Flow[T], before: int, after: int) -> None:
        if before:
            shelf = self._shelves[before]
            del shelf[flow]
            if not shelf:
                del self._shelves[before]
        if after:
            self._shelves.setdefault(after, OrderedDict())[flow] = None
        self._deepest = max(self._deepest, after)
        if self._deepest and self._deepest not in self._shelves:
            self._deepest -= 1
