"""Records up to when time has passed, so that a wrong clock at a start deletes no history."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler import metrics
from scheduler.decide.history_time import BEHIND_S, advance
from scheduler.state.lease_state import LeaseState
from scheduler.store.history_clock import read_history_clock, write_history_clock
from scheduler.store.pool import Pool, transaction

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class AdvanceHistory:
    """Adds the time that this process has seen passing since its last turn."""

    pool: Pool
    lease: LeaseState
    unix_clock: Callable[[], float]
    _turned_at: float | None = field(default=None, init=False)
    _is_behind: bool = field(default=False, init=False)

    async def run_once(self) -> float:
        """Advance the stored time, up to the earlier wall clock; return the seconds that lack."""
        if not self.lease.is_acting:
            self._turned_at = None
            return 0.0
        now = self.lease.clock()
        elapsed_s = 0.0 if self._turned_at is None else now - self._turned_at
        async with transaction(self.pool) as connection:
            stored = await read_history_clock(connection)
            wall_s = min(stored.database_s, self.unix_clock())
            at_s = advance(stored.at_s, elapsed_s, wall_s)
            await write_history_clock(connection, self.lease.epoch, at_s)
        self._turned_at = now
        behind_s = wall_s - at_s
        metrics.HISTORY_BEHIND_S.set(max(0.0, behind_s))
        if behind_s > BEHIND_S and not self._is_behind:
            fields = {"behind_s": round(behind_s), "history_unix_s": round(at_s)}
            log.warning("clock is ahead of the time that schedulers saw", extra={"fields": fields})
        self._is_behind = behind_s > BEHIND_S
        return behind_s
