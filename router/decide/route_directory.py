"""The route table that this router serves, indexed for look-ups."""

from collections.abc import Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Final

from isochrone.wire.ids import DeploymentId, KeyId, NodeId, ReplicaId
from isochrone.wire.routes import DeploymentEntry, KeyEntry, Route, RouteDelta, RouteTable

REGION_SETS_MAX: Final = 64
"""Of how many different lists of regions the excluded replicas are remembered."""


class RouteDirectory:
    """Deployments, keys, routes and nodes of the current table."""

    def __init__(self) -> None:
        """Start without a table."""
        self.table: RouteTable | None = None
        self._keys: dict[KeyId, KeyEntry] = {}
        self.keys: Mapping[KeyId, KeyEntry] = MappingProxyType(self._keys)
        self._deployments_by_name: dict[str, DeploymentEntry] = {}
        self._routes: dict[ReplicaId, Route] = {}
        self._replicas_by_node: dict[NodeId, list[ReplicaId]] = {}
        self._outside: dict[tuple[str, ...], Set[ReplicaId]] = {}

    def adopt(self, table: RouteTable, keys: dict[KeyId, KeyEntry] | None = None) -> Set[ReplicaId]:
        """Serve `table` from now on; return the replicas that it no longer has.

        `keys` are the table's keys by id, if the caller has them already.
        """
        removed = set(self._routes) - {route.replica_id for route in table.routes}
        self.table = table
        self._keys = {key.key_id: key for key in table.keys} if keys is None else keys
        self.keys = MappingProxyType(self._keys)
        self._deployments_by_name = {entry.name: entry for entry in table.deployments}
        self._routes = {route.replica_id: route for route in table.routes}
        self._replicas_by_node, self._outside = {}, {}
        for route in self._routes.values():
            self._replicas_by_node.setdefault(route.node_id, []).append(route.replica_id)
        return removed

    def adopt_keys(self, table: RouteTable, delta: RouteDelta) -> None:
        """Serve `table`, which differs from the current one only by the keys of `delta`."""
        for key_id in delta.keys_gone:
            self._keys.pop(key_id, None)
        self._keys.update((key.key_id, key) for key in delta.keys_set)
        self.table = table
        # A new view: what was remembered about the former keys no longer holds.
        self.keys = MappingProxyType(self._keys)

    @property
    def deployments(self) -> tuple[DeploymentEntry, ...]:
        """Return all deployments, in the order of the table."""
        return self.table.deployments if self.table else ()

    @property
    def routes(self) -> Collection[Route]:
        """Return the routes to all replicas."""
        return self._routes.values()

    def deployment(self, name: str) -> DeploymentEntry | None:
        """Return the deployment that clients call `name`."""
        return self._deployments_by_name.get(name)

    def route(self, replica_id: ReplicaId) -> Route | None:
        """Return the route to a replica, None if the table does not have it."""
        return self._routes.get(replica_id)

    def routes_by_deployment(self) -> Mapping[DeploymentId, list[Route]]:
        """Return the routes of each deployment of the table, none for one without replicas."""
        routes: dict[DeploymentId, list[Route]] = {
            entry.deployment_id: [] for entry in self.deployments
        }
        for route in self._routes.values():
            if route.deployment_id in routes:
                routes[route.deployment_id].append(route)
        return routes

    def replicas_outside(self, regions: tuple[str, ...]) -> Set[ReplicaId]:
        """Return the replicas that a key limited to `regions` (PoPs or countries) must not use."""
        outside = self._outside.get(regions)
        if outside is None:
            pops = self.table.pops if self.table else ()
            inside = {pop.pop for pop in pops if pop.pop in regions or pop.country in regions}
            outside = frozenset(
                route.replica_id for route in self._routes.values() if route.pop not in inside
            )
            if len(self._outside) >= REGION_SETS_MAX:
                self._outside.clear()
            self._outside[regions] = outside
        return outside

    def replicas_on(self, node_id: NodeId) -> Sequence[ReplicaId]:
        """Return the replicas of a node."""
        return self._replicas_by_node.get(node_id, ())

    def node_addresses(self) -> dict[NodeId, str]:
        """Return the address of every node of the table."""
        return {route.node_id: route.address for route in self._routes.values()}
