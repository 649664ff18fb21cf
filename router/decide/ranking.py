"""Which replica answers soonest: filter, score, order, each with its reason.

predicted = round trip and overhead + queue wait + uncached prompt tokens * time per token

All three are corrected by what was observed of each replica (latency.py), and kept in rows
(board.py): a choice is a few passes over them. What a miss of the cache costs the replica is
counted the more than once, the more requests find a queue: whoever comes next waits for it too.
"""

from collections.abc import Iterable, Sequence, Set
from math import inf
from typing import Final

from isochrone.wire.headers import SIBLINGS_MAX, Sibling
from isochrone.wire.ids import ReplicaId
from router.decide.affinity import SessionBinding, hash64, rendezvous_winner, within_load_bound
from router.decide.health import split_ejected
from router.decide.latency import prefill_work
from router.decide.prefix_index import NO_MATCHES, PrefixMatches, slots_of
from router.decide.replica_table import RankedRoute, RoutingSnapshot
from router.decide.slow_start import is_held_back

ALIKE_MS: Final = 2.0
ALIKE_RATIO: Final = 0.05
ALIKE_SPREADS: Final = 0.25
"""Within these of the best, or of its usual error, predictions count as alike: chance decides, and
routers that see the same do not all run to the same replica."""

SESSION_ALIKE_MS: Final = 20.0
SESSION_ALIKE_RATIO: Final = 0.25
"""A new session spreads over a wider circle, so that routers of one region choose alike."""

STICK_MS: Final = 20.0
STICK_RATIO: Final = 0.5
"""A session stays while its seat is at most this much slower than the best."""

SPILL_MS: Final = 10.0
SPILL_RATIO: Final = 0.1
"""Leaving home must save this much; once left, going on needs no more than being sooner."""

HANDOFF_MS_MIN: Final = 5.0
"""Siblings are named to a node only where a request takes longer than this there."""

UNEXPECTED_QUEUE_MS: Final = 20.0
"""A longer queue than was thought counts as a surprise only past this."""


class RouteQuery:
    """What the choice needs to know of a request.

    `held` is which slots hold how much of the prompt; the seat counts where nothing is known.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        session: str = "",
        binding: SessionBinding | None = None,
        matches: PrefixMatches = NO_MATCHES,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.session = session
        self.binding = binding
        self.matches = matches


class RankedRoutes(Sequence[RankedRoute]):
    """Where to try, best first. Only what is looked at is worked out: mostly that is the first."""

    def __init__(
        self,
        snapshot: RoutingSnapshot,
        query: RouteQuery,
        costs: list[float],
        left_out: int,
        first: int = -1,
        reason: str = "",
        others_ms: float = inf,
    ) -> None:
        """Begin with slot `first`, where `others_ms` is the soonest of all others.

        So many are `left_out` for other reasons than being full.
        """
        self._snapshot = snapshot
        self._query = query
        self._costs = costs
        self._left_out = left_out
        self._first = first
        self._reason = reason
        self._others_ms = others_ms
        self._order: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self._costs) - self._costs.count(inf)

    def __bool__(self) -> bool:
        return self._first >= 0

    def __getitem__(self, at: int) -> RankedRoute:  # type: ignore[override]
        if at == 0 and self._first >= 0:
            return self._ranked(self._first, self._reason)
        slot = self._slots()[at]
        return self._ranked(slot, "nearest-warm" if slot in self._snapshot.home else "soonest-warm")

    @property
    def full_count(self) -> int:
        """Count those passed over because they have no room."""
        return self._costs.count(inf) - self._left_out

    def route_to(self, replica_id: ReplicaId) -> RankedRoute | None:
        """Return the way to one replica: the answer comes from there."""
        slot = self._snapshot.slots.get(replica_id, -1)
        return self._ranked(slot, "passed-on") if slot >= 0 else None

    def siblings(self, first: RankedRoute) -> list[Sibling]:
        """Return who in the first's PoP might take the request, itself first; nobody if alone."""
        snapshot, costs = self._snapshot, self._costs
        mates = snapshot.mates.get(first.route.pop, ())
        if len(mates) < 2 or first.queue_ms + first.prefill_ms < HANDOFF_MS_MIN:
            return []
        slots = [slot for slot in mates if costs[slot] < inf and slot != self._first]
        slots.sort(key=costs.__getitem__)
        named = [self._first, *slots[: SIBLINGS_MAX - 1]]
        return [self._sibling(slot) for slot in named] if slots else []

    def _sibling(self, slot: int) -> Sibling:
        ranked, ms_per_token = self._ranked(slot, ""), self._snapshot.times[slot][2]
        return Sibling(
            ranked.route.replica_id,
            ranked.route.node_id,
            ranked.route.address,
            ranked.pending_prefill_tokens,
            round(ranked.prefill_ms),
            round(1000 * ms_per_token),
        )

    def _slots(self) -> Sequence[int]:
        if self._order is None:
            costs = self._costs
            rest = [slot for slot in range(len(costs)) if costs[slot] < inf and slot != self._first]
            rest.sort(key=costs.__getitem__)
            self._order = [self._first, *rest] if self._first >= 0 else rest
        return self._order

    def _queue_tokens_max(self) -> int:
        """Return how much may wait at the first before asking elsewhere is worth a round trip.

        What is only guessed to wait there is not put up with: its door knows.
        """
        if self._others_ms == inf:
            return 0
        snapshot, first = self._snapshot, self._first
        rtt_ms, base_ms, _, _, guess_ms = snapshot.facts[first]
        until_ms, least_ms, ms_per_token, _ = snapshot.times[first]
        known_ms = max(until_ms - snapshot.now_ms, least_ms - guess_ms) - base_ms
        better_by_ms = max(0.0, self._others_ms - self._costs[first])
        most_ms = known_ms + better_by_ms + rtt_ms + UNEXPECTED_QUEUE_MS
        return max(1, round(most_ms / ms_per_token))

    def _ranked(self, slot: int, reason: str) -> RankedRoute:
        snapshot, query = self._snapshot, self._query
        route = snapshot.routes[slot]
        assert route is not None, f"slot {slot} is ranked without a replica"
        cached = _cached_tokens(snapshot, query, slot)
        work = prefill_work(query.prompt_tokens, cached, snapshot.stretch_per_token)
        rtt_ms, base_ms, _, _, _ = snapshot.facts[slot]
        until_ms, least_ms, ms_per_token, _ = snapshot.times[slot]
        return RankedRoute(
            route,
            reason,
            rtt_ms=rtt_ms,
            overhead_ms=base_ms - rtt_ms,
            queue_ms=max(until_ms - snapshot.now_ms, least_ms) - base_ms,
            prefill_ms=work * ms_per_token,
            cached_tokens=cached,
            uncached_tokens=query.prompt_tokens - cached,
            pending_prefill_tokens=int(work + 0.5),
            queue_tokens_max=self._queue_tokens_max() if slot == self._first else 0,
        )


def rank(
    snapshot: RoutingSnapshot, query: RouteQuery, excluded: Set[ReplicaId] = frozenset()
) -> RankedRoutes:
    """Rank the replicas that have room, best first; `excluded` are those that failed already."""
    costs = _predicted_ms(snapshot, query)
    left_out = len(costs) - len(snapshot.slots)
    if excluded or snapshot.ejected_until:
        left_out += _exclude_unhealthy(snapshot, excluded, costs)
    if snapshot.starting:
        left_out += _exclude_starting(snapshot, query, costs)
    best, others_ms = _best_two(costs)
    if best < 0:
        return RankedRoutes(snapshot, query, costs, left_out)
    first, reason = _choose(snapshot, query, costs, best, others_ms)
    soonest_ms = others_ms if first == best else costs[best]
    return RankedRoutes(snapshot, query, costs, left_out, first, reason, soonest_ms)


def _best_two(costs: list[float]) -> tuple[int, float]:
    """Return the soonest slot, -1 where none has room, and how soon the next is."""
    best, best_ms, others_ms = -1, inf, inf
    for slot, cost in enumerate(costs):
        if cost < best_ms:
            best, best_ms, others_ms = slot, cost, best_ms
        elif cost < others_ms:
            others_ms = cost
    return best, others_ms


def _predicted_ms(snapshot: RoutingSnapshot, query: RouteQuery) -> list[float]:
    """Return each slot's predicted time, regard for others included; infinite where it is full."""
    now_ms = snapshot.now_ms
    tokens, stretch = query.prompt_tokens, snapshot.stretch_per_token
    wanted = tokens + query.output_tokens
    charged = 1.0 + snapshot.congestion_charge
    work = charged * prefill_work(tokens, tokens * query.matches.everyone, stretch)
    costs = [
        inf
        if wanted > room
        else work * pace + (wait if (wait := until - now_ms) > least else least)
        for until, least, pace, room in snapshot.times
    ]
    times = snapshot.times
    for mask, share in query.matches.some:
        saved = work - charged * prefill_work(tokens, tokens * share, stretch)
        for slot in slots_of(mask):
            costs[slot] -= saved * times[slot][2]
    if query.binding is not None and query.matches is NO_MATCHES:
        slot = snapshot.slots.get(query.binding.replica_id, -1)
        if slot >= 0:
            cached = min(query.binding.cached_tokens, tokens)
            costs[slot] -= (work - charged * prefill_work(tokens, cached, stretch)) * times[slot][2]
    return costs


def _exclude_unhealthy(
    snapshot: RoutingSnapshot, excluded: Set[ReplicaId], costs: list[float]
) -> int:
    """Take out who failed or is ejected; return how many that are, without the full among those
    who are asked last.
    """
    alone, last = excluded, frozenset[ReplicaId]()
    if snapshot.ejected_until:
        ill, last = split_ejected(list(snapshot.slots), snapshot.ejected_until)
        alone = alone | ill
    left_out = 0
    for replica_id in alone:
        slot = snapshot.slots.get(replica_id, -1)
        if slot >= 0:
            left_out += 1
            costs[slot] = inf
    late = [snapshot.slots[replica_id] for replica_id in last if replica_id in snapshot.slots]
    if late and any(cost < inf for slot, cost in enumerate(costs) if slot not in late):
        # Who is ill among too many ill is asked only where nobody well has room.
        left_out += _exclude_slots(late, costs)
    return left_out


def _exclude_slots(slots: Iterable[int], costs: list[float]) -> int:
    """Take slots out that have room; return how many."""
    closed = 0
    for slot in slots:
        closed += costs[slot] < inf
        costs[slot] = inf
    return closed


def _exclude_starting(snapshot: RoutingSnapshot, query: RouteQuery, costs: list[float]) -> int:
    """Take out who has just begun and is not drawn, if anybody else has room; return how many."""
    spared = {
        slot
        for replica_id, share in snapshot.starting.items()
        if (slot := snapshot.slots.get(replica_id, -1)) >= 0
        and is_held_back(replica_id, share, query.session or query.request_id)
    }
    if spared and any(cost < inf for slot, cost in enumerate(costs) if slot not in spared):
        return _exclude_slots(spared, costs)
    return 0


def _choose(
    snapshot: RoutingSnapshot, query: RouteQuery, costs: list[float], best: int, others_ms: float
) -> tuple[int, str]:
    """Return which slot goes first, and why: the session's seat, or one drawn among those alike.

    `best` is the soonest of all, `others_ms` how soon the next is.
    """
    seat = snapshot.slots.get(query.binding.replica_id, -1) if query.binding is not None else -1
    if seat >= 0 and costs[seat] <= _sticky_limit_ms(costs[best]):
        return seat, "session"
    best = _prefer_home(snapshot, costs, best)
    is_new = bool(query.session) and query.matches is NO_MATCHES
    if is_new and snapshot.home:
        # Drawn by the table alone: processes that share nothing else presume the same seat.
        seat = rendezvous_winner(
            hash64(query.session), sorted(snapshot.home), snapshot.seeds, snapshot.weights
        )
        if costs[seat] <= _sticky_limit_ms(costs[best]):
            return seat, "session-new nearest-warm"
    slot = _choose_among_alike(snapshot, query, costs, best, others_ms, is_new=is_new)
    reason = "nearest-warm" if slot in snapshot.home else "soonest-warm"
    if is_new:
        return slot, f"session-new {reason}"
    is_prefix = any(mask >> slot & 1 for mask, _ in query.matches.some)
    return slot, f"prefix {reason}" if is_prefix else reason


def _sticky_limit_ms(best_ms: float) -> float:
    """Return up to how much a seat is kept where the best takes `best_ms`."""
    return best_ms + max(STICK_MS, STICK_RATIO * best_ms)


def _choose_among_alike(
    snapshot: RoutingSnapshot,
    query: RouteQuery,
    costs: list[float],
    best: int,
    others_ms: float,
    *,
    is_new: bool,
) -> int:
    """Return one of those as good as the best, drawn by the request or by its new session."""
    best_ms = costs[best]
    noise_ms = max(ALIKE_RATIO * best_ms, ALIKE_SPREADS * snapshot.facts[best][2])
    slack_ms = max(ALIKE_MS, noise_ms)
    if is_new:
        slack_ms = max(slack_ms, SESSION_ALIKE_MS, SESSION_ALIKE_RATIO * best_ms)
    limit_ms = best_ms + slack_ms
    if others_ms > limit_ms:
        return best
    alike = [slot for slot, cost in enumerate(costs) if cost <= limit_ms]
    if not is_new:
        return alike[hash64(query.request_id) % len(alike)]
    alike = within_load_bound(alike, [facts[3] for facts in snapshot.facts], snapshot.weights)
    return rendezvous_winner(hash64(query.session), alike, snapshot.seeds, snapshot.weights)


def _prefer_home(snapshot: RoutingSnapshot, costs: Sequence[float], best: int) -> int:
    """Return the best slot to go by: one at home unless leaving it pays.

    Leaving must save more than the noise of the prediction; once requests leave, they go on leaving
    for as long as it is any sooner: between the two nothing flaps.
    """
    if best in snapshot.home or snapshot.is_spilling:
        return best
    home = min(snapshot.home, key=costs.__getitem__)
    margin_ms = max(SPILL_MS, SPILL_RATIO * costs[best])
    return home if costs[home] <= costs[best] + margin_ms else best


def _cached_tokens(snapshot: RoutingSnapshot, query: RouteQuery, slot: int) -> int:
    if query.matches is not NO_MATCHES:
        return round(query.matches.share_at(slot) * query.prompt_tokens)
    seat = query.binding
    if seat is not None and snapshot.slots.get(seat.replica_id) == slot:
        return min(seat.cached_tokens, query.prompt_tokens)
    return 0
