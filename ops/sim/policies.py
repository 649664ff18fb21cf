"""How others choose: the policies of the field, each as simple as its own description.

Each router holds its own instance, as each process does. `choose` returns a replica, or None where
the request should wait.
"""

import random
from typing import Protocol

from ops.sim.router import BelievedLoad, SimulatedRouter
from ops.sim.traces import TraceRequest
from router.decide.affinity import hash64
from router.decide.prefix_index import PrefixIndex, PrefixKeys


class RoutingPolicy(Protocol):
    """One router's way to choose."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Return which replica a request goes to, or None."""

    def sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """A request went there."""


def replicas_with_room(
    router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
) -> dict[int, BelievedLoad]:
    """Return who has room as far as this router knows, with what it believes of them."""
    found = {}
    for replica in router.by_distance:
        if replica not in refused:
            believed = router.believed(replica, now_s)
            if router.has_room(believed, replica, request):
                found[replica] = believed
    return found


def trace_prefix_keys(request: TraceRequest) -> PrefixKeys:
    """Return a request's blocks as prefix keys: the trace hashed them already."""
    ends = [(n + 1) * request.block_tokens for n in range(len(request.blocks))]
    return PrefixKeys(request.blocks, ends, max(1, request.prompt_tokens))


class StatelessPolicy:
    """What the simple policies share: nothing to remember."""

    def sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Remember nothing."""


class RandomPolicy(StatelessPolicy):
    """Anyone with room."""

    def __init__(self, pop: int) -> None:
        self._chance = random.Random(pop)

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Draw one."""
        room = list(replicas_with_room(router, request, refused, now_s))
        return self._chance.choice(room) if room else None


class RoundRobinPolicy(StatelessPolicy):
    """One after the other, wherever."""

    def __init__(self, pop: int) -> None:
        self._next = pop

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the next one with room."""
        room = replicas_with_room(router, request, refused, now_s)
        for _ in range(len(router.replicas)):
            self._next = (self._next + 1) % len(router.replicas)
            if self._next in room:
                return self._next
        return None


class NearestOnlyPolicy(StatelessPolicy):
    """The nearest PoP's replicas in turn; the next PoP only where that one has no room at all."""

    def __init__(self, pop: int) -> None:
        self._turn = pop

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take one of the nearest that have room."""
        room = list(replicas_with_room(router, request, refused, now_s))
        if not room:
            return None
        near = [r for r in room if router.rtt_ms[r] <= router.rtt_ms[room[0]] + 1]
        self._turn += 1
        return near[self._turn % len(near)]


class LeastRequestsPolicy(StatelessPolicy):
    """Whoever has the fewest requests; the nearest of them."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the least."""
        room = replicas_with_room(router, request, refused, now_s)
        return min(room, key=lambda r: room[r].requests, default=None)


class LeastTokensPolicy(StatelessPolicy):
    """Whoever has the fewest tokens for its speed; the nearest of them."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the least."""
        room = replicas_with_room(router, request, refused, now_s)
        sites = router.world.sites
        return min(
            room,
            key=lambda r: room[r].tokens / sites[r].profile.prefill_tokens_per_s,
            default=None,
        )


class LeastTokensNearPolicy(StatelessPolicy):
    """Least tokens among the replicas of the nearest PoP that has room."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the least of the nearest."""
        room = replicas_with_room(router, request, refused, now_s)
        nearest = next(iter(room), None)
        if nearest is None:
            return None
        near = [r for r in room if router.rtt_ms[r] <= router.rtt_ms[nearest] + 1]
        return min(near, key=lambda r: room[r].tokens)


class ConsistentHashPolicy(StatelessPolicy):
    """A ring of 160 points each, by session; the next with room along it. As vllm-router has it."""

    def __init__(self, replicas: int) -> None:
        self._ring = sorted(
            (hash64(f"{replica}/{point}"), replica)
            for replica in range(replicas)
            for point in range(160)
        )

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Walk the ring from the session's point."""
        room = replicas_with_room(router, request, refused, now_s)
        at = hash64(request.session or str(request.number))
        low, high = 0, len(self._ring)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._ring[middle][0] < at else (low, middle)
        for step in range(len(self._ring)):
            replica = self._ring[(low + step) % len(self._ring)][1]
            if replica in room:
                return replica
        return None


class _PrefixTreePolicy:
    """A router's own history of prefixes, bounded as those trees are."""

    def __init__(self) -> None:
        self._index = PrefixIndex(capacity=4_000_000, pairs_max=400_000)

    def sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Remember what went where."""
        self._index.sent(replica, trace_prefix_keys(request), now_s)

    def shares(self, request: TraceRequest, room: dict[int, BelievedLoad]) -> dict[int, float]:
        """Return which share of the prompt each replica was sent before."""
        held = self._index.match(trace_prefix_keys(request))
        return {replica: held.share_at(replica) for replica in room}


class CacheAwarePolicy(_PrefixTreePolicy):
    """sglang's cache_aware: the longest match above 0.3 while requests balance, else the shortest.

    Balance and defaults as of its last release: spread of more than 64 and 1.5 times.
    """

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Match or balance."""
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
    """SkyLB: push only where nothing is pending, at home by prefix; else the nearest region so.

    Where nobody is free the request is held a while, then goes to the least loaded at home.
    """

    HOLD_S = 2.0

    def __init__(self) -> None:
        super().__init__()
        self._held_since: dict[int, float] = {}

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Push selectively."""
        room = replicas_with_room(router, request, refused, now_s)
        if not room:
            return None
        shares = self.shares(request, room)
        free = [replica for replica in room if room[replica].prefill_tokens == 0]
        if free:
            self._held_since.pop(request.number, None)
            home = [r for r in free if router.rtt_ms[r] <= router.rtt_ms[router.by_distance[0]] + 1]
            if home:
                return max(home, key=lambda r: (shares[r], -room[r].tokens))
            return max(free, key=lambda r: (shares[r] > 0.5, -router.rtt_ms[r]))
        since_s = self._held_since.setdefault(request.number, now_s)
        if now_s - since_s < self.HOLD_S:
            return None
        del self._held_since[request.number]
        nearest = next(iter(room))
        near = [r for r in room if router.rtt_ms[r] <= router.rtt_ms[nearest] + 1]
        return min(near, key=lambda r: room[r].prefill_tokens)
