"""Publishes the route table whenever what it says has changed."""

from typing import NamedTuple

import msgspec

from isochrone.wire import codec
from isochrone.wire.ids import Generation
from isochrone.wire.routes import RouteTable, diff
from scheduler import metrics
from scheduler.acting import Acting
from scheduler.decide.liveness import liveness
from scheduler.decide.route_table import route_table
from scheduler.decide.steady import steady
from scheduler.store.cluster import read_fleet
from scheduler.store.keys import live_keys, next_route_generation, revoked_keys
from scheduler.store.pool import transaction


class Published(NamedTuple):
    """One turn's outcome."""

    generation: int = 0
    routes: int = 0
    told: int = 0


class Publish:
    """Routers get the delta from the table they have, or the whole of it."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> Published:
        """Rebuild, compare, number, tell."""
        acting = self._acting
        if not acting.is_acting:
            return Published()
        before = acting.table
        table = steady(before, await self._rebuild())
        if before is not None and table == before:
            return Published(before.generation, len(before.routes))
        async with transaction(acting.pool) as connection:
            generation = await next_route_generation(connection, acting.epoch)
        table = msgspec.structs.replace(table, generation=generation)
        acting.published(table)
        metrics.ROUTE_GENERATION.set(generation)
        routers = acting.routers()
        delta = b"" if before is None else codec.encode(diff(before, table))
        for peer in routers:
            has_previous = before is not None and peer.generation == before.generation
            peer.tell(delta if has_previous else acting.table_frame())
            peer.generation = generation
        return Published(generation, len(table.routes), len(routers))

    async def _rebuild(self) -> RouteTable:
        acting = self._acting
        async with transaction(acting.pool, isolation="repeatable_read") as connection:
            cluster = await read_fleet(
                connection,
                acting_for_s=acting.acting_for_s,
                silent_s=acting.silent_s(),
                known=acting.known_nodes,
            )
            keys = await live_keys(connection)
            revoked = await revoked_keys(connection)
        view = liveness(cluster.nodes, cluster.acting_for_s, acting.config.liveness)
        table = route_table(cluster, view, keys, generation=Generation(0), epoch=acting.epoch)
        return msgspec.structs.replace(table, keys_revoked=revoked)
