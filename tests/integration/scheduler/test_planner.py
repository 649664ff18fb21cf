"""The planner's process: it answers, its loss costs what was asked, it ends with its scheduler."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection
from typing import cast

import msgspec
import pytest

from isochrone.service.trust.identity import Authority
from isochrone.wire.ids import DeploymentId, Epoch, Generation, NodeId, ReplicaId
from scheduler.decide.cluster import PlacementPlan, ReplicaEnding
from scheduler.decide.membership import LivenessLimits, NodeContact
from scheduler.decide.placement import PlanLimits, plan_fleet
from scheduler.decide.whatif import ClusterSnapshot
from scheduler.loops.place_replicas import PlaceReplicas
from scheduler.planner.client import PlannerClient, PlannerFailed
from scheduler.planner.messages import PlannerSettings, frame
from scheduler.store.lease import EpochLost, read_cluster_row
from scheduler.store.pool import Pool, using
from tests.builders import a_spec
from tests.integration.scheduler.scheduler_parts import (
    SchedulerParts,
    expire_lease,
    no_nudge,
    scheduler_parts,
)
from tests.integration.scheduler.test_store import begun, planned, reported

HEARD = NodeContact(acting_for_s=99.0)


def settings(dsn: str) -> PlannerSettings:
    return PlannerSettings(database_url=dsn, liveness=LivenessLimits(), log_level="INFO")


@pytest.fixture
async def planner(pool: Pool, database_dsn: str) -> AsyncIterator[PlannerClient]:
    epoch = await begun(pool)
    await reported(pool, epoch)
    assert await planned(pool, epoch, a_spec())
    planner = PlannerClient(settings(database_dsn))
    yield planner
    await planner.stop()


async def test_it_reads_decides_and_answers(planner: PlannerClient) -> None:
    saved = msgspec.json.decode(await planner.snapshot(HEARD), type=ClusterSnapshot)
    assert [node.node_id for node in saved.cluster.nodes] == ["n1"]
    assert await planner.plan(HEARD) == plan_fleet(saved.cluster, LivenessLimits())
    quick = plan_fleet(saved.cluster, LivenessLimits(), PlanLimits(thorough_effort=0))
    assert await planner.plan(HEARD, is_quick=True) == quick
    explained = await planner.explain(HEARD, DeploymentId("d"))
    assert explained is not None
    assert [here.replica_id for here in explained.here] == ["r1"]
    assert await planner.explain(HEARD, DeploymentId("nowhere")) is None
    # A call returns after a while, with a part of the slots, where the machine is busy.
    while (learned := await planner.learn(Epoch(1))).is_behind:
        pass
    assert learned.is_new
    assert await planner.plan_prefetch(HEARD) == await planner.plan_prefetch(HEARD)


async def test_one_that_was_killed_or_is_stuck_is_replaced(planner: PlannerClient) -> None:
    first = await planner.plan(HEARD)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        assert planner._process is not None
        planner._answer_timeout_s = 0.5
        os.kill(planner._process.pid, number)
        with pytest.raises(PlannerFailed, match="cannot plan"):
            await planner.plan(HEARD)
        planner._answer_timeout_s = 60.0
        assert await planner.plan(HEARD) == first


async def test_a_question_that_fails_is_answered_in_words_and_the_next_one_too(
    planner: PlannerClient, pool: Pool
) -> None:
    first = await planner.plan(HEARD)
    asked = planner._process
    await pool.execute("ALTER TABLE node RENAME TO hidden")
    with pytest.raises(PlannerFailed, match="cannot plan: UndefinedTableError"):
        await planner.plan(HEARD)
    await pool.execute("ALTER TABLE hidden RENAME TO node")
    assert await planner.plan(HEARD) == first
    assert planner._process is asked


async def test_without_a_database_it_says_so(database_dsn: str) -> None:
    planner = PlannerClient(settings(database_dsn.replace("host=/", "host=/nowhere/")))
    with pytest.raises(PlannerFailed, match="cannot plan: the planner ended"):
        await planner.plan(HEARD)
    await planner.stop()


async def test_one_that_cannot_be_started_is_no_failure_of_the_database(
    pool: Pool, database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers take an OSError for an unreachable database. Operators see why nothing is placed."""
    parts = await placing_scheduler(pool)
    planner = PlannerClient(settings(database_dsn))
    place = place_replicas(parts, planner)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nowhere/python3")
        with pytest.raises(PlannerFailed, match=r"cannot start the planner: .+/nowhere/python3"):
            await place.run_once()
    assert "cannot start the planner" in parts.state.placement.failure
    await place.run_once()
    assert parts.state.placement.failure == ""
    await planner.stop()


def test_it_ends_when_nobody_can_ask(database_dsn: str) -> None:
    """Signals are for its scheduler, which may have something to ask until it ends itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler.planner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    with process, process.stdin as stdin:
        stdin.write(frame(settings(database_dsn)))
        stdin.close()
        assert process.wait(30.0) == 0


class LatePlanner:
    """Ends a replica in each plan but the `empty` ones, which are counted from 1. The first plan is
    of a cluster that has changed meanwhile."""

    def __init__(self, pool: Pool, empty: Collection[int]) -> None:
        self.pool = pool
        self.empty = empty
        self.asked: list[bool] = []

    async def plan(self, _: NodeContact, *, is_quick: bool = False) -> PlacementPlan:
        self.asked.append(is_quick)
        if len(self.asked) in self.empty:
            return PlacementPlan(based_on=Generation(0))
        async with using(self.pool) as connection:
            generation = (await read_cluster_row(connection)).generation
        ending = ReplicaEnding(replica_id=ReplicaId("r1"), node_id=NodeId("n1"), reason="test")
        based_on = Generation(generation - (len(self.asked) == 1))
        return PlacementPlan(based_on=based_on, endings=(ending,))


@pytest.mark.parametrize(
    ("empty", "committed"), [((), [False, True, True]), ((2,), [False, False, True])]
)
async def test_after_a_plan_that_came_too_late_the_next_one_is_quick(
    empty: tuple[int, ...], committed: list[bool], pool: Pool
) -> None:
    """Whether or not it finds something to do, the one after it is thorough again."""
    parts = await placing_scheduler(pool)
    planner = LatePlanner(pool, empty)
    place = place_replicas(parts, planner)
    assert [(await place.run_once()).committed for _ in range(3)] == committed
    assert planner.asked == [False, True, False]


class PlannerAcrossTerms:
    """While it plans, another scheduler acts for a while and changes nothing."""

    def __init__(self, parts: SchedulerParts) -> None:
        self.parts = parts

    async def plan(self, _: NodeContact, *, is_quick: bool = False) -> PlacementPlan:
        pool = self.parts.database.pool
        await expire_lease(pool)
        other = await scheduler_parts(pool, "s3")
        for scheduler in (other, self.parts):
            assert (await scheduler.hold_lease.run_once()).acting
            await expire_lease(pool)
        async with using(pool) as connection:
            generation = (await read_cluster_row(connection)).generation
        ending = ReplicaEnding(replica_id=ReplicaId("r1"), node_id=NodeId("n1"), reason="test")
        return PlacementPlan(based_on=generation, endings=(ending,))


async def test_a_plan_of_the_term_before_is_not_committed(pool: Pool) -> None:
    """The new term waits for the nodes' first reports before it places anything."""
    parts = await placing_scheduler(pool)
    with pytest.raises(EpochLost):
        await place_replicas(parts, PlannerAcrossTerms(parts)).run_once()
    assert parts.state.lease.is_acting


async def placing_scheduler(pool: Pool) -> SchedulerParts:
    """A scheduler that no longer waits for the nodes' first reports; r1 runs on n1."""
    epoch = await begun(pool)
    await reported(pool, epoch)
    assert await planned(pool, epoch, a_spec())
    await expire_lease(pool)
    parts = await scheduler_parts(pool, "s2")
    for _ in range(4):
        await parts.hold_lease.run_once()
        parts.clock.now_s += 4.0
    await parts.hold_lease.run_once()
    return parts


def place_replicas(parts: SchedulerParts, planner: object) -> PlaceReplicas:
    state = parts.state
    return PlaceReplicas(
        pool=parts.database.pool,
        planner=cast(PlannerClient, planner),
        authority=cast(Authority, None),  # it seals starts only
        lease=state.lease,
        heartbeats=state.heartbeats,
        assignments=state.assignments,
        routes=state.routes,
        first_reports=state.first_reports,
        status=state.placement,
        nudge_place=no_nudge,
    )
