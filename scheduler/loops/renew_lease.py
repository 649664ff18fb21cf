"""Renews a lease that is held, from a thread of its own: a busy event loop must not lose it.

A scheduler under a stampede is slow, and one that loses its lease for it sends the whole fleet to
the other, which then is the slow one. Taking and losing the lease stay with `hold_lease` in the
event loop; this only keeps what is held, and only while that loop still turns.
"""

import asyncio
import threading
from contextlib import suppress
from typing import Final, NamedTuple

from isochrone.service.loop import Loop
from scheduler.acting import Acting
from scheduler.store.lease import renew_lease
from scheduler.store.pool import Pool, open_pool, using

LOOP_SILENT_MAX_S: Final = 20.0
"""An event loop that has not turned for so long is not busy but stuck, and must not lead."""

STOP_TIMEOUT_S: Final = 5.0


class LeaseRenewed(NamedTuple):
    """One turn's outcome."""

    renewed: bool


class LeaseRenewalThread:
    """A thread with an event loop and a connection of its own, from `start()` to `stop()`."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._pool: Pool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="keep_lease", daemon=True)

    def start(self) -> None:
        """Begin to keep."""
        self._thread.start()

    async def stop(self) -> None:
        """Keep no longer: what is given up must stay so."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the thread's loop has ended by itself
                self._loop.call_soon_threadsafe(self._ended.set)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    async def run_once(self) -> LeaseRenewed:
        """Renew, unless there is nothing to keep or nobody to keep it for."""
        acting = self._acting
        asked_at = acting.clock()
        if not acting.holds_lease or asked_at - acting.turned_at > LOOP_SILENT_MAX_S:
            return LeaseRenewed(False)
        if self._pool is None:
            self._pool = await open_pool(acting.config.database_url, size_max=1)
        async with using(self._pool) as connection:
            lease = await renew_lease(connection, acting.holder, acting.config.lease_ttl_s)
        if lease is not None:
            acting.kept(lease, asked_at)
        return LeaseRenewed(lease is not None)

    def _run(self) -> None:
        asyncio.run(self._keep())

    async def _keep(self) -> None:
        self._loop = asyncio.get_running_loop()
        duty = Loop("keep_lease", self.run_once, self._acting.config.lease_renew_s)
        running = asyncio.create_task(duty.run())
        await self._ended.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if self._pool is not None:
            self._pool.terminate()
