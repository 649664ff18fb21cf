"""Outlier ejection: which replicas get no requests for a while, because requests failed there.

A replica is healthy, ejected or half-open. Consecutive failures, or far more failures than its
peers have, eject it; each ejection soon after the last is twice as long. When its time is over, one
request goes to it (half-open) while the others still go elsewhere, and its answer makes it healthy.
Only requests can do this: a ping is answered by the node and proves nothing about the engine. A
ping that is not answered postpones the half-open request.

At most half of a deployment's replicas are excluded. If more are unhealthy, either the whole fleet
is, or the fault is on this router's side (a broken uplink, a bug). Then no replica is excluded: the
unhealthy ones become the last resort, used when no healthy replica has capacity. A replica that is
really dead costs a request only then, and one that only seemed dead is healthy with its first
answer.

A node that misses two pings in a row is lost, and its replicas are ejected. If most nodes are
silent at once, this router itself is cut off, and no node is taken for lost.

A replica that becomes healthy again begins with a small share of requests (slow_start.py).
"""

from collections.abc import Collection, Mapping, Set
from typing import Final, NamedTuple

from isochrone.wire.ids import NodeId, ReplicaId

FAILURES_MAX: Final = 3
"""The failures in a row that eject a replica."""

EJECTED_MIN_S: Final = 2.0
EJECTED_MAX_S: Final = 60.0
HALF_OPEN_S: Final = 5.0
"""While a half-open replica's request is not answered, the others go elsewhere for this long."""

REPEAT_WINDOW_S: Final = 120.0
"""A replica ejected again within this time after its last ejection ended stays out twice as long
as before."""

FAILURE_RATIO_SMOOTHING: Final = 0.1
"""Weight of one request in a replica's failure ratio: it covers some ten requests."""

FAILURE_RATIO_MIN: Final = 0.3
FAILURE_RATIO_OVER_PEERS: Final = 3.0
"""A failure ratio ejects a replica if it is at least the minimum and this many times its peers'."""

UNREACHABLE_S: Final = 5.0
"""A ping that is not answered postpones the half-open request by this long."""


class HealthRecord:
    """A replica's failures. `until_s` is when its ejection or half-open time ends, 0 if healthy."""

    def __init__(self) -> None:
        self.consecutive_failures = 0
        self.failure_ratio = 0.0
        self.until_s = 0.0
        self.is_half_open = False
        self.ejected_at_s = 0.0
        self.ejected_for_s = 0.0

    @property
    def is_ejected(self) -> bool:
        """Return whether the replica is ejected, and not half-open."""
        return self.until_s > 0 and not self.is_half_open


class ReplicaHealth:
    """The records of replicas that have failed; a replica that never failed has none."""

    def __init__(self) -> None:
        """Start with every replica healthy."""
        self._records: dict[ReplicaId, HealthRecord] = {}
        self._until_s: dict[ReplicaId, float] = {}
        """`until_s` of the replicas that are not healthy."""

    def record_failure(
        self, replica_id: ReplicaId, now_s: float, peers: Collection[ReplicaId] = ()
    ) -> str:
        """Note a failed request; return the cause if it ejects the replica, else "".

        `peers` are the replicas of the same deployment.
        """
        record = self._records.get(replica_id)
        if record is None:
            record = self._records[replica_id] = HealthRecord()
        record.consecutive_failures += 1
        record.failure_ratio += FAILURE_RATIO_SMOOTHING * (1.0 - record.failure_ratio)
        if record.is_ejected:
            # The request was sent before the ejection.
            return ""
        if record.is_half_open:
            cause = "half_open"
        elif record.consecutive_failures >= FAILURES_MAX:
            cause = "consecutive"
        elif self._is_outlier(replica_id, record, peers):
            cause = "ratio"
        else:
            return ""
        self._eject(replica_id, record, now_s)
        return cause

    def record_success(self, replica_id: ReplicaId) -> bool:
        """Note a good answer; return True if it makes a half-open replica healthy."""
        record = self._records.get(replica_id)
        if record is None:
            return False
        record.failure_ratio -= FAILURE_RATIO_SMOOTHING * record.failure_ratio
        recovered = record.is_half_open
        if recovered:
            record.is_half_open = False
            record.until_s = 0.0
            record.failure_ratio = 0.0
            del self._until_s[replica_id]
        if not record.until_s:
            record.consecutive_failures = 0
        return recovered

    def record_sent(self, replica_id: ReplicaId, now_s: float) -> None:
        """Note a request on its way. It makes a replica that is not healthy half-open."""
        if replica_id in self._until_s:
            record = self._records[replica_id]
            record.is_half_open = True
            record.until_s = max(record.until_s, now_s + HALF_OPEN_S)
            self._until_s[replica_id] = record.until_s

    def eject_lost(self, replica_id: ReplicaId, now_s: float) -> bool:
        """Eject a replica whose node is lost; return False if it was ejected already."""
        record = self._records.setdefault(replica_id, HealthRecord())
        if record.is_ejected:
            return False
        self._eject(replica_id, record, now_s)
        return True

    def postpone_half_open(self, replica_id: ReplicaId, now_s: float) -> None:
        """Keep a replica ejected because its node answers no ping.

        Not for longer than EJECTED_MAX_S in all, because pings may fail for another reason.
        """
        record = self._records.get(replica_id)
        if record is not None and record.is_ejected:
            until_s = min(now_s + UNREACHABLE_S, record.ejected_at_s + EJECTED_MAX_S)
            if until_s > record.until_s:
                record.until_s = self._until_s[replica_id] = until_s

    def unhealthy(self) -> Set[ReplicaId]:
        """Return the replicas that are not healthy, whether their ejection has ended or not."""
        return self._until_s.keys()

    def ejected_until_s(self, now_s: float) -> Mapping[ReplicaId, float]:
        """Return the replicas that are ejected or half-open now, and until when."""
        if not self._until_s:
            return {}
        return {
            replica_id: until_s for replica_id, until_s in self._until_s.items() if until_s > now_s
        }

    def remove_replicas(self, replica_ids: Set[ReplicaId]) -> None:
        """Drop the records of replicas that left the route table."""
        for replica_id in replica_ids:
            self._records.pop(replica_id, None)
            self._until_s.pop(replica_id, None)

    def _is_outlier(
        self, replica_id: ReplicaId, record: HealthRecord, peers: Collection[ReplicaId]
    ) -> bool:
        others = [self._records.get(peer) for peer in peers if peer != replica_id]
        if record.failure_ratio < FAILURE_RATIO_MIN or not others:
            return False
        mean = sum(other.failure_ratio for other in others if other is not None) / len(others)
        return record.failure_ratio >= FAILURE_RATIO_OVER_PEERS * mean

    def _eject(self, replica_id: ReplicaId, record: HealthRecord, now_s: float) -> None:
        is_repeated = now_s - record.ejected_at_s <= record.ejected_for_s + REPEAT_WINDOW_S
        for_s = 2 * record.ejected_for_s if is_repeated else EJECTED_MIN_S
        record.ejected_for_s = min(EJECTED_MAX_S, max(EJECTED_MIN_S, for_s))
        record.ejected_at_s = now_s
        record.is_half_open = False
        record.until_s = self._until_s[replica_id] = now_s + record.ejected_for_s


class EjectionSplit(NamedTuple):
    """A deployment's unhealthy replicas: those to exclude, or those to use as a last resort.

    One of the two sets is empty.
    """

    excluded: frozenset[ReplicaId]
    last_resort: frozenset[ReplicaId]


def split_ejected(
    replicas: Collection[ReplicaId], ejected_until_s: Mapping[ReplicaId, float]
) -> EjectionSplit:
    """Exclude the ejected ones of `replicas`, or make them the last resort if they are the most."""
    unhealthy = frozenset(replica_id for replica_id in ejected_until_s if replica_id in replicas)
    if not is_panic(len(unhealthy), len(replicas)):
        return EjectionSplit(unhealthy, frozenset())
    return EjectionSplit(frozenset(), unhealthy)


def is_panic(unhealthy: int, replicas: int) -> bool:
    """Return whether too many of a deployment's replicas are unhealthy to exclude any."""
    return 2 * unhealthy > replicas


def lost_nodes(silent: Set[NodeId], node_count: int) -> Set[NodeId]:
    """Return which silent nodes are lost: all, or none if most of the nodes are silent."""
    return silent if 2 * len(silent) <= node_count else frozenset()
