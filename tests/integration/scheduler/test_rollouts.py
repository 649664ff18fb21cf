"""A rollout on a real Postgres continues after its scheduler is killed between any two steps."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from isochrone.cli.client import AdminClient, AdminError
from isochrone.service.clock import utc_now
from isochrone.service.files import write_atomic
from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.peers.rollout import RolloutState
from isochrone.wire.peers.usage import TrialRow
from scheduler.decide.rollout import Arm, Rollout, RolloutEvent, apply_event
from scheduler.store import deployments
from scheduler.store.lease import EpochLost
from scheduler.store.pool import Pool, transaction, using
from scheduler.store.retention import FIXED_RULES, TRIAL_DAYS, delete_expired
from scheduler.store.rollouts import (
    active_rollouts,
    add_rollout,
    get_rollout,
    record_trials,
    write_rollout,
)
from tests.builders import a_deployment
from tests.integration.scheduler.scheduler_parts import (
    SchedulerParts,
    expire_lease,
    scheduler_parts,
)
from tests.integration.scheduler.test_demand import begun
from tests.ports import free_port
from tests.system.harness import ROOT, until
from tests.unit.scheduler.test_rollout import a_rollout, an_arm

TOKEN = "0123456789abcdef-admin"
TIMEOUT_S = 40.0


def a_trial(version: int, arm: Arm) -> TrialRow:
    return TrialRow(
        deployment_id=DeploymentId("d"),
        version=version,
        pop=PopId("ams"),
        asked_pop=PopId("ams"),
        attempts=arm.attempts,
        failures=arm.failures,
        ttft=arm.ttft,
        itl=arm.itl,
    )


async def record_arms(pool: Pool, old: Arm, new: Arm) -> None:
    """Store routers' measurements of both versions for the current step."""
    async with transaction(pool) as connection:
        await record_trials(connection, [a_trial(1, old), a_trial(2, new)])


async def rolling(pool: Pool) -> Rollout:
    await begun(pool)
    async with transaction(pool) as connection:
        assert await add_rollout(connection, a_rollout())
    return await current_rollout(pool)


async def current_rollout(pool: Pool) -> Rollout:
    async with using(pool) as connection:
        rollout = await get_rollout(connection, "d.1")
    assert rollout is not None
    return rollout


async def delete_expired_trials(pool: Pool, days: int) -> int:
    """Return how many measurements are deleted if the current step began so long ago."""
    (rule,) = [rule for rule in FIXED_RULES if rule.table == "rollout_trial"]
    async with transaction(pool) as connection:
        await connection.execute(
            "UPDATE rollout SET step_since = clock_timestamp() - make_interval(days => $1)", days
        )
        return await delete_expired(connection, rule, utc_now(), 100)


async def test_measurements_are_deleted_when_none_is_compared_again(pool: Pool) -> None:
    first = await rolling(pool)
    await record_arms(pool, an_arm(10, 0), an_arm(20, 0))
    assert await delete_expired_trials(pool, 30) == 0, "the current step's are compared"
    second = apply_event(first, RolloutEvent.STEP_PASSED)
    async with transaction(pool) as connection:
        assert await write_rollout(connection, first, second)
    await record_arms(pool, an_arm(10, 0), an_arm(20, 0))
    assert await delete_expired_trials(pool, TRIAL_DAYS - 1) == 0
    assert await delete_expired_trials(pool, TRIAL_DAYS + 1) == 2, "those of the first step"
    async with transaction(pool) as connection:
        assert await write_rollout(connection, second, apply_event(second, RolloutEvent.ABORT))
    assert await delete_expired_trials(pool, TRIAL_DAYS + 1) == 2
    async with using(pool) as connection:
        assert await connection.fetchval("SELECT count(*) FROM rollout_trial") == 0


async def time_passes(pool: Pool) -> None:
    async with using(pool) as connection:
        await connection.execute("UPDATE rollout SET step_since = step_since - interval '5 min'")


async def deployed_version(pool: Pool) -> tuple[int, str]:
    async with using(pool) as connection:
        row = await deployments.get_deployment(connection, "d")
    assert row is not None
    return row.version, row.model_id


async def acting_scheduler(pool: Pool, name: str) -> SchedulerParts:
    await expire_lease(pool)
    scheduler = await scheduler_parts(pool, name)
    assert (await scheduler.hold_lease.run_once()).acting
    return scheduler


async def test_a_bad_version_is_reverted_and_its_number_is_not_used_again(pool: Pool) -> None:
    await rolling(pool)
    job = (await acting_scheduler(pool, "s1")).advance_rollouts()
    assert await job.run_once() == (1, 0)
    await record_arms(pool, an_arm(10_000, 10), an_arm(100, 60))
    assert await job.run_once() == (1, 1)
    rollout = await current_rollout(pool)
    assert rollout.state is RolloutState.REVERTED
    assert "errors" in rollout.reason
    assert await deployed_version(pool) == (1, "m")
    assert await job.run_once() == (0, 0)
    async with transaction(pool) as connection:
        assert await deployments.next_version(connection, "d") == 3
        changed = a_deployment(engine=rollout.spec.engine)
        await deployments.change_deployment(connection, changed, None)
    assert (await deployed_version(pool))[0] == 3


async def test_each_step_is_judged_by_its_own_measurements(pool: Pool) -> None:
    await rolling(pool)
    job = (await acting_scheduler(pool, "s1")).advance_rollouts()
    await record_arms(pool, an_arm(50_000, 50), an_arm(3_000, 3))
    await time_passes(pool)
    assert (await job.run_once()).changed == 1
    await time_passes(pool)
    assert (await job.run_once()).changed == 0, "this step has no measurements yet"
    assert (await current_rollout(pool)).step == 1


async def test_one_of_two_writers_wins_and_an_old_epoch_never_does(pool: Pool) -> None:
    rollout = await rolling(pool)
    stale = (await acting_scheduler(pool, "old")).advance_rollouts()
    await acting_scheduler(pool, "new")
    await record_arms(pool, an_arm(10_000, 10), an_arm(100, 60))
    with pytest.raises(EpochLost):
        await stale.run_once()
    assert (await current_rollout(pool)).state is RolloutState.RUNNING
    paused = apply_event(rollout, RolloutEvent.PAUSE)
    async with transaction(pool) as connection:
        assert await write_rollout(connection, rollout, paused)
        assert not await write_rollout(
            connection, rollout, apply_event(rollout, RolloutEvent.ABORT)
        )
        assert [active.state for active in await active_rollouts(connection)] == [
            RolloutState.PAUSED
        ]
        assert not await add_rollout(connection, a_rollout())


class SchedulerProcess:
    """A scheduler process that can be killed and started again."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self._folder = folder
        port = free_port()
        self.api = AdminClient(f"http://127.0.0.1:{port}", TOKEN)
        write_atomic(folder / "token", TOKEN.encode())
        text = (
            f'name = "s"\ndatabase_url = "{dsn}"\nauthority = "{folder}/ca"\n'
            f'admin_token_file = "{folder}/token"\nadmin_port = {port}\n'
            f"control_port = {free_port()}\nroll_interval_s = 0.1\n"
            "lease_ttl_s = 2.0\nlease_renew_s = 0.2\n"
        )
        write_atomic(folder / "s.toml", text.encode())
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "scheduler", "serve", "--config", f"{self._folder}/s.toml",
                cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip

        async def acts() -> bool:
            with suppress(AdminError):
                return bool((await self.ask("GET", "/v1/status"))["acting"])
            return False

        await until("it acts", acts, TIMEOUT_S)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        return await asyncio.to_thread(self.api.ask, method, path, body)


async def test_a_rollout_continues_after_a_kill_at_each_step(
    pool: Pool, database_dsn: str, tmp_path: Path
) -> None:
    await begun(pool)
    scheduler = SchedulerProcess(tmp_path, database_dsn)
    try:
        await scheduler.start()
        body = {"engine": {"driver": "mock", "kv_memory_bytes": 1}, "bounds": {"step_min_s": 0.0}}
        made = await scheduler.ask("POST", "/v1/deployments/d/rollouts", body)
        path = f"/v1/rollouts/{made['rollout_id']}"
        for step in range(3):
            await scheduler.kill()
            await expire_lease(pool)  # so that the next process can act at once
            # Measurements arrive while no scheduler acts; the next one judges them.
            await record_arms(pool, an_arm(50_000, 50), an_arm(3_000, 3))
            await scheduler.start()

            async def moved(past: int = step) -> bool:
                row = await scheduler.ask("GET", path)
                assert row["state"] in ("running", "done")
                return bool(row["step"] > past or row["state"] == "done")

            await until(f"step {step} is over", moved, TIMEOUT_S)
        row = await scheduler.ask("GET", path)
        assert (row["state"], row["step"]) == ("done", 2)
        assert (await deployed_version(pool))[0] == 2
        await scheduler.kill()
        await expire_lease(pool)
        await scheduler.start()
        assert (await scheduler.ask("GET", path))["state"] == "done"
        kinds = {
            event["kind"] for event in await asyncio.to_thread(scheduler.api.list, "/v1/events")
        }
        assert {"rollout.create", "rollout.step_passed", "rollout.last_step_passed"} <= kinds
    finally:
        await scheduler.kill()


async def test_a_rollout_survives_an_outage_before_its_first_replica_is_warm(pool: Pool) -> None:
    await rolling(pool)
    for _ in range(7):  # of five minutes each, half an hour in all, without a scheduler
        await time_passes(pool)
    scheduler = await acting_scheduler(pool, "s1")
    job = scheduler.advance_rollouts()
    assert await job.run_once() == (1, 0)
    scheduler.clock.now_s += 1801.0
    assert (await scheduler.hold_lease.run_once()).acting
    assert await job.run_once() == (1, 1)
    assert (await current_rollout(pool)).state is RolloutState.REVERTED
