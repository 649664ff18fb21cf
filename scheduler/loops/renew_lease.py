"""Renews a held lease from its own thread, so that a busy event loop does not lose it.

A scheduler is slow while a whole fleet connects. If it lost its lease because of that, the whole
fleet would connect to the other scheduler, which would then be the slow one. Taking and giving up
the lease stay with `hold_lease` in the event loop; this thread renews only while that loop still
turns.
"""

import asyncio
import threading
from contextlib import suppress
from typing import Final

from isochrone.service.loop import Loop
from scheduler.state.lease_state import LeaseState
from scheduler.store.lease import renew_lease
from scheduler.store.pool import Pool, open_pool, using

EVENT_LOOP_SILENT_MAX_S: Final = 20.0
"""An event loop that has not turned for this long is stuck, not busy, and must not lead."""

STOP_TIMEOUT_S: Final = 5.0


class LeaseRenewalThread:
    """A thread with its own event loop and database connection, from `start()` to `stop()`."""

    def __init__(self, *, database_url: str, interval_s: float, lease: LeaseState) -> None:
        self._database_url = database_url
        self._interval_s = interval_s
        self._lease = lease
        self._pool: Pool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._renew_until_stopped()), name="renew_lease", daemon=True
        )

    def start(self) -> None:
        """Start renewing."""
        self._thread.start()

    async def stop(self) -> None:
        """Stop renewing, before the lease is given up."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the thread's event loop is closed already
                self._loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    async def run_once(self) -> bool:
        """Renew the lease if the process holds it and its event loop is not stuck.

        Return whether it was renewed.
        """
        lease = self._lease
        requested_at = lease.clock()
        if not lease.is_held or requested_at - lease.last_attempt_at > EVENT_LOOP_SILENT_MAX_S:
            return False
        if self._pool is None:
            self._pool = await open_pool(self._database_url, size_max=1)
        async with using(self._pool) as connection:
            renewed = await renew_lease(connection, lease.holder, lease.ttl_s)
        if renewed is not None:
            lease.extend(renewed, requested_at)
        return renewed is not None

    async def _renew_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        job = Loop("renew_lease", self.run_once, self._interval_s)
        running = asyncio.create_task(job.run())
        await self._stopping.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if self._pool is not None:
            self._pool.terminate()
