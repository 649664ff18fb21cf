"""Tokens in flight at each replica: what this router sent there and is not over yet.

Rule 1: what is reserved is released exactly once, on finish, cancel and crash alike.
Rule 2: prefill and decode are counted apart; the first token turns prefill into decode.
Rule 3: a replica's own word (its load header) adds what others sent there, and it ages.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from isochrone.wire.headers import Load
from isochrone.wire.ids import ReplicaId

LOAD_FRESH_S: Final = 5.0
"""How long a replica's word about its load is believed; what others sent drains meanwhile."""


class InFlight(NamedTuple):
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

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that a new request waits for."""
        return self.prefill_tokens + self.others_prefill_tokens


NOTHING: Final = InFlight(0, 0, 0)


class Reservation:
    """One request's share of a replica. Whoever holds it releases it; a second time is nothing."""

    __slots__ = ("_ledger", "_open", "decode_tokens", "prefill_tokens", "replica_id")

    def __init__(
        self, ledger: "TokensInFlight", replica_id: ReplicaId, prefill: int, decode: int
    ) -> None:
        self._ledger = ledger
        self._open = True
        self.replica_id = replica_id
        self.prefill_tokens = prefill
        self.decode_tokens = decode

    @property
    def is_open(self) -> bool:
        """Whether these tokens are still counted."""
        return self._open

    def first_token(self) -> None:
        """Prefill is over: the prompt no longer stands in anyone's way, only its KV stays."""
        if self._open and self.prefill_tokens:
            self._ledger.move_to_decode(self.replica_id, self.prefill_tokens)
            self.decode_tokens += self.prefill_tokens
            self.prefill_tokens = 0

    def release(self) -> bool:
        """Give everything back; False where that has happened already."""
        if not self._open:
            return False
        self._open = False
        self._ledger.give_back(self)
        return True


class TokensInFlight:
    """The ledger: one line per replica that has anything in flight or said something lately."""

    def __init__(self, on_release: Callable[[ReplicaId], None] | None = None) -> None:
        """With `on_release`, tell whom when a replica got room."""
        self._prefill: dict[ReplicaId, int] = {}
        self._decode: dict[ReplicaId, int] = {}
        self._requests: dict[ReplicaId, int] = {}
        self._told: dict[ReplicaId, tuple[float, int, int]] = {}
        self._on_release = on_release

    def reserve(self, replica_id: ReplicaId, *, prefill: int, decode: int) -> Reservation:
        """Count a request's tokens before it is sent."""
        self._add(replica_id, prefill, decode, 1)
        return Reservation(self, replica_id, prefill, decode)

    def at(self, replica_id: ReplicaId, now_s: float) -> InFlight:
        """Return what is in flight at one replica."""
        requests = self._requests.get(replica_id, 0)
        told_at, others_prefill, others_decode = self._told.get(replica_id, (-1e18, 0, 0))
        left = max(0.0, 1.0 - (now_s - told_at) / LOAD_FRESH_S)
        if not requests and not left:
            return NOTHING
        return InFlight(
            self._prefill.get(replica_id, 0),
            self._decode.get(replica_id, 0),
            requests,
            round(others_prefill * left),
            round(others_decode * left),
        )

    def hear(self, replica_id: ReplicaId, load: Load, now_s: float) -> None:
        """Correct the view by a replica's own word: what is not ours is others'."""
        self._told[replica_id] = (
            now_s,
            max(0, load.prefill_tokens - self._prefill.get(replica_id, 0)),
            max(0, load.decode_tokens - self._decode.get(replica_id, 0)),
        )

    def forget(self, replica_ids: set[ReplicaId]) -> None:
        """Drop what replicas said that no table names any more."""
        for replica_id in replica_ids:
            self._told.pop(replica_id, None)

    @property
    def requests(self) -> int:
        """Requests in flight, everywhere."""
        return sum(self._requests.values())

    def totals(self) -> InFlight:
        """Everything this router has in flight."""
        return InFlight(sum(self._prefill.values()), sum(self._decode.values()), self.requests)

    def move_to_decode(self, replica_id: ReplicaId, tokens: int) -> None:
        """Turn prefill into decode. For Reservation."""
        self._add(replica_id, -tokens, tokens, 0)

    def give_back(self, reservation: Reservation) -> None:
        """Take a reservation off the ledger. For Reservation."""
        self._add(
            reservation.replica_id, -reservation.prefill_tokens, -reservation.decode_tokens, -1
        )
        if self._on_release is not None:
            self._on_release(reservation.replica_id)

    def _add(self, replica_id: ReplicaId, prefill: int, decode: int, requests: int) -> None:
        for counts, change in (
            (self._prefill, prefill),
            (self._decode, decode),
            (self._requests, requests),
        ):
            count = counts.get(replica_id, 0) + change
            assert count >= 0, f"{replica_id}: released more than was reserved"
            if count:
                counts[replica_id] = count
            else:
                counts.pop(replica_id, None)
