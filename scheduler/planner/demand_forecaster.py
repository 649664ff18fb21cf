"""Learns the demand of each slot after its end, and keeps the forecast up to date.

Series are saved in turns, each once an hour, so that a new term or a new planner continues from
there and from the slots since. Tens of thousands of series take seconds to learn: the event loop
runs other tasks after each of them.
"""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic
from typing import Final, NamedTuple
from zlib import crc32

from isochrone.wire.ids import Epoch
from scheduler.decide.cluster import DemandRate
from scheduler.decide.demand import (
    FORGET_SLOTS,
    LATER,
    LATER_S,
    FleetForecast,
    SeriesKey,
    SlotDemand,
    slot_of,
)
from scheduler.planner.messages import LearnReply
from scheduler.store.cluster import read_pops
from scheduler.store.forecast import (
    StoredSeries,
    forget_series,
    read_clock,
    read_series,
    read_slot,
    save_series,
)
from scheduler.store.history_clock import read_history_clock
from scheduler.store.pool import Pool, transaction, using

log = logging.getLogger(__name__)

GRACE_S: Final = 75.0
"""Time after the end of a slot in which routers may still report demand of it."""

CATCH_UP_SLOTS: Final = 36
"""How far back a new term learns what its predecessor did not: six hours, at about a second per
slot."""

CATCH_UP_FROM_NOTHING_SLOTS: Final = 2016
PUT_BACK_SLOTS_MAX: Final = 6
"""If the database clock is set back by up to this, nothing is learned until it catches up. If it is
set back farther, series from the future are forgotten, because they would stay until that time."""

SAVE_TURNS: Final = 6
SAVED_AT_ONCE: Final = 500
LEARN_S: Final = 10.0
"""How long one call learns slots before it returns and reports that more are left."""


class LaterForecast(NamedTuple):
    """The forecast for some hours ahead, and its time by this process's monotonic clock."""

    rows: Sequence[DemandRate] = ()
    at_s: float = float("-inf")

    def in_s(self) -> float:
        """Return the seconds until the time of the forecast."""
        return self.at_s - monotonic()


class DemandForecaster:
    """Learns demand and forecasts it during one term; a new term begins from the stored series."""

    def __init__(self, pool: Pool) -> None:
        self.soon: Sequence[DemandRate] = ()
        self.later = LaterForecast()
        self._pool = pool
        self._epoch: Epoch | None = None
        self._forecast = FleetForecast({})
        self._next_slot = 0
        self._is_current = True

    async def learn(self, epoch: Epoch) -> LearnReply:
        """Learn the slots that ended since the last call, and renew the forecast."""
        async with using(self._pool) as connection:
            last = slot_of(await read_clock(connection) - GRACE_S) - 1
        if epoch != self._epoch or self._next_slot > last + PUT_BACK_SLOTS_MAX:
            await self._begin(epoch)
        learned = saved = 0
        until = monotonic() + LEARN_S
        while self._next_slot <= last and monotonic() < until:
            async with using(self._pool) as connection:
                demand = await read_slot(connection, self._next_slot)
            if demand is not None:
                await self._learn_slot(self._next_slot, demand)
                learned += 1
            self._next_slot += 1
        if learned:
            saved = await self._save(self._next_slot - 1)
        is_behind = self._next_slot <= last
        is_new = not is_behind and not self._is_current
        if is_new:
            await self._renew_forecast()
        return LearnReply(
            slots=learned,
            series=len(self._forecast),
            saved=saved,
            is_new=is_new,
            is_behind=is_behind,
        )

    async def _renew_forecast(self) -> None:
        """Forecast all series, then replace the forecast as a whole."""
        soon, later = [], []
        for key in self._forecast.sorted_keys():
            soon.append(self._forecast.forecast(key))
            later.append(self._forecast.forecast(key, LATER))
            await asyncio.sleep(0)
        self.soon = [row for row in soon if row is not None]
        at_s = monotonic() + LATER_S - GRACE_S
        self.later = LaterForecast([row for row in later if row is not None], at_s)
        self._is_current = True

    async def _begin(self, epoch: Epoch) -> None:
        """Continue from the stored series; unreadable ones are learned again."""
        self.soon, self.later = (), LaterForecast()
        async with using(self._pool) as connection:
            pops = await read_pops(connection)
            now = slot_of(await read_clock(connection))
            history = slot_of((await read_history_clock(connection)).at_s)
            # A clock that is a year off must not delete what was learned by the right one.
            too_old, too_new = min(now, history) - FORGET_SLOTS, max(now, history)
            await forget_series(connection, too_old, too_new + PUT_BACK_SLOTS_MAX)
        self._forecast = FleetForecast({pop.pop: pop.longitude for pop in pops})
        oldest = now
        after: SeriesKey | None = None
        while True:
            async with using(self._pool) as connection:
                rows = await read_series(connection, after, SAVED_AT_ONCE)
            for row in rows:
                if self._forecast.restore(row.key, row.state):
                    oldest = min(oldest, row.slot + 1)
            if len(rows) < SAVED_AT_ONCE:
                break
            after = rows[-1].key
        known = len(self._forecast) > 0
        back = CATCH_UP_SLOTS if known else CATCH_UP_FROM_NOTHING_SLOTS
        self._next_slot = max(oldest if known else 0, now - back)
        self._epoch = epoch
        self._is_current = False
        log.info(
            "forecast started",
            extra={"fields": {"series": len(self._forecast), "slots": now - self._next_slot}},
        )

    async def _learn_slot(self, slot: int, demand: dict[SeriesKey, SlotDemand]) -> None:
        self._is_current = False
        for key in sorted(set(self._forecast.sorted_keys()) | set(demand)):
            self._forecast.learn(slot, key, demand.get(key, SlotDemand()))
            await asyncio.sleep(0)

    async def _save(self, slot: int) -> int:
        """Save the series whose turn it is; each is saved once an hour."""
        turn = slot % SAVE_TURNS
        due = [key for key in self._forecast.sorted_keys() if _turn_of(key) == turn]
        for start in range(0, len(due), SAVED_AT_ONCE):
            rows = [
                StoredSeries(key, *self._forecast.serialized(key))
                for key in due[start : start + SAVED_AT_ONCE]
            ]
            async with transaction(self._pool) as connection:
                await save_series(connection, rows)
        async with using(self._pool) as connection:
            history = slot_of((await read_history_clock(connection)).at_s)
            await forget_series(connection, min(slot, history) - FORGET_SLOTS)
        return len(due)


def _turn_of(key: SeriesKey) -> int:
    # Not hash(), which differs between processes.
    return crc32("\0".join(key).encode()) % SAVE_TURNS
