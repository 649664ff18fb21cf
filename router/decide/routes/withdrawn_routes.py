"""Replicas whose routes left the table, for deployments that are without any route.

A scheduler withdraws the route of an engine that crashed, and publishes it again once it is warm.
If its database dies in between, no newer table comes, or one that drops the last other route before
the scheduler knows that the engine serves again. So the router remembers the withdrawn replicas of
each deployment. While the deployment has no route, it probes them and uses those that serve, until
a table has a route. A replica that was stopped on purpose refuses: its node no longer knows it.
"""

from bisect import insort
from collections.abc import Iterable, Set
from typing import Final

import msgspec

from isochrone.wire.ids import DeploymentId, Generation, ReplicaId
from isochrone.wire.peers.routes import Route, RouteTable

WITHDRAWN_S: Final = 1_800.0
"""How long a withdrawn replica is remembered: longer than loading takes."""

WITHDRAWN_MAX: Final = 256
"""The most withdrawn replicas that are remembered, and so the most that are probed in a turn."""


def with_routes(table: RouteTable, added: Iterable[Route]) -> RouteTable:
    """Return `table` with routes that it lacks."""
    routes = {route.replica_id: route for route in (*added, *table.routes)}
    ordered = tuple(routes[replica_id] for replica_id in sorted(routes))
    return msgspec.structs.replace(table, routes=ordered)


def with_route(table: RouteTable, added: Route) -> RouteTable:
    """Return `table`, whose routes are in order, with one route that it lacks. None is compared."""
    routes = list(table.routes)
    insort(routes, added, key=lambda route: route.replica_id)
    return msgspec.structs.replace(table, routes=tuple(routes))


class WithdrawnRoutes:
    """The withdrawn replicas that may be probed, and those of them that serve again."""

    def __init__(self) -> None:
        self._until_s: dict[ReplicaId, float] = {}
        self._routes: dict[ReplicaId, Route] = {}
        """In the order in which they were withdrawn."""
        self._serving: set[ReplicaId] = set()
        self._unrouted: Set[DeploymentId] = frozenset()
        """The deployments of the last table without a route."""

    def adopt(self, old: RouteTable | None, new: RouteTable, now_s: float) -> bool:
        """Note the routes that `new` withdraws, and forget those that are unnecessary or too old
        now.

        Return whether it leaves a deployment without routes of which replicas are remembered.
        """
        if old is not None and new.routes is old.routes and new.deployments is old.deployments:
            return False
        known = {entry.deployment_id for entry in new.deployments}
        kept = {route.replica_id for route in new.routes}
        unrouted = known - {route.deployment_id for route in new.routes}
        left = [
            route
            for route in (old.routes if old is not None and new.routes is not old.routes else ())
            if route.replica_id not in kept and route.deployment_id in known
        ]
        # If ten thousand are withdrawn at once, those beyond the limit are not noted first.
        others = [route for route in left if route.deployment_id not in unrouted]
        needed = [route for route in left if route.deployment_id in unrouted]
        for route in (*others[-WITHDRAWN_MAX:], *needed[:WITHDRAWN_MAX]):
            self._until_s.setdefault(route.replica_id, now_s + WITHDRAWN_S)
            self._routes.setdefault(route.replica_id, route)
        has_lost_all = any(
            route.deployment_id in unrouted and route.deployment_id not in self._unrouted
            for route in self._routes.values()
        )
        self._unrouted = unrouted
        for replica_id, route in list(self._routes.items()):
            is_over = self._until_s[replica_id] <= now_s and replica_id not in self._serving
            if replica_id in kept or route.deployment_id not in known or is_over:
                self._forget(replica_id)
            elif route.deployment_id not in unrouted:
                # A replica may have ended by the time it is needed again.
                self._serving.discard(replica_id)
        self._drop_excess()
        return has_lost_all

    def record_answer(self, replica_id: ReplicaId, *, serves: bool) -> bool:
        """Note whether a withdrawn replica serves; return whether that has changed."""
        route = self._routes.get(replica_id)
        if route is None or route.deployment_id not in self._unrouted:
            return False
        if serves == (replica_id in self._serving):
            return False
        if serves:
            self._serving.add(replica_id)
        else:
            self._serving.discard(replica_id)
        return True

    def serving(self) -> tuple[Route, ...]:
        """Return the routes of those that serve again."""
        return tuple(self._routes[replica_id] for replica_id in sorted(self._serving))

    def serving_of(self, deployment_id: DeploymentId) -> list[Route]:
        """Return the routes of a deployment's replicas that serve again."""
        return [route for route in self.serving() if route.deployment_id == deployment_id]

    def serving_beside(self, table: RouteTable) -> tuple[Route, ...]:
        """Return the routes of those that will still be served once `table` is adopted."""
        if not self._serving:
            return ()
        unrouted = {entry.deployment_id for entry in table.deployments}
        unrouted -= {route.deployment_id for route in table.routes}
        return tuple(route for route in self.serving() if route.deployment_id in unrouted)

    def silent(self, now_s: float) -> tuple[Route, ...]:
        """Return the routes of those to ask: of deployments without a route in the table."""
        return tuple(
            route
            for replica_id, route in self._routes.items()
            if route.deployment_id in self._unrouted
            and replica_id not in self._serving
            and self._until_s[replica_id] > now_s
        )

    def table_to_store(self, table: RouteTable) -> RouteTable:
        """Return `table` as it is written to disk: with the withdrawn replicas that are needed.

        A router that starts again asks for them, too. No delta fits the result, so it has no
        generation: the scheduler sends a whole table.
        """
        needed = [route for route in self._routes.values() if route.deployment_id in self._unrouted]
        if not needed:
            return table
        stored = with_routes(table, needed)
        return msgspec.structs.replace(stored, generation=Generation(0))

    def _drop_excess(self) -> None:
        """Forget the replicas beyond the limit: the oldest of deployments that have routes first.

        The first withdrawn replicas of a deployment without routes stay.
        """
        excess = len(self._routes) - WITHDRAWN_MAX
        if excess <= 0:
            return
        other, needed = [], []
        for replica_id, route in self._routes.items():
            if route.deployment_id not in self._unrouted:
                other.append(replica_id)
            elif replica_id not in self._serving:
                needed.append(replica_id)
        for replica_id in (*other, *reversed(needed), *sorted(self._serving))[:excess]:
            self._forget(replica_id)

    def _forget(self, replica_id: ReplicaId) -> None:
        del self._routes[replica_id], self._until_s[replica_id]
        self._serving.discard(replica_id)


__all__ = ("WITHDRAWN_MAX", "WITHDRAWN_S", "WithdrawnRoutes", "with_route", "with_routes")
