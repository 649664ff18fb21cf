"""Publishes the route table whenever what it says has changed.

What a node's report changes is read of that node alone, and told at once; but who comes and goes
is back a little later each time (`decide/flaps.py`). All of the fleet is read now and then, for
what no report says: who fell silent, whose rates have drifted.
"""

from collections.abc import Sequence, Set
from typing import Final, NamedTuple

import msgspec

from isochrone.wire import codec
from isochrone.wire.ids import Generation, NodeId
from isochrone.wire.routes import KeyEntry, RouteTable, diff
from scheduler import metrics
from scheduler.acting import Acting
from scheduler.decide.cluster import ClusterState
from scheduler.decide.flaps import LeftBy, damped
from scheduler.decide.liveness import liveness
from scheduler.decide.route_table import route_table, steady, tied, with_part
from scheduler.store.cluster import read_fleet, read_fleet_nodes
from scheduler.store.keys import live_keys, next_route_generation, revoked_keys
from scheduler.store.pool import transaction

WHOLE_SHARE: Final = 0.05
"""The part of the time that reading all of the fleet may take, unless it is asked for."""


class PublishCounts(NamedTuple):
    """One turn's outcome; `nodes` is of how many it was read, -1 for all."""

    generation: int = 0
    routes: int = 0
    told: int = 0
    nodes: int = 0


class PublishRoutes:
    """Routers get the delta from the table they have, or the whole of it."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._fleet: ClusterState | None = None
        self._tied: Set[NodeId] = frozenset()
        self._left: LeftBy = {}
        self._whole_due_at = float("-inf")

    async def run_once(self) -> PublishCounts:
        """Rebuild, compare, number, tell."""
        acting = self._acting
        if not acting.is_acting:
            return PublishCounts()
        unpublished, acting.unpublished = acting.unpublished, set()
        try:
            return await self._publish(unpublished)
        except BaseException:
            acting.unpublished = None
            raise

    async def _publish(self, unpublished: set[NodeId] | None) -> PublishCounts:
        acting = self._acting
        before, fleet = acting.table, self._fleet
        if before is None or fleet is None or unpublished is None or self._wants_whole(unpublished):
            table, count = steady(before, await self._read_whole()), -1
        elif unpublished:
            part = await self._read_part(fleet, unpublished)
            table, count = steady(before, with_part(before, part, unpublished)), len(unpublished)
        else:
            return PublishCounts(before.generation, len(before.routes))
        table, waiting, left = damped(before, table, self._left, acting.clock())
        if acting.unpublished is not None:
            acting.unpublished |= waiting
        if before is not None and table == before:
            return PublishCounts(before.generation, len(before.routes), nodes=count)
        async with transaction(acting.pool) as connection:
            generation = await next_route_generation(connection, acting.epoch)
        self._left = left
        table = msgspec.structs.replace(table, generation=generation)
        return PublishCounts(generation, len(table.routes), self._tell(before, table), count)

    def _tell(self, before: RouteTable | None, table: RouteTable) -> int:
        acting = self._acting
        acting.published(table)
        metrics.ROUTE_GENERATION.set(table.generation)
        routers = acting.routers()
        delta = b"" if before is None else codec.encode(diff(before, table))
        for peer in routers:
            has_previous = before is not None and peer.generation == before.generation
            peer.tell(delta if has_previous else acting.table_frame())
            peer.generation = table.generation
        return len(routers)

    def _wants_whole(self, node_ids: Set[NodeId]) -> bool:
        # A replica over several nodes is served where none of them is lost, which not all may say.
        return self._acting.clock() >= self._whole_due_at or not self._tied.isdisjoint(node_ids)

    async def _read_whole(self) -> RouteTable:
        acting = self._acting
        began = acting.clock()
        async with transaction(acting.pool, isolation="repeatable_read") as connection:
            fleet = await read_fleet(connection, acting.heard(), acting.known_nodes)
            keys = await live_keys(connection)
            revoked = await revoked_keys(connection)
        table = self._table_of(fleet, keys)
        self._fleet = msgspec.structs.replace(fleet, nodes=(), placements=())
        self._tied = tied(fleet.placements)
        now = acting.clock()
        rest_s = max(acting.config.publish_interval_s, (now - began) / WHOLE_SHARE)
        # A little early: the timer's turn must not find it not yet due.
        self._whole_due_at = now + 0.9 * rest_s
        return msgspec.structs.replace(table, keys_revoked=revoked)

    async def _read_part(self, fleet: ClusterState, node_ids: Set[NodeId]) -> RouteTable:
        acting = self._acting
        async with transaction(acting.pool, isolation="repeatable_read") as connection:
            part = await read_fleet_nodes(
                connection, fleet, sorted(node_ids), acting.heard(), acting.known_nodes
            )
        return self._table_of(part, ())

    def _table_of(self, fleet: ClusterState, keys: Sequence[KeyEntry]) -> RouteTable:
        view = liveness(fleet.nodes, fleet.acting_for_s, self._acting.config.liveness)
        epoch = self._acting.epoch
        return route_table(fleet, view, keys, generation=Generation(0), epoch=epoch)
