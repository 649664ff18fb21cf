"""Stores the time that history has advanced to (`scheduler/decide/history_time.py`)."""

from typing import Final, NamedTuple

from isochrone.wire.ids import Epoch
from scheduler.store.lease import assert_epoch
from scheduler.store.pool import Connection, fetch_one

HISTORY_AT: Final = "(SELECT at FROM history_clock)"
"""SQL: nothing is old by a later time than this."""


class HistoryClock(NamedTuple):
    """The stored time, and what the database's wall clock says: Unix times."""

    at_s: float
    database_s: float


async def read_history_clock(connection: Connection) -> HistoryClock:
    """Return the stored time and the database's."""
    row = await fetch_one(
        connection,
        "SELECT extract(epoch FROM at)::float8 AS at,"
        " extract(epoch FROM clock_timestamp())::float8 AS now FROM history_clock",
    )
    return HistoryClock(row["at"], row["now"])


async def write_history_clock(connection: Connection, epoch: Epoch, at_s: float) -> None:
    """Store a later time; raises EpochLost."""
    await assert_epoch(connection, epoch)
    await connection.execute("UPDATE history_clock SET at = greatest(at, to_timestamp($1))", at_s)
