"""Shipping: what was asked, used and measured goes up to the scheduler.

Round trips are views of now: what is not delivered is superseded. Demand is kept in memory and sent
until the store has it, as long as it still says something. Usage is a ledger: it is on disk before
it is sent, and stays there until the store has it.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

from isochrone.service.threads import run_to_completion
from isochrone.wire.ids import BootId, RouterId
from isochrone.wire.usage import Demand, RoundTrips, Usage, UsageAck
from router.fleet import Fleet
from router.loops.spool import UsageSpool
from router.metrics import Metrics
from router.record import Recorder

log = logging.getLogger(__name__)

BATCH_ROWS_MAX: Final = 1000
SENT_AT_ONCE_MAX: Final = 16
DEMAND_KEPT_S: Final = 1800.0
DEMAND_WINDOWS_MAX: Final = 360
"""Half an hour of windows: what is older tells the scheduler nothing of now."""

_NEVER_S: Final = -1e18

Send = Callable[[msgspec.Struct], Awaitable[bool]]


class Shipped(NamedTuple):
    """One turn of usage: rows put on disk, batches sent, batches that wait to be acknowledged."""

    rows: int
    sent: int
    waiting: int


class _Window(NamedTuple):
    demand: Demand
    ended_at_s: float
    sent_at_s: float = _NEVER_S


class Shipper:
    """The duties that send upwards."""

    def __init__(
        self,
        *,
        router_id: RouterId,
        boot_id: BootId,
        fleet: Fleet,
        recorder: Recorder,
        metrics: Metrics,
        spool: UsageSpool,
        send: Send,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        resend_s: float,
    ) -> None:
        """Send by `send`, which answers False where there is no conversation."""
        self._router_id = router_id
        self._boot_id = boot_id
        self._fleet = fleet
        self._recorder = recorder
        self._metrics = metrics
        self._spool = spool
        self._send = send
        self._clock = clock
        self._unix_clock = unix_clock
        self._resend_s = resend_s
        self._seq = 0
        self._window_began_s = clock()
        self._sent_at_s: dict[str, float] = {}
        self._windows: dict[int, _Window] = {}

    async def ship_demand(self) -> int:
        """Close the window that ends now, and send what is not acknowledged; return its rows.

        The newest goes first: after an outage, what is asked now is known before what was.
        """
        now_s = self._clock()
        window_s, self._window_began_s = now_s - self._window_began_s, now_s
        rows = self._recorder.take_demand()
        self._seq += 1
        self._windows[self._seq] = _Window(
            Demand(
                router_id=self._router_id,
                boot_id=self._boot_id,
                seq=self._seq,
                window_s=window_s,
                rows=rows,
                trials=self._recorder.trials.take(),
            ),
            ended_at_s=now_s,
        )
        self._forget_windows(now_s)
        sent = 0
        for seq, window in list(reversed(self._windows.items())):
            if now_s - window.sent_at_s < self._resend_s:
                continue
            age_s = self._clock() - window.ended_at_s
            if sent >= SENT_AT_ONCE_MAX or not await self._send(
                msgspec.structs.replace(window.demand, age_s=age_s)
            ):
                break
            # It may be acknowledged while the sending is awaited.
            if seq in self._windows:
                self._windows[seq] = window._replace(sent_at_s=now_s)
            sent += 1
        return len(rows)

    def _forget_windows(self, now_s: float) -> None:
        """Let go of windows that are too old, and of the oldest of too many."""
        while self._windows:
            oldest = next(iter(self._windows))
            age_s = now_s - self._windows[oldest].ended_at_s
            if age_s <= DEMAND_KEPT_S and len(self._windows) <= DEMAND_WINDOWS_MAX:
                return
            lost = self._windows.pop(oldest)
            self._metrics.demand_dropped.inc(len(lost.demand.rows))

    async def ship_round_trips(self) -> int:
        """Send what was measured; return how many nodes."""
        rows = self._fleet.round_trips()
        if rows:
            await self._send(RoundTrips(router_id=self._router_id, rows=rows))
        return len(rows)

    async def ship_usage(self) -> Shipped:
        """Put what ended on disk, then send what is not acknowledged."""
        rows = await self.spool_usage()
        sent = 0
        now_s = self._clock()
        for batch_id in self._spool.batch_ids:
            if now_s - self._sent_at_s.get(batch_id, _NEVER_S) < self._resend_s:
                continue
            batch = await run_to_completion(self._spool.read, batch_id)
            if batch is None:
                continue
            if not await self._send(batch):
                break
            self._sent_at_s[batch_id] = now_s
            sent += 1
            if sent >= SENT_AT_ONCE_MAX:
                break
        return Shipped(rows, sent, len(self._spool.batch_ids))

    async def spool_usage(self) -> int:
        """Put what ended on disk; return how many rows."""
        taken, journal = self._recorder.take_usage()
        left = taken
        try:
            while left:
                rows = left[:BATCH_ROWS_MAX]
                self._seq += 1
                batch_id = (
                    f"{round(self._unix_clock() * 1000):013d}-{self._boot_id}-{self._seq:06d}"
                )
                batch = Usage(router_id=self._router_id, batch_id=batch_id, rows=rows)
                try:
                    dropped = await run_to_completion(self._spool.add, batch)
                finally:
                    # Cancelled or not, what is on disk is not kept in memory as well.
                    if batch_id in self._spool.batch_ids:
                        left = left[len(rows) :]
                self._metrics.usage_dropped.inc(dropped)
        finally:
            # A full disk keeps them in memory; the next turn tries again.
            self._recorder.put_back(left)
            self._metrics.usage_spooled.set(self._spool.bytes)
        if journal and not left:
            await run_to_completion(self._recorder.journal.saved, journal)
        return len(taken)

    async def on_ack(self, ack: UsageAck) -> None:
        """The store has a batch of ours, or refuses it for good: forget it."""
        is_ours = ack.demand_boot == self._boot_id or ack.batch_id in self._spool.batch_ids
        if ack.refused and is_ours:
            self._metrics.rows_refused.inc(ack.refused)
            fields = {"rows": ack.refused, "reason": ack.reason}
            log.error("the scheduler refuses rows", extra={"fields": fields})
        if not ack.batch_id:
            if is_ours:
                self._windows.pop(ack.demand_seq, None)
            return
        self._sent_at_s.pop(ack.batch_id, None)
        await run_to_completion(self._spool.forget, ack.batch_id)
        self._metrics.usage_spooled.set(self._spool.bytes)

    def on_welcome(self) -> None:
        """A new conversation: what went down with the old one is sent again."""
        self._sent_at_s.clear()
        for seq, window in self._windows.items():
            self._windows[seq] = window._replace(sent_at_s=_NEVER_S)
