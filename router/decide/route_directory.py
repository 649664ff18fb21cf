"""The route table that this router serves, indexed for look-ups."""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Final, NamedTuple

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.routes import DeploymentEntry, KeyTable, Route, RouteTable
from router.decide.adapters import AdapterDirectory


class DirectoryChange(NamedTuple):
    """What a new table changes. `routes` has all routes of each deployment with a change."""

    removed: Set[ReplicaId]
    changed: Sequence[Route]
    routes: Mapping[DeploymentId, list[Route]]


REGION_SETS_MAX: Final = 64
"""Of how many different lists of regions the excluded replicas are remembered."""


class RouteDirectory:
    """Deployments, keys, routes and nodes of the current table."""

    def __init__(self) -> None:
        """Start without a table."""
        self.table: RouteTable | None = None
        self.keys = KeyTable()
        self.adapters = AdapterDirectory()
        self._deployments_by_name: dict[str, DeploymentEntry] = {}
        self._routes: dict[ReplicaId, Route] = {}
        self._replicas_by_node: dict[NodeId, list[ReplicaId]] = {}
        self._outside: dict[tuple[str, ...], Set[ReplicaId]] = {}

    def adopt(self, table: RouteTable) -> DirectoryChange:
        """Serve `table` from now on; return what changes."""
        former, known = self._routes, {entry.deployment_id for entry in self.deployments}
        self.adopt_keys(table)
        self._deployments_by_name = {entry.name: entry for entry in table.deployments}
        self._routes = {route.replica_id: route for route in table.routes}
        self._outside = {}
        removed = former.keys() - self._routes.keys()
        changed = []
        for route in table.routes:
            was = former.get(route.replica_id)
            if was is not route and was != route:
                changed.append(route)
        gone = [former[replica_id] for replica_id in removed]
        moved = [former[route.replica_id] for route in changed if route.replica_id in former]
        for route in (*gone, *moved):
            self._remove_from_node(route)
        for route in changed:
            self._replicas_by_node.setdefault(route.node_id, []).append(route.replica_id)
        routes: dict[DeploymentId, list[Route]] = {
            route.deployment_id: [] for route in (*gone, *moved, *changed)
        }
        routes.update(
            (id_, []) for entry in table.deployments if (id_ := entry.deployment_id) not in known
        )
        for route in table.routes:
            if route.deployment_id in routes:
                routes[route.deployment_id].append(route)
        return DirectoryChange(removed, changed, routes)

    def adopt_keys(self, table: RouteTable) -> None:
        """Serve `table`, which differs from the current one only by its keys and adapters."""
        self.table, self.keys = table, table.keys
        self.adapters.adopt(table.adapters)

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

    @property
    def nodes(self) -> Set[NodeId]:
        """Return the nodes of all replicas."""
        return self._replicas_by_node.keys()

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

    def node_pops(self) -> dict[NodeId, PopId]:
        """Return the PoP of every node of the table."""
        return {route.node_id: route.pop for route in self._routes.values()}

    def _remove_from_node(self, route: Route) -> None:
        replicas = self._replicas_by_node[route.node_id]
        replicas.remove(route.replica_id)
        if not replicas:
            del self._replicas_by_node[route.node_id]
