"""Slow start: a replica that has just become warm or healthy takes a growing share of requests.

An idle replica looks best to every router at the same moment, and no router sees what the others
send. Each may send it one request, which is harmless. While a request is in flight there, a hash of
the session, or of the request if it has no session, decides whether the next may follow: one in ten
at first, growing linearly to all after SLOW_START_S. A session once admitted stays admitted, and
routers that know nothing of each other together send the share that each sends alone.

A request that is held back goes to the next best replica, or to this one if no other has capacity.
"""

from collections.abc import Collection, Mapping
from typing import Final

from isochrone.wire.ids import ReplicaId
from router.decide.caches.affinity import hash64

SLOW_START_S: Final = 10.0
SHARE_FIRST: Final = 0.1


class SlowStart:
    """The replicas in slow start, with the time it began."""

    def __init__(self) -> None:
        self._began_s: dict[ReplicaId, float] = {}

    def __len__(self) -> int:
        """Return how many replicas are recorded."""
        return len(self._began_s)

    def begin(self, replica_ids: Collection[ReplicaId], now_s: float) -> None:
        """Put replicas into slow start."""
        for replica_id in replica_ids:
            self._began_s[replica_id] = now_s

    def remove_replicas(self, replica_ids: Collection[ReplicaId]) -> None:
        """Drop replicas that left the route table."""
        for replica_id in replica_ids:
            self._began_s.pop(replica_id, None)

    def shares(self, now_s: float) -> Mapping[ReplicaId, float]:
        """Return the share of requests that each replica in slow start takes now."""
        if not self._began_s:
            return {}
        for replica_id, began_s in list(self._began_s.items()):
            if now_s - began_s >= SLOW_START_S:
                del self._began_s[replica_id]
        return {
            replica_id: SHARE_FIRST + (1 - SHARE_FIRST) * max(0.0, now_s - began_s) / SLOW_START_S
            for replica_id, began_s in self._began_s.items()
        }


def is_held_back(replica_id: ReplicaId, share: float, subject: str) -> bool:
    """Return whether a session or request may not go to a replica that takes this share."""
    return hash64(f"{subject}/{replica_id}") >= share * 2**64
