"""Who is left alone for a while: consecutive failures eject, one trial at a time brings back.

Never more than half of a deployment's replicas are ejected: when everything seems ill, the
observer may be (a probe bug, a broken uplink), and refusing all would make that true.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Final, NamedTuple

from isochrone.wire.ids import ReplicaId

FAILURES_MAX: Final = 3
EJECTED_MIN_S: Final = 2.0
EJECTED_MAX_S: Final = 60.0
TRIAL_S: Final = 5.0


class Standing(NamedTuple):
    """A replica's record: failures in a row, ejected until when, for how long the last time."""

    failures: int
    until_s: float
    ejected_for_s: float


class Health:
    """The standings of replicas that failed lately; one that answers well has no entry."""

    def __init__(self) -> None:
        """Start with everyone well."""
        self._standings: dict[ReplicaId, Standing] = {}

    def failed(self, replica_id: ReplicaId, now_s: float) -> bool:
        """Note a failure; True where it ejects the replica, for twice as long each time."""
        old = self._standings.get(replica_id, Standing(0, 0.0, 0.0))
        failures = old.failures + 1
        if failures < FAILURES_MAX:
            self._standings[replica_id] = Standing(failures, old.until_s, old.ejected_for_s)
            return False
        for_s = min(EJECTED_MAX_S, max(EJECTED_MIN_S, 2 * old.ejected_for_s))
        self._standings[replica_id] = Standing(failures, now_s + for_s, for_s)
        return True

    def answered(self, replica_id: ReplicaId) -> None:
        """Note a good answer: all is forgiven."""
        self._standings.pop(replica_id, None)

    def picked(self, replica_id: ReplicaId, now_s: float) -> None:
        """Note a request on its way. To one just back from ejection it is a trial: others wait."""
        standing = self._standings.get(replica_id)
        if standing is not None and standing.ejected_for_s and standing.until_s <= now_s:
            self._standings[replica_id] = standing._replace(until_s=now_s + TRIAL_S)

    def ejected_until(self, now_s: float) -> Mapping[ReplicaId, float]:
        """Return who is ejected now, and until when."""
        return {
            replica_id: standing.until_s
            for replica_id, standing in self._standings.items()
            if standing.until_s > now_s
        }

    def forget(self, replica_ids: Set[ReplicaId]) -> None:
        """Drop the standings of replicas that no table names any more."""
        for replica_id in replica_ids:
            self._standings.pop(replica_id, None)


def left_alone(
    replicas: Sequence[ReplicaId], ejected_until: Mapping[ReplicaId, float]
) -> frozenset[ReplicaId]:
    """Return which of `replicas` to leave alone: the ejected, at most half, the worst first."""
    ejected = sorted(
        (replica_id for replica_id in replicas if replica_id in ejected_until),
        key=lambda replica_id: (-ejected_until[replica_id], replica_id),
    )
    return frozenset(ejected[: len(replicas) // 2])


class RetryBudget:
    """Retries allowed as a share of requests, so that trouble is not multiplied by retrying."""

    def __init__(self, ratio: float = 0.2, reserve: float = 10.0) -> None:
        """Allow `ratio` retries per request, and `reserve` at once after a calm time."""
        self._ratio = ratio
        self._reserve = reserve
        self._balance = reserve

    def deposit(self) -> None:
        """Note a first attempt."""
        self._balance = min(self._reserve, self._balance + self._ratio)

    def withdraw(self) -> bool:
        """Take one retry out; False where the budget is spent."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True
