"""An agent without free file descriptors ends no engine for it."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import ReplicaId
from isochrone.wire.models.model import EngineSettings
from nodeagent.decide.replicas.health import UNANSWERED_MAX
from nodeagent.drivers.driver import EngineCommand, EngineLaunch
from nodeagent.drivers.mock import MockDriver
from nodeagent.host import processes
from nodeagent.host.devices import CPU, DeviceReader
from nodeagent.host.engines import engine_process
from tests.builders import a_spec
from tests.integration.nodeagent.test_data_plane import a_node
from tests.system.harness import until

LIMIT_S = 30.0


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let no file or socket be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_an_engine_that_the_agent_cannot_reach_for_lack_of_descriptors_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = MockDriver.command

    def without_keep_alive(self: MockDriver, launch: EngineLaunch) -> EngineCommand:
        return msgspec.structs.replace(command(self, launch), keep_alive=False)

    monkeypatch.setattr(MockDriver, "command", without_keep_alive)
    async with a_node(canary_interval_s=0.5) as node:
        await node.warm(node.spec())
        replica = node.supervisor.replicas[ReplicaId("r1")]
        engine: Any = replica.engine
        asked, stats = [], engine.stats

        async def counted() -> Any:
            found = await stats()
            asked.append(found)
            return found

        monkeypatch.setattr(engine, "stats", counted)

        async def is_asked_often() -> bool:
            return asked.count(None) > 2 * UNANSWERED_MAX

        with no_descriptors():
            await until("it was asked often", is_asked_often, LIMIT_S)
        async with node.ask() as response:
            assert response.status == 200
            assert b"t0" in await response.read()
        assert replica.engine is engine
        assert replica.failure_times == []


async def test_the_end_of_an_engine_is_noticed_that_began_without_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pidfd_open = os.pidfd_open
    refused: list[int] = []

    def fails_once(pid: int) -> int:
        if not refused:
            refused.append(pid)
            raise OSError(24, "Too many open files")
        return pidfd_open(pid)

    monkeypatch.setattr(engine_process, "PIDFD_RETRY_S", 0.05)
    monkeypatch.setattr(os, "pidfd_open", fails_once)
    async with a_node() as node:
        await node.warm(node.spec())
        engine: Any = node.supervisor.replicas[ReplicaId("r1")].engine
        assert refused == [engine.pid]
        os.kill(engine.pid, 9)

        async def has_exited() -> bool:
            return bool(engine.exited.is_set())

        await until("it has exited", has_exited, LIMIT_S)


def test_memory_that_cannot_be_read_is_unknown() -> None:
    devices = DeviceReader(0, open_nvml=lambda: None)
    with no_descriptors():
        assert devices.used_by(os.getpgrp(), (CPU,)) == 0
        assert devices.memory((CPU,)) is None


def test_the_rest_of_an_engine_is_looked_for_until_proc_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    child = processes.spawn(("sleep", "60"), log)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def wait(_seconds: float) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    monkeypatch.setattr("nodeagent.host.processes.time.sleep", wait)
    try:
        with no_descriptors():
            processes.kill_remaining(log)
        assert child.wait(LIMIT_S) == -9
    finally:
        child.kill()
        child.wait()


async def test_an_engine_whose_start_fails_for_lack_of_descriptors_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on without a folder and a record, and the next one started beside it."""
    started: list[int] = []
    lower_priority = processes.lower_priority

    def without_descriptors(pid: int) -> None:
        started.append(pid)
        with no_descriptors():
            lower_priority(pid)

    monkeypatch.setattr(engine_process, "lower_priority", without_descriptors)
    spec = a_spec("r1", device_ids=(CPU,), engine=EngineSettings(driver="mock", kv_memory_bytes=1))
    with pytest.raises(OSError, match="Too many open files"):
        await engine_process.EngineProcesses(tmp_path, 1).start(spec, tmp_path)
    (pid,) = started
    left = processes.group_members(pid)
    for process in left:
        os.kill(process, 9)
    assert not left
