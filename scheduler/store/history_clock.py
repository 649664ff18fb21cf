"""Up to when schedulers have seen time pass (`scheduler/decide/history_time.py`)."""

from datetime import datetime
from typing import Final, NamedTuple

from isochrone.wire.ids import Epoch
from scheduler.store.lease import assert_epoch
from scheduler.store.pool import Connection, fetch_one

HISTORY_AT: Final = "(SELECT at FROM history_clock)"
"""SQL: nothing is old by a later time than this."""


class HistoryClock(NamedTuple):
    """The stored time, and what the database's wall clock says."""

    at: datetime
    database_now: datetime


async def read_history_clock(connection: Connection) -> HistoryClock:
    """Return the stored time and the database's."""
    row = await fetch_one(connection, "SELECT at, clock_timestamp() AS now FROM history_clock")
    return HistoryClock(row["at"], row["now"])


async def write_history_clock(connection: Connection, epoch: Epoch, at: datetime) -> None:
    """Store a later time; raises EpochLost."""
    await assert_epoch(connection, epoch)
    await connection.execute("UPDATE history_clock SET at = $1 WHERE at < $1", at)
