"""The route table that this router serves, indexed for look-ups."""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Final, NamedTuple

from isochrone.wire.client_keys.key_table import BUDGET_PREFIX, budget_id
from isochrone.wire.ids import DeploymentId, KeyId, NodeId, PopId, ReplicaId
from isochrone.wire.peers.routes import DeploymentEntry, KeyEntry, KeyTable, Route, RouteTable
from router.decide.routes.adapters import AdapterDirectory


class DirectoryChange(NamedTuple):
    """The changes of a new table. `routes` has all routes of each deployment with a change."""

    removed: Set[ReplicaId]
    changed: Sequence[Route]
    routes: Mapping[DeploymentId, list[Route]]


ROUTES_PER_STEP: Final = 1_000
"""How many routes of a table are indexed before requests have their turn: about a millisecond."""

REGION_SETS_MAX: Final = 64
"""The different lists of regions for which the excluded replicas are remembered."""


class RouteDirectory:
    """Deployments, keys, routes and nodes of the current table."""

    def __init__(self) -> None:
        self.table: RouteTable | None = None
        self.keys = KeyTable()
        self.adapters = AdapterDirectory()
        self._has_budgets = False
        self._deployments_by_name: dict[str, DeploymentEntry] = {}
        self._routes: dict[ReplicaId, Route] = {}
        self._replicas_by_node: dict[NodeId, list[ReplicaId]] = {}
        self._outside: dict[tuple[str, ...], Set[ReplicaId]] = {}

    def adopt(self, table: RouteTable) -> DirectoryChange:
        """Serve `table` from now on; return what changes."""
        indexes = TableIndexes(self, table)
        for _ in indexes.steps():
            pass
        return self.commit(indexes)

    def commit(self, indexes: "TableIndexes") -> DirectoryChange:
        """Serve the table of `indexes`, made for the one served now; return what changes."""
        table = indexes.table
        self.adopt_keys(table)
        self._deployments_by_name = indexes.deployments_by_name
        self._routes, self._replicas_by_node = indexes.routes, indexes.replicas_by_node
        self._outside = {}
        return DirectoryChange(indexes.removed, indexes.changed, indexes.changed_routes)

    def adopt_keys(self, table: RouteTable) -> None:
        """Serve `table`, which differs from the current one only by its keys and adapters."""
        self.table, self.keys = table, table.keys
        self.adapters.adopt(table.adapters)
        # They are looked up where they are: an index would be rebuilt for each changed key.
        first = table.keys.first_after(KeyId(BUDGET_PREFIX))
        self._has_budgets = first is not None and first.key_id.startswith(BUDGET_PREFIX)

    def budget_of(self, key: KeyEntry) -> KeyEntry | None:
        """Return the budget of a key's tenant; None if it has none."""
        return self.keys.get(budget_id(key.tenant_id)) if self._has_budgets else None

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

    def base_of(self, model: str) -> str:
        """Return the name of the deployment in `model`, which is one or `deployment:adapter`.

        A model that names no deployment is returned as it is.
        """
        base = model.rpartition(":")[0]
        is_adapter = base in self._deployments_by_name and model not in self._deployments_by_name
        return base if is_adapter else model

    def route(self, replica_id: ReplicaId) -> Route | None:
        """Return the route to a replica, None if the table does not have it."""
        return self._routes.get(replica_id)

    @property
    def nodes(self) -> Set[NodeId]:
        """Return the nodes of all replicas."""
        return self._replicas_by_node.keys()

    def pops_inside(self, regions: tuple[str, ...]) -> Set[PopId]:
        """Return the PoPs in `regions` (PoPs or countries)."""
        pops = self.table.pops if self.table else ()
        return {pop.pop for pop in pops if pop.pop in regions or pop.country in regions}

    def replicas_outside(self, regions: tuple[str, ...]) -> Set[ReplicaId]:
        """Return the replicas that a key limited to `regions` (PoPs or countries) must not use."""
        outside = self._outside.get(regions)
        if outside is None:
            inside = self.pops_inside(regions)
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


class TableIndexes:
    """The indexes of a table to serve next. Making them changes nothing that is served."""

    def __init__(self, directory: RouteDirectory, table: RouteTable) -> None:
        """Prepare the change from the table that `directory` serves now to `table`."""
        self.table = table
        self.base = directory.table
        self.deployments_by_name: dict[str, DeploymentEntry] = {}
        self.routes: dict[ReplicaId, Route] = {}
        self.replicas_by_node = dict(directory._replicas_by_node)
        self.removed: Set[ReplicaId] = set()
        self.changed: list[Route] = []
        self.changed_routes: dict[DeploymentId, list[Route]] = {}
        self._former = directory._routes

    def steps(self, routes_per_step: int = ROUTES_PER_STEP) -> Iterator[None]:
        """Make the indexes, with a pause after `routes_per_step` routes."""
        table, former = self.table, self._former
        known = {entry.deployment_id for entry in self.base.deployments} if self.base else set()
        for entry in table.deployments:
            self.deployments_by_name[entry.name] = entry
            if entry.deployment_id not in known:
                self.changed_routes[entry.deployment_id] = []
        moved = []
        for index, route in enumerate(table.routes):
            self.routes[route.replica_id] = route
            was = former.get(route.replica_id)
            if was is not route and was != route:
                self.changed.append(route)
                if was is not None:
                    moved.append(was)
            if index % routes_per_step == routes_per_step - 1:
                yield
        self.removed = former.keys() - self.routes.keys()
        left = [*(former[replica_id] for replica_id in self.removed), *moved]
        for route in (*left, *self.changed):
            self.changed_routes[route.deployment_id] = []
        yield
        yield from self._move_replicas(left, routes_per_step)
        yield
        for index, route in enumerate(table.routes):
            if route.deployment_id in self.changed_routes:
                self.changed_routes[route.deployment_id].append(route)
            if index % routes_per_step == routes_per_step - 1:
                yield

    @classmethod
    def with_addition(
        cls, directory: RouteDirectory, table: RouteTable, added: Route, routes: list[Route]
    ) -> "TableIndexes":
        """Return the indexes of `table`, which is the one served with one more route.

        `routes` are all of its deployment. The others are copied from those in use: no route is
        compared, so the time is a tenth of a millisecond even for a table of ten thousand.
        """
        indexes = cls(directory, table)
        indexes.deployments_by_name = directory._deployments_by_name
        indexes.routes = directory._routes | {added.replica_id: added}
        indexes.changed = [added]
        indexes.changed_routes = {added.deployment_id: routes}
        for _ in indexes._move_replicas((), ROUTES_PER_STEP):
            pass
        return indexes

    def _move_replicas(self, left: Sequence[Route], routes_per_step: int) -> Iterator[None]:
        """Take replicas off the nodes they have left, and add changed ones to theirs."""
        nodes = self.replicas_by_node
        gone: dict[NodeId, set[ReplicaId]] = {}
        for route in left:
            gone.setdefault(route.node_id, set()).add(route.replica_id)
        for index, (node_id, replica_ids) in enumerate(gone.items()):
            kept = [id_ for id_ in nodes[node_id] if id_ not in replica_ids]
            if kept:
                nodes[node_id] = kept
            else:
                del nodes[node_id]
            if index % routes_per_step == routes_per_step - 1:
                yield
        yield
        added: dict[NodeId, list[ReplicaId]] = {}
        for route in self.changed:
            added.setdefault(route.node_id, []).append(route.replica_id)
        for index, (node_id, ids) in enumerate(added.items()):
            # A new list: the one there is still served.
            nodes[node_id] = [*nodes.get(node_id, ()), *ids]
            if index % routes_per_step == routes_per_step - 1:
                yield
