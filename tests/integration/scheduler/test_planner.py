"""The planner's process: it answers, its loss costs what was asked, it ends with its scheduler."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest

from isochrone.wire.ids import DeploymentId, Epoch
from scheduler.decide.membership import LivenessLimits, NodeContact
from scheduler.decide.placement import plan_fleet
from scheduler.decide.whatif import ClusterSnapshot
from scheduler.planner.client import PlannerClient, PlannerFailed
from scheduler.planner.messages import PlannerSettings, frame
from scheduler.store.pool import Pool
from tests.builders import a_spec
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
