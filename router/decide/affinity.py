"""Where a session goes: a weighted rendezvous that every router computes alike.

Adding a replica moves only the sessions that it wins; losing one moves only its own.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import log
from typing import Final, NamedTuple

import xxhash

from isochrone.wire.ids import ReplicaId

SESSIONS_MAX: Final = 50_000
SESSION_TTL_S: Final = 1800.0
SESSION_BYTES_MAX: Final = 256

LOAD_BOUND: Final = 1.25
"""No replica is drawn that has more than this times its share of the tokens of those drawn from."""

_MASK: Final = 2**64 - 1
_MIX: Final = 0x9E3779B97F4A7C15


def hash64(name: str) -> int:
    """Return the 64 bits that stand for a replica or a session in every draw."""
    return xxhash.xxh3_64_intdigest(name.encode())


def rendezvous_score(subject: int, seed: int, weight: float = 1.0) -> float:
    """Return a replica's score for `subject`, both as `seed_of` gives: highest wins, by weight."""
    mixed = ((subject ^ seed) * _MIX) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
    # (0, 1): the logarithm of neither end is of use.
    uniform = ((mixed >> 11) + 0.5) * 2.0**-53
    return -weight / log(uniform)


def rendezvous_winner(
    subject: int, slots: Sequence[int], seeds: Sequence[int], weights: Sequence[float]
) -> int:
    """Return which of `slots` the rendezvous gives `subject` to."""
    return max(slots, key=lambda slot: rendezvous_score(subject, seeds[slot], weights[slot]))


def within_load_bound(
    slots: Sequence[int], tokens: Sequence[float], weights: Sequence[float]
) -> list[int]:
    """Return those of `slots` that hold no more than LOAD_BOUND times their share; never none."""
    total = sum([tokens[slot] for slot in slots])
    share = LOAD_BOUND * total / sum([weights[slot] for slot in slots])
    return [slot for slot in slots if tokens[slot] <= share * weights[slot]]


class SessionBinding(NamedTuple):
    """Where a session was last answered, and how much of it is in that replica's cache."""

    replica_id: ReplicaId
    cached_tokens: int
    seen_at_s: float


class SessionTable:
    """The last seats, bounded: the least recently used is forgotten first."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, ttl_s: float = SESSION_TTL_S) -> None:
        """Keep at most `sessions_max`, each for `ttl_s` after its last answer."""
        self._seats: OrderedDict[str, SessionBinding] = OrderedDict()
        self._sessions_max = sessions_max
        self._ttl_s = ttl_s

    def __len__(self) -> int:
        """Return how many sessions are remembered."""
        return len(self._seats)

    def lookup(self, session: str, now_s: float) -> SessionBinding | None:
        """Return where the session sat, if that is recent."""
        seat = self._seats.get(session)
        if seat is None:
            return None
        if now_s - seat.seen_at_s > self._ttl_s:
            del self._seats[session]
            return None
        return seat

    def bind(self, session: str, replica_id: ReplicaId, cached_tokens: int, now_s: float) -> None:
        """Remember that the session was answered there."""
        self._seats[session] = SessionBinding(replica_id, cached_tokens, now_s)
        self._seats.move_to_end(session)
        while len(self._seats) > self._sessions_max:
            self._seats.popitem(last=False)
