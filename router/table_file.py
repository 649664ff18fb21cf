"""The last route table on disk, with which a router starts while no scheduler can be reached."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from isochrone.service import files
from isochrone.service.threads import run_to_completion
from isochrone.wire import codec
from isochrone.wire.ids import ClusterId
from isochrone.wire.peers.routes import RouteTable
from isochrone.wire.peers.table_parts import encode_table, read_table

log = logging.getLogger(__name__)

WRITE_SHARE: Final = 0.05
"""The share of the time that writing may take: a large table changes all the time, and is written
whole."""


class TableOnDisk(NamedTuple):
    """A table that was read from disk, and when it was written, in Unix time; 0 if unknown."""

    table: RouteTable
    written_at_s: float


class TableFile:
    """The file, and the table that it holds."""

    def __init__(self, path: Path, cluster_id: ClusterId, clock: Callable[[], float]) -> None:
        """Keep tables of one cluster at `path`. `clock` returns monotonic seconds."""
        self._path = path
        self._cluster_id = cluster_id
        self._clock = clock
        self._due_at_s = float("-inf")
        self._held: RouteTable | None = None

    async def read(self) -> TableOnDisk | None:
        """Return the table on disk; None if there is none that can be used."""
        payload = await asyncio.to_thread(files.read_snapshot, self._path)
        if payload is None:
            return None
        try:
            table = await asyncio.to_thread(read_table, payload)
            if table.cluster_id != self._cluster_id:
                # With this table in use, every table of the current cluster would be refused.
                raise codec.MalformedFrame(f"it is of cluster {table.cluster_id}")
        except codec.MalformedFrame as error:
            log.error("cannot use the stored table", extra={"fields": {"error": str(error)}})
            return None
        written_at_s = 0.0
        with suppress(FileNotFoundError):
            # The current snapshot may be missing while the previous one exists.
            written_at_s = await asyncio.to_thread(lambda: self._path.stat().st_mtime)
        self._held = table
        return TableOnDisk(table, written_at_s)

    async def wait_until_due(self, table: RouteTable | None) -> None:
        """Wait until it is time to write `table`, unless the file holds it."""
        if self._held is not table:
            await asyncio.sleep(max(0.0, self._due_at_s - self._clock()))

    async def write(self, table: RouteTable, to_store: Callable[[RouteTable], RouteTable]) -> None:
        """Write what `to_store` makes of a table, unless the file holds it."""
        if self._held is table:
            return
        began_s = self._clock()
        await run_to_completion(self._write, table, to_store)
        now_s = self._clock()
        self._due_at_s = now_s + (now_s - began_s) / WRITE_SHARE

    def _write(self, table: RouteTable, to_store: Callable[[RouteTable], RouteTable]) -> None:
        files.write_snapshot(self._path, encode_table(to_store(table)))
        # Set in the thread: if the wait is cancelled, the file is written all the same.
        self._held = table
