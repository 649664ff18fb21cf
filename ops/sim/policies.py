"""Routing policies of the field to compare with, each as simple as its own description.

Each router has its own instance. `choose` returns a replica, or None if the request must wait.
"""

import random
from bisect import bisect_left
from typing import Final, Protocol

from ops.sim.router import BelievedLoad, SimulatedRouter
from ops.sim.traces import TraceRequest
from router.decide.caches.affinity import hash64
from router.decide.caches.prefix_index import PrefixIndex, PrefixKeys


class RoutingPolicy(Protocol):
    """One router's policy."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Return the replica that a request goes to, None if it must wait."""

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Note that a request goes to a replica."""


def replicas_with_capacity(
    router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
) -> dict[int, BelievedLoad]:
    """Return the replicas with capacity as far as this router knows, with their believed load."""
    found = {}
    for replica in router.by_distance:
        if replica not in refused:
            believed = router.believed(replica, now_s)
            if router.has_capacity(believed, replica, request):
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
    """Any replica with capacity."""

    def __init__(self, pop: int) -> None:
        self._chance = random.Random(pop)

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Choose at random."""
        candidates = list(replicas_with_capacity(router, request, refused, now_s))
        return self._chance.choice(candidates) if candidates else None


class RoundRobinPolicy(StatelessPolicy):
    """All replicas in turn, wherever they are."""

    def __init__(self, pop: int) -> None:
        self._next = pop

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the next replica with capacity."""
        candidates = replicas_with_capacity(router, request, refused, now_s)
        for _ in range(len(router.replicas)):
            self._next = (self._next + 1) % len(router.replicas)
            if self._next in candidates:
                return self._next
        return None


class NearestOnlyPolicy(StatelessPolicy):
    """The nearest PoP's replicas in turn; the next PoP only if the nearest has no capacity."""

    def __init__(self, pop: int) -> None:
        self._turn = pop

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the next of the nearest with capacity."""
        candidates = list(replicas_with_capacity(router, request, refused, now_s))
        if not candidates:
            return None
        near = [r for r in candidates if router.rtt_ms[r] <= router.rtt_ms[candidates[0]] + 1]
        self._turn += 1
        return near[self._turn % len(near)]


class LeastRequestsPolicy(StatelessPolicy):
    """The replica with fewest requests; the nearest of several."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the least loaded."""
        candidates = replicas_with_capacity(router, request, refused, now_s)
        return min(candidates, key=lambda r: candidates[r].requests, default=None)


class LeastTokensPolicy(StatelessPolicy):
    """The replica with fewest tokens for its speed; the nearest of several."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the least loaded."""
        candidates = replicas_with_capacity(router, request, refused, now_s)
        sites = router.world.sites
        return min(
            candidates,
            key=lambda r: candidates[r].tokens / sites[r].profile.prefill_tokens_per_s,
            default=None,
        )


class LeastTokensNearPolicy(StatelessPolicy):
    """The replica with fewest tokens in the nearest PoP that has capacity."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the least loaded of the nearest."""
        candidates = replicas_with_capacity(router, request, refused, now_s)
        nearest = next(iter(candidates), None)
        if nearest is None:
            return None
        near = [r for r in candidates if router.rtt_ms[r] <= router.rtt_ms[nearest] + 1]
        return min(near, key=lambda r: candidates[r].tokens)


class ConsistentHashPolicy(StatelessPolicy):
    """vllm-router's rule: a ring with 160 points per replica; the next with capacity is taken."""

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
        candidates = replicas_with_capacity(router, request, refused, now_s)
        point = hash64(request.session or str(request.number))
        first = bisect_left(self._ring, (point,))
        for step in range(len(self._ring)):
            replica = self._ring[(first + step) % len(self._ring)][1]
            if replica in candidates:
                return replica
        return None


class _PrefixTreePolicy:
    """Base of the policies with a history of sent prefixes, bounded as their trees are."""

    def __init__(self) -> None:
        self._index = PrefixIndex(capacity=4_000_000, pairs_max=400_000)

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Remember which prefixes went to the replica."""
        self._index.record_sent(replica, trace_prefix_keys(request), now_s)

    def shares(
        self, request: TraceRequest, candidates: dict[int, BelievedLoad]
    ) -> dict[int, float]:
        """Return the share of the prompt that each replica was sent before."""
        matches = self._index.match(trace_prefix_keys(request))
        return {replica: matches.share_at(replica) for replica in candidates}


class CacheAwarePolicy(_PrefixTreePolicy):
    """sglang's cache_aware policy: the longest match above 0.3, or else the fewest requests.

    If requests are out of balance, by more than 64 and 1.5 times, it also takes the fewest. The
    constants are the defaults of its last release.
    """

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take the longest match, or balance."""
        candidates = replicas_with_capacity(router, request, refused, now_s)
        if not candidates:
            return None
        loads = [believed.requests for believed in candidates.values()]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            return min(candidates, key=lambda r: candidates[r].requests)
        shares = self.shares(request, candidates)
        best = max(shares, key=lambda r: shares[r])
        if shares[best] > 0.3:
            return best
        return min(candidates, key=lambda r: candidates[r].requests)


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
        candidates = replicas_with_capacity(router, request, refused, now_s)
        if not candidates:
            return None
        shares = self.shares(request, candidates)
        free = [replica for replica in candidates if candidates[replica].prefill_tokens == 0]
        if free:
            self._held_since.pop(request.number, None)
            limit_ms = router.rtt_ms[router.by_distance[0]] + 1
            near = [r for r in free if router.rtt_ms[r] <= limit_ms]
            if near:
                return max(near, key=lambda r: (shares[r], -candidates[r].tokens))
            return max(free, key=lambda r: (shares[r] > 0.5, -router.rtt_ms[r]))
        since_s = self._held_since.setdefault(request.number, now_s)
        if now_s - since_s < self.HOLD_S:
            return None
        del self._held_since[request.number]
        nearest = next(iter(candidates))
        near = [r for r in candidates if router.rtt_ms[r] <= router.rtt_ms[nearest] + 1]
        return min(near, key=lambda r: candidates[r].prefill_tokens)
