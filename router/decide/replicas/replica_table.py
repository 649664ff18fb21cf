"""The replicas of one deployment as ranking sees them: a slot for each, with its estimates.

Estimates are replaced, never changed, so a snapshot of the replicas shares them (estimates.py).
A replica keeps its slot for as long as the route table has it; the slot is then reused.
"""

from collections.abc import Mapping, Sequence, Set
from math import inf
from typing import Final

from isochrone.native_class import mypyc_attr
from isochrone.wire.ids import PopId, ReplicaId
from isochrone.wire.peers.routes import Route
from router.decide.caches.affinity import hash64
from router.decide.replicas.estimates import EMPTY_SLOT, Estimates, ReplicaEstimate
from router.decide.replicas.latency import (
    UNUSED_REPLICA_MS,
    DepthCost,
    LatencyCorrection,
    moving_average,
    prefill_work,
    prompt_token_ms,
)
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.slot_columns import new_slot_columns, new_slot_values
from router.decide.replicas.tokens_in_flight import ReplicaLoad

NEAREST_RATIO: Final = 1.1
NEAREST_MS: Final = 2.0
"""Replicas this little farther away than the nearest count as nearest too. A request that goes
anywhere else spills over."""

SPILLOVER_LASTS_MS: Final = 2000.0
"""After a request spilled over, the next ones may follow it more easily for this time."""

CONGESTION_CHARGE_MAX: Final = 1.2
"""A request delays those behind it by its prefill time, so ranking counts that time this many times
more when all of the time to first token is queueing that no replica would have spared, and
proportionally less when it is not. A queue that a request joins for a cached prefix while others
are idle does not count: the charge would lengthen such queues, and they the charge."""

QUEUED_SAMPLED: Final = 8
"""One in this many requests is looked at for that: it takes a look at all replicas."""

QUEUED_SMOOTHING: Final = 0.15
"""Weight of one of these in the average share of queueing in the time to first token."""

UNCACHED_SMOOTHING: Final = 0.02
"""Weight of one answer in the average share of prompts that is not cached."""

DECODE_SLOWDOWN: Final = 1.4e-5
"""Each output token reserved by a running request makes reading a prompt slower by this share: a
step that reads also decodes. An answer of 512 tokens costs 0.7 %; engines were measured at 0.3 to
0.4 % (ops/sim/world.py), and the rest keeps replicas with few answers free for the next prompts."""

DECODE_SLOWDOWN_MAX: Final = 1.0
"""Running requests count for at most as much as the prompt itself."""

QUEUE_SHARE_MAX: Final = 0.1
"""An answer with more queueing than this share of its prefill does not teach the depth cost."""


class ReplicaTable:
    """The replicas of one deployment by slot, kept up to date one at a time."""

    def __init__(self) -> None:
        self.slots: dict[ReplicaId, int] = {}
        self.routes: list[Route | None] = []
        self.estimates = Estimates()
        self.columns = new_slot_columns()
        """The fields of the estimates that ranking compares."""
        self.corrections: list[LatencyCorrection] = []
        self.hashes: list[int] = []
        self.weights: list[float] = []
        self.slots_by_pop: dict[PopId, list[int]] = {}
        self.all_slots_mask = 0
        """A bit for each slot that has a replica."""
        self.depth_cost = DepthCost()
        self.spilled_at_ms = -inf
        self.uncached_share = 1.0
        """Average share of prompts that is not cached, for nodes that do not report what is
        pending."""
        self.queued_share = 0.0
        self._sent_count = 0
        self._free_slots: list[int] = []
        self._nearest: frozenset[int] | None = None
        self._rtt_ms = new_slot_values()

    def __len__(self) -> int:
        """Return the number of slots, including those without a replica."""
        return len(self.routes)

    def set_routes(self, routes: Sequence[Route]) -> Set[int]:
        """Hold these replicas and no others; return the slots that lost theirs."""
        kept = {route.replica_id for route in routes}
        freed = set()
        # Snapshots share these: replace them rather than change them.
        self.slots, self.routes = self.slots.copy(), self.routes.copy()
        self.hashes, self.weights = self.hashes.copy(), self.weights.copy()
        for replica_id in [replica_id for replica_id in self.slots if replica_id not in kept]:
            slot = self.slots.pop(replica_id)
            self._free_slot(slot)
            freed.add(slot)
        for route in routes:
            slot = self.slots.get(route.replica_id, -1)
            if slot < 0:
                slot = self._assign_slot(route)
            self.routes[slot] = route
            self.weights[slot] = max(1.0, route.prefill_tokens_per_s)
        self._nearest = None
        self.slots_by_pop = {}
        for route in routes:
            self.slots_by_pop.setdefault(route.pop, []).append(self.slots[route.replica_id])
        self.all_slots_mask = sum(1 << slot for slot in self.slots.values())
        return freed

    def refresh(
        self,
        slot: int,
        rtt_ms: float,
        load: ReplicaLoad,
        now_s: float,
        prefill_wait_ms: float = 0.0,
    ) -> None:
        """Recompute one replica's estimate.

        A prompt waits at least `prefill_wait_ms`, if another replica reads it.
        """
        route = self.routes[slot]
        if route is None:
            return
        if rtt_ms != self._rtt_ms[slot]:
            self._note_round_trip(slot, rtt_ms)
        correction = self.corrections[slot]
        # As gain_at and overhead_ms_at do, but fading once: this runs a dozen times per request.
        retained = correction.retained(now_s)
        reported_gain = correction.reported_gain
        gain = reported_gain + (correction.gain - reported_gain) * retained
        unused_ms = 0.0 if correction.answers else UNUSED_REPLICA_MS
        base_ms = rtt_ms + unused_ms + correction.overhead_ms * retained
        others = load.others.estimate(now_s)
        ms_per_token = prompt_token_ms(route.prefill_tokens_per_s) * gain
        decode_tokens = load.output_tokens + others.decode
        ms_per_token *= 1.0 + min(DECODE_SLOWDOWN_MAX, DECODE_SLOWDOWN * decode_tokens)
        others_prefill = others.reported_prefill + others.assumed_prefill
        tokens = load.prefill_tokens + load.decode_tokens + others_prefill + others.decode
        queued_ms = load.queued_ms + others_prefill * ms_per_token
        estimate = ReplicaEstimate(
            base_ms + 1000 * load.busy_until_s - rtt_ms / 2,
            base_ms + load.wake_ms + max(max(queued_ms, prefill_wait_ms), load.sequence_wait_ms),
            ms_per_token,
            route.tokens_in_flight_max - tokens if tokens >= 1 else inf,
            rtt_ms,
            base_ms,
            correction.spread_ms,
            tokens,
            others.assumed_prefill * ms_per_token,
        )
        self._set_estimate(slot, estimate)

    def prefill_time_ms(self, slot: int, prompt_tokens: float, cached_tokens: float) -> float:
        """Return how long a replica takes to read the uncached part of a prompt."""
        work = prefill_work(prompt_tokens, cached_tokens, self.depth_cost.per_token)
        return work * self.estimates[slot].ms_per_token

    def other_routers_ms(self, slot: int, load: ReplicaLoad, now_s: float) -> float:
        """Return how long a replica takes to read the prompts of other routers that wait there."""
        return load.others.estimate(now_s).prefill * self.estimates[slot].ms_per_token

    def learn_first_token(
        self, slot: int, ranked: RankedRoute, took_ms: float, now_s: float
    ) -> None:
        """Learn from a first token that came `took_ms` after its request was sent."""
        correction = self.corrections[slot]
        computed_ms = ranked.queue_ms + ranked.prefill_ms
        uncorrected_ms = computed_ms / correction.gain_at(now_s)
        certainty = ranked.prefill_ms / computed_ms if computed_ms > 0 else 1.0
        error_ms = correction.learn(
            uncorrected_ms, took_ms - ranked.rtt_ms, now_s, certainty * certainty
        )
        if ranked.queue_ms < QUEUE_SHARE_MAX * ranked.prefill_ms:
            depth = ranked.cached_tokens + ranked.uncached_tokens / 2
            self.depth_cost.learn(ranked.prefill_ms, depth, error_ms)

    def record_prefill_pace(self, slot: int, ns_per_token: int) -> bool:
        """Take the node's measurement of how long a replica takes to read a token, 0 if unknown.

        Return whether the replica's estimate changes.
        """
        route = self.routes[slot]
        if route is None:
            return False
        table_ms = prompt_token_ms(route.prefill_tokens_per_s)
        return self.corrections[slot].record_reported(ns_per_token / 1e6 / table_ms)

    def learn_uncached_share(self, share: float) -> None:
        """Learn from an answer which share of its prompt was not cached."""
        self.uncached_share = moving_average(self.uncached_share, share, UNCACHED_SMOOTHING)

    def record_sent(
        self, slot: int, ranked: RankedRoute, now_s: float, unhealthy: Set[ReplicaId] = frozenset()
    ) -> None:
        """Note whether a request sent to `slot` spills over, and how much of its time every
        replica that is not `unhealthy` would have let it wait."""
        if slot not in self.nearest:
            self.spilled_at_ms = 1000 * now_s
        self._sent_count += 1
        if self._sent_count % QUEUED_SAMPLED == 0:
            queued_share = self._least_wait_ms(1000 * now_s, unhealthy) / max(1.0, ranked.ttft_ms)
            self.queued_share += QUEUED_SMOOTHING * (min(1.0, queued_share) - self.queued_share)

    @property
    def nearest(self) -> frozenset[int]:
        """Return the slots of the nearest replicas."""
        if self._nearest is None:
            shortest = self._rtt_ms.best_two()[0]
            limit_ms = NEAREST_RATIO * self._rtt_ms[shortest] + NEAREST_MS if shortest >= 0 else 0.0
            self._nearest = frozenset(self._rtt_ms.up_to(limit_ms))
        return self._nearest

    def _least_wait_ms(self, now_ms: float, unhealthy: Set[ReplicaId]) -> float:
        """Return the shortest wait, counting also what a replica is farther than the nearest."""
        waits = self.columns.costs(now_ms, 0.0, 0.0)
        for replica_id in unhealthy:
            if (slot := self.slots.get(replica_id, -1)) >= 0:
                waits[slot] = inf
        soonest = waits.best_two()[0]
        if soonest < 0:
            return 0.0
        estimate = self.estimates[soonest]
        nearest_ms = self._rtt_ms[self._rtt_ms.best_two()[0]]
        return max(0.0, waits[soonest] - estimate.base_ms + estimate.rtt_ms - nearest_ms)

    def _note_round_trip(self, slot: int, rtt_ms: float) -> None:
        """Take a new round trip; forget which replicas are nearest if it may change that."""
        self._rtt_ms[slot] = rtt_ms
        nearest = self._nearest
        if nearest is None or slot in nearest:
            self._nearest = None
            return
        # One of these has the shortest round trip, so this is at least the limit.
        farthest_ms = NEAREST_RATIO * max([self._rtt_ms[near] for near in nearest])
        if rtt_ms <= farthest_ms + NEAREST_MS:
            self._nearest = None

    def _assign_slot(self, route: Route) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self.hashes[slot] = hash64(route.replica_id)
            self.corrections[slot] = LatencyCorrection()
        else:
            slot = len(self.routes)
            self.routes.append(route)
            self.corrections.append(LatencyCorrection())
            self.hashes.append(hash64(route.replica_id))
            self.weights.append(1.0)
            self.estimates.append(EMPTY_SLOT)
            self.columns.append()
            self._rtt_ms.append(inf)
        self.slots[route.replica_id] = slot
        return slot

    def _free_slot(self, slot: int) -> None:
        self.routes[slot] = None
        self._set_estimate(slot, EMPTY_SLOT)
        self._rtt_ms[slot] = inf
        self._free_slots.append(slot)

    def _set_estimate(self, slot: int, estimate: ReplicaEstimate) -> None:
        self.estimates.replace(slot, estimate)
        self.columns.replace(
            slot,
            estimate.ready_at_ms,
            estimate.wait_min_ms,
            estimate.ms_per_token,
            estimate.free_tokens,
        )


@mypyc_attr(acyclic=True, free_list_len=1)
class RoutingSnapshot:
    """One deployment at one moment: later events do not change it.

    `ejected_until_s` are the ejected and half-open replicas, and `starting` the share of requests
    that each replica in slow start takes.
    """

    def __init__(
        self,
        table: ReplicaTable,
        now_s: float,
        ejected_until_s: Mapping[ReplicaId, float],
        starting: Mapping[ReplicaId, float],
    ) -> None:
        self.now_ms = 1000 * now_s
        self.slots, self.routes = table.slots, table.routes
        self.slots_by_pop, self.nearest = table.slots_by_pop, table.nearest
        self.hashes, self.weights = table.hashes, table.weights
        self.estimates, self.columns = table.estimates.copy(), table.columns.copy()
        self.depth_cost_per_token = table.depth_cost.per_token
        self.congestion_charge = CONGESTION_CHARGE_MAX * table.queued_share
        self.is_spilling = self.now_ms - table.spilled_at_ms < SPILLOVER_LASTS_MS
        self.ejected_until_s = ejected_until_s
        self.starting = starting
