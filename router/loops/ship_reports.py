"""Ships demand, usage and round trips to the scheduler.

Round trips describe the present: a report that is not delivered is superseded by the next. Demand
is kept in memory and sent until the store has it, or until it is too old to matter. Usage is
billed: it is on disk before it is sent, and stays there until the store has it.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from isochrone.service.threads import run_to_completion
from isochrone.wire.ids import BootId, Generation, RouterId
from isochrone.wire.peers.usage import Demand, RoundTrips, Usage, UsageAck
from router.fleet_state import FleetState
from router.recording.metrics import Metrics
from router.recording.record import Recorder
from router.recording.usage_spool import UsageSpool

log = logging.getLogger(__name__)

BATCH_ROWS_MAX: Final = 1000
BATCHES_PER_TURN_MAX: Final = 16
DEMAND_KEPT_S: Final = 1800.0
DEMAND_WINDOWS_MAX: Final = 360
"""Half an hour of windows: older demand says nothing about the present."""

_NEVER_S: Final = -1e18

Send = Callable[[msgspec.Struct], Awaitable[bool]]


class ShippedUsage(NamedTuple):
    """One turn: rows written to disk, batches sent, batches not acknowledged yet."""

    rows: int
    sent: int
    waiting: int


DEMAND_ROWS_PER_BATCH_MAX: Final = 10_000
"""A window with more rows (deployments times PoPs of clients) is sent in several batches: of one
batch the scheduler refuses the rows beyond 20,000."""


class _DemandWindow(NamedTuple):
    demand: Demand
    ended_at_s: float
    sent_at_s: float = _NEVER_S


@dataclass(eq=False, kw_only=True)
class ReportShipper:
    """The periodic jobs that send reports to the scheduler.

    `send` returns False if there is no connection.
    `table_refusal` says why the router serves no newer route table, empty if it follows.
    """

    router_id: RouterId
    boot_id: BootId
    fleet: FleetState
    table_refusal: Callable[[], str]
    recorder: Recorder
    metrics: Metrics
    spool: UsageSpool
    send: Send
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    resend_s: float
    _seq: int = field(default=0, init=False)
    _window_began_s: float = field(init=False)
    _batch_sent_at_s: dict[str, float] = field(default_factory=dict, init=False)
    _windows: dict[int, _DemandWindow] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._window_began_s = self.clock()

    async def ship_demand(self) -> int:
        """End the current window, and send all unacknowledged ones; return the window's rows.

        The newest window is sent first, so that after an outage the scheduler knows current demand
        before past demand.
        """
        now_s = self.clock()
        window_s, self._window_began_s = now_s - self._window_began_s, now_s
        rows, trials = self.recorder.take_demand(), self.recorder.trials.take()
        for start in range(0, max(1, len(rows)), DEMAND_ROWS_PER_BATCH_MAX):
            self._seq += 1
            self._windows[self._seq] = _DemandWindow(
                Demand(
                    router_id=self.router_id,
                    boot_id=self.boot_id,
                    seq=self._seq,
                    window_s=window_s,
                    rows=rows[start : start + DEMAND_ROWS_PER_BATCH_MAX],
                    trials=() if start else trials,
                ),
                ended_at_s=now_s,
            )
        self._drop_old_windows(now_s)
        sent = 0
        for seq, window in list(reversed(self._windows.items())):
            if now_s - window.sent_at_s < self.resend_s:
                continue
            age_s = self.clock() - window.ended_at_s
            if sent >= BATCHES_PER_TURN_MAX or not await self.send(
                self._stamped(window.demand, age_s)
            ):
                break
            # The window may have been acknowledged while the send was awaited.
            if seq in self._windows:
                self._windows[seq] = window._replace(sent_at_s=now_s)
            sent += 1
        return len(rows)

    async def ship_round_trips(self) -> int:
        """Send the measured round trips; return how many."""
        rows = self.fleet.nodes.round_trips()
        if rows:
            await self.send(RoundTrips(router_id=self.router_id, rows=rows))
        return len(rows)

    async def ship_usage(self) -> ShippedUsage:
        """Write new usage to disk, then send the batches that are not acknowledged."""
        rows = await self.spool_usage()
        sent = 0
        now_s = self.clock()
        for batch_id in self.spool.batch_ids:
            if now_s - self._batch_sent_at_s.get(batch_id, _NEVER_S) < self.resend_s:
                continue
            batch = await run_to_completion(self.spool.read, batch_id)
            if batch is None:
                continue
            if not await self.send(batch):
                break
            self._batch_sent_at_s[batch_id] = now_s
            sent += 1
            if sent >= BATCHES_PER_TURN_MAX:
                break
        return ShippedUsage(rows, sent, len(self.spool.batch_ids))

    async def spool_usage(self) -> int:
        """Write new usage to disk; return how many rows were new."""
        taken, journal_files = self.recorder.take_usage()
        left = taken
        try:
            while left:
                rows = left[:BATCH_ROWS_MAX]
                self._seq += 1
                batch_id = f"{round(self.unix_clock() * 1000):013d}-{self.boot_id}-{self._seq:06d}"
                batch = Usage(router_id=self.router_id, batch_id=batch_id, rows=rows)
                try:
                    dropped = await run_to_completion(self.spool.add, batch)
                finally:
                    # Even if cancelled: rows that are on disk are not kept in memory too.
                    if batch_id in self.spool.batch_ids:
                        left = left[len(rows) :]
                self.metrics.usage_dropped.inc(dropped)
        finally:
            # Rows that a full disk did not take stay in memory for the next turn.
            self.recorder.put_back(left)
            self.metrics.usage_spooled.set(self.spool.bytes)
        if journal_files and not left:
            await run_to_completion(self.recorder.journal.remove, journal_files)
        return len(taken)

    async def on_ack(self, ack: UsageAck) -> None:
        """Drop a batch or window that the store has, or has refused for good."""
        is_ours = ack.demand_boot == self.boot_id or ack.batch_id in self.spool.batch_ids
        if ack.refused and is_ours:
            self.metrics.rows_refused.inc(ack.refused)
            fields = {"rows": ack.refused, "reason": ack.reason}
            log.error("the scheduler refuses rows", extra={"fields": fields})
        if not ack.batch_id:
            if is_ours:
                self._windows.pop(ack.demand_seq, None)
            return
        self._batch_sent_at_s.pop(ack.batch_id, None)
        await run_to_completion(self.spool.remove, ack.batch_id)
        self.metrics.usage_spooled.set(self.spool.bytes)

    def on_welcome(self) -> None:
        """Send everything again: what was sent on the last connection may be lost."""
        self._batch_sent_at_s.clear()
        for seq, window in self._windows.items():
            self._windows[seq] = window._replace(sent_at_s=_NEVER_S)

    def _stamped(self, demand: Demand, age_s: float) -> Demand:
        """Return `demand` with its age, the time, and the route table that is served now."""
        table = self.fleet.directory.table
        return msgspec.structs.replace(
            demand,
            age_s=age_s,
            table_generation=Generation(0) if table is None else table.generation,
            table_refusal=self.table_refusal(),
            sent_at=self.unix_clock(),
        )

    def _drop_old_windows(self, now_s: float) -> None:
        """Drop windows that are too old, and the oldest of too many."""
        while self._windows:
            oldest = next(iter(self._windows))
            age_s = now_s - self._windows[oldest].ended_at_s
            if age_s <= DEMAND_KEPT_S and len(self._windows) <= DEMAND_WINDOWS_MAX:
                return
            dropped = self._windows.pop(oldest)
            self.metrics.demand_dropped.inc(len(dropped.demand.rows))
