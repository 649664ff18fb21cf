"""A scheduler whose event loop is busy keeps its lease; one whose event loop is stuck does not."""

import hashlib
import time
from collections.abc import AsyncIterator

import pytest

from scheduler.acting import Acting
from scheduler.loops.hold_lease import HoldLease
from scheduler.loops.renew_lease import LeaseRenewalThread
from scheduler.store.pool import Pool, using
from tests.integration.scheduler.test_record import Settings
from tests.integration.scheduler.test_store import begun
from tests.integration.scheduler.test_trust import an_acting, expire
from tests.system.harness import until

TTL_S = 4.0


class Quick(Settings, kw_only=True):
    database_url: str
    lease_ttl_s: float = TTL_S
    lease_renew_s: float = 0.1


@pytest.fixture
async def acting(pool: Pool, database_dsn: str) -> AsyncIterator[Acting]:
    await begun(pool)
    await expire(pool)
    made = await an_acting(pool)
    made.config = Quick(database_url=database_dsn)  # type: ignore[assignment]
    made.clock = time.monotonic
    assert (await HoldLease(made).run_once()).acting
    keeper = LeaseRenewalThread(made)
    keeper.start()
    yield made
    await keeper.stop()


async def is_free(pool: Pool) -> bool:
    async with using(pool) as connection:
        return bool(await connection.fetchval("SELECT expires_at <= clock_timestamp() FROM lease"))


def be_busy(seconds: float) -> None:
    """Keep this thread, and so its event loop, from anything else."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        hashlib.sha256(b"x" * 10_000).digest()


async def test_a_busy_event_loop_keeps_its_lease(acting: Acting, pool: Pool) -> None:
    epoch = acting.epoch
    await until("the thread renews", lambda: _renewed(acting), 10.0)
    be_busy(1.25 * TTL_S)
    assert acting.is_acting
    assert acting.epoch == epoch
    assert not await is_free(pool)


async def test_a_stuck_event_loop_loses_it(acting: Acting, pool: Pool) -> None:
    await until("the thread renews", lambda: _renewed(acting), 10.0)
    acting.turned_at = time.monotonic() - 60.0
    await until("the lease is free", lambda: is_free(pool), 10.0)
    assert not acting.is_acting


async def test_what_is_given_up_stays_so(acting: Acting, pool: Pool) -> None:
    await until("the thread renews", lambda: _renewed(acting), 10.0)
    await acting.step_down()
    await until("the lease is free", lambda: is_free(pool), 10.0)
    assert not acting.is_acting


async def _renewed(acting: Acting) -> bool:
    """Say whether trust reaches further than the first asking gave."""
    return acting._trusted_until > acting.turned_at + TTL_S - 1.0
