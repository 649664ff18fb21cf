"""Where a session goes: a weighted rendezvous that every router computes alike.

Adding a replica moves only the sessions that it wins; losing one moves only its own.
"""

from collections import OrderedDict
from math import log
from typing import Final, NamedTuple

import xxhash

from isochrone.wire.ids import ReplicaId

SESSIONS_MAX: Final = 50_000
SESSION_TTL_S: Final = 1800.0
SESSION_BYTES_MAX: Final = 256


def rendezvous(subject: str, replica_id: ReplicaId, weight: float = 1.0) -> float:
    """Return the replica's score for `subject`: highest wins, in proportion to weight."""
    digest = xxhash.xxh3_64_intdigest(f"{subject}\0{replica_id}".encode())
    # (0, 1): never 0, whose logarithm is none.
    uniform = (digest + 1) / (2**64 + 1)
    return -weight / log(uniform) if uniform < 1.0 else float("inf")


class Seat(NamedTuple):
    """Where a session was last answered, and how much of it is in that replica's cache."""

    replica_id: ReplicaId
    cached_tokens: int
    seen_at_s: float


class Sessions:
    """The last seats, bounded: the least recently used is forgotten first."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, ttl_s: float = SESSION_TTL_S) -> None:
        """Keep at most `sessions_max`, each for `ttl_s` after its last answer."""
        self._seats: OrderedDict[str, Seat] = OrderedDict()
        self._sessions_max = sessions_max
        self._ttl_s = ttl_s

    def __len__(self) -> int:
        """Return how many sessions are remembered."""
        return len(self._seats)

    def find(self, session: str, now_s: float) -> Seat | None:
        """Return where the session sat, if that is recent."""
        seat = self._seats.get(session)
        if seat is None:
            return None
        if now_s - seat.seen_at_s > self._ttl_s:
            del self._seats[session]
            return None
        return seat

    def sat(self, session: str, replica_id: ReplicaId, cached_tokens: int, now_s: float) -> None:
        """Remember that the session was answered there."""
        self._seats[session] = Seat(replica_id, cached_tokens, now_s)
        self._seats.move_to_end(session)
        while len(self._seats) > self._sessions_max:
            self._seats.popitem(last=False)
