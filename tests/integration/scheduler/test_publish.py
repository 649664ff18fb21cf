"""What routers are told, from a real store: all of it, or what one node's report changed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from isochrone.wire.ids import NodeId
from scheduler.acting import Acting
from scheduler.decide.flaps import HELD_S
from scheduler.decide.liveness import LivenessLimits
from scheduler.loops.hold_lease import HoldLease
from scheduler.loops.publish_routes import PublishRoutes
from scheduler.store.pool import Pool
from tests.builders import a_replica_report, a_spec
from tests.integration.scheduler.test_store import begun, planned, reported
from tests.integration.scheduler.test_trust import an_acting, expire


async def a_publisher(pool: Pool) -> tuple[Acting, PublishRoutes]:
    """A process that acts, with one replica that is loading."""
    epoch = await begun(pool)
    await reported(pool, epoch)
    assert await planned(pool, epoch, a_spec())
    await expire(pool)
    acting = await an_acting(pool)
    config = cast(SimpleNamespace, acting.config)
    config.publish_interval_s, config.liveness = 2.0, LivenessLimits()
    await HoldLease(acting).run_once()
    return acting, PublishRoutes(acting)


def routed(acting: Acting) -> list[str]:
    assert acting.table is not None
    return [route.replica_id for route in acting.table.routes]


async def test_what_a_report_changed_is_read_of_its_node_alone(pool: Pool) -> None:
    acting, publish = await a_publisher(pool)
    assert (await publish.run_once()).nodes == -1
    assert routed(acting) == []
    assert (await publish.run_once()).nodes == 0
    for seq, (state, expected) in enumerate((("warm", ["r1"]), ("loading", [])), start=2):
        replicas = (a_replica_report(a_spec(), state),)
        await reported(pool, acting.epoch, seq=seq, replicas=replicas)
        acting.publish(NodeId("n1"))
        before = acting.table
        published = await publish.run_once()
        assert before is not None
        assert (published.nodes, published.generation) == (1, before.generation + 1)
        assert routed(acting) == expected


async def test_who_comes_and_goes_is_withdrawn_at_once_and_back_a_little_later(pool: Pool) -> None:
    acting, publish = await a_publisher(pool)
    await publish.run_once()
    now_s, seen = acting.clock(), []
    acting.clock = lambda: now_s
    for seq in range(2, 12):
        state = "loading" if seq % 2 else "warm"
        await reported(pool, acting.epoch, seq=seq, replicas=(a_replica_report(a_spec(), state),))
        acting.publish(NodeId("n1"))
        await publish.run_once()
        seen.append(len(routed(acting)))
        now_s += 0.1
    # Once it is back at once, then no more: but never told as there when it is not.
    assert seen == [1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    await reported(pool, acting.epoch, seq=12, replicas=(a_replica_report(a_spec()),))
    acting.publish(NodeId("n1"))
    await publish.run_once()
    assert routed(acting) == []
    now_s += HELD_S
    # Nobody reports anything any more.
    await publish.run_once()
    assert routed(acting) == ["r1"]


async def test_a_turn_that_failed_leaves_nothing_unpublished(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting, publish = await a_publisher(pool)
    await publish.run_once()

    async def broken(*_: Any, **__: Any) -> None:
        raise ConnectionError

    await reported(pool, acting.epoch, seq=2, replicas=(a_replica_report(a_spec()),))
    acting.publish(NodeId("n1"))
    with monkeypatch.context() as patched:
        patched.setattr("scheduler.loops.publish_routes.read_part", broken)
        with pytest.raises(ConnectionError):
            await publish.run_once()
    assert (await publish.run_once()).nodes == -1
    assert routed(acting) == ["r1"]
