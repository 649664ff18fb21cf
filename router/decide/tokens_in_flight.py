"""Tokens in flight at each replica: what this router sent there and is not over yet.

Rule 1: what is reserved is released exactly once, on finish, cancel and crash alike.
Rule 2: prefill and decode are counted apart; the first token turns prefill into decode.
Rule 3: a replica's own word (its load) adds what others sent there, as far as it lasts (others.py).
Rule 4: prompts are read one after the other, so a queue empties by the clock: what is counted as
still before a new request is what the replica cannot have read yet.
"""

from collections import deque
from collections.abc import Callable, Set
from typing import Final, NamedTuple

from isochrone.wire.ids import ReplicaId
from router.decide.other_routers_load import OtherRoutersLoad

HISTORY_MAX: Final = 256
"""How many of our own changes at a replica are remembered, to tell ours in an old word of its."""


class InFlightTokens(NamedTuple):
    """Tokens at one replica: of this router, and what else the replica told of."""

    prefill_tokens: int
    decode_tokens: int
    requests: int
    others_prefill_tokens: int = 0
    others_decode_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All tokens there, of whomever."""
        return (
            self.prefill_tokens
            + self.decode_tokens
            + self.others_prefill_tokens
            + self.others_decode_tokens
        )


class Reservation:
    """One request's share of a replica. Whoever holds it releases it; a second time is nothing."""

    __slots__ = (
        "_ledger", "_open", "decode_tokens", "output_tokens", "prefill_tokens", "replica_id",
        "work_ms",
    )  # fmt: skip

    def __init__(
        self,
        ledger: "InFlightLedger",
        replica_id: ReplicaId,
        prefill: int,
        decode: int,
        work_ms: float,
    ) -> None:
        self._ledger = ledger
        self._open = True
        self.replica_id = replica_id
        self.prefill_tokens = prefill
        self.decode_tokens = decode
        self.output_tokens = decode
        self.work_ms = work_ms

    def first_token(self, at_s: float | None = None) -> None:
        """Prefill is over: the prompt no longer stands in anyone's way, only its KV stays.

        With `at_s`, when that was, what was queued behind it is known to begin only now.
        """
        if self._open:
            self._ledger.prefilled(self, at_s)

    def release(self, at_s: float | None = None) -> bool:
        """Give everything back; False where that has happened already.

        With `at_s`, from when on the replica itself no longer counts it.
        """
        if not self._open:
            return False
        self._open = False
        self._ledger.give_back(self, at_s)
        return True


class ReplicaLoad:
    """One replica's line in the ledger. Times are monotonic seconds as seen at the replica."""

    def __init__(self) -> None:
        self.is_gone = False
        """No table names the replica: it ends with the last answer."""
        self.requests = 0
        self.prefill = 0
        self.decode = 0
        self.outputs = 0
        self.reading: dict[Reservation, float] = {}
        """Prompts not read yet, in the order sent, each with the milliseconds it takes."""
        self.reading_ms = 0.0
        """What these take together: kept, as a busy replica has hundreds."""
        self.free_at_s = -1e18
        self.others = OtherRoutersLoad()
        self.past: deque[tuple[float, int, int]] = deque(maxlen=HISTORY_MAX)

    @property
    def behind_first_ms(self) -> float:
        """Return the work that cannot have begun: all but the first prompt being read."""
        if len(self.reading) < 2:
            return 0.0
        return max(0.0, self.reading_ms - next(iter(self.reading.values())))

    def read(self, reservation: Reservation) -> bool:
        """Take a prompt out of those not read; False where it is not among them."""
        work_ms = self.reading.get(reservation)
        if work_ms is None:
            return False
        del self.reading[reservation]
        # Nothing is what nobody takes, whatever rounding left.
        self.reading_ms = self.reading_ms - work_ms if self.reading else 0.0
        return True

    def ours(self, at_s: float) -> tuple[int, int]:
        """Return what of ours (unread, outputs) was there at `at_s`, as far as remembered."""
        for when_s, unread, outputs in reversed(self.past):
            if when_s <= at_s:
                return unread, outputs
        if len(self.past) == HISTORY_MAX:
            return self.past[0][1:]
        return (0, 0) if self.past else (self.prefill, self.outputs)


class InFlightLedger:
    """The ledger: one line per replica that was ever sent anything or said something."""

    def __init__(
        self,
        on_release: Callable[[ReplicaId], None] | None = None,
        on_change: Callable[[ReplicaId], None] | None = None,
    ) -> None:
        """With `on_release`, tell whom when a replica got room; with `on_change`, of any change."""
        self._lines: dict[ReplicaId, ReplicaLoad] = {}
        self._on_release = on_release or _ignore
        self._changed = on_change or _ignore

    def reserve(
        self,
        replica_id: ReplicaId,
        *,
        prefill: int,
        decode: int,
        work_ms: float = 0.0,
        arrives_s: float | None = None,
        others_ms: float = 0.0,
    ) -> Reservation:
        """Count a request's tokens before it is sent: `prefill` of its prompt are not cached.

        Reading it takes `work_ms` after it `arrives_s` and after what others have waiting there.
        """
        line = self._line(replica_id)
        reservation = Reservation(self, replica_id, prefill, decode, work_ms)
        line.prefill += prefill
        line.decode += decode
        line.outputs += decode
        line.reading[reservation] = work_ms
        line.reading_ms += work_ms
        line.requests += 1
        line.is_gone = False
        if arrives_s is not None:
            begins_s = max(line.free_at_s, arrives_s + others_ms / 1000)
            line.free_at_s = begins_s + work_ms / 1000
            line.past.append((arrives_s, line.prefill, line.outputs))
        self._changed(replica_id)
        return reservation

    def at(self, replica_id: ReplicaId, now_s: float) -> InFlightTokens:
        """Return what is in flight at one replica."""
        line = self.line(replica_id)
        told, usual, others_decode = line.others.at(now_s)
        others = round(told + usual), round(others_decode)
        return InFlightTokens(line.prefill, line.decode, line.requests, *others)

    def line(self, replica_id: ReplicaId) -> ReplicaLoad:
        """Return the replica's line, to read."""
        return self._lines.get(replica_id) or ReplicaLoad()

    def hear(self, replica_id: ReplicaId, unread: int, outputs: int, told_at_s: float) -> None:
        """Correct the view by a replica's own word as of `told_at_s`: the rest is others'.

        It had `unread` tokens of prompts before it, and `outputs` promised.
        """
        our_unread, our_outputs = self._line(replica_id).ours(told_at_s)
        others = max(0, unread - our_unread), max(0, outputs - our_outputs)
        self.hear_others(replica_id, *others, told_at_s)

    def hear_others(
        self, replica_id: ReplicaId, unread: int, outputs: int, told_at_s: float
    ) -> None:
        """Take its word on what others had there as of `told_at_s`."""
        if self._line(replica_id).others.hear(unread, outputs, told_at_s):
            self._changed(replica_id)

    def forget(self, replica_ids: Set[ReplicaId]) -> None:
        """Drop what replicas said that no table names any more; what they still answer stays."""
        for replica_id in replica_ids & self._lines.keys():
            line = self._lines[replica_id]
            line.others, line.is_gone = OtherRoutersLoad(), True
            if not line.requests:
                del self._lines[replica_id]

    @property
    def requests(self) -> int:
        """Requests in flight, everywhere."""
        return sum(line.requests for line in self._lines.values())

    def totals(self) -> InFlightTokens:
        """Everything this router has in flight."""
        return InFlightTokens(
            sum(line.prefill for line in self._lines.values()),
            sum(line.decode for line in self._lines.values()),
            self.requests,
        )

    def prefilled(self, reservation: Reservation, at_s: float | None) -> None:
        """Turn prefill into decode. For Reservation."""
        line = self._line(reservation.replica_id)
        if not line.read(reservation):
            return
        line.prefill -= reservation.prefill_tokens
        line.decode += reservation.prefill_tokens
        reservation.decode_tokens += reservation.prefill_tokens
        reservation.prefill_tokens = 0
        if at_s is not None:
            line.past.append((at_s, line.prefill, line.outputs))
            line.free_at_s = at_s + line.reading_ms / 1000
        self._changed(reservation.replica_id)

    def give_back(self, reservation: Reservation, at_s: float | None = None) -> None:
        """Take a reservation off the ledger. For Reservation."""
        replica_id = reservation.replica_id
        line = self._line(replica_id)
        line.prefill -= reservation.prefill_tokens
        line.decode -= reservation.decode_tokens
        line.outputs -= reservation.output_tokens
        if line.read(reservation):
            line.free_at_s -= reservation.work_ms / 1000
        if at_s is not None:
            line.past.append((at_s, line.prefill, line.outputs))
        assert line.prefill >= 0 and line.decode >= 0, f"{replica_id}: released more than reserved"
        line.requests -= 1
        if line.is_gone and not line.requests:
            del self._lines[replica_id]
        self._changed(replica_id)
        self._on_release(replica_id)

    def _line(self, replica_id: ReplicaId) -> ReplicaLoad:
        line = self._lines.get(replica_id)
        if line is None:
            line = self._lines[replica_id] = ReplicaLoad()
        return line


def _ignore(replica_id: ReplicaId) -> None:
    """Need to hear of no replica."""
