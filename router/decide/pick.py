"""Which replica answers soonest: filter, score, order, each with its reason.

predicted = round trip and overhead + queue wait + uncached prompt tokens * time per token

All three are corrected by what was observed of each replica (latency.py), and kept in rows
(board.py): a choice is a few passes over them. What a miss of the cache costs the replica is
counted the more than once, the more requests find a queue: whoever comes next waits for it too.
"""

from collections.abc import Iterable, Sequence, Set
from math import inf
from typing import Final

from isochrone.wire.headers import PEER_REPLICAS_MAX, PeerReplica
from isochrone.wire.ids import ReplicaId
from router.decide.affinity import Seat, draw, seed_of, within_bound
from router.decide.board import Picture, Ranked
from router.decide.health import judge
from router.decide.latency import stretched
from router.decide.prefixes import NOTHING_HELD, Held, slots_of
from router.decide.slow_start import is_spared

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

PASSING_MS: Final = 5.0
"""Siblings are named to a node only where a request takes longer than this there."""

SURPRISE_MS: Final = 20.0
"""A longer queue than was thought counts as a surprise only past this."""


class Ask:
    """What the choice needs to know of a request.

    `held` is which slots hold how much of the prompt; the seat counts where nothing is known.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        session: str = "",
        seat: Seat | None = None,
        held: Held = NOTHING_HELD,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.session = session
        self.seat = seat
        self.held = held


class Routes(Sequence[Ranked]):
    """Where to try, best first. Only what is looked at is worked out: mostly that is the first."""

    def __init__(
        self,
        picture: Picture,
        ask: Ask,
        costs: list[float],
        left_out: int,
        first: int = -1,
        reason: str = "",
        others_ms: float = inf,
    ) -> None:
        """Begin with slot `first`, where `others_ms` is the soonest of all others.

        So many are `left_out` for other reasons than being full.
        """
        self._picture = picture
        self._ask = ask
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

    def __getitem__(self, at: int) -> Ranked:  # type: ignore[override]
        if at == 0 and self._first >= 0:
            return self._ranked(self._first, self._reason)
        slot = self._slots()[at]
        return self._ranked(slot, "nearest-warm" if slot in self._picture.home else "soonest-warm")

    @property
    def full(self) -> int:
        """Count those passed over because they have no room."""
        return self._costs.count(inf) - self._left_out

    def of(self, replica_id: ReplicaId) -> Ranked | None:
        """Return the way to one replica: the answer comes from there."""
        slot = self._picture.slots.get(replica_id, -1)
        return self._ranked(slot, "passed-on") if slot >= 0 else None

    def siblings(self, first: Ranked) -> list[PeerReplica]:
        """Return who in the first's PoP might take the request, itself first; nobody if alone."""
        picture, costs = self._picture, self._costs
        mates = picture.mates.get(first.route.pop, ())
        if len(mates) < 2 or first.queue_ms + first.prefill_ms < PASSING_MS:
            return []
        slots = [slot for slot in mates if costs[slot] < inf and slot != self._first]
        slots.sort(key=costs.__getitem__)
        named = [self._first, *slots[: PEER_REPLICAS_MAX - 1]]
        return [self._sibling(slot) for slot in named] if slots else []

    def _sibling(self, slot: int) -> PeerReplica:
        ranked, ms_per_token = self._ranked(slot, ""), self._picture.times[slot][2]
        return PeerReplica(
            ranked.route.replica_id,
            ranked.route.node_id,
            ranked.route.address,
            ranked.unread_tokens,
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
        picture, first = self._picture, self._first
        rtt_ms, base_ms, _, _, guess_ms = picture.facts[first]
        until_ms, least_ms, ms_per_token, _ = picture.times[first]
        known_ms = max(until_ms - picture.now_ms, least_ms - guess_ms) - base_ms
        better_by_ms = max(0.0, self._others_ms - self._costs[first])
        most_ms = known_ms + better_by_ms + rtt_ms + SURPRISE_MS
        return max(1, round(most_ms / ms_per_token))

    def _ranked(self, slot: int, reason: str) -> Ranked:
        picture, ask = self._picture, self._ask
        route = picture.routes[slot]
        assert route is not None, f"slot {slot} is ranked without a replica"
        cached = _cached_tokens(picture, ask, slot)
        work = stretched(ask.prompt_tokens, cached, picture.stretch_per_token)
        rtt_ms, base_ms, _, _, _ = picture.facts[slot]
        until_ms, least_ms, ms_per_token, _ = picture.times[slot]
        return Ranked(
            route,
            reason,
            rtt_ms=rtt_ms,
            overhead_ms=base_ms - rtt_ms,
            queue_ms=max(until_ms - picture.now_ms, least_ms) - base_ms,
            prefill_ms=work * ms_per_token,
            cached_tokens=cached,
            uncached_tokens=ask.prompt_tokens - cached,
            unread_tokens=int(work + 0.5),
            queue_tokens_max=self._queue_tokens_max() if slot == self._first else 0,
        )


def rank(picture: Picture, ask: Ask, excluded: Set[ReplicaId] = frozenset()) -> Routes:
    """Rank the replicas that have room, best first; `excluded` are those that failed already."""
    costs = _costs(picture, ask)
    left_out = len(costs) - len(picture.slots)
    if excluded or picture.ejected_until:
        left_out += _leave_out(picture, excluded, costs)
    if picture.starting:
        left_out += _spare_starting(picture, ask, costs)
    best, others_ms = _soonest(costs)
    if best < 0:
        return Routes(picture, ask, costs, left_out)
    first, reason = _first(picture, ask, costs, best, others_ms)
    soonest_ms = others_ms if first == best else costs[best]
    return Routes(picture, ask, costs, left_out, first, reason, soonest_ms)


def _soonest(costs: list[float]) -> tuple[int, float]:
    """Return the soonest slot, -1 where none has room, and how soon the next is."""
    best, best_ms, others_ms = -1, inf, inf
    for slot, cost in enumerate(costs):
        if cost < best_ms:
            best, best_ms, others_ms = slot, cost, best_ms
        elif cost < others_ms:
            others_ms = cost
    return best, others_ms


def _costs(picture: Picture, ask: Ask) -> list[float]:
    """Return each slot's predicted time, regard for others included; infinite where it is full."""
    now_ms = picture.now_ms
    tokens, stretch = ask.prompt_tokens, picture.stretch_per_token
    wanted = tokens + ask.output_tokens
    charged = 1.0 + picture.regard
    work = charged * stretched(tokens, tokens * ask.held.everyone, stretch)
    costs = [
        inf
        if wanted > room
        else work * pace + (wait if (wait := until - now_ms) > least else least)
        for until, least, pace, room in picture.times
    ]
    times = picture.times
    for mask, share in ask.held.some:
        saved = work - charged * stretched(tokens, tokens * share, stretch)
        for slot in slots_of(mask):
            costs[slot] -= saved * times[slot][2]
    if ask.seat is not None and ask.held is NOTHING_HELD:
        slot = picture.slots.get(ask.seat.replica_id, -1)
        if slot >= 0:
            cached = min(ask.seat.cached_tokens, tokens)
            costs[slot] -= (work - charged * stretched(tokens, cached, stretch)) * times[slot][2]
    return costs


def _leave_out(picture: Picture, excluded: Set[ReplicaId], costs: list[float]) -> int:
    """Take out who failed or is ejected; return how many that are, without the full among those
    who are asked last.
    """
    alone, last = excluded, frozenset[ReplicaId]()
    if picture.ejected_until:
        ill, last = judge(list(picture.slots), picture.ejected_until)
        alone = alone | ill
    left_out = 0
    for replica_id in alone:
        slot = picture.slots.get(replica_id, -1)
        if slot >= 0:
            left_out += 1
            costs[slot] = inf
    late = [picture.slots[replica_id] for replica_id in last if replica_id in picture.slots]
    if late and any(cost < inf for slot, cost in enumerate(costs) if slot not in late):
        # Who is ill among too many ill is asked only where nobody well has room.
        left_out += _close(late, costs)
    return left_out


def _close(slots: Iterable[int], costs: list[float]) -> int:
    """Take slots out that have room; return how many."""
    closed = 0
    for slot in slots:
        closed += costs[slot] < inf
        costs[slot] = inf
    return closed


def _spare_starting(picture: Picture, ask: Ask, costs: list[float]) -> int:
    """Take out who has just begun and is not drawn, if anybody else has room; return how many."""
    spared = {
        slot
        for replica_id, share in picture.starting.items()
        if (slot := picture.slots.get(replica_id, -1)) >= 0
        and is_spared(replica_id, share, ask.session or ask.request_id)
    }
    if spared and any(cost < inf for slot, cost in enumerate(costs) if slot not in spared):
        return _close(spared, costs)
    return 0


def _first(
    picture: Picture, ask: Ask, costs: list[float], best: int, others_ms: float
) -> tuple[int, str]:
    """Return which slot goes first, and why: the session's seat, or one drawn among those alike.

    `best` is the soonest of all, `others_ms` how soon the next is.
    """
    seat = picture.slots.get(ask.seat.replica_id, -1) if ask.seat is not None else -1
    if seat >= 0 and costs[seat] <= _sticks_ms(costs[best]):
        return seat, "session"
    best = _at_home(picture, costs, best)
    is_new = bool(ask.session) and ask.held is NOTHING_HELD
    if is_new and picture.home:
        # Drawn by the table alone: processes that share nothing else presume the same seat.
        seat = draw(seed_of(ask.session), sorted(picture.home), picture.seeds, picture.weights)
        if costs[seat] <= _sticks_ms(costs[best]):
            return seat, "session-new nearest-warm"
    slot = _drawn(picture, ask, costs, best, others_ms, is_new=is_new)
    reason = "nearest-warm" if slot in picture.home else "soonest-warm"
    if is_new:
        return slot, f"session-new {reason}"
    is_prefix = any(mask >> slot & 1 for mask, _ in ask.held.some)
    return slot, f"prefix {reason}" if is_prefix else reason


def _sticks_ms(best_ms: float) -> float:
    """Return up to how much a seat is kept where the best takes `best_ms`."""
    return best_ms + max(STICK_MS, STICK_RATIO * best_ms)


def _drawn(
    picture: Picture, ask: Ask, costs: list[float], best: int, others_ms: float, *, is_new: bool
) -> int:
    """Return one of those as good as the best, drawn by the request or by its new session."""
    best_ms = costs[best]
    noise_ms = max(ALIKE_RATIO * best_ms, ALIKE_SPREADS * picture.facts[best][2])
    slack_ms = max(ALIKE_MS, noise_ms)
    if is_new:
        slack_ms = max(slack_ms, SESSION_ALIKE_MS, SESSION_ALIKE_RATIO * best_ms)
    limit_ms = best_ms + slack_ms
    if others_ms > limit_ms:
        return best
    alike = [slot for slot, cost in enumerate(costs) if cost <= limit_ms]
    if not is_new:
        return alike[seed_of(ask.request_id) % len(alike)]
    alike = within_bound(alike, [facts[3] for facts in picture.facts], picture.weights)
    return draw(seed_of(ask.session), alike, picture.seeds, picture.weights)


def _at_home(picture: Picture, costs: Sequence[float], best: int) -> int:
    """Return the best slot to go by: one at home unless leaving it pays.

    Leaving must save more than the noise of the prediction; once requests leave, they go on leaving
    for as long as it is any sooner: between the two nothing flaps.
    """
    if best in picture.home or picture.is_spilling:
        return best
    home = min(picture.home, key=costs.__getitem__)
    margin_ms = max(SPILL_MS, SPILL_RATIO * costs[best])
    return home if costs[home] <= costs[best] + margin_ms else best


def _cached_tokens(picture: Picture, ask: Ask, slot: int) -> int:
    if ask.held is not NOTHING_HELD:
        return round(ask.held.share_at(slot) * ask.prompt_tokens)
    seat = ask.seat
    if seat is not None and picture.slots.get(seat.replica_id) == slot:
        return min(seat.cached_tokens, ask.prompt_tokens)
    return 0
