"""A scheduler that starts with a clock that is ahead, together with its database's.

The clocks cannot be set here, so the rows and the time that schedulers saw are set back instead: to
the scheduler it is the same.
"""

from datetime import timedelta
from time import time

import pytest

from isochrone.service.clock import JumpFreeClock, utc_now
from isochrone.wire.ids import DeploymentId, Epoch, PopId
from scheduler.decide.demand import slot_of
from scheduler.loops.advance_history import AdvanceHistory
from scheduler.loops.delete_expired_rows import DeleteExpiredRows
from scheduler.loops.rotate_partitions import RotatePartitions
from scheduler.planner.demand_forecaster import DemandForecaster
from scheduler.store.forecast import StoredSeries, read_series, save_series
from scheduler.store.history_clock import read_history_clock
from scheduler.store.pool import Connection, Pool, transaction, using
from scheduler.store.retention import retention_rules
from tests.integration.scheduler.test_record import acting_scheduler

DAYS_AHEAD = [1 / 24, 365]


async def set_back(connection: Connection, days: float) -> None:
    """Make the present that schedulers saw lie so far back, with a row of then in each table."""
    await connection.execute(
        "UPDATE history_clock SET at = clock_timestamp() - make_interval(secs => $1)",
        86_400.0 * days,
    )
    then = "clock_timestamp() - make_interval(secs => $1)"
    for statement in (
        f"INSERT INTO event (at, actor, kind, subject, reason) VALUES ({then}, 'a', 'k', 's', '')",
        "INSERT INTO idempotency (idempotency_key, method, path, body_sha256, status, body,"
        f" created_at) VALUES ('i', 'PUT', '/', 's', 200, '', {then})",
        f"INSERT INTO demand_seen (router_id, boot_id, seq, seen_at) VALUES ('r', 'b', 1, {then})",
    ):
        await connection.execute(statement, 86_400.0 * days - 60.0)


async def rows_left(connection: Connection) -> dict[str, int]:
    return {
        table: await connection.fetchval(f"SELECT count(*) FROM {table}")
        for table in ("event", "idempotency", "demand_seen")
    }


@pytest.mark.parametrize("days", DAYS_AHEAD)
async def test_nothing_of_the_time_before_is_deleted(pool: Pool, days: float) -> None:
    scheduler = await acting_scheduler(pool)
    lease = scheduler.state.lease
    async with transaction(pool) as connection:
        await set_back(connection, days)
        before = await rows_left(connection)
    rules = retention_rules(event_days=90.0, certificate_lifetime_s=1.0)
    history = AdvanceHistory(pool=pool, lease=lease, unix_clock=time)
    delete = DeleteExpiredRows(pool=pool, lease=lease, rules=rules, clock=JumpFreeClock())
    for _ in range(3):
        await history.run_once()
        await delete.run_once()
        scheduler.clock.now_s += 60.0
    async with using(pool) as connection:
        assert await rows_left(connection) == before
        stored = await read_history_clock(connection)
    behind_s = stored.database_s - stored.at_s
    assert 86_400 * days - 200 < behind_s < 86_400 * days + 60


async def test_history_follows_the_clock_of_a_scheduler_that_keeps_running(pool: Pool) -> None:
    scheduler = await acting_scheduler(pool)
    async with transaction(pool) as connection:
        await set_back(connection, 1 / 24)
        before = await rows_left(connection)
    history = AdvanceHistory(pool=pool, lease=scheduler.state.lease, unix_clock=time)
    assert await history.run_once() > 3500
    scheduler.clock.now_s += 4 * 3600.0
    await scheduler.hold_lease.run_once()
    assert await history.run_once() == 0
    async with using(pool) as connection:
        assert await rows_left(connection) == before


async def test_partitions_and_series_of_the_time_before_are_kept(pool: Pool) -> None:
    scheduler = await acting_scheduler(pool)
    then = (utc_now() - timedelta(days=100)).date()
    name = f"demand_{then:%Y%m%d}"
    async with transaction(pool) as connection:
        await set_back(connection, 100)
        await connection.execute(f"CREATE TABLE {name} (LIKE demand INCLUDING ALL)")
        await connection.execute(
            f"ALTER TABLE demand ATTACH PARTITION {name} FOR VALUES FROM ('{then} 00:00+00')"
            f" TO ('{then + timedelta(days=1)} 00:00+00')"
        )
        slot = slot_of(utc_now().timestamp()) - 100 * 144
        await connection.execute(
            "INSERT INTO pop (pop, city, country, latitude, longitude)"
            " VALUES ('ams', 'A', 'NL', 0, 0) ON CONFLICT DO NOTHING"
        )
        key = (DeploymentId("d"), PopId("ams"))
        await save_series(connection, [StoredSeries(key, slot, b"state")])
    job = RotatePartitions(pool=pool, lease=scheduler.state.lease, clock=JumpFreeClock())
    await job.run_once()
    await DemandForecaster(pool).learn(Epoch(1))
    async with using(pool) as connection:
        assert await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", name)
        assert [row.slot for row in await read_series(connection, None, 10)] == [slot]
