"""Which replicas refused requests because they were full, and when to send them one again.

Routers do not know a node's limit of requests. Each refusal would let the next waiting request try,
so that a full node would refuse without end.

Rule 1: a replica that refused a tenant's request when it had N requests gets that tenant's requests
again once it has fewer: this router's own requests, and those of others by the last report. N is
counted in the same way, so that a late report causes no refusal.
Rule 2: every ASK_AGAIN_S one request is sent anyway. The replica may have lacked tokens, of which
another request needs fewer, and reports are late.
Rule 3: an answer that says that the replica has more than N requests raises N to that.
Rule 4: refusals concern only their tenant, because a node admits a tenant's first request even
beyond its limit. Refusals of batch items do not concern requests of clients: nodes end items for
those.
"""

from collections.abc import Callable, Set
from typing import Final

from isochrone.wire.ids import ReplicaId

ASK_AGAIN_S: Final = 0.25
FORGET_S: Final = 5.0
"""Refusals older than this are dropped."""

NO_REPLICAS: Final[Set[ReplicaId]] = frozenset()

RequestGroup = tuple[str, bool]
"""Requests that a full node treats alike: their tenant, and whether they are items of batches."""


class FullRefusal:
    """How many requests a replica had when it refused one, and when it was last sent one more."""

    __slots__ = ("refused_at_s", "requests", "sent_at_s")

    def __init__(self, requests: int, now_s: float) -> None:
        self.requests = requests
        self.refused_at_s = self.sent_at_s = now_s


class FullReplicas:
    """The refusals of the last seconds, by the group of the refused request."""

    def __init__(self) -> None:
        self._refusals: dict[RequestGroup, dict[ReplicaId, FullRefusal]] = {}
        self._swept_at_s = 0.0

    def record_refusal(
        self, group: RequestGroup, replica_id: ReplicaId, requests: int, now_s: float
    ) -> None:
        """Note that a replica that has `requests` refused one."""
        self._refusals.setdefault(group, {})[replica_id] = FullRefusal(requests, now_s)
        if now_s - self._swept_at_s > FORGET_S:
            self._sweep(now_s)

    def record_sent(
        self, group: RequestGroup, replica_id: ReplicaId, requests: int, now_s: float
    ) -> None:
        """Note that a request is sent to a replica that has `requests`."""
        refusal = self._find(group, replica_id)
        if refusal is not None and requests >= refusal.requests:
            refusal.sent_at_s = now_s

    def record_answer(self, group: RequestGroup, replica_id: ReplicaId, requests: int) -> None:
        """Note that a replica that has `requests` answered one."""
        refusal = self._find(group, replica_id)
        if refusal is not None:
            refusal.requests = max(refusal.requests, requests)

    def full_for(
        self, group: RequestGroup, requests_at: Callable[[ReplicaId], int], now_s: float
    ) -> Set[ReplicaId]:
        """Return the replicas that would refuse the request; `requests_at` counts theirs now."""
        refusals = self._refusals.get(group)
        if refusals is None:
            return NO_REPLICAS
        return {
            replica_id
            for replica_id, refusal in refusals.items()
            if now_s - refusal.sent_at_s < ASK_AGAIN_S
            and requests_at(replica_id) >= refusal.requests
        }

    def _find(self, group: RequestGroup, replica_id: ReplicaId) -> FullRefusal | None:
        refusals = self._refusals.get(group)
        return refusals.get(replica_id) if refusals is not None else None

    def _sweep(self, now_s: float) -> None:
        """Forget old refusals."""
        self._swept_at_s = now_s
        for group, refusals in list(self._refusals.items()):
            recent = {
                replica_id: refusal
                for replica_id, refusal in refusals.items()
                if now_s - refusal.refused_at_s <= FORGET_S
            }
            if recent:
                self._refusals[group] = recent
            else:
                del self._refusals[group]
