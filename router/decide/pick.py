"""Which replica answers soonest: every warm one ranked by its predicted time to first token.

predicted = round trip + tokens queued ahead / prefill rate + uncached prompt tokens / prefill rate
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from isochrone.wire.ids import ReplicaId
from isochrone.wire.routes import Route
from router.decide.affinity import Seat, rendezvous
from router.decide.health import judge
from router.decide.latency import prefill_ms
from router.decide.tokens_in_flight import InFlight

ALIKE_MS: Final = 2.0
ALIKE_RATIO: Final = 1.1
"""Within these two predictions count as alike, and the rendezvous decides."""

SESSION_ALIKE_MS: Final = 20.0
SESSION_ALIKE_RATIO: Final = 1.25
"""A new session spreads over a wider circle, so that routers of one region choose alike."""

STICK_MS: Final = 50.0
STICK_RATIO: Final = 2.0
"""A session stays while its seat is at most this much slower than the best."""


class Candidate(NamedTuple):
    """One warm replica as the router believes it to be now."""

    route: Route
    rtt_ms: float
    in_flight: InFlight


class Picture(NamedTuple):
    """What the router believes of one deployment, frozen at `now_s`."""

    candidates: Sequence[Candidate]
    ejected_until: Mapping[ReplicaId, float]


class Ask(NamedTuple):
    """What the choice needs to know of a request."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    seat: Seat | None = None


class Ranked(NamedTuple):
    """One way to go, with what is predicted of it and why it stands where it stands."""

    route: Route
    reason: str
    rtt_ms: float
    queue_ms: float
    prefill_ms: float
    uncached_tokens: int

    @property
    def ttft_ms(self) -> float:
        """Predicted time to first token."""
        return self.rtt_ms + self.queue_ms + self.prefill_ms

    @property
    def why(self) -> str:
        """The header value that tells a client why this replica."""
        return (
            f"{self.reason} rtt={self.rtt_ms:.1f}ms queue={self.queue_ms:.0f}ms "
            f"prefill={self.prefill_ms:.0f}ms"
        )


class Ranking(NamedTuple):
    """Where to try, in order, and how many replicas were passed over because they are full."""

    routes: Sequence[Ranked]
    full: int


def rank(picture: Picture, ask: Ask, excluded: frozenset[ReplicaId] = frozenset()) -> Ranking:
    """Rank the replicas that have room, best first; `excluded` are those that failed already."""
    ids = [candidate.route.replica_id for candidate in picture.candidates]
    alone, last = judge(ids, picture.ejected_until)
    usable = [
        candidate
        for candidate in picture.candidates
        if candidate.route.replica_id not in alone and candidate.route.replica_id not in excluded
    ]
    roomy = [candidate for candidate in usable if _has_room(candidate, ask)]
    # Who is ill among too many ill is asked only where nobody well has room.
    roomy = [one for one in roomy if one.route.replica_id not in last] or roomy
    if not roomy:
        return Ranking((), len(usable))
    nearest_ms = min(candidate.rtt_ms for candidate in usable)
    predicted = sorted(
        (_predict(candidate, ask, nearest_ms) for candidate in roomy),
        key=lambda ranked: (ranked.ttft_ms, ranked.route.replica_id),
    )
    return Ranking(_seated(predicted, ask), len(usable) - len(roomy))


def _has_room(candidate: Candidate, ask: Ask) -> bool:
    # An idle replica takes any request: whether it fits at all is the replica's to say.
    in_flight = candidate.in_flight
    wanted = in_flight.tokens + ask.prompt_tokens + ask.output_tokens
    return in_flight.tokens == 0 or wanted <= candidate.route.tokens_in_flight_max


def _predict(candidate: Candidate, ask: Ask, nearest_ms: float) -> Ranked:
    route = candidate.route
    cached = 0
    if ask.seat is not None and ask.seat.replica_id == route.replica_id:
        cached = min(ask.seat.cached_tokens, ask.prompt_tokens)
    uncached = ask.prompt_tokens - cached
    is_near = candidate.rtt_ms <= nearest_ms * ALIKE_RATIO + ALIKE_MS
    return Ranked(
        route=route,
        reason="nearest-warm" if is_near else "soonest-warm",
        rtt_ms=candidate.rtt_ms,
        queue_ms=prefill_ms(candidate.in_flight.queued_tokens, route.prefill_tokens_per_s),
        prefill_ms=prefill_ms(uncached, route.prefill_tokens_per_s),
        uncached_tokens=uncached,
    )


def _seated(predicted: Sequence[Ranked], ask: Ask) -> Sequence[Ranked]:
    """Put first whom the session sticks to, or whom the rendezvous draws among those alike."""
    best_ms = predicted[0].ttft_ms
    if ask.seat is not None:
        for ranked in predicted:
            is_near_best = ranked.ttft_ms <= max(best_ms * STICK_RATIO, best_ms + STICK_MS)
            if ranked.route.replica_id == ask.seat.replica_id and is_near_best:
                return _first(ranked._replace(reason="session"), predicted)
    ratio, slack_ms = (
        (SESSION_ALIKE_RATIO, SESSION_ALIKE_MS) if ask.session else (ALIKE_RATIO, ALIKE_MS)
    )
    subject = ask.session or ask.request_id
    alike = [ranked for ranked in predicted if ranked.ttft_ms <= best_ms * ratio + slack_ms]
    drawn = max(
        alike,
        key=lambda ranked: rendezvous(
            subject, ranked.route.replica_id, max(1.0, ranked.route.prefill_tokens_per_s)
        ),
    )
    if ask.session:
        drawn = drawn._replace(reason=f"session-new {drawn.reason}")
    return _first(drawn, predicted)


def _first(first: Ranked, predicted: Sequence[Ranked]) -> Sequence[Ranked]:
    rest = [r for r in predicted if r.route.replica_id != first.route.replica_id]
    return [first, *rest]
