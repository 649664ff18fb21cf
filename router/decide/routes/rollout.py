"""Chooses the version that answers a request during a rollout, and counts how both perform.

The version is drawn by a hash of the session, or of the request if it has no session: every router
and every attempt draws the same, and as the share grows, sessions on the new version stay there.
"""

from collections.abc import Iterable
from math import log
from typing import Final, NamedTuple

import xxhash
from msgspec.structs import replace

from isochrone.wire.ids import DeploymentId, PopId, ReplicaId
from isochrone.wire.peers.routes import DeploymentEntry, RolloutEntry, Route
from isochrone.wire.peers.usage import Moments, TrialRow

ROWS_MAX: Final = 2_000
"""Rows of (deployment, version, PoP) kept until they are shipped; others are not counted."""

MS_MIN: Final = 0.01
"""Shortest time counted, because times are averaged as logarithms."""


class VersionDraw(NamedTuple):
    """The replicas of the version that was not drawn, and whether they may be used as fallback."""

    excluded: frozenset[ReplicaId]
    may_fall_back: bool


NO_ROLLOUT: Final = VersionDraw(frozenset(), False)


def draw_version(
    entry: DeploymentEntry, subject: str, pop: PopId, routes: Iterable[Route]
) -> VersionDraw:
    """Draw the version that answers a session or request at `pop`.

    A request drawn for the new version may fall back to the old one, so that a bad version fails
    no request twice. A request drawn for the old version never goes to the new one while there is
    an old one, because the share of the new version is a limit. Without a share, the new version
    gets only requests that the old one has no capacity for.
    """
    rollout = entry.rollout
    if rollout is None:
        return NO_ROLLOUT
    new = {route.replica_id for route in routes if route.version == rollout.version}
    old = {route.replica_id for route in routes if route.version != rollout.version}
    if not new or not old:
        return NO_ROLLOUT
    is_in_pop = not rollout.pops or pop in rollout.pops
    if is_in_pop and _draws_new_version(entry, rollout, subject):
        return VersionDraw(frozenset(old), True)
    # A version that was rolled back helps where the old one lacks capacity, until it is gone.
    return VersionDraw(frozenset(new), rollout.share <= 0)


def _draws_new_version(entry: DeploymentEntry, rollout: RolloutEntry, subject: str) -> bool:
    name = f"{entry.deployment_id}\0{rollout.version}\0{subject}"
    return xxhash.xxh3_64_intdigest(name.encode()) < rollout.share * 2**64


class TrialCounter:
    """Attempts, failures and latencies of each version since they were last taken."""

    def __init__(self, pop: PopId) -> None:
        """Count for this router's own PoP."""
        self._pop = pop
        self._rows: dict[tuple[DeploymentId, int, PopId], TrialRow] = {}

    def record_attempt(
        self,
        entry: DeploymentEntry,
        route: Route,
        *,
        failed: bool,
        ttft_ms: float = 0.0,
        itl_ms: float = 0.0,
    ) -> None:
        """Count an attempt that ended; a time of 0 was not measured."""
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
        """Return the rows and start again from none."""
        rows = tuple(row for _, row in sorted(self._rows.items()))
        self._rows.clear()
        return rows


def _add_sample(moments: Moments, time_ms: float) -> Moments:
    """Add the logarithm of a time, unless it was not measured."""
    if time_ms <= 0:
        return moments
    value = log(max(time_ms, MS_MIN))
    return Moments(
        count=moments.count + 1,
        total=moments.total + value,
        squares=moments.squares + value * value,
    )
