"""Tokens in flight at each replica: those of this router's requests that have not ended yet.

Rule 1: a reservation is released exactly once, on finish, cancellation and crash alike.
Rule 2: prefill and decode tokens are counted apart; the first token turns prefill into decode.
Rule 3: the replica's own load reports add what other routers sent (other_routers_load.py).
Rule 4: a replica reads prompts one after the other, so its queue shrinks with time: a new request
waits only for what the replica cannot have read yet.
"""

from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Final, NamedTuple

from isochrone.native_class import mypyc_attr
from isochrone.sequence_wait import sequence_wait_ms
from isochrone.wire.http.headers import ReportedLoad
from isochrone.wire.ids import ReplicaId
from router.decide.replicas.other_routers_load import OtherRoutersLoad

HISTORY_MAX: Final = 256
"""How many changes of our own tokens at a replica are kept.

A load report is older than our newest requests. The history tells what of the reported load was
ours at the time of the report.
"""


class InFlightTokens(NamedTuple):
    """Tokens at one replica: those of this router, and those of other routers."""

    prefill_tokens: int
    decode_tokens: int
    requests: int
    others_prefill_tokens: int = 0
    others_decode_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All tokens there, of all routers."""
        return (
            self.prefill_tokens
            + self.decode_tokens
            + self.others_prefill_tokens
            + self.others_decode_tokens
        )


@mypyc_attr(acyclic=True, free_list_len=1)
class OwnLoad:
    """This router's load at one replica at one moment: an entry of its history."""

    __slots__ = ("at_s", "batch_items", "output_tokens", "prefill_tokens", "requests")

    def __init__(
        self,
        at_s: float,
        prefill_tokens: int = 0,
        output_tokens: int = 0,
        requests: int = 0,
        batch_items: int = 0,
    ) -> None:
        self.at_s = at_s
        self.prefill_tokens = prefill_tokens
        self.output_tokens = output_tokens
        self.requests = requests
        self.batch_items = batch_items


@mypyc_attr(free_list_len=1)
class Reservation:
    """One request's tokens at a replica. Releasing it a second time does nothing."""

    __slots__ = (
        "_is_open", "_ledger", "decode_tokens", "is_batch_item", "output_tokens", "prefill_tokens",
        "replica_id", "work_ms",
    )  # fmt: skip

    def __init__(
        self,
        ledger: "InFlightLedger",
        replica_id: ReplicaId,
        prefill_tokens: int,
        decode_tokens: int,
        work_ms: float,
        is_batch_item: bool,
    ) -> None:
        self._ledger = ledger
        self._is_open = True
        self.replica_id = replica_id
        self.prefill_tokens = prefill_tokens
        self.decode_tokens = decode_tokens
        self.output_tokens = decode_tokens
        self.work_ms = work_ms
        self.is_batch_item = is_batch_item

    def finish_prefill(self, at_s: float | None = None) -> None:
        """Note that the prompt is read: from now on only its KV cache takes space.

        `at_s` is when the replica finished it, if known: the prompts queued behind it begin then.
        """
        if self._is_open:
            self._ledger.finish_prefill(self, at_s)

    def release(self, at_s: float | None = None) -> bool:
        """Give all tokens back; return False if that has happened already.

        `at_s` is from when on the replica itself no longer counts them; now, if that is unknown.
        """
        if not self._is_open:
            return False
        self._is_open = False
        self._ledger.release(self, at_s)
        return True


class ReplicaLoad:
    """The ledger's account of one replica. Times are monotonic seconds as seen at the replica."""

    def __init__(self) -> None:
        self.is_removed = False
        """The route table no longer has the replica: drop the account after its last answer."""
        self.requests = 0
        self.batch_items = 0
        """Those of the requests that are items of batches: a client's request preempts them."""
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.output_tokens = 0
        self.pending: dict[Reservation, float] = {}
        """Prompts not read yet, in the order sent, each with its prefill time in ms."""
        self.pending_ms = 0.0
        """Sum of `pending`, kept because a busy replica has hundreds of them."""
        self.busy_until_s = -1e18
        self.wake_ms = 0.0
        """How long a request would wait for the replica to wake, as it reported last."""
        self.others = OtherRoutersLoad()
        self.sequences_max = 0
        """How many requests the engine runs at once, as its node said last; 0 if unknown."""
        self.sequence_ms = 0.0
        """The time from the end of one of them to the next when it runs that many."""
        self.others_requests = 0
        self.others_batch_items = 0
        """Requests of other routers there when its node was pinged last, and the items of them."""
        self.history: deque[OwnLoad] = deque(maxlen=HISTORY_MAX)

    @property
    def queued_ms(self) -> float:
        """Return the prefill time that cannot have begun: all but the first pending prompt."""
        if len(self.pending) < 2:
            return 0.0
        return max(0.0, self.pending_ms - next(iter(self.pending.values())))

    @property
    def clients_requests(self) -> int:
        """Return the requests of clients there, of all routers."""
        own = self.requests - self.batch_items
        return own + self.others_requests - self.others_batch_items

    @property
    def sequence_wait_ms(self) -> float:
        """Return how long a client's next request waits until the engine has a sequence."""
        if not self.sequences_max:
            return 0.0
        return sequence_wait_ms(self.clients_requests, self.sequences_max, self.sequence_ms)

    def remove_pending(self, reservation: Reservation) -> bool:
        """Take a prompt out of the pending ones; return False if it is not among them."""
        work_ms = self.pending.get(reservation)
        if work_ms is None:
            return False
        del self.pending[reservation]
        # An empty queue is exactly 0: no rounding error stays behind.
        self.pending_ms = self.pending_ms - work_ms if self.pending else 0.0
        return True

    def note_own_load(self, at_s: float) -> None:
        """Append what this router has there to the history, as of `at_s`."""
        self.history.append(self._own_load(at_s))

    def own_load(self, at_s: float) -> OwnLoad:
        """Return what this router had there at `at_s`, as far back as the history reaches."""
        for entry in reversed(self.history):
            if entry.at_s <= at_s:
                return entry
        if len(self.history) == HISTORY_MAX:
            return self.history[0]
        if self.history:
            return OwnLoad(at_s)
        return self._own_load(at_s)

    def _own_load(self, at_s: float) -> OwnLoad:
        return OwnLoad(
            at_s, self.prefill_tokens, self.output_tokens, self.requests, self.batch_items
        )


class InFlightLedger:
    """An account for each replica that was sent a request or reported its load."""

    def __init__(
        self,
        clock: Callable[[], float],
        on_release: Callable[[ReplicaId], None] | None = None,
        on_change: Callable[[ReplicaId], None] | None = None,
    ) -> None:
        """Call `on_release` when a replica gets capacity, and `on_change` after any change."""
        self._clock = clock
        self._loads: dict[ReplicaId, ReplicaLoad] = {}
        self._on_release = on_release or _ignore
        self._on_change = on_change or _ignore

    def reserve(
        self,
        replica_id: ReplicaId,
        *,
        prefill: int,
        decode: int,
        work_ms: float = 0.0,
        arrives_s: float | None = None,
        others_ms: float = 0.0,
        is_batch_item: bool = False,
    ) -> Reservation:
        """Count a request's tokens before it is sent.

        `prefill` are the prompt tokens that are not cached, and `work_ms` the time to read them.
        Reading begins after the request arrives and after `others_ms`, the prompts of other
        routers that wait there.
        """
        load = self._get_or_create(replica_id)
        reservation = Reservation(self, replica_id, prefill, decode, work_ms, is_batch_item)
        load.prefill_tokens += prefill
        load.decode_tokens += decode
        load.output_tokens += decode
        load.pending[reservation] = work_ms
        load.pending_ms += work_ms
        load.requests += 1
        load.batch_items += is_batch_item
        load.is_removed = False
        if arrives_s is not None:
            begins_s = max(load.busy_until_s, arrives_s + others_ms / 1000)
            load.busy_until_s = begins_s + work_ms / 1000
            load.note_own_load(arrives_s)
        self._on_change(replica_id)
        return reservation

    def tokens_at(self, replica_id: ReplicaId, now_s: float) -> InFlightTokens:
        """Return what is in flight at one replica."""
        load = self.load_of(replica_id)
        others = load.others.estimate(now_s)
        return InFlightTokens(
            load.prefill_tokens,
            load.decode_tokens,
            load.requests,
            round(others.prefill),
            round(others.decode),
        )

    def queued_tokens(self, replica_id: ReplicaId, now_s: float) -> int:
        """Return how many tokens of prompts wait at one replica, those of other routers too."""
        load = self._loads.get(replica_id)
        if load is None:
            return 0
        others = load.others.estimate(now_s).prefill
        return load.prefill_tokens + (round(others) if others else 0)

    def load_of(self, replica_id: ReplicaId) -> ReplicaLoad:
        """Return the replica's account, to read only."""
        return self._loads.get(replica_id) or ReplicaLoad()

    def record_report(
        self,
        replica_id: ReplicaId,
        pending_prefill_tokens: int,
        output_tokens: int,
        reported_at_s: float,
    ) -> None:
        """Take a replica's report of its whole load at `reported_at_s`.

        Tokens in the report beyond this router's own at that time belong to the other routers.
        """
        own = self._get_or_create(replica_id).own_load(reported_at_s)
        self.record_other_routers(
            replica_id,
            max(0, pending_prefill_tokens - own.prefill_tokens),
            max(0, output_tokens - own.output_tokens),
            reported_at_s,
        )

    def record_wake(self, replica_id: ReplicaId, wake_ms: float) -> None:
        """Take a replica's report of how long it needs to wake; 0 if it is awake."""
        if wake_ms == 0.0 and replica_id not in self._loads:
            return
        load = self._get_or_create(replica_id)
        if load.wake_ms != wake_ms:
            load.wake_ms = wake_ms
            self._on_change(replica_id)

    def record_sequences(
        self, replica_id: ReplicaId, reported: ReportedLoad, reported_at_s: float
    ) -> None:
        """Take the answer to a ping: the limit of sequences, and the requests of all routers."""
        load = self._get_or_create(replica_id)
        own, wait_ms = load.own_load(reported_at_s), load.sequence_wait_ms
        load.sequences_max = reported.sequences_max
        load.sequence_ms = float(reported.sequence_ms)
        load.others_requests = max(0, reported.running - own.requests)
        others_items = max(0, reported.batch_items - own.batch_items)
        load.others_batch_items = min(others_items, load.others_requests)
        if load.sequence_wait_ms != wait_ms:
            self._on_change(replica_id)

    def requests_at(self, replica_id: ReplicaId) -> int:
        """Return how many requests of all routers a replica has, as far as is known."""
        load = self.load_of(replica_id)
        return load.requests + load.others_requests

    def full_batches(self, replica_ids: Iterable[ReplicaId]) -> Set[ReplicaId]:
        """Return the replicas whose engine runs as many requests of clients as it can."""
        full = set()
        for replica_id in replica_ids:
            load = self._loads.get(replica_id)
            if load is not None and 0 < load.sequences_max <= load.clients_requests:
                full.add(replica_id)
        return full

    def record_other_routers(
        self,
        replica_id: ReplicaId,
        pending_prefill_tokens: int,
        output_tokens: int,
        reported_at_s: float,
    ) -> None:
        """Take a replica's report of what other routers had there at `reported_at_s`."""
        others = self._get_or_create(replica_id).others
        if others.record(pending_prefill_tokens, output_tokens, reported_at_s):
            self._on_change(replica_id)

    def remove_replicas(self, replica_ids: Set[ReplicaId]) -> None:
        """Drop reports of replicas that left the route table; open reservations stay."""
        # Thousands may leave at once, nearly all without a request.
        for replica_id in replica_ids & self._loads.keys():
            load = self._loads[replica_id]
            if load.requests:
                load.others, load.is_removed = OtherRoutersLoad(), True
            else:
                del self._loads[replica_id]

    def busy_replicas(self) -> list[ReplicaId]:
        """Return the replicas with requests of this router."""
        return [replica_id for replica_id, load in self._loads.items() if load.requests]

    @property
    def requests(self) -> int:
        """Requests in flight at all replicas."""
        return sum(load.requests for load in self._loads.values())

    def totals(self) -> InFlightTokens:
        """Return everything this router has in flight."""
        return InFlightTokens(
            sum(load.prefill_tokens for load in self._loads.values()),
            sum(load.decode_tokens for load in self._loads.values()),
            self.requests,
        )

    def finish_prefill(self, reservation: Reservation, at_s: float | None) -> None:
        """Turn a reservation's prefill tokens into decode tokens. Called by Reservation."""
        load = self._get_or_create(reservation.replica_id)
        if not load.remove_pending(reservation):
            return
        load.prefill_tokens -= reservation.prefill_tokens
        load.decode_tokens += reservation.prefill_tokens
        reservation.decode_tokens += reservation.prefill_tokens
        reservation.prefill_tokens = 0
        if at_s is not None:
            load.note_own_load(at_s)
            load.busy_until_s = at_s + load.pending_ms / 1000
        self._on_change(reservation.replica_id)

    def release(self, reservation: Reservation, at_s: float | None = None) -> None:
        """Take a reservation off the ledger. Called by Reservation."""
        replica_id = reservation.replica_id
        load = self._get_or_create(replica_id)
        load.prefill_tokens -= reservation.prefill_tokens
        load.decode_tokens -= reservation.decode_tokens
        load.output_tokens -= reservation.output_tokens
        if load.remove_pending(reservation):
            load.busy_until_s -= reservation.work_ms / 1000
        assert load.prefill_tokens >= 0 and load.decode_tokens >= 0, (
            f"{replica_id}: released more than reserved"
        )
        load.requests -= 1
        load.batch_items -= reservation.is_batch_item
        load.note_own_load(self._clock() if at_s is None else at_s)
        if load.is_removed and not load.requests:
            del self._loads[replica_id]
        self._on_change(replica_id)
        self._on_release(replica_id)

    def _get_or_create(self, replica_id: ReplicaId) -> ReplicaLoad:
        load = self._loads.get(replica_id)
        if load is None:
            load = self._loads[replica_id] = ReplicaLoad()
        return load


def _ignore(replica_id: ReplicaId) -> None:
    """Do nothing."""
