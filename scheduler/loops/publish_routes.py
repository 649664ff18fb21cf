"""Publishes the route table to routers whenever its contents have changed.

After a node's report, that node alone is read and published at once. A replica that keeps coming
and going is published a little later each time (`flap_damping.py`). The whole fleet is read now and
then, for changes without a report: nodes that fell silent, rates that drift.

The first table after the database has lost history waits for the nodes' reports: the store may lack
deployments whose replicas run. Routers use the routes that they have meanwhile. Keys need no
report: a table of keys alone is published at once.

A changed key is read and published alone. There may be a million keys, so all are read only when a
term begins. After that the newest events, and a page of keys at a time, are compared with the table
to find changes that were not announced.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from isochrone.wire import codec
from isochrone.wire.ids import Epoch, Generation, KeyId, NodeId
from isochrone.wire.peers.routes import KeyTable, Route, RouteDelta, RouteTable, apply_delta, diff
from scheduler import metrics
from scheduler.decide.cluster import ClusterState
from scheduler.decide.membership import LivenessLimits, judge_liveness
from scheduler.decide.routing import (
    DeparturesByReplica,
    build_route_table,
    build_routes,
    damp_flaps,
    keep_unchanged_rates,
    multi_node_hosts,
    replace_node_routes,
)
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.first_reports import FirstReports
from scheduler.state.peers.heartbeats import Heartbeats
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.accounts.keys import (
    live_keys,
    next_route_generation,
    read_all_keys,
    read_key_page,
    revoked_among,
    revoked_keys,
)
from scheduler.store.client_objects.adapters import read_adapter_entries
from scheduler.store.cluster import read_fleet, read_fleet_nodes
from scheduler.store.events import recent_key_changes
from scheduler.store.fleet.node_reports import NodeReportCache
from scheduler.store.lease import EpochLost, read_cluster_row
from scheduler.store.pool import Pool, transaction, using

WHOLE_READ_SHARE: Final = 0.05
"""The share of the time that timed reads of the whole fleet may take."""

DELTA_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest delta, about 20,000 routes: a router decodes it in one piece. After a larger change
routers get the whole table, which is in parts."""

RECENT_EVENTS: Final = 1000
"""How many of the newest events are looked through for changed keys at each whole read."""

KEYS_PER_DELTA: Final = 500
"""How many changed keys are published at once; a router takes them in some 3 ms."""


class PublishCounts(NamedTuple):
    """The result of one turn. `nodes` is how many nodes were read, -1 for the whole fleet."""

    generation: int = 0
    routes: int = 0
    routers: int = 0
    nodes: int = 0


@dataclass(eq=False, kw_only=True)
class PublishRoutes:
    """Sends each router the change to the table it has, or the whole table."""

    pool: Pool
    interval_s: float
    limits: LivenessLimits
    lease: LeaseState
    peers: PeerRegistry
    heartbeats: Heartbeats
    routes: PublishedRoutes
    reports: NodeReportCache
    first_reports: FirstReports
    _fleet: ClusterState | None = field(default=None, init=False)
    _group_nodes: Set[NodeId] = field(default_factory=frozenset, init=False)
    _departures: DeparturesByReplica = field(default_factory=dict, init=False)
    _whole_due_at: float = field(default=float("-inf"), init=False)
    _compared_until: KeyId = field(default=KeyId(""), init=False)
    _seen_events: set[int] = field(default_factory=set, init=False)

    async def run_once(self) -> PublishCounts:
        """Build the table, compare it with the published one, number and send what changed."""
        if not self.lease.is_acting:
            return PublishCounts()
        # A new term may begin while this turn reads, and must not publish what was read before.
        epoch = self.lease.epoch
        has_no_routes = self.routes.table is None or self.routes.table.keys_only
        waits = has_no_routes and await self.first_reports.must_routes_wait(self.pool)
        if self.routes.table is None:
            # Keys that change while they are read are in the next turn.
            self.routes.keys = await read_all_keys(self.pool, self.routes.keys)
            if waits:
                return await self._publish_keys_first(epoch)
        changed, changed_keys = self.routes.take_changed(), frozenset[KeyId]()
        try:
            if self.routes.table is not None:
                changed_keys = self.routes.take_changed_keys(KEYS_PER_DELTA)
            if changed_keys and self.routes.table is not None:
                await self._publish_keys(self.routes.table, changed_keys)
            if waits:
                self.routes.restore_all(())
                return PublishCounts()
            return await self._publish(epoch, changed)
        except BaseException:
            self.routes.restore_all(changed_keys)
            raise

    async def _publish_keys_first(self, epoch: Epoch) -> PublishCounts:
        """Publish a table of keys alone, which routers use with the routes that they have."""
        async with transaction(self.pool) as connection:
            revoked = await revoked_keys(connection)
            generation = await next_route_generation(
                connection, epoch, Generation(0), keys_only=True
            )
            cluster = await read_cluster_row(connection)
        table = RouteTable(
            cluster_id=cluster.cluster_id,
            generation=generation,
            epoch=epoch,
            keys_only=True,
            keys=self.routes.keys,
            keys_revoked=revoked,
        )
        return PublishCounts(generation, routers=self._send(None, table))

    async def _publish(self, epoch: Epoch, changed: set[NodeId] | None) -> PublishCounts:
        latest, fleet = self.routes.table, self._fleet
        before = None if latest is None or latest.keys_only else latest
        if before is None or fleet is None or changed is None or self._needs_whole_read(changed):
            table = keep_unchanged_rates(before, await self._read_whole(epoch))
            if before is not None:
                await self._compare_recent(before.keys)
                await self._compare_keys(before.keys)
            nodes_read = -1
        elif changed:
            routes = await self._read_nodes(fleet, changed)
            table = replace_node_routes(before, routes, changed)
            nodes_read = len(changed)
        else:
            return PublishCounts(before.generation, len(before.routes))
        now = self.lease.clock()
        table, waiting, departures = damp_flaps(before, table, self._departures, now)
        self.routes.postpone(set(waiting))
        if before is not None and (table is before or table == before):
            return PublishCounts(before.generation, len(before.routes), nodes=nodes_read)
        async with transaction(self.pool) as connection:
            published = Generation(0) if latest is None else latest.generation
            generation = await next_route_generation(connection, epoch, published)
        self._departures = departures
        table = msgspec.structs.replace(table, generation=generation)
        routers = self._send(before, table)
        return PublishCounts(generation, len(table.routes), routers, nodes_read)

    async def _publish_keys(self, before: RouteTable, key_ids: frozenset[KeyId]) -> None:
        """Read and publish these keys alone: with a million keys, all are read in seconds."""
        async with transaction(self.pool) as connection:
            live = await live_keys(connection, sorted(key_ids))
            revoked = await revoked_among(connection, sorted(key_ids))
            generation = await next_route_generation(
                connection, before.epoch, before.generation, keys_only=before.keys_only
            )
        was_revoked = key_ids.intersection(before.keys_revoked)
        delta = RouteDelta(
            cluster_id=before.cluster_id,
            base=before.generation,
            generation=generation,
            epoch=before.epoch,
            keys_set=live,
            keys_gone=tuple(sorted(key_ids - {key.key_id for key in live})),
            revoked_set=tuple(sorted(revoked - was_revoked)),
            revoked_gone=tuple(sorted(was_revoked - revoked)),
        )
        self._send(before, apply_delta(before, delta), delta)

    async def _compare_recent(self, published: KeyTable) -> None:
        """Publish soon the changes of keys that the newest events name and the table lacks.

        A key may change unannounced: at a scheduler that does not act. With a million keys, half an
        hour passes until all have been compared.
        """
        async with using(self.pool) as connection:
            recent = await recent_key_changes(connection, RECENT_EVENTS)
            # Events are seen in the order of their commits, not of their numbers.
            key_ids = {key_id for event_id, key_id in recent if event_id not in self._seen_events}
            keys = await live_keys(connection, sorted(key_ids)) if key_ids else ()
        live = {key.key_id: key for key in keys}
        for key_id in key_ids:
            if published.get(key_id) != live.get(key_id):
                self.routes.mark_key_changed(key_id)
        self._seen_events = {event_id for event_id, _ in recent}

    async def _compare_keys(self, published: KeyTable) -> None:
        """Read the next page of keys, and publish those that differ from the table soon."""
        after = self._compared_until
        async with using(self.pool) as connection:
            page = await read_key_page(connection, after)
        until = page.until
        changes = KeyTable.of(page.keys).changes_from(published.between(after, until))
        for key_id in (*(key.key_id for key in changes.changed), *changes.gone):
            self.routes.mark_key_changed(key_id)
        self._compared_until = until or KeyId("")

    def _send(
        self, before: RouteTable | None, table: RouteTable, change: RouteDelta | None = None
    ) -> int:
        if table.epoch != self.lease.newest_epoch:
            raise EpochLost(f"cannot publish routes of epoch {table.epoch}: a newer term has begun")
        delta = b"" if before is None else codec.encode(change or diff(before, table))
        if len(delta) > DELTA_BYTES_MAX:
            delta = b""
        self.routes.replace(table, delta)
        self.routes.following.record_published(table.generation, self.lease.clock())
        metrics.ROUTE_GENERATION.set(table.generation)
        routers = self.peers.routers()
        for router in routers:
            has_previous = before is not None and router.generation == before.generation
            if has_previous and delta:
                router.enqueue(delta)
                router.generation = table.generation
            else:
                self.routes.send_table(router)
        return len(routers)

    def _needs_whole_read(self, node_ids: Set[NodeId]) -> bool:
        # A replica over several nodes is routable only while none of them is lost.
        is_due = self.lease.clock() >= self._whole_due_at
        return is_due or not self._group_nodes.isdisjoint(node_ids)

    async def _read_whole(self, epoch: Epoch) -> RouteTable:
        began = self.lease.clock()
        async with transaction(self.pool, isolation="repeatable_read") as connection:
            fleet = await read_fleet(connection, self.heartbeats.observed(), self.reports)
            revoked = await revoked_keys(connection)
            adapters = await read_adapter_entries(connection)
        table = self._table_of(fleet, epoch)
        self._fleet = msgspec.structs.replace(fleet, nodes=(), placements=())
        self._group_nodes = multi_node_hosts(fleet.placements)
        now = self.lease.clock()
        rest_s = max(self.interval_s, (now - began) / WHOLE_READ_SHARE)
        # A little early: it must be due when the timer's next turn comes.
        self._whole_due_at = now + 0.9 * rest_s
        return msgspec.structs.replace(table, keys_revoked=revoked, adapters=adapters)

    async def _read_nodes(self, fleet: ClusterState, node_ids: Set[NodeId]) -> tuple[Route, ...]:
        """Read the routes to some nodes; the rest of the table is that of the last whole read."""
        async with transaction(self.pool, isolation="repeatable_read") as connection:
            part = await read_fleet_nodes(
                connection, fleet, sorted(node_ids), self.heartbeats.observed(), self.reports
            )
        return build_routes(part, judge_liveness(part.nodes, part.acting_for_s, self.limits))

    def _table_of(self, fleet: ClusterState, epoch: Epoch) -> RouteTable:
        view = judge_liveness(fleet.nodes, fleet.acting_for_s, self.limits)
        return build_route_table(
            fleet, view, self.routes.keys, generation=Generation(0), epoch=epoch
        )
