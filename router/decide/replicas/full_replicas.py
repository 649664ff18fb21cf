"""Which replicas refused requests for lack of room, so that those that wait do not ask in vain.

Routers do not know a node's limit of requests, and each refusal would let the next waiting request
ask.

Rule 1: a replica that refused a tenant's request when it had N requests is asked for that tenant
again once it has fewer: this router's own requests, and those of others by the last report. N is
counted in the same way, so that a late report lets none ask in vain.
Rule 2: every ASK_AGAIN_S one request asks anyway. What the replica lacked may have been tokens, of
which another request needs fewer, and reports are late.
Rule 3: an answer that says that the replica has more than N requests raises N to that.
Rule 4: refusals concern only their tenant, because nodes have room for a tenant's first request;
and those of items of batches concern no request of a client, for which nodes end items.
"""

from collections.abc import Callable, Set
from typing import Final

from isochrone.wire.ids import ReplicaId

ASK_AGAIN_S: Final = 0.25
FORGET_S: Final = 5.0
"""Refusals older than this are dropped."""

NO_REPLICAS: Final[Set[ReplicaId]] = frozenset()

Asker = tuple[str, bool]
"""Whose requests a node treats alike: a tenant, and whether they are items of batches."""


class RoomRefusal:
    """How many requests a replica had when it refused one, and when it was asked with as many."""

    __slots__ = ("asked_at_s", "refused_at_s", "requests")

    def __init__(self, requests: int, now_s: float) -> None:
        self.requests = requests
        self.refused_at_s = self.asked_at_s = now_s


class FullReplicas:
    """The refusals of the last seconds, by whose request was refused."""

    def __init__(self) -> None:
        self._refusals: dict[Asker, dict[ReplicaId, RoomRefusal]] = {}
        self._swept_at_s = 0.0

    def record_refusal(
        self, asker: Asker, replica_id: ReplicaId, requests: int, now_s: float
    ) -> None:
        """Note that a replica that has `requests` refused one."""
        self._refusals.setdefault(asker, {})[replica_id] = RoomRefusal(requests, now_s)
        if now_s - self._swept_at_s > FORGET_S:
            self._sweep(now_s)

    def record_sent(self, asker: Asker, replica_id: ReplicaId, requests: int, now_s: float) -> None:
        """Note that a request is sent to a replica that has `requests`."""
        refusal = self._find(asker, replica_id)
        if refusal is not None and requests >= refusal.requests:
            refusal.asked_at_s = now_s

    def record_answer(self, asker: Asker, replica_id: ReplicaId, requests: int) -> None:
        """Note that a replica that has `requests` answered one."""
        refusal = self._find(asker, replica_id)
        if refusal is not None:
            refusal.requests = max(refusal.requests, requests)

    def full_for(
        self, asker: Asker, requests_at: Callable[[ReplicaId], int], now_s: float
    ) -> Set[ReplicaId]:
        """Return the replicas that would refuse the request; `requests_at` counts theirs now."""
        refusals = self._refusals.get(asker)
        if refusals is None:
            return NO_REPLICAS
        return {
            replica_id
            for replica_id, refusal in refusals.items()
            if now_s - refusal.asked_at_s < ASK_AGAIN_S
            and requests_at(replica_id) >= refusal.requests
        }

    def _find(self, asker: Asker, replica_id: ReplicaId) -> RoomRefusal | None:
        refusals = self._refusals.get(asker)
        return refusals.get(replica_id) if refusals is not None else None

    def _sweep(self, now_s: float) -> None:
        """Forget old refusals."""
        self._swept_at_s = now_s
        for asker, refusals in list(self._refusals.items()):
            recent = {
                replica_id: refusal
                for replica_id, refusal in refusals.items()
                if now_s - refusal.refused_at_s <= FORGET_S
            }
            if recent:
                self._refusals[asker] = recent
            else:
                del self._refusals[asker]
