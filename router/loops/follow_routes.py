"""Follows the scheduler: checks route tables, adopts accepted ones, and keeps the last on disk.

The table in use is always whole: a delta is applied to the table it is based on, and a delta that
does not fit asks for a snapshot. A refused table is quarantined and checked again, because the
replicas it drops may really be ending; the entries that it adds are served at once. If an
accepted table leaves a deployment without routes, the replicas that it had are still probed, and
used while they serve.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from isochrone.service.network.control_link import Progress
from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.ids import ClusterId, Epoch, Generation
from isochrone.wire.peers.routes import (
    Route,
    RouteDelta,
    RouteTable,
    RouteTablePart,
    SnapshotWanted,
    apply_delta,
)
from isochrone.wire.peers.table_parts import BadParts, TableAssembler
from router.decide.admission.limits import KeyLimiter
from router.decide.routes.route_directory import TableIndexes
from router.decide.routes.table_acceptance import (
    TableRefusal,
    check_table,
    merge_additions,
    trusts_silence,
)
from router.decide.routes.withdrawn_routes import WithdrawnRoutes, with_route, with_routes
from router.fleet_state import FleetState
from router.recording.metrics import Metrics
from router.table_file import TableFile

log = logging.getLogger(__name__)

KEYS_PER_SLICE: Final = 1_000
"""How many keys with limits are looked at before requests have their turn."""

LOG_AGAIN_S: Final = 10.0
"""How often it is logged that a table is still refused: it may change many times a second."""


class PreparedTable(NamedTuple):
    """The indexes of a table to serve, with the withdrawn routes that were added to it."""

    indexes: TableIndexes
    added: tuple[Route, ...]


Send = Callable[[msgspec.Struct], Awaitable[bool]]


class QuarantinedTable(NamedTuple):
    """A refused table, the reason, the last table that was accepted, and since when none was."""

    accepted: RouteTable
    table: RouteTable
    refusal: TableRefusal
    since_s: float


class TableFollower:
    """Turns route tables and deltas into the table that the fleet state serves."""

    def __init__(
        self,
        *,
        fleet: FleetState,
        limiter: KeyLimiter,
        metrics: Metrics,
        cluster_id: ClusterId,
        snapshot: Path,
        clock: Callable[[], float],
    ) -> None:
        """Keep the table on disk at `snapshot`. `clock` gives monotonic seconds."""
        self.quarantined: QuarantinedTable | None = None
        self._fleet = fleet
        self._limiter = limiter
        self._metrics = metrics
        self._cluster_id = cluster_id
        self._file = TableFile(snapshot, cluster_id, clock)
        self._clock = clock
        self._started_at_s = clock()
        self._withdrawn = WithdrawnRoutes()
        self._accepted: RouteTable | None = None
        """The table in use without the withdrawn replicas that are served as well."""
        self._assembler = TableAssembler()
        self._held = KeyTable()
        """The keys that this router last reported to the scheduler."""
        self._parts_refusal = ""
        self._refusal_logged_at_s = float("-inf")
        self._confirmed_at_s: float | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called after every change of the table in use."""
        self.on_withdrawn: Callable[[], None] = lambda: None
        """Called when a table leaves a deployment without the routes that it had."""

    def progress(self) -> Progress:
        """Return the cluster, generation and epoch of the table in use, for the scheduler."""
        table = self._fleet.directory.table
        if table is None:
            return Progress(self._cluster_id, Generation(0), Epoch(0))
        return Progress(table.cluster_id, table.generation, table.epoch)

    def registering(self) -> Progress:
        """Return the same with the keys in use, which the next table need not contain."""
        return self.progress()._replace(keys_held=self._tell_keys())

    def _tell_keys(self) -> bytes:
        """Return the sums of the keys in use, and remember these keys.

        The table that answers them may arrive when the keys in use have changed.
        """
        self._held = self._fleet.directory.keys
        return self._held.sums.encode() if self._held else b""

    def age_s(self, *, is_connected: bool) -> float:
        """Return how long ago the table was confirmed.

        A connected scheduler that sends no table confirms the current one.
        """
        now_s = self._clock()
        has_table = self._fleet.directory.table is not None
        if is_connected and self.quarantined is None and has_table:
            self._confirmed_at_s = now_s
        return 0.0 if self._confirmed_at_s is None else now_s - self._confirmed_at_s

    def dropped(self) -> tuple[Route, ...]:
        """Return the replicas to be probed one by one: dropped by the quarantined table, or
        withdrawn earlier from deployments that are without routes."""
        dropped = self.quarantined.refusal.dropped if self.quarantined else ()
        return (*dropped, *self._withdrawn.silent(self._clock()))

    def record_answer(self, route: Route, refusal: str) -> None:
        """Note what a node answered for a dropped replica; serve a withdrawn one again."""
        replica_id = route.replica_id
        accepted = self._accepted
        if accepted is None or not self._withdrawn.record_answer(replica_id, serves=not refusal):
            return
        log.warning("withdrawn replica serves again", extra={"fields": {"replica": replica_id}})
        served = self._fleet.directory.table
        added = [entry for entry in self._withdrawn.serving() if entry.replica_id == replica_id]
        if served is None or not added:
            self._serve(accepted)
            return
        # Many may serve again in one turn: the table is not indexed whole for each of them.
        served = with_route(served, added[0])
        # A deployment with withdrawn replicas that are served has no others.
        routes = self._withdrawn.serving_of(route.deployment_id)
        indexes = TableIndexes.with_addition(self._fleet.directory, served, added[0], routes)
        self._fleet.adopt(served, indexes)
        self._after_adoption(served)

    async def load(self, unix_now_s: float) -> bool:
        """Serve the table on disk; return False if there is none that can be used."""
        stored = await self._file.read()
        if stored is None:
            return False
        self.accept(stored.table)
        self._confirmed_at_s = self._clock() - max(0.0, unix_now_s - stored.written_at_s)
        return True

    def refusal(self) -> str:
        """Return why no newer table is served, empty if the scheduler's last one is."""
        if self.quarantined is not None:
            return f"quarantined: {self.quarantined.refusal.reason}"
        return self._parts_refusal

    async def on_table(self, message: RouteTable | RouteTablePart | RouteDelta, send: Send) -> None:
        """Take a table, a part of one, or a delta from the scheduler."""
        if isinstance(message, RouteTablePart):
            await self._add_part(message)
            # Parts that have arrived are read without a pause; requests get their turn here.
            await asyncio.sleep(0)
            return
        if isinstance(message, RouteTable):
            await self._check(message)
            return
        quarantined = self.quarantined.table if self.quarantined else None
        known = [table for table in (quarantined, self._accepted) if table]
        if any(message.cluster_id != table.cluster_id for table in known):
            self._log_refusal(f"cannot follow: a delta of cluster {message.cluster_id}")
            return
        if known and message.generation <= known[0].generation:
            # Sent before a reconnect and again after it.
            return
        for table in known:
            if table.generation == message.base:
                changed = apply_delta(table, message)
                await asyncio.sleep(0)
                await self._check(changed)
                return
        have = known[-1].generation if known else Generation(0)
        await send(SnapshotWanted(have=have, keys_held=self._tell_keys()))

    async def recheck(self) -> str:
        """Check a quarantined table again; return what came of it."""
        await self._drop_refused_again()
        if self.quarantined is None:
            return "nothing quarantined"
        # Against the last accepted table: the additions of the refused table must not make its
        # drops look small.
        quarantined, table = self.quarantined, self.quarantined.table
        refusal = check_table(quarantined.accepted, table, self._is_answering(table))
        if refusal is not None:
            return refusal.reason
        prepared = await self.prepare(table)
        if self.quarantined is not quarantined:
            return "a newer table has come"
        fields = {"generation": table.generation}
        log.warning("quarantined table accepted", extra={"fields": fields})
        self.accept(table, prepared)
        return "accepted"

    async def persist(self) -> int:
        """Write the table in use to disk as soon as it is time; return its generation.

        It waits until then instead of leaving the change to a later turn: a router that crashes
        before has lost it if no scheduler runs when it comes back.
        """
        await self._forget_keys()
        while self._fleet.forget_removed():  # noqa: ASYNC110 - it waits for nothing
            await asyncio.sleep(0)
        await self._file.wait_until_due(self._fleet.directory.table)
        return await self.persist_now()

    async def _forget_keys(self) -> None:
        """Drop the limits' state of keys that have left the table, some at a time."""
        used = self._limiter.key_ids()
        for start in range(0, len(used), KEYS_PER_SLICE):
            keys = self._fleet.directory.keys
            self._limiter.forget(
                key_id for key_id in used[start : start + KEYS_PER_SLICE] if key_id not in keys
            )
            await asyncio.sleep(0)

    async def persist_now(self) -> int:
        """Write the table in use to disk if it changed; return its generation."""
        table = self._fleet.directory.table
        if table is None:
            return 0
        await self._file.write(table, self._withdrawn.table_to_store)
        return table.generation

    async def prepare(self, table: RouteTable) -> PreparedTable | None:
        """Index a table before it is served, in slices between which requests are served.

        The withdrawn replicas that serve again are indexed, too. Return None if the indexes in use
        fit it.
        """
        added = self._withdrawn.serving_beside(table)
        served = self._with_withdrawn(table, added)
        if not self._fleet.needs_indexes(served):
            return None
        await asyncio.sleep(0)
        indexes = TableIndexes(self._fleet.directory, served)
        for _ in indexes.steps():
            await asyncio.sleep(0)
        return PreparedTable(indexes, added)

    def accept(self, table: RouteTable, prepared: PreparedTable | None = None) -> None:
        """Serve a table that this process, or the main process of this router, has accepted."""
        self.quarantined = None
        self._parts_refusal = ""
        self._confirmed_at_s = self._clock()
        self._serve(table, prepared)

    async def accept_change(self, delta: RouteDelta) -> None:
        """Serve the table in use after a change that the main process has accepted."""
        table = self._accepted
        if table is not None:
            changed = apply_delta(table, delta)
            self.accept(changed, await self.prepare(changed))

    async def assemble(self, part: RouteTablePart) -> RouteTable | None:
        """Take a part of a table; return the table when it is complete. Raises BadParts."""
        known = self._held if part.keys_kept else self._fleet.directory.keys
        steps = self._assembler.steps(part, known)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                table: RouteTable | None = end.value
                return table
            await asyncio.sleep(0)

    async def _add_part(self, part: RouteTablePart) -> None:
        try:
            table = await self.assemble(part)
        except BadParts as error:
            self._parts_refusal = str(error)
            self._log_refusal(self._parts_refusal)
            return
        if table is None:
            return
        if not table.keys_only:
            await self._check(table)
        elif self._accepted is not None:
            changed = {"keys": table.keys, "keys_revoked": table.keys_revoked}
            await self._check(
                msgspec.structs.replace(
                    self._accepted,
                    cluster_id=table.cluster_id,
                    generation=table.generation,
                    epoch=table.epoch,
                    **changed,
                )
            )

    async def _check(self, table: RouteTable) -> None:
        """Accept a table, or quarantine it and serve its additions. Requests are served between."""
        if self._fleet.directory.table is None and table.cluster_id != self._cluster_id:
            self._log_refusal(f"cannot follow: a table of cluster {table.cluster_id}")
            return
        accepted = self.quarantined.accepted if self.quarantined else self._accepted
        refusal = check_table(accepted, table, self._is_answering(table))
        if refusal is None:
            self.accept(table, await self.prepare(table))
            return
        self._note_refusal(refusal.reason)
        if refusal.is_stale or accepted is None:
            return
        since_s = self.quarantined.since_s if self.quarantined else self._clock()
        quarantined = QuarantinedTable(accepted, table, refusal, since_s)
        self.quarantined = quarantined
        await asyncio.sleep(0)
        merged = merge_additions(accepted, table)
        await asyncio.sleep(0)
        prepared = await self.prepare(merged)
        # Unless the table has been accepted meanwhile.
        if self.quarantined is quarantined:
            self._serve(merged, prepared)

    def _serve(self, table: RouteTable, prepared: PreparedTable | None = None) -> None:
        """Serve a table, and the withdrawn replicas that serve again."""
        has_lost_all = self._withdrawn.adopt(self._accepted, table, self._clock())
        added = self._withdrawn.serving()
        if prepared is not None and prepared.added == added:
            served = prepared.indexes.table
        else:
            served = self._with_withdrawn(table, added)
        self._accepted = table
        self._fleet.adopt(served, prepared.indexes if prepared is not None else None)
        self._after_adoption(served)
        if has_lost_all:
            self.on_withdrawn()

    def _with_withdrawn(self, table: RouteTable, added: tuple[Route, ...]) -> RouteTable:
        """Return `table` with the routes `added`: those served now, if these are the same.

        Then a change of keys alone needs no new indexes.
        """
        if not added:
            return table
        accepted, served = self._accepted, self._fleet.directory.table
        if accepted is not None and served is not None and table.routes is accepted.routes:
            in_use = self._fleet.directory
            is_same_count = len(served.routes) == len(table.routes) + len(added)
            if is_same_count and all(in_use.route(r.replica_id) is r for r in added):
                return msgspec.structs.replace(table, routes=served.routes)
        return with_routes(table, added)

    async def _drop_refused_again(self) -> None:
        """Serve no withdrawn replica any more that its node has disowned again."""
        refused = [
            route.replica_id
            for route in self._withdrawn.serving()
            if self._fleet.nodes.is_disowned(route.replica_id)
        ]
        for replica_id in refused:
            self._withdrawn.record_answer(replica_id, serves=False)
        accepted = self._accepted
        if refused and accepted is not None:
            prepared = await self.prepare(accepted)
            # A table accepted meanwhile is served without them.
            if self._accepted is accepted:
                self._serve(accepted, prepared)

    def _is_answering(self, table: RouteTable) -> Callable[[Route], bool]:
        """Return a function that says of a replica whether `table` must not drop many like it."""
        now_s = self._clock()
        refused_for_s = now_s - self.quarantined.since_s if self.quarantined else 0.0
        trusts = trusts_silence(table, now_s - self._started_at_s, refused_for_s)
        return self._fleet.answering_test(trusts_silence=trusts)

    def _after_adoption(self, table: RouteTable) -> None:
        self._metrics.table_generation.set(table.generation)
        self._metrics.table_routes.set(len(table.routes))
        self.on_change()

    def _note_refusal(self, reason: str) -> None:
        """Log a refusal, but not each of many changes of a table that stays refused."""
        if self.quarantined is not None and self._clock() < self._refusal_logged_at_s + LOG_AGAIN_S:
            self._metrics.table_refused.inc()
            return
        self._refusal_logged_at_s = self._clock()
        self._log_refusal(reason)

    def _log_refusal(self, reason: str) -> None:
        self._metrics.table_refused.inc()
        log.error("table refused", extra={"fields": {"reason": reason}})
