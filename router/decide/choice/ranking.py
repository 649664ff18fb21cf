"""Rank the replicas of a deployment by predicted time to first token.

predicted = round trip + overhead + queue wait + uncached prompt tokens * time per token

The estimates behind it are corrected by observation (latency.py) and kept per slot
(replica_table.py), so ranking is a few passes over one list. When requests often find a queue, a
request is also charged for the delay that its prefill causes to those behind it (the congestion
charge), which favours replicas that have its prompt cached.
"""

import sys
from collections.abc import Sequence, Set
from math import inf
from typing import Final

from isochrone.wire.ids import ReplicaId
from router.decide.caches.affinity import hash64, rendezvous_winner, within_load_bound
from router.decide.caches.prefix_index import NO_MATCHES
from router.decide.choice.route_query import RouteQuery as RouteQuery
from router.decide.choice.slot_costs import SlotCosts, slot_costs
from router.decide.replicas.latency import prefill_work
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.replica_table import RoutingSnapshot

ALIKE_MS: Final = 2.0
ALIKE_RATIO: Final = 0.05
ALIKE_SPREADS: Final = 0.25
"""Replicas within this distance of the best count as alike: in ms, as a share of its time, or as a
share of its usual prediction error. A hash of the request chooses among them, so that routers with
the same knowledge do not all choose the same replica."""

SESSION_ALIKE_MS: Final = 20.0
SESSION_ALIKE_RATIO: Final = 0.25
"""The same for the first request of a session. Wider, so that all routers of a region find the same
candidates, of which the session's hash chooses one."""

STICKY_MS: Final = 20.0
STICKY_RATIO: Final = 0.5
"""A session stays at its replica while that is at most this much slower than the best."""

SPILLOVER_MS: Final = 10.0
SPILLOVER_RATIO: Final = 0.1
"""The first request to leave the nearest replicas must save this much; while requests spill over,
the next ones need only be sooner."""

UNEXPECTED_QUEUE_MS: Final = 20.0
"""A replica refuses a request only if its queue is longer than predicted by more than this."""

REFUSAL_FACTOR: Final = 1.5
QUEUE_REFUSALS_MAX: Final = 12
"""Each refusal multiplies that, up to this many: replicas are busier everywhere than this router
knows, and each further refusal costs a round trip. So a burst of short prompts does not wander."""


MAX_MS: Final = sys.float_info.max
"""Any cost but an infinite one is at most this."""


class RankedRoutes(Sequence[RankedRoute]):
    """The replicas with capacity, best first. A route is computed when it is read.

    Mostly only the first one is used.
    """

    def __init__(
        self,
        snapshot: RoutingSnapshot,
        query: RouteQuery,
        costs: SlotCosts,
        first: int = -1,
        reason: str = "",
        next_best_ms: float = inf,
    ) -> None:
        """Put slot `first` at the head; `next_best_ms` is the lowest cost of the other slots."""
        self._snapshot = snapshot
        self._query = query
        self._costs = costs
        self._first = first
        self._reason = reason
        self._next_best_ms = next_best_ms
        self._order: Sequence[int] | None = None

    def __len__(self) -> int:
        return self._costs.values.count_up_to(MAX_MS)

    def __bool__(self) -> bool:
        return self._first >= 0

    def __getitem__(self, rank: int) -> RankedRoute:  # type: ignore[override]
        if rank == 0 and self._first >= 0:
            return self._route(self._first, self._reason)
        slot = self._slots()[rank]
        return self._route(slot, _place_reason(self._snapshot, slot))

    @property
    def full_count(self) -> int:
        """Return how many replicas were passed over because they have no capacity."""
        return len(self._costs.values) - len(self) - self._costs.excluded_count

    @property
    def congestion_charge(self) -> float:
        """Return how many times more ranking counts a request's prefill."""
        return self._snapshot.congestion_charge

    def route_to(self, replica_id: ReplicaId) -> RankedRoute | None:
        """Return the route to the replica that a request was handed to, None if it is unknown."""
        slot = self._snapshot.slots.get(replica_id, -1)
        return self._route(slot, "handed-off") if slot >= 0 else None

    def peers_of_first(self, count_max: int) -> list[RankedRoute]:
        """Return the first route and the best others in its PoP; nothing if there are no others."""
        snapshot, costs = self._snapshot, self._costs
        route = snapshot.routes[self._first]
        in_pop = snapshot.slots_by_pop.get(route.pop, ()) if route is not None else ()
        peers = [slot for slot in in_pop if costs.at(slot) < inf and slot != self._first]
        if not peers:
            return []
        peers.sort(key=costs.at)
        return [self._route(slot, "") for slot in (self._first, *peers[: count_max - 1])]

    def _slots(self) -> Sequence[int]:
        if self._order is None:
            values = self._costs.values
            rest = [slot for slot in values.up_to(MAX_MS) if slot != self._first]
            rest.sort(key=values.__getitem__)
            self._order = [self._first, *rest] if self._first >= 0 else rest
        return self._order

    def _queue_tokens_max(self) -> int:
        """Return how much may wait at the first replica before the next best would be sooner.

        The assumed part of the predicted queue does not count: the node knows its real queue.
        """
        if self._next_best_ms == inf:
            return 0
        snapshot, estimate = self._snapshot, self._snapshot.estimates[self._first]
        reported_ms = estimate.wait_min_ms - estimate.assumed_queue_ms
        known_ms = max(estimate.ready_at_ms - snapshot.now_ms, reported_ms) - estimate.base_ms
        ahead_ms = max(0.0, self._next_best_ms - self._costs.at(self._first))
        refusals = min(QUEUE_REFUSALS_MAX, self._query.queue_refusals)
        unexpected_ms: float = UNEXPECTED_QUEUE_MS * REFUSAL_FACTOR**refusals
        limit_ms = known_ms + ahead_ms + estimate.rtt_ms + unexpected_ms
        return max(1, round(limit_ms / estimate.ms_per_token))

    def _route(self, slot: int, reason: str) -> RankedRoute:
        snapshot, query = self._snapshot, self._query
        route = snapshot.routes[slot]
        assert route is not None, f"slot {slot} is ranked without a replica"
        cached = _cached_tokens(snapshot, query, slot)
        work = prefill_work(query.prompt_tokens, cached, snapshot.depth_cost_per_token)
        estimate = snapshot.estimates[slot]
        wait_ms = max(estimate.ready_at_ms - snapshot.now_ms, estimate.wait_min_ms)
        return RankedRoute(
            route,
            reason,
            rtt_ms=estimate.rtt_ms,
            overhead_ms=estimate.base_ms - estimate.rtt_ms,
            queue_ms=wait_ms - estimate.base_ms,
            prefill_ms=work * estimate.ms_per_token,
            ms_per_token=estimate.ms_per_token,
            cached_tokens=cached,
            uncached_tokens=query.prompt_tokens - cached,
            pending_prefill_tokens=int(work + 0.5),
            queue_tokens_max=self._queue_tokens_max() if slot == self._first else 0,
        )


def rank(
    snapshot: RoutingSnapshot, query: RouteQuery, excluded: Set[ReplicaId] = frozenset()
) -> RankedRoutes:
    """Rank the replicas that have capacity, best first, without those `excluded`."""
    costs = slot_costs(snapshot, query, excluded)
    best_two = costs.best_two()
    best, second_ms = best_two.slot, best_two.second_ms
    if best < 0:
        return RankedRoutes(snapshot, query, costs)
    first, reason = _choose(snapshot, query, costs, best, second_ms)
    next_best_ms = second_ms if first == best else costs.at(best)
    return RankedRoutes(snapshot, query, costs, first, reason, next_best_ms)


def _choose(
    snapshot: RoutingSnapshot, query: RouteQuery, costs: SlotCosts, best: int, second_ms: float
) -> tuple[int, str]:
    """Return the slot that goes first, and why: the session's replica, or one like the best.

    `best` is the slot of lowest cost, `second_ms` the second lowest cost.
    """
    bound = query.binding
    slot = snapshot.slots.get(bound.replica_id, -1) if bound is not None else -1
    if slot >= 0 and costs.at(slot) <= _sticky_limit_ms(costs.at(best)):
        return slot, "session"
    best = _prefer_nearest(snapshot, costs, best)
    is_new = bool(query.session) and query.matches is NO_MATCHES
    if is_new and snapshot.nearest:
        # Uses the route table alone: processes that share nothing else choose the same replica.
        nearest = sorted(snapshot.nearest)
        hashed = hash64(query.session)
        slot = rendezvous_winner(hashed, nearest, snapshot.hashes, snapshot.weights)
        if costs.at(slot) <= _sticky_limit_ms(costs.at(best)):
            return slot, "session-new nearest-warm"
    slot = _choose_among_alike(snapshot, query, costs, best, second_ms, is_new=is_new)
    reason = _place_reason(snapshot, slot)
    if is_new:
        return slot, f"session-new {reason}"
    has_prefix = any(match.mask >> slot & 1 for match in query.matches.longer)
    return slot, f"prefix {reason}" if has_prefix else reason


def _place_reason(snapshot: RoutingSnapshot, slot: int) -> str:
    return "nearest-warm" if slot in snapshot.nearest else "soonest-warm"


def _sticky_limit_ms(best_ms: float) -> float:
    """Return the cost up to which a session stays at its replica, if the best costs `best_ms`."""
    return best_ms + max(STICKY_MS, STICKY_RATIO * best_ms)


def _prefer_nearest(snapshot: RoutingSnapshot, costs: SlotCosts, best: int) -> int:
    """Return the best of the nearest slots unless `best`, further away, saves enough.

    Spilling over must save more than the noise of predictions. Once requests spill over they go on
    for as long as that is sooner at all, so that traffic does not flap between the two.
    """
    if best in snapshot.nearest or snapshot.is_spilling:
        return best
    nearest = costs.cheapest_of(snapshot.nearest)
    best_ms = costs.at(best)
    margin_ms = max(SPILLOVER_MS, SPILLOVER_RATIO * best_ms)
    return nearest if costs.at(nearest) <= best_ms + margin_ms else best


def _choose_among_alike(
    snapshot: RoutingSnapshot,
    query: RouteQuery,
    costs: SlotCosts,
    best: int,
    second_ms: float,
    *,
    is_new: bool,
) -> int:
    """Return one of the slots that are as good as `best`, by the hash of the request or session."""
    best_ms = costs.at(best)
    noise_ms = max(ALIKE_RATIO * best_ms, ALIKE_SPREADS * snapshot.estimates[best].error_ms)
    slack_ms = max(ALIKE_MS, noise_ms)
    if is_new:
        slack_ms = max(slack_ms, SESSION_ALIKE_MS, SESSION_ALIKE_RATIO * best_ms)
    limit_ms = best_ms + slack_ms
    if second_ms > limit_ms:
        return best
    if not is_new:
        count = costs.values.count_up_to(limit_ms)
        return costs.values.nth_up_to(limit_ms, hash64(query.request_id) % count)
    alike = costs.values.up_to(limit_ms)
    tokens = {slot: snapshot.estimates[slot].in_flight_tokens for slot in alike}
    alike = within_load_bound(alike, tokens, snapshot.weights)
    return rendezvous_winner(hash64(query.session), alike, snapshot.hashes, snapshot.weights)


def _cached_tokens(snapshot: RoutingSnapshot, query: RouteQuery, slot: int) -> int:
    if query.matches is not NO_MATCHES:
        return round(query.matches.share_at(slot) * query.prompt_tokens)
    bound = query.binding
    if bound is not None and snapshot.slots.get(bound.replica_id) == slot:
        return min(bound.cached_tokens, query.prompt_tokens)
    return 0
