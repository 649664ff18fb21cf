"""Reads rows one by one: a row that cannot be read does not keep the others from being used.

A row cannot be read if, for example, another release or an operator has written a JSON column in a
form that this release does not know. The row is reported with the reason
(`ClusterState.unreadable`). If this process could read the row before, it uses the last value that
it read.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import asyncpg
import msgspec

from scheduler import metrics
from scheduler.decide.cluster import UnreadableRow

log = logging.getLogger(__name__)

T = TypeVar("T")


class LastReadableRows:
    """The last readable value of each row, by table and name, and what was logged last."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, object]] = {}
        self.logged: dict[str, frozenset[UnreadableRow]] = {}


class RowReader:
    """Reads the rows of one snapshot; `unreadable` collects those that cannot be read."""

    def __init__(self, last: LastReadableRows | None = None) -> None:
        """Keep readable values in `last`, if it is given, for the time when a row is not."""
        self.unreadable: list[UnreadableRow] = []
        self._last = LastReadableRows() if last is None else last

    def read_table(
        self,
        table: str,
        rows: Sequence[asyncpg.Record],
        decode: Callable[[asyncpg.Record], T],
        *,
        name: str,
        deployment: str = "",
    ) -> tuple[T, ...]:
        """Decode all rows of a table; leave out those without a readable value.

        `name` is the column that names a row, `deployment` one that names its deployment.
        """
        known = self._last.values.get(table, {})
        read: dict[str, T] = {}
        for row in rows:
            try:
                read[row[name]] = decode(row)
            except (ValueError, LookupError, msgspec.MsgspecError) as error:
                last = known.get(row[name])
                deployment_id = row[deployment] if deployment else ""
                self.note(table, row[name], error, deployment_id, has_last=last is not None)
                if last is not None:
                    read[row[name]] = last  # type: ignore[assignment]
        # Rows that are gone are forgotten.
        self._last.values[table] = dict(read)
        return tuple(read.values())

    def read_each(
        self,
        table: str,
        rows: Iterable[asyncpg.Record],
        decode: Callable[[asyncpg.Record], T],
        *,
        name: str,
    ) -> tuple[T, ...]:
        """Decode some rows of a table, of which no values are kept; leave out unreadable ones."""
        read = []
        for row in rows:
            try:
                read.append(decode(row))
            except (ValueError, LookupError, msgspec.MsgspecError) as error:
                self.note(table, row[name], error)
        return tuple(read)

    def note(
        self,
        table: str,
        name: str,
        error: object,
        deployment_id: str = "",
        *,
        has_last: bool = False,
    ) -> None:
        """Add a row that cannot be read."""
        self.unreadable.append(
            UnreadableRow(
                table=table,
                name=name,
                reason=str(error),
                deployment_id=deployment_id,
                has_last=has_last,
            )
        )

    def log_all(self) -> None:
        """Log the rows that cannot be read."""
        for row in self.unreadable:
            log.error("row cannot be read", extra={"fields": {"row": row.words()}})

    def finish(self, reading: str) -> tuple[UnreadableRow, ...]:
        """Return the rows that cannot be read; log those that the last `reading` could read."""
        found = frozenset(self.unreadable)
        for row in sorted(found - self._last.logged.get(reading, frozenset())):
            log.error("row cannot be read", extra={"fields": {"row": row.words()}})
        self._last.logged[reading] = found
        metrics.UNREADABLE_ROWS.labels(reading).set(len(found))
        return tuple(sorted(found))
