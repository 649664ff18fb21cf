"""Learns each slot of demand once it is over, and keeps what is foretold from it.

What was learned is saved in turns, each series once an hour, so that a new term, or a new planner,
goes on from there and from the slots since. Tens of thousands of series are seconds of work: after
each one others have their turn.
"""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic
from typing import Final, NamedTuple
from zlib import crc32

from isochrone.wire.ids import Epoch
from scheduler.decide.cluster import DemandRate
from scheduler.decide.demand.fleet_forecast import (
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
from scheduler.store.pool import Pool, transaction, using

log = logging.getLogger(__name__)

GRACE_S: Final = 75.0
"""How long after its end a slot is still counted into: routers send every few seconds."""

CATCH_UP_SLOTS: Final = 36
"""How far back a new term learns what its predecessor did not: six hours, a second's work each."""

CATCH_UP_FROM_NOTHING_SLOTS: Final = 2016
PUT_BACK_SLOTS_MAX: Final = 6
"""How far the clock may be put back for what was learned to stand: for an hour nothing is learned.
What was learned in a time farther ahead is forgotten, or it would be believed until that came."""

SAVE_TURNS: Final = 6
SAVED_AT_ONCE: Final = 500
LEARN_S: Final = 10.0
"""How long slots are learned before it is told that there are more."""


class LaterForecast(NamedTuple):
    """What is foretold for some hours ahead, and by this process's clock when that is."""

    rows: Sequence[DemandRate] = ()
    at: float = float("-inf")

    def in_s(self) -> float:
        """Return how far ahead that is."""
        return self.at - monotonic()


class DemandForecaster:
    """The forecast of a term; a new term begins from what is stored."""

    def __init__(self, pool: Pool) -> None:
        self.soon: Sequence[DemandRate] = ()
        self.later = LaterForecast()
        self._pool = pool
        self._epoch: Epoch | None = None
        self._outlook = FleetForecast({})
        self._next_slot = 0
        self._is_told = True

    async def learn(self, epoch: Epoch) -> LearnReply:
        """Learn the slots that ended since the last time, and foretell what follows from them."""
        async with using(self._pool) as connection:
            last = slot_of(await read_clock(connection) - GRACE_S) - 1
        if epoch != self._epoch or self._next_slot > last + PUT_BACK_SLOTS_MAX:
            await self._begin(epoch)
        learned = saved = 0
        until = monotonic() + LEARN_S
        while self._next_slot <= last and monotonic() < until:
            async with using(self._pool) as connection:
                asked = await read_slot(connection, self._next_slot)
            if asked is not None:
                await self._learn(self._next_slot, asked)
                learned += 1
            self._next_slot += 1
        if learned:
            saved = await self._save(self._next_slot - 1)
        is_behind = self._next_slot <= last
        is_news = not is_behind and not self._is_told
        if is_news:
            await self._foretell()
        return LearnReply(
            slots=learned,
            series=len(self._outlook),
            saved=saved,
            is_news=is_news,
            is_behind=is_behind,
        )

    async def _foretell(self) -> None:
        """Take the rates to come, once they are all there."""
        soon, later = [], []
        for key in self._outlook.known():
            soon.append(self._outlook.foretell(key))
            later.append(self._outlook.foretell(key, LATER))
            await asyncio.sleep(0)
        self.soon = [row for row in soon if row is not None]
        at = monotonic() + LATER_S - GRACE_S
        self.later = LaterForecast([row for row in later if row is not None], at)
        self._is_told = True

    async def _begin(self, epoch: Epoch) -> None:
        """Go on from what was saved; what no release of this kind saved is learned anew."""
        self.soon, self.later = (), LaterForecast()
        async with using(self._pool) as connection:
            pops = await read_pops(connection)
            now = slot_of(await read_clock(connection))
            await forget_series(connection, now - FORGET_SLOTS, now + PUT_BACK_SLOTS_MAX)
        self._outlook = FleetForecast({pop.pop: pop.longitude for pop in pops})
        oldest = now
        after: SeriesKey | None = None
        while True:
            async with using(self._pool) as connection:
                rows = await read_series(connection, after, SAVED_AT_ONCE)
            for row in rows:
                if self._outlook.restore(row.key, row.state):
                    oldest = min(oldest, row.slot + 1)
            if len(rows) < SAVED_AT_ONCE:
                break
            after = rows[-1].key
        known = len(self._outlook) > 0
        back = CATCH_UP_SLOTS if known else CATCH_UP_FROM_NOTHING_SLOTS
        self._next_slot = max(oldest if known else 0, now - back)
        self._epoch = epoch
        self._is_told = False
        log.info(
            "forecast begins",
            extra={"fields": {"series": len(self._outlook), "slots": now - self._next_slot}},
        )

    async def _learn(self, slot: int, asked: dict[SeriesKey, SlotDemand]) -> None:
        self._is_told = False
        for key in sorted(set(self._outlook.known()) | set(asked)):
            self._outlook.learn(slot, key, asked.get(key, SlotDemand()))
            await asyncio.sleep(0)

    async def _save(self, slot: int) -> int:
        """Save the series whose turn it is; all of them once an hour."""
        turn = slot % SAVE_TURNS
        due = [key for key in self._outlook.known() if _turn_of(key) == turn]
        for start in range(0, len(due), SAVED_AT_ONCE):
            rows = [
                StoredSeries(key, *self._outlook.saved(key))
                for key in due[start : start + SAVED_AT_ONCE]
            ]
            async with transaction(self._pool) as connection:
                await save_series(connection, rows)
        async with using(self._pool) as connection:
            await forget_series(connection, slot - FORGET_SLOTS)
        return len(due)


def _turn_of(key: SeriesKey) -> int:
    # Not hash(): that differs from process to process.
    return crc32("\0".join(key).encode()) % SAVE_TURNS
