"""Flap damping: a route that disappears is withdrawn at once; one that returns too often waits.

Every change of a route goes to all routers, and sessions move with it. A replica that returns for
the first time is routed at once. Each further time within STEADY_S of the last departure it waits
twice as long, up to HOLD_MAX_S. If no other replica serves its deployment it waits at most HOLD_S.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.peers.routes import RouteTable

STEADY_S: Final = 90.0
HOLD_S: Final = 2.0
HOLD_MAX_S: Final = 32.0


class Departures(NamedTuple):
    """How often a replica left, each time within STEADY_S of the time before, and when last."""

    times: int
    at_s: float


DeparturesByReplica = Mapping[ReplicaId, Departures]


class DampedRoutes(NamedTuple):
    """The table without routes that must wait, the nodes of those, and the departures so far."""

    table: RouteTable
    waiting: frozenset[NodeId]
    departures: DeparturesByReplica


def damp_flaps(
    sent: RouteTable | None, new: RouteTable, departures: DeparturesByReplica, now_s: float
) -> DampedRoutes:
    """Return the part of `new` to send to routers that hold the table `sent`."""
    if sent is None:
        return DampedRoutes(new, frozenset(), {})
    if new.routes is sent.routes:
        return DampedRoutes(new, frozenset(), departures)
    before = {route.replica_id for route in sent.routes}
    recent = {name: left for name, left in departures.items() if now_s - left.at_s < STEADY_S}
    for name in before - {route.replica_id for route in new.routes}:
        times = recent[name].times if name in recent else 0
        recent[name] = Departures(times + 1, now_s)
    returned = [
        route
        for route in new.routes
        if route.replica_id in recent and route.replica_id not in before
    ]
    waiting = {
        route.replica_id
        for route in returned
        if _is_too_soon(recent[route.replica_id], now_s, HOLD_MAX_S)
    }
    if not waiting:
        return DampedRoutes(new, frozenset(), recent)
    served = {route.deployment_id for route in new.routes if route.replica_id not in waiting}
    waiting -= {
        route.replica_id
        for route in returned
        if route.deployment_id not in served
        and not _is_too_soon(recent[route.replica_id], now_s, HOLD_S)
    }
    if not waiting:
        return DampedRoutes(new, frozenset(), recent)
    return DampedRoutes(
        msgspec.structs.replace(
            new, routes=tuple(route for route in new.routes if route.replica_id not in waiting)
        ),
        frozenset(route.node_id for route in returned if route.replica_id in waiting),
        recent,
    )


def _is_too_soon(departures: Departures, now_s: float, hold_max_s: float) -> bool:
    """Return whether a replica that returned must still wait."""
    if departures.times < 2:
        return False
    # The exponent is capped, or the power would overflow.
    hold_s = HOLD_S * 2.0 ** min(departures.times - 2, 10)
    return now_s - departures.at_s < min(hold_max_s, hold_s)
