"""Shares the use of keys with limits per minute with the other routers.

Each process reports its use to the main process, which reports it to the scheduler. The use at
other routers comes back the same way, and each process draws its share of it.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from isochrone.wire.client_keys.key_use import KEY_USE_ROWS_MAX, FleetKeyUse, KeyUse
from isochrone.wire.ids import KeyId

ROWS_PER_SLICE: Final = 500
"""How many rows are drawn before requests have their turn: two or three milliseconds, if the table
has a million keys."""


class OwnKeyUse(msgspec.Struct, frozen=True, tag="own_key_use"):
    """The use of keys at one process in one turn."""

    rows: tuple[KeyUse, ...]


class KeyUseOutbox:
    """The use that the other routers do not know yet: one row for each key."""

    def __init__(self) -> None:
        self._rows: dict[KeyId, KeyUse] = {}

    def add(self, rows: Iterable[KeyUse]) -> None:
        """Add the use that a process of this router reports, or that could not be sent."""
        for row in rows:
            known = self._rows.get(row.key_id)
            if known is not None:
                row = KeyUse(row.key_id, known.requests + row.requests, known.tokens + row.tokens)
            self._rows[row.key_id] = row

    def take(self) -> FleetKeyUse | None:
        """Return a message for the scheduler and forget what is in it; None if there is nothing."""
        if not self._rows:
            return None
        rows = tuple(self._rows.values())[:KEY_USE_ROWS_MAX]
        for row in rows:
            del self._rows[row.key_id]
        return FleetKeyUse(rows)


async def draw_in_slices(rows: Sequence[KeyUse], draw: Callable[[KeyUse], None]) -> None:
    """Call `draw` with each row, with pauses."""
    for start in range(0, len(rows), ROWS_PER_SLICE):
        for row in rows[start : start + ROWS_PER_SLICE]:
            draw(row)
        # Messages that have arrived are read without a pause; requests get their turn here.
        await asyncio.sleep(0)
