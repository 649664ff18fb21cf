"""The record: who was lost and who is back, once each, and what is past its keeping goes."""

from datetime import timedelta
from typing import Any

import msgspec

from scheduler.acting import Acting, now
from scheduler.decide.liveness import LivenessLimits
from scheduler.loops.delete_expired_rows import DeleteExpiredRows
from scheduler.loops.hold_lease import HoldLease
from scheduler.loops.record_node_loss import NodeLossCounts, RecordNodeLoss
from scheduler.store.events import record_event
from scheduler.store.lease import read_acting_for_s
from scheduler.store.pool import Pool, transaction, using
from scheduler.store.retention import delete_expired, retention_rules
from tests.integration.scheduler.test_store import begun
from tests.integration.scheduler.test_trust import an_acting, expire


class Settings(msgspec.Struct, kw_only=True):
    name: str = "s1"
    lease_ttl_s: float = 6.0
    lease_renew_s: float = 2.0
    admissions_per_s: float = 100.0
    event_retention_days: float = 90.0
    certificate_lifetime_s: float = 60.0
    liveness: LivenessLimits = LivenessLimits(grace_s=0.0)


async def acting_on(pool: Pool) -> Acting:
    await begun(pool)
    await expire(pool)
    acting = await an_acting(pool)
    acting.config = Settings()  # type: ignore[assignment]
    await HoldLease(acting).run_once()
    return acting


async def silent(pool: Pool, age_s: float) -> None:
    async with using(pool) as connection:
        await connection.execute(
            "UPDATE node SET last_seen_at = clock_timestamp() - make_interval(secs => $1)", age_s
        )


async def told(pool: Pool) -> list[Any]:
    async with using(pool) as connection:
        rows = await connection.fetch(
            "SELECT kind, subject, reason FROM event WHERE kind LIKE 'node.%' ORDER BY event_id"
        )
    return [tuple(row) for row in rows]


async def test_a_loss_and_a_return_are_told_once_each(pool: Pool) -> None:
    acting = await acting_on(pool)
    duty = RecordNodeLoss(acting)
    assert await duty.run_once() == NodeLossCounts(0, 0)
    await silent(pool, 10.0)
    assert await duty.run_once() == NodeLossCounts(0, 0), "suspect is not lost"
    await silent(pool, 45.0)
    assert await duty.run_once() == NodeLossCounts(1, 0)
    # Another scheduler that acts afterwards does not tell it again.
    assert await RecordNodeLoss(acting).run_once() == NodeLossCounts(0, 0)
    await silent(pool, 0.0)
    assert await duty.run_once() == NodeLossCounts(0, 1)
    assert await duty.run_once() == NodeLossCounts(0, 0)
    events = await told(pool)
    assert [event[:2] for event in events] == [("node.lost", "n1"), ("node.back", "n1")]
    assert "silent for 45 s" in events[0][2]


async def test_a_scheduler_that_does_not_act_tells_nothing(pool: Pool) -> None:
    acting = await acting_on(pool)
    await silent(pool, 45.0)
    await acting.step_down()
    assert await RecordNodeLoss(acting).run_once() == NodeLossCounts(0, 0)
    assert await told(pool) == []


async def test_old_events_are_forgotten_the_oldest_first(pool: Pool) -> None:
    acting = await acting_on(pool)
    async with transaction(pool) as connection:
        await connection.execute("TRUNCATE event")
        for subject in ("a", "b", "c"):
            await record_event(connection, actor="x", kind="k", subject=subject)
        await connection.execute("ALTER TABLE event DISABLE TRIGGER event_append_only")
        await connection.execute(
            "UPDATE event SET at = at - interval '91 days' WHERE subject < 'c'"
        )
        await connection.execute("ALTER TABLE event ENABLE TRIGGER event_append_only")
        events, *_ = retention_rules(event_days=90.0, certificate_lifetime_s=1.0)
        a_year_ago = now() - timedelta(days=365)
        assert await delete_expired(connection, events, a_year_ago, 1) == 0, (
            "one clock alone says so"
        )
        assert await delete_expired(connection, events, now(), 1) == 1
    assert (await DeleteExpiredRows(acting).run_once()).rows == 1
    async with using(pool) as connection:
        assert [row[0] for row in await connection.fetch("SELECT subject FROM event")] == ["c"]


async def test_a_standby_knows_how_long_the_other_acts(pool: Pool) -> None:
    await acting_on(pool)
    async with using(pool) as connection:
        acting_for_s = await read_acting_for_s(connection)
        assert acting_for_s is not None
        assert 0 <= acting_for_s < 60
    await expire(pool)
    async with using(pool) as connection:
        assert await read_acting_for_s(connection) is None
