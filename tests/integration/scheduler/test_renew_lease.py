"""A scheduler whose event loop is busy keeps its lease; one whose event loop is stuck does not."""

import hashlib
import time
from collections.abc import AsyncIterator

import pytest

from isochrone.wire.ids import ClusterId
from scheduler.loops.renew_lease import LeaseRenewalThread
from scheduler.state.lease_state import LeaseState
from scheduler.store.pool import Pool, using
from tests.integration.scheduler.scheduler_parts import (
    SchedulerParts,
    expire_lease,
    scheduler_parts,
)
from tests.integration.scheduler.test_store import begun
from tests.system.harness import until

TTL_S = 4.0


@pytest.fixture
async def scheduler(pool: Pool, database_dsn: str) -> AsyncIterator[SchedulerParts]:
    """An acting scheduler whose thread renews its lease."""
    await begun(pool)
    await expire_lease(pool)
    parts = await scheduler_parts(pool, lease_ttl_s=TTL_S, clock=time.monotonic)
    assert (await parts.hold_lease.run_once()).acting
    thread = LeaseRenewalThread(database_url=database_dsn, interval_s=0.1, lease=parts.state.lease)
    thread.start()
    yield parts
    await thread.stop()


async def test_the_lease_of_another_clusters_database_is_not_taken(pool: Pool) -> None:
    """It would be kept from the schedulers of that cluster for as long as this process runs."""
    await begun(pool)
    await expire_lease(pool)
    stray = SchedulerParts(pool, ClusterId("another"))
    with pytest.raises(RuntimeError, match="cannot act: the database belongs to cluster c1"):
        await stray.hold_lease.run_once()
    own = await scheduler_parts(pool)
    assert (await own.hold_lease.run_once()).acting


async def is_free(pool: Pool) -> bool:
    async with using(pool) as connection:
        return bool(await connection.fetchval("SELECT expires_at <= clock_timestamp() FROM lease"))


def be_busy(seconds: float) -> None:
    """Block this thread, and so its event loop."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        hashlib.sha256(b"x" * 10_000).digest()


async def test_a_busy_event_loop_keeps_its_lease(scheduler: SchedulerParts, pool: Pool) -> None:
    lease = scheduler.state.lease
    epoch = lease.epoch
    await until("the thread renews", lambda: is_renewed(lease), 10.0)
    be_busy(1.25 * TTL_S)
    assert lease.is_acting
    assert lease.epoch == epoch
    assert not await is_free(pool)


async def test_a_stuck_event_loop_loses_it(scheduler: SchedulerParts, pool: Pool) -> None:
    lease = scheduler.state.lease
    await until("the thread renews", lambda: is_renewed(lease), 10.0)
    lease.last_attempt_at = time.monotonic() - 60.0
    await until("the lease is free", lambda: is_free(pool), 10.0)
    assert not lease.is_acting


async def test_a_lease_that_was_given_up_is_not_renewed(
    scheduler: SchedulerParts, pool: Pool
) -> None:
    lease = scheduler.state.lease
    await until("the thread renews", lambda: is_renewed(lease), 10.0)
    await scheduler.state.leadership.step_down()
    await until("the lease is free", lambda: is_free(pool), 10.0)
    assert not lease.is_acting


async def is_renewed(lease: LeaseState) -> bool:
    """Return whether the lease is trusted for longer than its first request gave."""
    return lease._trusted_until > lease.last_attempt_at + TTL_S - 1.0
