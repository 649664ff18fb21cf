"""Other routers as their sources define them. Each city has its own; the rules are rival_scores.py.

These routers are made for one cluster. Over several cities each gets what llm-d calls saturation:
requests go to the nearest PoP that is not saturated, and if all are, to the least saturated one.
Within the PoP the router decides by its own rule. llm-d and Dynamo read the replicas' caches as
they are now, as if KV events took no time; queues and KV use are as old as all load reports. SkyLB
has its own rule for other regions.
"""

import random
from abc import ABC, abstractmethod
from collections import Counter
from math import inf
from typing import Final

from ops.sim.policies import trace_prefix_keys
from ops.sim.replica import SimulatedReplica
from ops.sim.replica_job import EngineLoad
from ops.sim.rival_scores import (
    LLMD_KV_WEIGHT,
    LLMD_PREFIX_WEIGHT,
    LLMD_QUEUE_WEIGHT,
    SMG_MATCH_MIN,
    DynamoLoad,
    aibrix_least_loaded_if_imbalanced,
    aibrix_matched_replica,
    dynamo_cost,
    llmd_kv_score,
    llmd_prefix_score,
    llmd_queue_scores,
    llmd_saturation,
    smg_is_imbalanced,
)
from ops.sim.router import SimulatedRouter
from ops.sim.traces import TraceRequest
from router.decide.caches.prefix_index import PrefixIndex

LOCAL_MS: Final = 1.0
"""Replicas within this of the nearest one's round trip are in the router's own region."""

DYNAMO_BLOCK_TOKENS: Final = 16


class RivalPolicy(ABC):
    """Base: a rival's choice and other events, and how long requests wait for capacity.

    Most rivals learn from some of the events only.
    """

    retry_interval_s = 0.1
    queue_timeout_s = 10.0

    @abstractmethod
    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Return the replica for a request, None if it must wait."""

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:  # noqa: B027
        """Note that a request goes to a replica."""

    def record_first_token(self, request: TraceRequest, replica: int) -> None:  # noqa: B027
        """Note the first token of an answer."""

    def record_end(self, request: TraceRequest, replica: int) -> None:  # noqa: B027
        """Note the end of an answer, a refusal or a failure."""


class PopRival(RivalPolicy):
    """Base of the rivals made for one cluster: over several cities, the nearest not full."""

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Choose within the nearest PoP that is not saturated."""
        loads = engine_loads(router, refused, now_s)
        if not loads:
            return None
        pop = _nearest_unsaturated(router, loads)
        return self.choose_among({r: loads[r] for r in pop}, router, request, now_s)

    @abstractmethod
    def choose_among(
        self,
        loads: dict[int, EngineLoad],
        router: SimulatedRouter,
        request: TraceRequest,
        now_s: float,
    ) -> int | None:
        """Choose one of the replicas of a PoP, whose reported loads these are."""


def engine_loads(
    router: SimulatedRouter, refused: frozenset[int], now_s: float
) -> dict[int, EngineLoad]:
    """Return the newest reports of the engines, the nearest replica first."""
    at_s = router.reported_at_s(now_s)
    return {
        replica: router.replicas[replica].engine_load_at(at_s)
        for replica in router.by_distance
        if replica not in refused
    }


def _nearest_unsaturated(router: SimulatedRouter, loads: dict[int, EngineLoad]) -> list[int]:
    """Return the replicas of the nearest PoP that is not saturated, or of the least saturated."""
    pops: dict[int, list[int]] = {}
    for replica in loads:
        pops.setdefault(router.world.sites[replica].pop, []).append(replica)
    saturation = {
        pop: llmd_saturation(
            {r: loads[r].waiting for r in replicas}, {r: loads[r].kv_usage for r in replicas}
        )
        for pop, replicas in pops.items()
    }
    found = next((pop for pop in pops if saturation[pop] < 1), None)
    return pops[min(saturation, key=lambda pop: saturation[pop]) if found is None else found]


class LlmdPolicy(PopRival):
    """llm-d's default profile: queue 2, KV use 2, prefix 3; equal scores by chance."""

    def __init__(self, pop: int, replicas: list[SimulatedReplica]) -> None:
        self._replicas = replicas
        self._chance = random.Random(pop)

    def choose_among(
        self,
        loads: dict[int, EngineLoad],
        router: SimulatedRouter,
        request: TraceRequest,
        now_s: float,
    ) -> int | None:
        """Take the highest weighted sum of scores."""
        queues = llmd_queue_scores({replica: load.waiting for replica, load in loads.items()})
        blocks = len(request.blocks)
        scores = {}
        for replica, load in loads.items():
            matched = self._replicas[replica].cached(request) // request.block_tokens
            scores[replica] = (
                LLMD_QUEUE_WEIGHT * queues[replica]
                + LLMD_KV_WEIGHT * llmd_kv_score(load.kv_usage)
                + LLMD_PREFIX_WEIGHT * llmd_prefix_score(matched, blocks)
            )
        best = max(scores.values())
        return self._chance.choice([r for r, score in scores.items() if score == best])


class DynamoPolicy(PopRival):
    """Dynamo's KV router: its own bookings, and caches by events and its own recent decisions."""

    def __init__(self, pop: int, replicas: list[SimulatedReplica]) -> None:
        self._replicas = replicas
        self._chance = random.Random(pop)
        self._prefill_tokens: Counter[int] = Counter()
        self._blocks: list[Counter[int]] = [Counter() for _ in replicas]
        """For each replica, how many of its active requests hold each trace block."""
        self._tail_tokens: Counter[int] = Counter()
        self._booked: dict[int, int] = {}
        """Prefill tokens that are booked for a request, until its first token."""

    def choose_among(
        self,
        loads: dict[int, EngineLoad],
        router: SimulatedRouter,
        request: TraceRequest,
        now_s: float,
    ) -> int | None:
        """Take the lowest cost, equal ones by chance."""
        blocks = request.prompt_tokens / DYNAMO_BLOCK_TOKENS
        costs = {replica: dynamo_cost(self._load(replica, request), blocks) for replica in loads}
        best = min(costs.values())
        return self._chance.choice([r for r, cost in costs.items() if cost == best])

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Book the uncached tokens and the blocks."""
        cached = self._replicas[replica].cached(request, self._blocks[replica].keys())
        self._booked[request.number] = request.prompt_tokens - cached
        self._prefill_tokens[replica] += request.prompt_tokens - cached
        self._blocks[replica].update(request.blocks)
        self._tail_tokens[replica] += _tail_tokens(request)

    def record_first_token(self, request: TraceRequest, replica: int) -> None:
        """Take the prompt off the prefill load."""
        self._prefill_tokens[replica] -= self._booked.pop(request.number, 0)

    def record_end(self, request: TraceRequest, replica: int) -> None:
        """Take everything off."""
        self.record_first_token(request, replica)
        blocks = self._blocks[replica]
        for block in request.blocks:
            blocks[block] -= 1
            if blocks[block] <= 0:
                del blocks[block]
        self._tail_tokens[replica] -= _tail_tokens(request)

    def _load(self, replica: int, request: TraceRequest) -> DynamoLoad:
        active = self._blocks[replica]
        tokens = len(active) * request.block_tokens + self._tail_tokens[replica]
        overlap = self._replicas[replica].cached(request, active.keys())
        return DynamoLoad(
            self._prefill_tokens[replica] / DYNAMO_BLOCK_TOKENS,
            tokens / DYNAMO_BLOCK_TOKENS,
            overlap / DYNAMO_BLOCK_TOKENS,
        )


def _tail_tokens(request: TraceRequest) -> int:
    return request.prompt_tokens - len(request.blocks) * request.block_tokens


class _HistoryPolicy(RivalPolicy):
    """Base of the rivals that know caches from their own history of sent prompts."""

    def __init__(self, pop: int) -> None:
        self._index = PrefixIndex(capacity=4_000_000, pairs_max=400_000)
        self._chance = random.Random(pop)
        self._sent = 0
        self._last_sent: Counter[int] = Counter()
        self._processed: Counter[int] = Counter()

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Remember which prefixes went to the replica."""
        self._index.record_sent(replica, trace_prefix_keys(request), now_s)
        self._sent += 1
        self._last_sent[replica] = self._sent
        self._processed[replica] += 1

    def shares(self, request: TraceRequest, replicas: dict[int, EngineLoad]) -> dict[int, float]:
        """Return the share of the prompt that each replica was sent before."""
        matches = self._index.match(trace_prefix_keys(request))
        return {replica: matches.share_at(replica) for replica in replicas}


class AibrixPolicy(_HistoryPolicy, PopRival):
    """AIBrix's prefix-cache routing; its gateway counts the running requests itself."""

    def choose_among(
        self,
        loads: dict[int, EngineLoad],
        router: SimulatedRouter,
        request: TraceRequest,
        now_s: float,
    ) -> int | None:
        """Take the longest match that is not overloaded, else the fewest requests."""
        requests = {replica: router.believed(replica, now_s).requests for replica in loads}
        allowed = aibrix_least_loaded_if_imbalanced(requests) or set(requests)
        percents = {
            replica: int(100 * share)
            for replica, share in self.shares(request, loads).items()
            if share > 0 and replica in allowed
        }
        matched = aibrix_matched_replica(requests, percents, self._chance) if percents else None
        if matched is not None:
            return matched
        fewest = min(requests.values())
        return self._chance.choice([r for r, count in requests.items() if count == fewest])


class SmgPolicy(_HistoryPolicy, PopRival):
    """smg's cache_aware policy over HTTP, with its defaults."""

    def choose_among(
        self,
        loads: dict[int, EngineLoad],
        router: SimulatedRouter,
        request: TraceRequest,
        now_s: float,
    ) -> int | None:
        """Take the longest match above a half, else the fewest requests, then the least used."""
        requests = {replica: router.believed(replica, now_s).requests for replica in loads}
        fewest = min(requests, key=lambda r: (requests[r], self._processed[r], r))
        if smg_is_imbalanced(list(requests.values())):
            return fewest
        shares = self.shares(request, loads)
        best = max(shares, key=lambda r: (shares[r], self._last_sent[r]))
        return best if shares[best] > SMG_MATCH_MIN else fewest


class ProductionStackPolicy(PopRival):
    """vLLM production-stack's prefixaware router (a6c01db0, routing_logic.py): any of the replicas
    with the longest match in a trie that forgets nothing; without a match any replica."""

    def __init__(self, pop: int) -> None:
        self._chance = random.Random(pop)
        self._holders: dict[int, set[int]] = {}

    def choose_among(
        self,
        loads: dict[int, EngineLoad],
        router: SimulatedRouter,
        request: TraceRequest,
        now_s: float,
    ) -> int | None:
        """Walk the trie as far as a replica is left, and take any of those."""
        left = set(loads)
        for block in request.blocks:
            holders = self._holders.get(block, set()) & left
            if not holders:
                break
            left = holders
        return self._chance.choice(sorted(left))

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Insert the prompt into the trie."""
        for block in request.blocks:
            self._holders.setdefault(block, set()).add(replica)


class SkyLbSourcePolicy(_HistoryPolicy):
    """SkyLB's prototype (skypilot, sky/serve/load_balancer.py and load_balancing_policies.py).

    A replica is free while its engine reports no waiting request; one whose prompt is being read is
    not waiting. Among the free local ones: the longest match above a half, else the fewest requests
    that this balancer has there. If none is free, a balancer of another region that has a free one
    gets the request, by the same rule over regions, else the nearest; and if there is none, the
    request stays in this balancer's queue for as long as that takes.
    """

    retry_interval_s = 0.02
    queue_timeout_s = inf

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Take a free replica, or hold the request."""
        loads = engine_loads(router, refused, now_s)
        free = {replica: load for replica, load in loads.items() if not load.waiting}
        if not free:
            return None
        limit_ms = router.rtt_ms[router.by_distance[0]] + LOCAL_MS
        local = {r: load for r, load in free.items() if router.rtt_ms[r] <= limit_ms}
        if local:
            return self._by_prefix(local, request, router)
        shares = self.shares(request, free)
        best = max(shares, key=lambda r: shares[r])
        first = best if shares[best] > SMG_MATCH_MIN else next(iter(free))
        pop = router.world.sites[first].pop
        region = {r: load for r, load in free.items() if router.world.sites[r].pop == pop}
        return self._by_prefix(region, request, router)

    def _by_prefix(
        self, free: dict[int, EngineLoad], request: TraceRequest, router: SimulatedRouter
    ) -> int:
        shares = self.shares(request, free)
        own = router.own_requests
        best = max(shares, key=lambda r: (shares[r], -own(r)))
        return best if shares[best] > SMG_MATCH_MIN else min(free, key=lambda r: (own(r), r))
