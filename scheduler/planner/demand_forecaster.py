"""Learns the demand of each slot after its end, and keeps the forecast up to date.

Series are saved in turns, each once an hour, so that a new term or a new planner continues from
there and from the slots since. Tens of thousands of series take seconds to learn: the event loop
runs other tasks after each of them, and one call does a part that takes LEARN_S.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
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
from scheduler.planner.messages import LearnedDemand
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
LEARN_S: Final = 2.0
"""How long one call works before it returns and reports that more is left. The job that calls it
then rests three times as long: the most that a loop rests."""


FORECAST_WAIT_S: Final = 600.0
"""How long what only a forecast needs is kept until there is one, in a new term or a new planner. A
large fleet's takes some minutes to learn what was not saved."""


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
        self.is_made = False
        """Whether there is a forecast, which may be of no demand."""
        self._not_made_since_s = monotonic()
        self._pool = pool
        self._epoch: Epoch | None = None
        self._forecast = FleetForecast({})
        self._next_slot = 0
        self._is_current = True
        self._learning: Iterator[None] | None = None
        """The rest of learning the next slot, once it has begun."""
        self._renewing: Iterator[None] | None = None
        """The rest of the new forecast, once it has begun."""

    @property
    def is_known(self) -> bool:
        """Whether there is a forecast, or none was made for longer than replicas wait for one."""
        return self.is_made or monotonic() - self._not_made_since_s >= FORECAST_WAIT_S

    async def learn(self, epoch: Epoch) -> LearnedDemand:
        """Learn slots that have ended, then renew the forecast, from where the last call ended."""
        async with using(self._pool) as connection:
            last = slot_of(await read_clock(connection) - GRACE_S) - 1
        if epoch != self._epoch or self._next_slot > last + PUT_BACK_SLOTS_MAX:
            await self._begin(epoch)
        if self._learning is None:
            # A clock that was set ahead by a year must not have each slot of that year read.
            self._next_slot = max(self._next_slot, last - CATCH_UP_FROM_NOTHING_SLOTS)
        until_s = monotonic() + LEARN_S
        learned = saved = 0
        while await self._has_slot(last, until_s):
            assert self._learning is not None
            if not await _finish(self._learning, until_s):
                break
            self._learning = None
            self._next_slot += 1
            learned += 1
        if learned:
            saved = await self._save(self._next_slot - 1)
        is_behind = self._next_slot <= last
        is_new = False
        if not is_behind and not self._is_current:
            self._renewing = self._renewing or self._renew_forecast()
            is_new = await _finish(self._renewing, until_s)
            is_behind = not is_new
        return LearnedDemand(
            slots=learned,
            series=len(self._forecast),
            saved=saved,
            is_new=is_new,
            is_behind=is_behind,
        )

    async def _has_slot(self, last: int, until_s: float) -> bool:
        """Skip slots of unknown demand; return whether there is one to learn, up to `last`."""
        while self._learning is None and self._next_slot <= last and monotonic() < until_s:
            async with using(self._pool) as connection:
                demand = await read_slot(connection, self._next_slot)
            if demand is None:
                self._next_slot += 1
            else:
                self._learning = self._learn_slot(self._next_slot, demand)
        return self._learning is not None

    def _renew_forecast(self) -> Iterator[None]:
        """Forecast all series, with a pause after each; replace the forecast as a whole."""
        soon, later = [], []
        for key in self._forecast.sorted_keys():
            soon.append(self._forecast.forecast(key))
            later.append(self._forecast.forecast(key, LATER))
            yield
        self.soon = [row for row in soon if row is not None]
        at_s = monotonic() + LATER_S - GRACE_S
        self.later = LaterForecast([row for row in later if row is not None], at_s)
        self._is_current = self.is_made = True

    async def _begin(self, epoch: Epoch) -> None:
        """Continue from the stored series; unreadable ones are learned again."""
        self._learning = self._renewing = None
        if self.is_made:
            self._not_made_since_s = monotonic()
        self.soon, self.later, self.is_made = (), LaterForecast(), False
        async with using(self._pool) as connection:
            pops = await read_pops(connection)
            now = slot_of(await read_clock(connection))
            history = slot_of((await read_history_clock(connection)).at_s)
            # A clock that is a year off must not delete series that were learned with the right
            # one.
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

    def _learn_slot(self, slot: int, demand: dict[SeriesKey, SlotDemand]) -> Iterator[None]:
        """Learn the demand of a slot, with a pause after each series."""
        self._is_current, self._renewing = False, None
        new = self._forecast.admit_new(demand)
        for key in (*self._forecast.sorted_keys(), *new):
            self._forecast.learn(slot, key, demand.get(key, SlotDemand()))
            yield

    async def _save(self, slot: int) -> int:
        """Save the series whose turn it is; each is saved once an hour."""
        turn = slot % SAVE_TURNS
        # A checksum, because hash() differs between processes.
        due = [
            key
            for key in self._forecast.sorted_keys()
            if crc32("\0".join(key).encode()) % SAVE_TURNS == turn
        ]
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


async def _finish(steps: Iterator[None], until_s: float) -> bool:
    """Take steps, at least one, until that monotonic time; return whether none is left."""
    for _ in steps:
        await asyncio.sleep(0)
        if monotonic() >= until_s:
            return False
    return True
