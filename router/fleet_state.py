"""The state of the fleet as this router knows it. All mutable state of replicas and nodes is here.

`snapshot()` gives a frozen view of one deployment for ranking. Requests and probes update it
through `feedback.py`. One event loop owns it, so it needs no locks.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Final

from isochrone.wire.http.headers import ReportedLoad
from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.peers.routes import DeploymentEntry, Route, RouteTable
from router.decide.caches.affinity import SessionTable
from router.decide.choice.deployment_routing import DeploymentRouting
from router.decide.liveness.outlier_ejection import ReplicaHealth, is_panic
from router.decide.liveness.reachability import NodeReachability
from router.decide.liveness.slow_start import SlowStart
from router.decide.replicas.full_replicas import FullReplicas, RequestGroup
from router.decide.replicas.replica_table import ReplicaTable, RoutingSnapshot
from router.decide.replicas.tokens_in_flight import InFlightLedger
from router.decide.routes.rollout import VersionDraw, draw_version
from router.decide.routes.route_directory import RouteDirectory, TableIndexes
from router.sharing.prompt_sharing import PromptOutbox, SharedPrompt

NOT_REPORTED: Final = -1
"""Value of a load field that the node does not report."""

DEPLOYMENTS_SET_AT_ONCE_MAX: Final = 64
"""A table that changes the routes of more deployments sets those of each when it is used next, so
that requests do not wait for all."""

REPLICAS_FORGOTTEN_AT_ONCE: Final = 500
"""How many replicas that left the table, and their nodes, are forgotten before requests have their
turn: about two milliseconds."""


class FleetState:
    """The route table in use, and the measurements of its replicas and nodes."""

    def __init__(self, pop: PopId, clock: Callable[[], float], name: str = "") -> None:
        """Start without a table. `clock` gives monotonic seconds; nodes know this router as `name`.

        `name` is new with each start of the router.
        """
        self.pop = pop
        self.name = name
        self.clock = clock
        self.directory = RouteDirectory()
        self.nodes = NodeReachability(pop)
        self.health = ReplicaHealth()
        self.handoff_health = ReplicaHealth()
        """Of replicas that hand requests off, or take them over: which of the two failed is not
        known. An ejected one does neither."""
        self.sessions = SessionTable()
        self.slow_start = SlowStart()
        self.prompt_outbox = PromptOutbox()
        self.full = FullReplicas()
        self.in_flight = InFlightLedger(clock, self._notify_replica_capacity, self.note_change)
        self._deployments: dict[DeploymentId, DeploymentRouting] = {}
        """The routing of each deployment whose routes have been set."""
        self._routes_to_set: dict[DeploymentId, list[Route]] = {}
        self._depth_costs: dict[DeploymentId, float] = {}
        """The deployments of the table, each with the cost of depth to start from."""
        self._removed: list[ReplicaId] = []
        """The replicas that left the table and are to be forgotten."""
        self._notify_capacity: Callable[[DeploymentId], None] | None = None

    def on_capacity(self, callback: Callable[[DeploymentId], None]) -> None:
        """Call `callback` with each deployment that may have got capacity for a request."""
        self._notify_capacity = callback

    def adopt(self, table: RouteTable, prepared: TableIndexes | None = None) -> None:
        """Serve `table` from now on, and drop the state of replicas that it no longer has.

        The indexes `prepared` for this change are not built again here. If very many replicas are
        gone, `forget_removed` drops the state of the others.
        """
        current = self.directory.table
        if not self.needs_indexes(table):
            self.directory.adopt_keys(table)
            return
        if prepared is not None and prepared.base is current and prepared.table is table:
            removed, changed, routes = self.directory.commit(prepared)
        else:
            removed, changed, routes = self.directory.adopt(table)
        if current is None or table.deployments is not current.deployments:
            self._keep_deployments(table.deployments)
        for deployment_id, its_routes in routes.items():
            if deployment_id in self._depth_costs:
                self._routes_to_set[deployment_id] = its_routes
        if len(routes) <= DEPLOYMENTS_SET_AT_ONCE_MAX:
            for deployment_id in routes:
                self._set_routes(deployment_id)
        self.nodes.adopt(table.pops, removed)
        if removed:
            self._removed.extend(removed)
            self.forget_removed()
        have_pops_moved = current is None or current.pops != table.pops
        for route in table.routes if have_pops_moved else changed:
            deployment = self._deployments.get(route.deployment_id)
            if deployment is not None:
                deployment.changed.add(route.replica_id)
        if self._notify_capacity is not None:
            for deployment_id in routes:
                self._notify_capacity(deployment_id)

    def forget_removed(self) -> bool:
        """Drop the state of some replicas that have left the table, and of nodes.

        Return whether more are left.
        """
        some = set(self._removed[-REPLICAS_FORGOTTEN_AT_ONCE:])
        del self._removed[-REPLICAS_FORGOTTEN_AT_ONCE:]
        # Some may have come back meanwhile.
        gone = {replica_id for replica_id in some if self.directory.route(replica_id) is None}
        self.health.remove_replicas(gone)
        self.handoff_health.remove_replicas(gone)
        self.in_flight.remove_replicas(gone)
        self.slow_start.remove_replicas(gone)
        more = self.nodes.keep_nodes(self.directory.nodes, REPLICAS_FORGOTTEN_AT_ONCE)
        return more or bool(self._removed)

    def needs_indexes(self, table: RouteTable) -> bool:
        """Return whether `table` differs from the one in use by more than keys and adapters."""
        current = self.directory.table
        return current is None or not (
            table.routes is current.routes
            and table.deployments is current.deployments
            and table.pops is current.pops
        )

    def routing(self, deployment_id: DeploymentId) -> DeploymentRouting:
        """Return what is known of a deployment; empty for one that the table does not have."""
        if self._routes_to_set and deployment_id in self._routes_to_set:
            self._set_routes(deployment_id)
        return self._deployments.get(deployment_id) or DeploymentRouting()

    def note_change(self, replica_id: ReplicaId) -> None:
        """Note that the estimate of a replica is out of date."""
        route = self.directory.route(replica_id)
        if route is not None:
            self.routing(route.deployment_id).changed.add(replica_id)

    def note_connection(self, node_id: NodeId) -> None:
        """Note that requests that waited for a connection to a node may get one."""
        for replica_id in self.directory.replicas_on(node_id):
            self._notify_replica_capacity(replica_id)

    def full_for(self, group: RequestGroup, now_s: float) -> Set[ReplicaId]:
        """Return the replicas that are full for such a request, by their last refusals."""
        return self.full.full_for(group, self.in_flight.requests_at, now_s)

    def note_sent(self, group: RequestGroup, replica_id: ReplicaId, now_s: float) -> None:
        """Note that a request will be sent to a replica, before it is counted there."""
        requests = self.in_flight.requests_at(replica_id)
        self.full.record_sent(group, replica_id, requests, now_s)

    def refresh_changed(self, deployment_ids: Iterable[DeploymentId]) -> None:
        """Recompute the estimates that are out of date, so that the next requests need not."""
        now_s = self.clock()
        for deployment_id in deployment_ids:
            deployment = self.routing(deployment_id)
            self._refresh_slots(deployment.replicas, deployment.take_changed(), now_s)

    def snapshot(self, deployment_id: DeploymentId, now_s: float) -> RoutingSnapshot:
        """Return a frozen view of one deployment as it is now."""
        deployment = self.routing(deployment_id)
        replicas = deployment.replicas
        self._refresh_slots(replicas, deployment.take_changed(), now_s)
        self._refresh_slots(replicas, deployment.slots_due(now_s), now_s)
        return RoutingSnapshot(
            replicas, now_s, self.health.ejected_until_s(now_s), self._busy_starting(now_s)
        )

    def prefill_snapshot(self, deployment_id: DeploymentId) -> RoutingSnapshot:
        """Return a frozen view of the prefill replicas of a deployment."""
        now_s = self.clock()
        table = self.routing(deployment_id).prefill_replicas.table
        for slot, route in enumerate(table.routes):
            if route is not None:
                load = self.in_flight.load_of(route.replica_id)
                table.refresh(slot, self.nodes.rtt_ms(route), load, now_s, 0.0)
        return RoutingSnapshot(
            table, now_s, self.health.ejected_until_s(now_s), self._busy_starting(now_s)
        )

    def has_replica(self, deployment_id: DeploymentId, regions: tuple[str, ...] = ()) -> bool:
        """Return whether the table has a replica of the deployment, in `regions` if there are."""
        replicas = self.routing(deployment_id).replicas.slots.keys()
        if not regions:
            return bool(replicas)
        return bool(replicas - self.directory.replicas_outside(regions))

    def why_no_replica(self, deployment_id: DeploymentId, regions: tuple[str, ...]) -> str:
        """Say that no replica is ready, and if the regions of a key are why, what helps."""
        if not regions:
            return "no replica is ready yet"
        reason = f"no replica is ready yet in the regions of this key ({', '.join(regions)})"
        if self.has_replica(deployment_id):
            reason += (
                "; others are elsewhere, and a key alone starts none: ask the operator to keep one"
                " there (`keep_warm`)"
            )
        return reason

    def draw_version(
        self, entry: DeploymentEntry, subject: str, outside: Set[ReplicaId]
    ) -> VersionDraw:
        """Draw the version that answers a session or request, and exclude the other's replicas.

        Replicas `outside` the regions of the key count for neither version: if one version alone
        has replicas within them, that one answers.
        """
        routes: Iterable[Route] = self.routing(entry.deployment_id).routes
        if outside:
            routes = [route for route in routes if route.replica_id not in outside]
        return draw_version(entry, subject, self.pop, routes)

    def record_load(self, route: Route, load: ReportedLoad, reported_at_s: float) -> None:
        """Note a replica's load as it was at `reported_at_s`."""
        replica_id = route.replica_id
        self.in_flight.record_wake(replica_id, float(load.wake_ms))
        self.record_cache_age(route, load, reported_at_s)
        if load.others_pending_prefill_tokens > NOT_REPORTED:
            self.in_flight.record_other_routers(
                replica_id,
                load.others_pending_prefill_tokens,
                load.others_decode_tokens,
                reported_at_s,
            )
            return
        pending = load.pending_prefill_tokens
        if pending <= NOT_REPORTED:
            replicas = self.routing(route.deployment_id).replicas
            pending = round(load.prefill_tokens * replicas.uncached_share)
        self.in_flight.record_report(replica_id, pending, load.decode_tokens, reported_at_s)

    def record_peer_load(self, route: Route, load: ReportedLoad, reported_at_s: float) -> None:
        """Note the load that other routers put on a replica, as the node of another one says it.

        It counts if it is no more than this router knows: a node must not draw requests by saying
        that others are busy.
        """
        known = self.in_flight.load_of(route.replica_id).others.estimate(reported_at_s)
        if NOT_REPORTED < load.others_pending_prefill_tokens <= known.prefill:
            self.in_flight.record_other_routers(
                route.replica_id,
                load.others_pending_prefill_tokens,
                min(load.others_decode_tokens, round(known.decode)),
                reported_at_s,
            )

    def record_pace(self, route: Route, load: ReportedLoad, reported_at_s: float) -> None:
        """Note how fast a replica works, which only answers to pings say."""
        self.in_flight.record_sequences(route.replica_id, load, reported_at_s)
        replicas = self.routing(route.deployment_id)
        replicas.record_prefill_pace(route.replica_id, load.prefill_ns_per_token)

    def record_cache_age(self, route: Route, load: ReportedLoad, reported_at_s: float) -> None:
        """Note how far back a replica's prefix cache reached at `reported_at_s`, if it says so."""
        if load.cache_age_ms > NOT_REPORTED:
            routing = self.routing(route.deployment_id)
            slot = routing.slot_of(route.replica_id)
            used_before_s = reported_at_s - load.cache_age_ms / 1000
            if slot >= 0:
                routing.record_evicted(slot, used_before_s)
            else:
                routing.prefill_replicas.record_evicted(route.replica_id, used_before_s)

    def learn_prompts(self, prompts: Iterable[SharedPrompt]) -> None:
        """Note prompts that another process of this router had answered."""
        now_s = self.clock()
        for prompt in prompts:
            deployment = self.routing(prompt.deployment_id)
            slot = deployment.slot_of(prompt.replica_id)
            if slot >= 0:
                deployment.record_peer_prompt(slot, prompt.prefix_keys, now_s)
            else:
                keys = prompt.prefix_keys
                deployment.prefill_replicas.record_sent(prompt.replica_id, keys, now_s)

    def deployments_of(self, replica_ids: Iterable[ReplicaId]) -> list[DeploymentId]:
        """Return the deployment of each of these replicas that may get requests."""
        found = []
        for replica_id in replica_ids:
            route = self.directory.route(replica_id)
            if route is not None and self.routing(route.deployment_id).slot_of(replica_id) >= 0:
                found.append(route.deployment_id)
        return found

    def panicking_deployments(self, unhealthy: Mapping[DeploymentId, int]) -> int:
        """Return in how many deployments more than half of the replicas are `unhealthy`."""
        return sum(
            is_panic(count, len(self.routing(deployment_id).replicas.slots))
            for deployment_id, count in unhealthy.items()
        )

    def answering_test(self, *, trusts_silence: bool = True) -> Callable[[Route], bool]:
        """Return a function that says whether a node still serves a replica of the table, as far as
        is known.

        Without `trusts_silence`, that of a node that does not answer counts as served.
        """
        return self.nodes.answering_test(
            self.directory.route, self.clock(), trusts_silence=trusts_silence
        )

    def _keep_deployments(self, entries: Iterable[DeploymentEntry]) -> None:
        """Know these deployments and no others."""
        self._depth_costs = {entry.deployment_id: entry.depth_cost_per_token for entry in entries}
        for deployment_id in list(self._deployments):
            if (depth_cost := self._depth_costs.get(deployment_id)) is None:
                del self._deployments[deployment_id]
            else:
                self._deployments[deployment_id].expect_depth_cost(depth_cost)
        for deployment_id in self._routes_to_set.keys() - self._depth_costs.keys():
            del self._routes_to_set[deployment_id]

    def _set_routes(self, deployment_id: DeploymentId) -> None:
        """Set the routes that a deployment has now; at first all its estimates are out of date."""
        routes = self._routes_to_set.pop(deployment_id, None)
        if routes is None:
            return
        deployment = self._deployments.get(deployment_id)
        if deployment is None:
            deployment = self._deployments[deployment_id] = DeploymentRouting()
            deployment.expect_depth_cost(self._depth_costs.get(deployment_id, 0.0))
            deployment.changed.update(route.replica_id for route in routes)
        self.slow_start.begin(deployment.set_routes(routes), self.clock())

    def _refresh_slots(self, replicas: ReplicaTable, slots: Iterable[int], now_s: float) -> None:
        """Recompute the estimates of some replicas."""
        for slot in slots:
            route = replicas.routes[slot]
            if route is not None:
                self._refresh(replicas, slot, route, now_s)

    def _refresh(self, replicas: ReplicaTable, slot: int, route: Route, now_s: float) -> None:
        """Recompute the estimate of one replica."""
        load = self.in_flight.load_of(route.replica_id)
        readers = self.routing(route.deployment_id).prefill_replicas
        wait_ms = 0.0
        if readers and load.decode_tokens > 0:
            # A replica that generates has its prompts read elsewhere; an idle one reads them.
            wait_ms = readers.wait_ms(route, self.in_flight, now_s)
        replicas.refresh(slot, self.nodes.rtt_ms(route), load, now_s, wait_ms)

    def _busy_starting(self, now_s: float) -> Mapping[ReplicaId, float]:
        """Return the shares of replicas in slow start; an idle one may take any request."""
        starting = self.slow_start.shares(now_s)
        if not starting:
            return starting
        return {
            replica_id: share
            for replica_id, share in starting.items()
            if self.in_flight.tokens_at(replica_id, now_s).tokens
        }

    def _notify_replica_capacity(self, replica_id: ReplicaId) -> None:
        route = self.directory.route(replica_id)
        if route is not None and self._notify_capacity is not None:
            self._notify_capacity(route.deployment_id)
