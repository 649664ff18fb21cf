"""Learns each slot of demand once it is over, and tells placement what is to come.

What was learned is saved in turns, each series once an hour, so a new acting scheduler goes on from
there and from the slots since.
"""

import logging
from typing import Final, NamedTuple
from zlib import crc32

from isochrone.service.loop import Pieces
from isochrone.wire.ids import Epoch
from scheduler.acting import Acting, Later
from scheduler.decide.outlook import (
    FORGET_SLOTS,
    LATER,
    LATER_S,
    Key,
    Outlook,
    SlotDemand,
    slot_of,
)
from scheduler.store.cluster import read_pops
from scheduler.store.forecast import (
    StoredSeries,
    forget_series,
    read_clock,
    read_series,
    read_slot,
    save_series,
)
from scheduler.store.pool import transaction, using

log = logging.getLogger(__name__)

GRACE_S: Final = 75.0
"""How long after its end a slot is still counted into: routers send every few seconds."""

CATCH_UP_SLOTS: Final = 36
"""How far back a new term learns what its predecessor did not: six hours, a second's work each."""

CATCH_UP_FROM_NOTHING_SLOTS: Final = 2016
SAVE_TURNS: Final = 6
SHARE: Final = 0.25
"""The part of the event loop's time that learning and foretelling may take: tens of thousands of
series are tens of seconds of work, and reports and the lease must not wait for it."""

SAVED_AT_ONCE: Final = 500


class Foretold(NamedTuple):
    """One turn's counts: slots learned, series known, series saved."""

    slots: int = 0
    series: int = 0
    saved: int = 0


class Forecast:
    """The forecast of this term; a new term begins from what is stored."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._epoch: Epoch | None = None
        self._outlook = Outlook({})
        self._next_slot = 0

    async def run_once(self) -> Foretold:
        """Learn the slots that ended since the last turn, and tell what follows from them."""
        acting = self._acting
        if not acting.is_acting:
            return Foretold()
        begins = acting.epoch != self._epoch
        if begins:
            await self._begin(acting.epoch)
        async with using(acting.pool) as connection:
            last = slot_of(await read_clock(connection) - GRACE_S) - 1
        learned = saved = 0
        while self._next_slot <= last and acting.is_acting:
            async with using(acting.pool) as connection:
                asked = await read_slot(connection, self._next_slot)
            if asked is not None:
                await self._learn(self._next_slot, asked)
                learned += 1
            self._next_slot += 1
        if learned or begins:
            await self._tell()
        if learned:
            saved = await self._save(last)
        return Foretold(learned, len(self._outlook), saved)

    async def _tell(self) -> None:
        """Hand placement the rates to come, once they are all there."""
        acting, outlook = self._acting, self._outlook
        soon, later = [], []
        pieces = Pieces(SHARE)
        for key in outlook.known():
            soon.append(outlook.foretell(key))
            later.append(outlook.foretell(key, LATER))
            await pieces.rest()
        acting.foretold = [row for row in soon if row is not None]
        at = acting.clock() + LATER_S - GRACE_S
        acting.later = Later([row for row in later if row is not None], at)
        acting.nudge_place()
        acting.nudge_prefetch()

    async def _begin(self, epoch: Epoch) -> None:
        """Go on from what was saved; what no release of this kind saved is learned anew."""
        acting = self._acting
        async with using(acting.pool) as connection:
            pops = await read_pops(connection)
            now = slot_of(await read_clock(connection))
        self._outlook = Outlook({pop.pop: pop.longitude for pop in pops})
        oldest = now
        after: Key | None = None
        while True:
            async with using(acting.pool) as connection:
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
        log.info(
            "forecast begins",
            extra={"fields": {"series": len(self._outlook), "slots": now - self._next_slot}},
        )

    async def _learn(self, slot: int, asked: dict[Key, SlotDemand]) -> None:
        keys = sorted(set(self._outlook.known()) | set(asked))
        pieces = Pieces(SHARE)
        for key in keys:
            self._outlook.learn(slot, key, asked.get(key, SlotDemand()))
            await pieces.rest()

    async def _save(self, slot: int) -> int:
        """Save the series whose turn it is; all of them once an hour."""
        turn = slot % SAVE_TURNS
        due = [key for key in self._outlook.known() if _turn_of(key) == turn]
        for start in range(0, len(due), SAVED_AT_ONCE):
            rows = [
                StoredSeries(key, *self._outlook.saved(key))
                for key in due[start : start + SAVED_AT_ONCE]
            ]
            async with transaction(self._acting.pool) as connection:
                await save_series(connection, rows)
        async with using(self._acting.pool) as connection:
            await forget_series(connection, slot - FORGET_SLOTS)
        return len(due)


def _turn_of(key: Key) -> int:
    # Not hash(): that differs from process to process.
    return crc32("\0".join(key).encode()) % SAVE_TURNS
