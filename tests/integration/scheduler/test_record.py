"""The event log: losses and returns of nodes are recorded once, and old events are deleted."""

from datetime import timedelta
from typing import Any

from isochrone.service.clock import JumpFreeClock, utc_now
from scheduler.decide.membership import LivenessLimits
from scheduler.loops.delete_expired_rows import DeleteExpiredRows
from scheduler.loops.record_node_loss import NodeLossCounts
from scheduler.store.events import record_event
from scheduler.store.lease import read_acting_for_s
from scheduler.store.pool import Pool, transaction, using
from scheduler.store.retention import delete_expired, retention_rules
from tests.integration.scheduler.scheduler_parts import (
    SchedulerParts,
    expire_lease,
    scheduler_parts,
)
from tests.integration.scheduler.test_store import begun


async def acting_scheduler(pool: Pool) -> SchedulerParts:
    await begun(pool)
    await expire_lease(pool)
    scheduler = await scheduler_parts(pool, limits=LivenessLimits(grace_s=0.0))
    await scheduler.hold_lease.run_once()
    return scheduler


async def set_silence(pool: Pool, age_s: float) -> None:
    async with using(pool) as connection:
        await connection.execute(
            "UPDATE node SET last_seen_at = clock_timestamp() - make_interval(secs => $1)", age_s
        )


async def node_events(pool: Pool) -> list[Any]:
    async with using(pool) as connection:
        rows = await connection.fetch(
            "SELECT kind, subject, reason FROM event WHERE kind LIKE 'node.%' ORDER BY event_id"
        )
    return [tuple(row) for row in rows]


async def test_a_loss_and_a_return_are_recorded_once_each(pool: Pool) -> None:
    scheduler = await acting_scheduler(pool)
    job = scheduler.record_node_loss()
    assert await job.run_once() == NodeLossCounts(0, 0)
    await set_silence(pool, 10.0)
    assert await job.run_once() == NodeLossCounts(0, 0), "suspect is not lost"
    await set_silence(pool, 45.0)
    assert await job.run_once() == NodeLossCounts(1, 0)
    # Another scheduler that acts later does not record it again.
    assert await scheduler.record_node_loss().run_once() == NodeLossCounts(0, 0)
    await set_silence(pool, 0.0)
    assert await job.run_once() == NodeLossCounts(0, 1)
    assert await job.run_once() == NodeLossCounts(0, 0)
    events = await node_events(pool)
    assert [event[:2] for event in events] == [("node.lost", "n1"), ("node.back", "n1")]
    assert "silent for 45 s" in events[0][2]


async def test_a_standby_records_nothing(pool: Pool) -> None:
    scheduler = await acting_scheduler(pool)
    await set_silence(pool, 45.0)
    await scheduler.state.leadership.step_down()
    assert await scheduler.record_node_loss().run_once() == NodeLossCounts(0, 0)
    assert await node_events(pool) == []


async def test_old_events_are_deleted_the_oldest_first(pool: Pool) -> None:
    scheduler = await acting_scheduler(pool)
    async with transaction(pool) as connection:
        await connection.execute("TRUNCATE event")
        for subject in ("a", "b", "c"):
            await record_event(connection, actor="x", kind="k", subject=subject)
        await connection.execute("ALTER TABLE event DISABLE TRIGGER event_append_only")
        await connection.execute(
            "UPDATE event SET at = at - interval '91 days' WHERE subject < 'c'"
        )
        await connection.execute("ALTER TABLE event ENABLE TRIGGER event_append_only")
        rules = retention_rules(event_days=90.0, certificate_lifetime_s=1.0)
        events = rules[0]
        a_year_ago = utc_now() - timedelta(days=365)
        assert await delete_expired(connection, events, a_year_ago, 1) == 0, (
            "one clock alone deletes nothing"
        )
        assert await delete_expired(connection, events, utc_now(), 1) == 1
    # Both clocks jump ahead together: to the job, the database's is a year ahead of its own.
    wall = [a_year_ago]
    jumping = JumpFreeClock(lambda: wall[0], lambda: 0.0)
    wall[0] = utc_now()
    lease = scheduler.state.lease
    job = DeleteExpiredRows(pool=pool, lease=lease, rules=rules, clock=jumping)
    assert await job.run_once() == 0
    job = DeleteExpiredRows(pool=pool, lease=lease, rules=rules, clock=JumpFreeClock())
    assert await job.run_once() == 1
    async with using(pool) as connection:
        assert [row[0] for row in await connection.fetch("SELECT subject FROM event")] == ["c"]


async def test_a_standby_reads_for_how_long_the_other_has_acted(pool: Pool) -> None:
    await acting_scheduler(pool)
    async with using(pool) as connection:
        acting_for_s = await read_acting_for_s(connection)
        assert acting_for_s is not None
        assert 0 <= acting_for_s < 60
    await expire_lease(pool)
    async with using(pool) as connection:
        assert await read_acting_for_s(connection) is None
