"""The agent's operations cancelled at every await: nothing is left over, and a retry succeeds."""

import asyncio
import random
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nodeagent.host import processes
from nodeagent.host.artifacts import artifact_store as artifacts
from nodeagent.host.engines import engine_process as module
from nodeagent.host.engines.engine_process import EngineProcess, EngineProcesses
from nodeagent.host.processes import Child
from tests.cuts import cut_everywhere, held, until_as_before
from tests.integration.nodeagent.test_artifacts import (
    Origin,
    a_folder,
    a_store,
    artifact_of,
    origin,
)
from tests.integration.nodeagent.test_survivors import SPEC, folder

__all__ = ["folder", "origin"]

FILES: Mapping[str, bytes] = {"m": random.Random(3).randbytes(1_200_000), "config.json": b"{}"}


@pytest.mark.parametrize("source", ["origin", "folder"])
async def test_a_cancelled_fetch_can_be_resumed_at_once(
    tmp_path: Path, origin: tuple[Origin, str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slow disk, so that a cancellation arrives during a write.
    monkeypatch.setattr(artifacts, "sync", lambda _: time.sleep(0.005))
    served, url = origin
    served.files = {f"/{name}": body for name, body in FILES.items()}
    source_url = url if source == "origin" else a_folder(tmp_path, **FILES)
    artifact = artifact_of(source_url, dict(FILES))
    store = a_store(tmp_path)

    async def fetch() -> None:
        await store.ensure(artifact, tuple, lambda _: None)

    async def again() -> None:
        path = await store.ensure(artifact, tuple, lambda _: None)
        assert {name: (path / name).read_bytes() for name in FILES} == FILES
        assert store.fetched_bytes(artifact.digest) is None
        shutil.rmtree(path)

    assert await cut_everywhere(fetch, at_once=again) > 5


async def test_a_start_cancelled_twice_leaves_no_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawning, may_spawn = asyncio.Event(), threading.Event()
    loop, spawn = asyncio.get_running_loop(), processes.spawn

    def late(*given: Any, **named: Any) -> Child:
        loop.call_soon_threadsafe(spawning.set)
        assert may_spawn.wait(30)
        return spawn(*given, **named)

    monkeypatch.setattr(module, "spawn", late)
    before, tasks = held(), asyncio.all_tasks()
    starting = asyncio.create_task(EngineProcesses(folder, 1).start(SPEC, folder))
    await spawning.wait()
    for _ in range(2):
        starting.cancel()
        await asyncio.sleep(0)
    may_spawn.set()
    await asyncio.wait((starting,))
    assert starting.cancelled()
    await until_as_before(before, tasks, "twice")


async def test_a_start_cut_short_leaves_no_engine(folder: Path) -> None:
    engines = EngineProcesses(folder, 1)
    started: list[EngineProcess] = []

    async def start() -> None:
        started.append(await engines.start(SPEC, folder))
        await started[-1].stop(kill=True)

    async def stop() -> None:
        while started:
            await started.pop().stop(kill=True)

    def check() -> None:
        assert engines.survivors() == []

    assert await cut_everywhere(start, at_once=stop, check=check) > 5
