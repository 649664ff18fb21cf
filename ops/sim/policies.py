"""Routing policies of the field to compare with, each as simple as its own description.

Each router has its own instance. `choose` returns a replica, or None if the request must wait.
"""

import random
from bisect import bisect_left
from typing import Final, Protocol

from ops.sim.router import BelievedLoad, SimulatedRouter
from ops.sim.traces import TraceRequest
from router.decide.affinity import hash64
from router.decide.prefix_index import PrefixIndex, PrefixKeys


class RoutingPolicy(Protocol):
    """One router's policy."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Return the replica that a request goes to, None if it must wait."""

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Note that a request goes to a replica."""


def replicas_with_room(
    router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
) -> dict[int, BelievedLoad]:
    """Return the replicas with room as far as this router knows, with their believed load."""
    found = {}
    for replica in router.by_distance:
        if replica not in refused:
            believed = router.believed(replica, now_s)
            if router.has_room(believed, replica, request):
                found[replica] = believed
    return found


def trace_prefix_keys(request: TraceRequest) -> PrefixKeys:
    """Return a request's blocks as prefix keys: the trace has hashes of blocks."""
    ends = [(n + 1) * request.block_tokens for n in range(len(request.blocks))]
    return PrefixKeys(request.blocks, ends, max(1, request.prompt_tokens))


class StatelessPolicy:
    """Base of the policies that remember nothing."""

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Do nothing."""


class RandomPolicy(StatelessPolicy):
    """Any replica with room."""

    def __init__(self, pop: int) -> None:
        self._chance = random.Random(pop)

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Choose at random."""
        room = list(replicas_with_room(router, request, refused, now_s))
        return self._chance.choice(room) if room else None


class RoundRobinPolicy(StatelessPolicy):
    """All replicas in turn, wherever they are."""

    def __init__(self, pop: int) -> None:
        self._next = pop

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the next replica with room."""
        room = replicas_with_room(router, request, refused, now_s)
        for _ in range(len(router.replicas)):
            self._next = (self._next + 1) % len(router.replicas)
            if self._next in room:
                return self._next
        return None


class NearestOnlyPolicy(StatelessPolicy):
    """The nearest PoP's replicas in turn; the next PoP only if the nearest has no room at all."""

    def __init__(self, pop: int) -> None:
        self._turn = pop

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the next of the nearest with room."""
        room = list(replicas_with_room(router, request, refused, now_s))
        if not room:
            return None
        near = [r for r in room if router.rtt_ms[r] <= router.rtt_ms[room[0]] + 1]
        self._turn += 1
        return near[self._turn % len(near)]


class LeastRequestsPolicy(StatelessPolicy):
    """The replica with fewest requests; the nearest of several."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the least loaded."""
        room = replicas_with_room(router, request, refused, now_s)
        return min(room, key=lambda r: room[r].requests, default=None)


class LeastTokensPolicy(StatelessPolicy):
    """The replica with fewest tokens for its speed; the nearest of several."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the least loaded."""
        room = replicas_with_room(router, request, refused, now_s)
        sites = router.world.sites
        return min(
            room,
            key=lambda r: room[r].tokens / sites[r].profile.prefill_tokens_per_s,
            default=None,
        )


class LeastTokensNearPolicy(StatelessPolicy):
    """The replica with fewest tokens in the nearest PoP that has room."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the least loaded of the nearest."""
        room = replicas_with_room(router, request, refused, now_s)
        nearest = next(iter(room), None)
        if nearest is None:
            return None
        near = [r for r in room if router.rtt_ms[r] <= router.rtt_ms[nearest] + 1]
        return min(near, key=lambda r: room[r].tokens)


class ConsistentHashPolicy(StatelessPolicy):
    """As vllm-router: a ring with 160 points per replica; the next with room is taken."""

    def __init__(self, replicas: int) -> None:
        self._ring = sorted(
            (hash64(f"{replica}/{point}"), replica)
            for replica in range(replicas)
            for point in range(160)
        )

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Walk the ring from the point of the session."""
        room = replicas_with_room(router, request, refused, now_s)
        point = hash64(request.session or str(request.number))
        first = bisect_left(self._ring, (point,))
        for step in range(len(self._ring)):
            replica = self._ring[(first + step) % len(self._ring)][1]
            if replica in room:
                return replica
        return None


class _PrefixTreePolicy:
    """Base of the policies with a history of sent prefixes, bounded as their trees are."""

    def __init__(self) -> None:
        self._index = PrefixIndex(capacity=4_000_000, pairs_max=400_000)

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Remember which prefixes went to the replica."""
        self._index.record_sent(replica, trace_prefix_keys(request), now_s)

    def shares(self, request: TraceRequest, room: dict[int, BelievedLoad]) -> dict[int, float]:
        """Return the share of the prompt that each replica was sent before."""
        matches = self._index.match(trace_prefix_keys(request))
        return {replica: matches.share_at(replica) for replica in room}


class CacheAwarePolicy(_PrefixTreePolicy):
    """sglang's cache_aware policy: the longest match above 0.3, or else the fewest requests.

    If requests are out of balance, by more than 64 and 1.5 times, it also takes the fewest. These
    are the defaults of its last release.
    """

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the longest match, or balance."""
        room = replicas_with_room(router, request, refused, now_s)
        if not room:
            return None
        loads = [believed.requests for believed in room.values()]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            return min(room, key=lambda r: room[r].requests)
        shares = self.shares(request, room)
        best = max(shares, key=lambda r: shares[r])
        if shares[best] > 0.3:
            return best
        return min(room, key=lambda r: room[r].requests)


class SkyLbPolicy(_PrefixTreePolicy):
    """SkyLB: push only to replicas with nothing pending: by prefix in the nearest region, else in
    the next nearest.

    If no replica is free, the request is held for HOLD_S, then goes to the least loaded nearby.
    """

    HOLD_S: Final = 2.0

    def __init__(self) -> None:
        super().__init__()
        self._held_since: dict[int, float] = {}

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take a free replica, or hold the request."""
        room = replicas_with_room(router, request, refused, now_s)
        if not room:
            return None
        shares = self.shares(request, room)
        free = [replica for replica in room if room[replica].prefill_tokens == 0]
        if free:
            self._held_since.pop(request.number, None)
            limit_ms = router.rtt_ms[router.by_distance[0]] + 1
            near = [r for r in free if router.rtt_ms[r] <= limit_ms]
            if near:
                return max(near, key=lambda r: (shares[r], -room[r].tokens))
            return max(free, key=lambda r: (shares[r] > 0.5, -router.rtt_ms[r]))
        since_s = self._held_since.setdefault(request.number, now_s)
        if now_s - since_s < self.HOLD_S:
            return None
        del self._held_since[request.number]
        nearest = next(iter(room))
        near = [r for r in room if router.rtt_ms[r] <= router.rtt_ms[nearest] + 1]
        return min(near, key=lambda r: room[r].prefill_tokens)
