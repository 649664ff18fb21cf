"""Which version answers a request while a new one is on its way, and how both did.

The draw is by the session, else the request: the same on every router and at every try, and as the
share grows those who had the new version keep it.
"""

from collections.abc import Iterable
from math import log
from typing import Final, NamedTuple

import xxhash
from msgspec.structs import replace

from isochrone.wire.ids import DeploymentId, PopId, ReplicaId
from isochrone.wire.routes import DeploymentEntry, RolloutEntry, Route
from isochrone.wire.usage import Moments, TrialRow

ROWS_MAX: Final = 2_000
MS_MIN: Final = 0.01


class VersionDraw(NamedTuple):
    """The replicas a request leaves alone, and whether it may turn to them if nothing else does."""

    excluded: frozenset[ReplicaId]
    may_fall_back: bool


NO_ROLLOUT: Final = VersionDraw(frozenset(), False)


def draw_version(
    entry: DeploymentEntry, subject: str, pop: PopId, routes: Iterable[Route]
) -> VersionDraw:
    """Return whom a request of `pop` leaves alone.

    One drawn for the new version may go back to the old, so that a bad version harms nobody twice;
    one drawn for the old never goes to the new while there is an old one: the share is a promise.
    """
    rollout = entry.rollout
    if rollout is None:
        return NO_ROLLOUT
    new = {route.replica_id for route in routes if route.version == rollout.version}
    old = {route.replica_id for route in routes if route.version != rollout.version}
    if not new or not old:
        return NO_ROLLOUT
    takes_new = (not rollout.pops or pop in rollout.pops) and _draws_new_version(
        entry, rollout, subject
    )
    return VersionDraw(frozenset(old), True) if takes_new else VersionDraw(frozenset(new), False)


def _draws_new_version(entry: DeploymentEntry, rollout: RolloutEntry, subject: str) -> bool:
    named = f"{entry.deployment_id}\0{rollout.version}\0{subject}"
    return xxhash.xxh3_64_intdigest(named.encode()) < rollout.share * 2**64


class TrialCounter:
    """What was seen of each version since it was last taken."""

    def __init__(self, pop: PopId) -> None:
        """Count for the router's own PoP."""
        self._pop = pop
        self._rows: dict[tuple[DeploymentId, int, PopId], TrialRow] = {}

    def ended(
        self,
        entry: DeploymentEntry,
        route: Route,
        *,
        failed: bool,
        ttft_ms: float = 0.0,
        itl_ms: float = 0.0,
    ) -> None:
        """An attempt ended; a time of 0 was not measured."""
        key = (entry.deployment_id, route.version, route.pop)
        if entry.rollout is None or (key not in self._rows and len(self._rows) >= ROWS_MAX):
            return
        row = self._rows.get(key) or TrialRow(
            deployment_id=entry.deployment_id,
            version=route.version,
            pop=route.pop,
            asked_pop=self._pop,
        )
        self._rows[key] = replace(
            row,
            attempts=row.attempts + 1,
            failures=row.failures + failed,
            ttft=_add_sample(row.ttft, ttft_ms),
            itl=_add_sample(row.itl, itl_ms),
        )

    def take(self) -> tuple[TrialRow, ...]:
        """Hand over what was seen."""
        rows = tuple(row for _, row in sorted(self._rows.items()))
        self._rows.clear()
        return rows


def _add_sample(moments: Moments, time_ms: float) -> Moments:
    if time_ms <= 0:
        return moments
    value = log(max(time_ms, MS_MIN))
    return Moments(
        count=moments.count + 1,
        total=moments.total + value,
        squares=moments.squares + value * value,
    )
