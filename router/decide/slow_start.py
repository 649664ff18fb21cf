"""A replica just warm, or just well again, takes a growing share of what would go to it.

Whoever comes back idle looks best to every router at the same moment, and none sees what the others
send. Each may send it one request, which harms nobody; while anything is known to be in flight
there, each request draws whether it may follow: one in ten at first, all after SLOW_START_S, a
share that grows evenly between. It draws by its session, else by its own id: a session once let in
stays, and routers that know nothing of one another send together the share that each does alone.
Those who may not go where they would, go to the next best; where nobody else has room, they go all
the same.
"""

from collections.abc import Collection, Mapping
from typing import Final

from isochrone.wire.ids import ReplicaId
from router.decide.affinity import hash64

SLOW_START_S: Final = 10.0
SHARE_FIRST: Final = 0.1


class SlowStart:
    """Who has begun lately, and when."""

    def __init__(self) -> None:
        """Take everyone for long since begun."""
        self._began_s: dict[ReplicaId, float] = {}

    def __len__(self) -> int:
        """Return of how many it is remembered."""
        return len(self._began_s)

    def began(self, replica_ids: Collection[ReplicaId], now_s: float) -> None:
        """These are warm, or well again, from now on."""
        for replica_id in replica_ids:
            self._began_s[replica_id] = now_s

    def forget(self, replica_ids: Collection[ReplicaId]) -> None:
        """No table names these any more."""
        for replica_id in replica_ids:
            self._began_s.pop(replica_id, None)

    def shares(self, now_s: float) -> Mapping[ReplicaId, float]:
        """Return who still takes less than everything, and what share."""
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
    """Say whether a session or request leaves a replica alone that takes only this share yet."""
    return hash64(f"{subject}/{replica_id}") >= share * 2**64
