"""The route table that this router serves, indexed for look-ups."""

from collections.abc import Collection, Mapping, Sequence, Set

from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.routes import DeploymentEntry, KeyTable, Route, RouteTable


class RouteDirectory:
    """Deployments, keys, routes and nodes of the current table."""

    def __init__(self) -> None:
        """Start without a table."""
        self.table: RouteTable | None = None
        self.keys = KeyTable()
        self._deployments_by_name: dict[str, DeploymentEntry] = {}
        self._routes: dict[ReplicaId, Route] = {}
        self._replicas_by_node: dict[NodeId, list[ReplicaId]] = {}

    def adopt(self, table: RouteTable) -> Set[ReplicaId]:
        """Serve `table` from now on; return the replicas that it no longer has."""
        removed = set(self._routes) - {route.replica_id for route in table.routes}
        self.table, self.keys = table, table.keys
        self._deployments_by_name = {entry.name: entry for entry in table.deployments}
        self._routes = {route.replica_id: route for route in table.routes}
        self._replicas_by_node = {}
        for route in self._routes.values():
            self._replicas_by_node.setdefault(route.node_id, []).append(route.replica_id)
        return removed

    def adopt_keys(self, table: RouteTable) -> None:
        """Serve `table`, which differs from the current one only by its keys."""
        self.table, self.keys = table, table.keys

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

    def replicas_on(self, node_id: NodeId) -> Sequence[ReplicaId]:
        """Return the replicas of a node."""
        return self._replicas_by_node.get(node_id, ())

    def node_addresses(self) -> dict[NodeId, str]:
        """Return the address of every node of the table."""
        return {route.node_id: route.address for route in self._routes.values()}
