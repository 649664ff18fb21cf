"""Following the scheduler: route tables come down, are believed or not, and are kept on disk.

What is served by is always whole: a delta is applied to the table it is based on, and one that
does not fit asks for a snapshot. A table that is not believed is held and looked at again, for the
replicas it drops may indeed be ending; what it adds is taken at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from isochrone.service import files
from isochrone.service.control_link import Progress
from isochrone.service.threads import run_to_completion
from isochrone.wire import codec
from isochrone.wire.ids import ClusterId, Epoch, Generation
from isochrone.wire.routes import Route, RouteDelta, RouteTable, SnapshotWanted, apply_delta
from router.decide.adopt import RefusedTable, refused, widened
from router.decide.limits import Gate
from router.fleet import Fleet
from router.metrics import Metrics

log = logging.getLogger(__name__)

_TABLE = codec.decoder(RouteTable)

Send = Callable[[msgspec.Struct], Awaitable[bool]]


class Held(NamedTuple):
    """A table that is not believed yet, why, and the last one that was."""

    before: RouteTable
    table: RouteTable
    refusal: RefusedTable


class Follower:
    """Turns what the scheduler says into what the fleet is believed to be."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        gate: Gate,
        metrics: Metrics,
        cluster_id: ClusterId,
        snapshot: Path,
        clock: Callable[[], float],
    ) -> None:
        """Keep the table at `snapshot`."""
        self.held: Held | None = None
        self._fleet = fleet
        self._gate = gate
        self._metrics = metrics
        self._cluster_id = cluster_id
        self._snapshot = snapshot
        self._clock = clock
        self._confirmed_at_s: float | None = None
        self._on_disk: RouteTable | None = None
        self._on_change: Callable[[], None] | None = None

    def on_change(self, tell: Callable[[], None]) -> None:
        """Let `tell` hear of every table adopted."""
        self._on_change = tell

    def progress(self) -> Progress:
        """Return what this router has, for the scheduler."""
        table = self._fleet.table
        if table is None:
            return Progress(self._cluster_id, Generation(0), Epoch(0))
        return Progress(table.cluster_id, table.generation, table.epoch)

    def age_s(self, *, is_led: bool) -> float:
        """Return how long ago the table was confirmed: whoever leads and sends none confirms it."""
        now_s = self._clock()
        if is_led and self.held is None and self._fleet.table is not None:
            self._confirmed_at_s = now_s
        return 0.0 if self._confirmed_at_s is None else now_s - self._confirmed_at_s

    def dropped(self) -> tuple[Route, ...]:
        """Return the replicas whose drop is not believed: the probes ask each of them."""
        return self.held.refusal.dropped if self.held else ()

    async def load(self, unix_now_s: float) -> bool:
        """Serve by the table on disk, if there is one; False where there is none."""
        payload = await asyncio.to_thread(files.read_snapshot, self._snapshot)
        if payload is None:
            return False
        try:
            table: RouteTable = codec.decode(payload, _TABLE, bytes_max=len(payload))
            if table.cluster_id != self._cluster_id:
                # By it, no table of the cluster joined since would ever be believed.
                raise codec.MalformedFrame(f"it is of cluster {table.cluster_id}")
        except codec.MalformedFrame as error:
            log.error("cannot use the stored table", extra={"fields": {"error": str(error)}})
            return False
        written_at_s = 0.0
        with suppress(FileNotFoundError):
            # There may be only the one before it.
            written_at_s = await asyncio.to_thread(lambda: self._snapshot.stat().st_mtime)
        self.take(table)
        self._confirmed_at_s = self._clock() - max(0.0, unix_now_s - written_at_s)
        self._on_disk = table
        return True

    async def on_table(self, message: RouteTable | RouteDelta, send: Send) -> None:
        """Take what came down."""
        if isinstance(message, RouteTable):
            self._consider(message)
            return
        known = [table for table in (self.held and self.held.table, self._fleet.table) if table]
        if any(message.cluster_id != table.cluster_id for table in known):
            self._refuse(f"cannot follow: a delta of cluster {message.cluster_id}")
            return
        if known and message.generation <= known[0].generation:
            # Sent before a reconnect and again after it: nothing new.
            return
        for table in known:
            if table.generation == message.base:
                self._consider(apply_delta(table, message))
                return
        have = known[-1].generation if known else Generation(0)
        await send(SnapshotWanted(have=have))

    async def reconsider(self) -> str:
        """Look at a held table again: its dropped replicas may have ended meanwhile."""
        if self.held is None:
            return "nothing held"
        # Judged by the table before it: what it added must not make its drops look small.
        refusal = refused(self.held.before, self.held.table, self._fleet.answering())
        if refusal is not None:
            return refusal.reason
        fields = {"generation": self.held.table.generation}
        log.warning("a table that was held is now believed", extra={"fields": fields})
        self.take(self.held.table)
        return "believed"

    async def persist(self) -> int:
        """Keep the table served by on disk; return its generation."""
        table = self._fleet.table
        if table is not None and self._on_disk is not table:
            await run_to_completion(self._write, table)
        return table.generation if table is not None else 0

    def _write(self, table: RouteTable) -> None:
        files.write_snapshot(self._snapshot, codec.encode(table))
        # Here, not after the wait: a cancelled wait has written all the same.
        self._on_disk = table

    def _consider(self, table: RouteTable) -> None:
        if self._fleet.table is None and table.cluster_id != self._cluster_id:
            self._refuse(f"cannot follow: a table of cluster {table.cluster_id}")
            return
        before = self.held.before if self.held else self._fleet.table
        refusal = refused(before, table, self._fleet.answering())
        if refusal is None:
            self.take(table)
            return
        self._refuse(refusal.reason)
        if not refusal.is_stale and before is not None:
            self._serve_by(widened(before, table))
            self.held = Held(before, table, refusal)

    def take(self, table: RouteTable) -> None:
        """Serve by a table that is believed, here or by the main process of this router."""
        self.held = None
        self._confirmed_at_s = self._clock()
        self._serve_by(table)

    def _serve_by(self, table: RouteTable) -> None:
        self._fleet.adopt(table)
        self._gate.forget(set(self._fleet.keys))
        self._metrics.table_generation.set(table.generation)
        self._metrics.table_routes.set(len(table.routes))
        if self._on_change is not None:
            self._on_change()

    def _refuse(self, reason: str) -> None:
        self._metrics.table_refused.inc()
        log.error("table refused", extra={"fields": {"reason": reason}})
