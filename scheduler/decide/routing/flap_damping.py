"""Replicas that come and go: one that left is withdrawn at once, one that is back too often waits.

Each change goes to every router of the planet, and sessions move with it. The first time a replica
is back at once; each further time within STEADY_S it waits twice as long, at most HELD_MAX_S. Where
nobody else serves its deployment it waits HELD_S, no longer.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.routes import RouteTable

STEADY_S: Final = 90.0
HELD_S: Final = 2.0
HELD_MAX_S: Final = 32.0


class Departures(NamedTuple):
    """How often a replica has left, each time within STEADY_S of the one before, and when last."""

    times: int
    at_s: float


DeparturesByReplica = Mapping[ReplicaId, Departures]


class DampedRoutes(NamedTuple):
    """The table without those that must wait, the nodes of these, and who has left by now."""

    table: RouteTable
    waiting: frozenset[NodeId]
    left: DeparturesByReplica


def damp_flaps(
    told: RouteTable | None, new: RouteTable, left: DeparturesByReplica, now_s: float
) -> DampedRoutes:
    """Return what routers may be told of `new` after what they were told."""
    if told is None:
        return DampedRoutes(new, frozenset(), {})
    before = {route.replica_id for route in told.routes}
    left_by = {name: one for name, one in left.items() if now_s - one.at_s < STEADY_S}
    for name in before - {route.replica_id for route in new.routes}:
        times = left_by[name].times if name in left_by else 0
        left_by[name] = Departures(times + 1, now_s)
    back = [
        route
        for route in new.routes
        if route.replica_id in left_by and route.replica_id not in before
    ]
    waiting = {route.replica_id for route in back if _waits(left_by[route.replica_id], now_s)}
    served = {route.deployment_id for route in new.routes if route.replica_id not in waiting}
    waiting -= {
        route.replica_id
        for route in back
        if route.deployment_id not in served
        and not _waits(left_by[route.replica_id], now_s, HELD_S)
    }
    if not waiting:
        return DampedRoutes(new, frozenset(), left_by)
    return DampedRoutes(
        msgspec.structs.replace(
            new, routes=tuple(route for route in new.routes if route.replica_id not in waiting)
        ),
        frozenset(route.node_id for route in back if route.replica_id in waiting),
        left_by,
    )


def _waits(left: Departures, now_s: float, most_s: float = HELD_MAX_S) -> bool:
    """Say whether one that left is back too soon."""
    if left.times < 2:
        return False
    # Beyond a few times it is the most, whatever the power.
    return now_s - left.at_s < min(most_s, HELD_S * 2.0 ** min(left.times - 2, 10))
