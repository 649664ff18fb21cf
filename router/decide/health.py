"""Who is left alone for a while: what failed in a row, or far more often than its peers.

A replica is well, ejected, or on trial. Failures eject it, for twice as long each time it comes
back soon; when that time is over one request is its trial, and the others go elsewhere until that
one has answered. Only its own requests make a replica well: a ping that its node answers proves
nothing of the engine, but one that goes unanswered spares a client the trial.

Never more than half of a deployment's replicas are left alone. When more are ill, either the fleet
is or the observer (a broken uplink, a bug of ours): then none is left alone, and those that are ill
are asked after all that are well. What is truly dead costs a request only where nothing else has
room, and what only seemed ill is well again with its first answer.

A node that answers no ping, twice, is gone, and its replicas are ejected; where most nodes are
silent at once it is the router that is cut off, and none is taken for gone.

One that is well again takes a growing share at first (slow_start.py).
"""

from collections.abc import Collection, Mapping, Set
from typing import Final, NamedTuple

from isochrone.wire.ids import NodeId, ReplicaId

FAILURES_MAX: Final = 3
EJECTED_MIN_S: Final = 2.0
EJECTED_MAX_S: Final = 60.0
HALF_OPEN_S: Final = 5.0
REPEAT_WINDOW_S: Final = 120.0
"""Who is ejected again within this time of coming back is so for twice as long as before."""

FAILURE_RATIO_SMOOTHING: Final = 0.1
FAILURE_RATIO_MIN: Final = 0.3
FAILURE_RATIO_OVER_PEERS: Final = 3.0
"""Such a share of failures among the last ten or so ejects, if it is so many times the peers'."""

UNREACHABLE_S: Final = 5.0


class HealthRecord:
    """A replica's record. `until_s` is when its ejection or its trial is over; 0 if it is well."""

    def __init__(self) -> None:
        self.failures = 0
        self.ratio = 0.0
        self.until_s = 0.0
        self.is_trial = False
        self.ejected_at_s = 0.0
        self.ejected_for_s = 0.0


class ReplicaHealth:
    """The standings of replicas that ever failed; one that never did has no entry."""

    def __init__(self) -> None:
        """Start with everyone well."""
        self._standings: dict[ReplicaId, HealthRecord] = {}
        self._until_s: dict[ReplicaId, float] = {}

    def failed(self, replica_id: ReplicaId, now_s: float, peers: Collection[ReplicaId] = ()) -> str:
        """Note a failure among `peers`; where it ejects the replica, return why."""
        standing = self._standings.get(replica_id)
        if standing is None:
            standing = self._standings[replica_id] = HealthRecord()
        standing.failures += 1
        standing.ratio += FAILURE_RATIO_SMOOTHING * (1.0 - standing.ratio)
        if standing.until_s and not standing.is_trial:
            # It was on its way before the ejection: nothing new.
            return ""
        if standing.is_trial:
            cause = "trial"
        elif standing.failures >= FAILURES_MAX:
            cause = "consecutive"
        elif self._stands_out(replica_id, standing, peers):
            cause = "ratio"
        else:
            return ""
        self._eject(replica_id, standing, now_s)
        return cause

    def answered(self, replica_id: ReplicaId) -> bool:
        """Note a good answer. One that passed its trial is well, and judged anew; true for that."""
        standing = self._standings.get(replica_id)
        if standing is None:
            return False
        standing.ratio -= FAILURE_RATIO_SMOOTHING * standing.ratio
        passed = standing.is_trial
        if passed:
            standing.is_trial = False
            standing.until_s = 0.0
            standing.ratio = 0.0
            del self._until_s[replica_id]
        if not standing.until_s:
            standing.failures = 0
        return passed

    def picked(self, replica_id: ReplicaId, now_s: float) -> None:
        """Note a request on its way. To one that is not well it is a trial: others wait for it."""
        if replica_id in self._until_s:
            standing = self._standings[replica_id]
            standing.is_trial = True
            standing.until_s = self._until_s[replica_id] = max(
                standing.until_s, now_s + HALF_OPEN_S
            )

    def gone(self, replica_id: ReplicaId, now_s: float) -> bool:
        """Its node is gone: eject it; false where it was ejected already."""
        standing = self._standings.setdefault(replica_id, HealthRecord())
        if standing.until_s and not standing.is_trial:
            return False
        self._eject(replica_id, standing, now_s)
        return True

    def unreachable(self, replica_id: ReplicaId, now_s: float) -> None:
        """Its node answers no ping: put its trial off, but not for ever, as pings may be broken."""
        standing = self._standings.get(replica_id)
        if standing is not None and standing.until_s and not standing.is_trial:
            until_s = min(now_s + UNREACHABLE_S, standing.ejected_at_s + EJECTED_MAX_S)
            if until_s > standing.until_s:
                standing.until_s = self._until_s[replica_id] = until_s

    def ejected(self) -> Set[ReplicaId]:
        """Return who is not well, whether its time is over or not."""
        return self._until_s.keys()

    def ejected_until(self, now_s: float) -> Mapping[ReplicaId, float]:
        """Return who is ejected or on trial now, and until when."""
        if not self._until_s:
            return {}
        return {
            replica_id: until_s for replica_id, until_s in self._until_s.items() if until_s > now_s
        }

    def forget(self, replica_ids: Set[ReplicaId]) -> None:
        """Drop the standings of replicas that no table names any more."""
        for replica_id in replica_ids:
            self._standings.pop(replica_id, None)
            self._until_s.pop(replica_id, None)

    def _stands_out(
        self, replica_id: ReplicaId, standing: HealthRecord, peers: Collection[ReplicaId]
    ) -> bool:
        others = [self._standings.get(peer) for peer in peers if peer != replica_id]
        if standing.ratio < FAILURE_RATIO_MIN or not others:
            return False
        mean = sum(other.ratio for other in others if other is not None) / len(others)
        return standing.ratio >= FAILURE_RATIO_OVER_PEERS * mean

    def _eject(self, replica_id: ReplicaId, standing: HealthRecord, now_s: float) -> None:
        is_again = now_s - standing.ejected_at_s <= standing.ejected_for_s + REPEAT_WINDOW_S
        for_s = 2 * standing.ejected_for_s if is_again else EJECTED_MIN_S
        standing.ejected_for_s = min(EJECTED_MAX_S, max(EJECTED_MIN_S, for_s))
        standing.ejected_at_s = now_s
        standing.is_trial = False
        standing.until_s = self._until_s[replica_id] = now_s + standing.ejected_for_s


class EjectionSplit(NamedTuple):
    """Of one deployment's replicas: whom to leave `alone`, and whom to ask only after all others.

    There is never someone in both: either few enough are ill to be left alone, or it is a panic.
    """

    alone: frozenset[ReplicaId]
    last: frozenset[ReplicaId]


def split_ejected(
    replicas: Collection[ReplicaId], ejected_until: Mapping[ReplicaId, float]
) -> EjectionSplit:
    """Judge `replicas` by who of them is ejected now."""
    ill = frozenset(replica_id for replica_id in replicas if replica_id in ejected_until)
    if 2 * len(ill) <= len(replicas):
        return EjectionSplit(ill, frozenset())
    return EjectionSplit(frozenset(), ill)


def lost_nodes(silent: Set[NodeId], nodes: int) -> Set[NodeId]:
    """Return who of the `silent` among so many nodes is gone: none where most are silent."""
    return silent if 2 * len(silent) <= nodes else frozenset()
