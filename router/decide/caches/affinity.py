"""Chooses the replica of a session: weighted rendezvous hashing, the same on every router.

Adding a replica moves only the sessions it wins; removing one moves only its own.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import log
from typing import Final, NamedTuple

import xxhash

from isochrone.wire.ids import ReplicaId

SESSIONS_MAX: Final = 50_000
SESSION_TTL_S: Final = 1800.0
SESSION_BYTES_MAX: Final = 256
"""Longest session name that a client may send."""

LOAD_BOUND: Final = 1.25
"""A replica with more than this times its share of the candidates' tokens wins no session."""

_MASK: Final = 2**64 - 1
_MIX: Final = 0x9E3779B97F4A7C15


def hash64(name: str) -> int:
    """Return the 64-bit hash of a replica's, session's or request's name."""
    return xxhash.xxh3_64_intdigest(name.encode())


def rendezvous_score(subject: int, replica: int, weight: float = 1.0) -> float:
    """Return a replica's score for a subject, both hashes: the highest wins, in ratio of weights.

    Weighted rendezvous hashing by -weight / ln(u), u uniform in (0, 1).
    """
    mixed = ((subject ^ replica) * _MIX) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
    # Half a step away from 0 and 1, where the logarithm is infinite or 0.
    uniform = ((mixed >> 11) + 0.5) * 2.0**-53
    return -weight / log(uniform)


def rendezvous_winner(
    subject: int, slots: Sequence[int], hashes: Sequence[int], weights: Sequence[float]
) -> int:
    """Return the slot of highest score for `subject`; hashes and weights are by slot."""
    return max(slots, key=lambda slot: rendezvous_score(subject, hashes[slot], weights[slot]))


def within_load_bound(
    slots: Sequence[int], tokens: Mapping[int, float], weights: Sequence[float]
) -> list[int]:
    """Return the slots with at most LOAD_BOUND times their share of the tokens, at least one."""
    total = sum([tokens[slot] for slot in slots])
    share = LOAD_BOUND * total / sum([weights[slot] for slot in slots])
    return [slot for slot in slots if tokens[slot] <= share * weights[slot]]


class SessionBinding(NamedTuple):
    """The replica that answered a session last, and how much of the session it has cached."""

    replica_id: ReplicaId
    cached_tokens: int
    answered_at_s: float


class SessionTable:
    """The most recently used session bindings."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, ttl_s: float = SESSION_TTL_S) -> None:
        """Keep at most `sessions_max`, each for `ttl_s` after its last answer."""
        self._bindings: OrderedDict[str, SessionBinding] = OrderedDict()
        self._sessions_max = sessions_max
        self._ttl_s = ttl_s

    def __len__(self) -> int:
        """Return how many sessions are bound."""
        return len(self._bindings)

    def lookup(self, session: str, now_s: float) -> SessionBinding | None:
        """Return the session's binding, None if there is none or it has expired."""
        binding = self._bindings.get(session)
        if binding is None:
            return None
        if now_s - binding.answered_at_s > self._ttl_s:
            del self._bindings[session]
            return None
        return binding

    def bind(self, session: str, replica_id: ReplicaId, cached_tokens: int, now_s: float) -> None:
        """Bind the session to the replica that answered it, dropping the oldest binding if full."""
        self._bindings[session] = SessionBinding(replica_id, cached_tokens, now_s)
        self._bindings.move_to_end(session)
        while len(self._bindings) > self._sessions_max:
            self._bindings.popitem(last=False)
