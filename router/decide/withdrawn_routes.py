"""Replicas whose routes left the table and left their deployments without one.

A scheduler withdraws the route of an engine that crashed, and publishes it again once it is warm.
If its database dies in between, no newer table comes, although the engine serves. So the router
keeps probing the last replicas of a deployment, and uses those that serve again until a table has a
route for the deployment. A replica that was stopped on purpose refuses: its node no longer knows
it.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from isochrone.wire.ids import Generation, ReplicaId
from isochrone.wire.routes import Route, RouteTable

WITHDRAWN_S: Final = 1_800.0
"""How long a withdrawn replica is probed for serving again: longer than loading takes."""

WITHDRAWN_MAX: Final = 256
"""How many withdrawn replicas are probed, once in each turn of the probes."""


def deployments_left_without_routes(old: RouteTable | None, new: RouteTable) -> tuple[Route, ...]:
    """Return the routes of `old` to deployments that `new` still has, but without any route."""
    if old is None or new.routes is old.routes:
        return ()
    empty = {route.deployment_id for route in old.routes}
    empty -= {route.deployment_id for route in new.routes}
    if not empty:
        return ()
    empty &= {entry.deployment_id for entry in new.deployments}
    return tuple(route for route in old.routes if route.deployment_id in empty)


def with_routes(table: RouteTable, added: Iterable[Route]) -> RouteTable:
    """Return `table` with routes that it lacks."""
    routes = {route.replica_id: route for route in (*added, *table.routes)}
    ordered = tuple(routes[replica_id] for replica_id in sorted(routes))
    return msgspec.structs.replace(table, routes=ordered)


class WithdrawnRoutes:
    """The withdrawn replicas that are probed, and those of them that serve again."""

    def __init__(self) -> None:
        self._until_s: dict[ReplicaId, float] = {}
        self._routes: dict[ReplicaId, Route] = {}
        self._serving: set[ReplicaId] = set()

    def adopt(self, old: RouteTable | None, new: RouteTable, now_s: float) -> None:
        """Note what `new` withdraws, and forget what it makes unnecessary or took too long."""
        for route in deployments_left_without_routes(old, new):
            if route.replica_id not in self._routes and len(self._routes) < WITHDRAWN_MAX:
                self._routes[route.replica_id] = route
                self._until_s[route.replica_id] = now_s + WITHDRAWN_S
        if not self._routes:
            return
        known = {entry.deployment_id for entry in new.deployments}
        known -= {route.deployment_id for route in new.routes}
        for replica_id, route in list(self._routes.items()):
            is_over = self._until_s[replica_id] <= now_s and replica_id not in self._serving
            if route.deployment_id not in known or is_over:
                del self._routes[replica_id], self._until_s[replica_id]
                self._serving.discard(replica_id)

    def record_answer(self, replica_id: ReplicaId, *, serves: bool) -> bool:
        """Note whether a withdrawn replica serves; return whether that has changed."""
        if replica_id not in self._routes or serves == (replica_id in self._serving):
            return False
        if serves:
            self._serving.add(replica_id)
        else:
            self._serving.discard(replica_id)
        return True

    def serving(self) -> tuple[Route, ...]:
        """Return the routes of those that serve again."""
        return tuple(self._routes[replica_id] for replica_id in sorted(self._serving))

    def silent(self, now_s: float) -> tuple[Route, ...]:
        """Return the routes of those to ask."""
        return tuple(
            route
            for replica_id, route in self._routes.items()
            if replica_id not in self._serving and self._until_s[replica_id] > now_s
        )

    def table_to_store(self, table: RouteTable) -> RouteTable:
        """Return `table` as it is written to disk: with all withdrawn replicas.

        A router that starts again asks for them, too. No delta fits the result, so it has no
        generation: the scheduler sends a whole table.
        """
        if not self._routes:
            return table
        stored = with_routes(table, self._routes.values())
        return msgspec.structs.replace(stored, generation=Generation(0))


__all__ = ("WITHDRAWN_MAX", "WITHDRAWN_S", "WithdrawnRoutes", "with_routes")
