"""Admits requests to one replica by tokens in flight, counted apart for prefill and decode.

Generations are also admitted by number, where the engine's limit of concurrent sequences is known.
Requests beyond the limits wait in the routers' queues, which are fair between tenants. The surplus
that is admitted waits on the node if the engine's own queue is first come, first served
(`seats.py`). A tenant without a request here may enter beside a tenant that fills the replica, and
routers share the places (`router_shares.py`). If items of batches hold what a client's request
needs, they are preempted (`preemption.py`).

Each reservation is released exactly once. A router knows its own requests better than the node
does, so the load reported to a router also gives the tokens of all other routers. Prompts are
assumed to be prefilled in arrival order: of the first one, the part already prefilled is estimated
from the elapsed time (`prompt_progress.py`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from isochrone.sequence_wait import sequence_wait_ms
from isochrone.wire.http.headers import ReportedLoad
from nodeagent.decide.requests.preemption import BatchItem, in_order_of_preemption
from nodeagent.decide.requests.prefill_pace import PrefillPace
from nodeagent.decide.requests.prompt_progress import tokens_read
from nodeagent.decide.requests.router_shares import RouterShares
from nodeagent.decide.requests.sequence_ends import SequenceEnds

SURPLUS_SHARE: Final = 0.25
"""The generations admitted beyond the engine's sequences, as a share of them: the next one is there
when a sequence ends, without a round trip to a router."""

FAIR_SURPLUS_SHARE: Final = 3.0
"""The same for an engine whose own queue is fair between tenants. The surplus is less than the
engine can queue by default (64 for 16 sequences), so that another tenant's first request still
fits."""

SURPLUS_MIN: Final = 2


class ReplicaAdmission:
    """Counts the tokens in flight on one replica against a limit."""

    def __init__(
        self, tokens_max: int, sequences_max: int = 0, *, is_engine_fair: bool = False
    ) -> None:
        """Admit for an engine that runs `sequences_max` sequences at once; 0 if that is unknown.

        `is_engine_fair` says that its own queue is fair between tenants.
        """
        self.tokens_max = tokens_max
        self.sequences_max = sequences_max
        self.generations_max = 0
        """The limit of generations in flight; 0 for none."""
        share = FAIR_SURPLUS_SHARE if is_engine_fair else SURPLUS_SHARE
        surplus = max(SURPLUS_MIN, int(share * sequences_max)) if sequences_max else 0
        if sequences_max:
            self.generations_max = sequences_max + surplus
        # The sequences stay taken while places are left.
        self._router_shares = RouterShares(left_max=surplus)
        self.is_closed = False
        """True while the engine refuses new requests for lack of memory, whatever the tokens."""
        self.wake_ms: Callable[[], int] = lambda: 0
        """How long a request would wait for the replica to wake; 0 while it is awake."""
        self.sleep_reason: Callable[[], str] = lambda: ""
        """The reason that operators see for a replica that sleeps or waits for memory; "" for
        others."""
        self.decode_tokens_per_s: Callable[[], float] = lambda: 0.0
        """The measured speed of the engine with all its sequences; 0 if that is unknown."""
        self.cache_since_s: float | None = None
        """The engine's prefix cache has lost the blocks last used before this monotonic time, and
        has the others; None if the engine does not say."""
        self.running = 0
        """Number of requests in flight."""
        self._read_elsewhere = 0
        """Number of requests whose prompt another replica reads: the engine waits with them."""
        self._generations: Counter[str] = Counter()
        """Number of generations in flight, by tenant."""
        self._sequence_ends = SequenceEnds(sequences_max)
        self._prefill_tokens = 0
        self._pending_prefill_tokens = 0
        self._decode_tokens = 0
        self._decode_tokens_by_router: dict[str, int] = {}
        # Reservations without a first token, in arrival order (a dict used as an ordered set).
        self._in_prefill: dict[TokenReservation, None] = {}
        self._items: dict[BatchItem, TokenReservation] = {}
        """The reservations of items of batches."""
        self._last_prefill_end_s = 0.0
        self._pace = PrefillPace()

    def __repr__(self) -> str:
        return (
            f"<ReplicaAdmission {self._prefill_tokens}+{self._decode_tokens}/{self.tokens_max}, "
            f"{self.running} running>"
        )

    def admit(
        self,
        prompt_tokens: int,
        output_tokens: int,
        pending_prefill_tokens: int | None = None,
        *,
        router: str = "",
        generates_for: str | None = None,
        prefill_ms: float = 0.0,
        now_s: float = 0.0,
        item: BatchItem | None = None,
    ) -> "TokenReservation | None":
        """Reserve the tokens of a request, or return None if they do not fit.

        `item` is set for an item of a batch. For other requests items are preempted.

        An idle replica admits a request of any size, unless its engine refuses new requests.
        `pending_prefill_tokens` is the router's estimate of the prefill work that the prefix cache
        does not save (default: the whole prompt), and `prefill_ms` of the time that it takes.
        `generates_for` is the tenant of a generation, None for a request without one.
        """
        left = self._router_shares.places_left(router, now_s, to_all=item is not None)
        preempted = self._items_to_preempt(prompt_tokens + output_tokens, generates_for, item, left)
        if preempted is None:
            if item is None and generates_for is not None:
                self._router_shares.record_refusal(router, now_s)
            return None
        for other in preempted:
            other.preempt()
        if pending_prefill_tokens is None:
            pending_prefill_tokens = prompt_tokens
        self._prefill_tokens += prompt_tokens
        self._pending_prefill_tokens += pending_prefill_tokens
        self._decode_tokens += output_tokens
        self._decode_tokens_by_router[router] = (
            self._decode_tokens_by_router.get(router, 0) + output_tokens
        )
        self.running += 1
        if generates_for is not None:
            self._generations[generates_for] += 1
            self._router_shares.record_begin(router)
            self._sequence_ends.record_begin(self._generations.total(), now_s)
        reservation = TokenReservation(
            self,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            pending_prefill_tokens=pending_prefill_tokens,
            router=router,
            generates_for=generates_for,
            prefill_ms=prefill_ms,
            admitted_s=now_s,
            item=item,
        )
        self._in_prefill[reservation] = None
        if item is not None:
            self._items[item] = reservation
            item.on_preempt(reservation.preempt)
        return reservation

    def _items_to_preempt(
        self, needed_tokens: int, tenant: str | None, item: BatchItem | None, left: int
    ) -> list[BatchItem] | None:
        """Return the items to preempt so that a request fits; None if it does not even then.

        `left` places are for other routers, unless it is its tenant's first request.
        """
        if self.is_closed:
            return None
        endable = in_order_of_preemption(self._items) if item is None else []
        in_flight = self._prefill_tokens + self._decode_tokens
        generations, running = self._generations.total(), self.running
        is_first = tenant is not None and not self._generations[tenant]
        for ended in range(len(endable) + 1):
            fits = running == 0 or in_flight + needed_tokens <= self.tokens_max
            if fits and self._has_place(tenant, generations, left, is_first=is_first):
                return endable[:ended]
            if ended < len(endable):
                reservation = self._items[endable[ended]]
                in_flight -= reservation.held_tokens
                running -= 1
                generations -= reservation.generates_for is not None
        return None

    def load(self, router: str = "", now_s: float = 0.0, *, is_ping: bool = False) -> ReportedLoad:
        """Return the load that answers carry; with `router`, also the load of all other routers.

        Answers to pings also say how many requests the engine runs at once, how soon one ends, and
        how long a token of a prompt takes.
        A closed replica reports its whole token limit as taken, so that no router sees capacity.
        """
        decode_tokens = self._decode_tokens + (self.tokens_max if self.is_closed else 0)
        others_pending, others_decode = -1, -1
        if router:
            others_pending = self.pending_prefill_tokens(now_s, excluding_router=router)
            others_decode = decode_tokens - self._decode_tokens_by_router.get(router, 0)
        return ReportedLoad(
            prefill_tokens=self._prefill_tokens,
            decode_tokens=decode_tokens,
            running=self.running,
            waiting=0,
            pending_prefill_tokens=self._pending_prefill_tokens,
            others_pending_prefill_tokens=others_pending,
            others_decode_tokens=others_decode,
            wake_ms=self.wake_ms(),
            cache_age_ms=self._cache_age_ms(now_s),
            sequences_max=self.sequences_max if is_ping else 0,
            sequence_ms=round(self._sequence_ms()) if is_ping else 0,
            batch_items=len(self._items) if is_ping else 0,
            prefill_ns_per_token=self._pace.ns_per_token(now_s) if is_ping else 0,
        )

    def sequence_wait_ms(self) -> float:
        """Return how long a client's next generation waits until the engine has a sequence."""
        clients = self.running - len(self._items)
        return sequence_wait_ms(clients, self.sequences_max, self._sequence_ms())

    def _sequence_ms(self) -> float:
        """Return the time from the end of one sequence to the next when all are taken.

        Before it is measured, it is the time in which the engine generates one expected answer.
        """
        measured_ms, generations = self._sequence_ends.mean_ms, self._generations.total()
        if measured_ms is not None:
            return measured_ms
        tokens_per_s = self.decode_tokens_per_s()
        if not generations or tokens_per_s <= 0:
            return 0.0
        return 1000 * self._decode_tokens / generations / tokens_per_s

    def _cache_age_ms(self, now_s: float) -> int:
        if self.cache_since_s is None or not now_s:
            return -1
        return max(0, round(1000 * (now_s - self.cache_since_s)))

    def pending_prefill_tokens(self, now_s: float, excluding_router: str | None = None) -> int:
        """Return the tokens still to be prefilled, less the estimated progress on the first prompt.

        Requests that `excluding_router` sent are not counted.
        """
        pending = sum(
            r.pending_prefill_tokens for r in self._in_prefill if r.router != excluding_router
        )
        first = next(iter(self._in_prefill), None)
        if first is None or first.router == excluding_router:
            return pending
        return pending - tokens_read(first, self._last_prefill_end_s, now_s)

    @property
    def in_engine(self) -> int:
        """Number of requests in flight that the engine works on or could begin."""
        return self.running - self._read_elsewhere

    @property
    def answering(self) -> int:
        """Number of requests in flight whose answer has begun."""
        return self.decoding - self._read_elsewhere

    @property
    def begins_at_once(self) -> bool:
        """Whether the engine has sequences enough for all generations that were admitted."""
        return not self.sequences_max or self._generations.total() <= self.sequences_max

    @property
    def decoding(self) -> int:
        """Number of requests in flight whose prompt does not queue here."""
        return self.running - len(self._in_prefill)

    def _has_place(
        self, tenant: str | None, generations: int, left: int, *, is_first: bool
    ) -> bool:
        """Return True if one more generation beside `generations` is within their limit.

        The first one of a tenant may exceed the limit, up to twice the limit.
        """
        if tenant is None or not self.generations_max:
            return True
        if is_first:
            return generations < 2 * self.generations_max
        return generations < self.generations_max - left

    def _end_prefill(
        self, reservation: "TokenReservation", now_s: float, began_s: float | None
    ) -> None:
        """Release the prefill tokens of a reservation. Called by TokenReservation only.

        If the engine read the prompt in the time since `began_s`, that is measured.
        """
        del self._in_prefill[reservation]
        if began_s is not None:
            took_s = now_s - max(began_s, self._last_prefill_end_s)
            self._pace.record(reservation.pending_prefill_tokens, took_s, now_s)
        self._last_prefill_end_s = max(self._last_prefill_end_s, now_s)
        self._prefill_tokens -= reservation.prompt_tokens
        self._pending_prefill_tokens -= reservation.pending_prefill_tokens

    def _move_prefill(self, reservation: "TokenReservation", *, away: bool) -> None:
        """Take a prompt out of the queue, or back into it. Called by TokenReservation only."""
        self._read_elsewhere += 1 if away else -1
        if away:
            del self._in_prefill[reservation]
            self._pending_prefill_tokens -= reservation.pending_prefill_tokens
        else:
            self._in_prefill[reservation] = None
            self._pending_prefill_tokens += reservation.pending_prefill_tokens

    def _end_request(self, reservation: "TokenReservation") -> None:
        """Release the decode tokens of a reservation. Called by TokenReservation only."""
        self.running -= 1
        if reservation.item is not None:
            del self._items[reservation.item]
        self._decode_tokens -= reservation.output_tokens
        tenant = reservation.generates_for
        if tenant is not None:
            self._router_shares.record_end(reservation.router)
            self._generations[tenant] -= 1
            if not self._generations[tenant]:
                del self._generations[tenant]
        router = reservation.router
        left = self._decode_tokens_by_router.get(router, 0) - reservation.output_tokens
        if left:
            self._decode_tokens_by_router[router] = left
        else:
            self._decode_tokens_by_router.pop(router, None)


@dataclass(slots=True, eq=False)
class TokenReservation:
    """The tokens that one request holds. Releasing it twice has no effect."""

    _admission: ReplicaAdmission | None
    prompt_tokens: int
    output_tokens: int
    pending_prefill_tokens: int
    router: str
    generates_for: str | None
    prefill_ms: float
    admitted_s: float
    item: BatchItem | None
    on_first_token: Callable[[], None] = lambda: None
    _is_prefilled: bool = False
    _is_elsewhere: bool = False
    _began_s: float | None = None

    @property
    def held_tokens(self) -> int:
        """The tokens that it holds now."""
        if self._admission is None:
            return 0
        return self.output_tokens + (0 if self._is_prefilled else self.prompt_tokens)

    def set_prefill_elsewhere(self, is_elsewhere: bool) -> None:
        """Note whether another replica prefills the prompt: then it does not queue here."""
        if self._admission is None or self._is_prefilled or self._is_elsewhere == is_elsewhere:
            return
        self._is_elsewhere = is_elsewhere
        self._admission._move_prefill(self, away=is_elsewhere)

    def begin_prefill(self, now_s: float) -> None:
        """Note that the engine gets the prompt now, which it reads itself.

        An item is computed after all else, and a prompt beyond the engine's sequences waits for one
        of them: their times say nothing of the engine's pace.
        """
        if self.item is None and self._admission is not None and self._admission.begins_at_once:
            self._began_s = now_s

    def first_token(self, now_s: float = 0.0, *, is_timely: bool = False) -> None:
        """Release the prompt's tokens: the engine has prefilled it, just now if `is_timely`."""
        if not self._is_prefilled and self._admission is not None:
            self.set_prefill_elsewhere(False)
            self._is_prefilled = True
            self._admission._end_prefill(self, now_s, self._began_s if is_timely else None)
            self.on_first_token()

    def release(self, now_s: float = 0.0) -> None:
        """Release all tokens, whether the request finished, was cancelled or failed."""
        self.first_token(now_s)
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._end_request(self)
            if self.generates_for is not None:
                admission._sequence_ends.record_end(admission._generations.total(), now_s)

    def preempt(self) -> None:
        """Release all tokens for another request, which takes its sequence."""
        self.first_token()
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._end_request(self)
            admission._sequence_ends.record_preemption()
