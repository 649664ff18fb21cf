"""A standby becomes the engine that it is told to become, and ends with whoever kept it."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import pytest

from isochrone.service.trust.landlock import WHOLE_VERSION, landlock_version
from isochrone.wire.engines.engine import EngineConfig
from nodeagent.drivers.driver import EngineCommand
from nodeagent.host.confinement import EngineConfinement
from nodeagent.host.engines.standby import StandbyProcess
from tests.integration.engine.conftest import ROOT

STANDBY: Final = (sys.executable, "-m", "nodeagent.engine", "--standby")
DEADLINE_S: Final = 60.0


def command(folder: Path) -> EngineCommand:
    return EngineCommand(
        arguments=(*STANDBY[:3], "--config", str(folder / "config.json")),
        base_url="http://localhost",
        environment={"CUDA_VISIBLE_DEVICES": ""},
        standby=STANDBY,
    )


def are_confined(pid: int) -> bool:
    """Return True if all threads of a process have given up privileges, as a confined one must."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/status"))
    return len(threads) > 1 and all("NoNewPrivs:\t1" in path.read_text() for path in threads)


@pytest.fixture
def standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandbyProcess:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return StandbyProcess(tmp_path / "standby.log")


@pytest.mark.model
@pytest.mark.parametrize("stages", [1, 2])
async def test_a_standby_serves_what_it_is_told(
    standby: StandbyProcess, tmp_path: Path, short_folder: Path, model_path: Path, stages: int
) -> None:
    config = EngineConfig(
        model_path=str(model_path),
        served_name="m",
        socket=str(short_folder / "engine.sock"),
        kv_memory_bytes=64 * 1024 * 1024,
        quantisation="file",
        # Each process computes with threads of its own, also where it was forked from the standby.
        threads=2,
        pipeline_parallel=stages,
    )
    (short_folder / "config.json").write_bytes(msgspec.json.encode(config))
    wanted, log = command(short_folder), short_folder / "engine.log"
    assert standby.take_for(wanted, log) is None, "there is none yet"
    standby.prepare_for(wanted)
    rules = EngineConfinement([tmp_path / "agent"], tmp_path / "artifacts").rules(short_folder)
    engine = standby.take_for(wanted, log, rules if landlock_version() >= WHOLE_VERSION else ())
    assert engine is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while b'"ready":true' not in (log.read_bytes() if log.exists() else b""):
                assert engine.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
            connector = aiohttp.UnixConnector(config.socket)
            async with aiohttp.ClientSession("http://engine", connector=connector) as http:
                body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
                async with http.post("/v1/completions", json=body) as response:
                    answer = await response.json()
        assert "Paris" in answer["choices"][0]["text"]
        if landlock_version() >= WHOLE_VERSION:
            assert are_confined(engine.pid), "all threads, before the engine started others"
        assert standby.take_for(wanted, log) is None, "it is an engine now"
    finally:
        engine.terminate()
        engine.wait(20)


def test_a_standby_ends_with_its_keeper_and_a_dead_one_is_not_used(
    standby: StandbyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = command(tmp_path)
    standby.prepare_for(wanted)
    standby.stop()
    # An engine that says why it cannot be one: the order itself was taken up.
    standby.prepare_for(wanted)
    engine = standby.take_for(wanted, tmp_path / "engine.log")
    assert engine is not None
    assert engine.wait(DEADLINE_S) == 2
    assert "cannot read config" in (tmp_path / "engine.log").read_text()
    # The same order from one who has gone since is not.
    standby.prepare_for(wanted)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("os.getpid", lambda: 1)
        late = standby.take_for(wanted, tmp_path / "late.log")
    assert late is not None
    assert late.wait(DEADLINE_S) == 0
    assert "cannot read config" not in (tmp_path / "late.log").read_text()
    other = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    other.wait(10)
    monkeypatch.setattr("nodeagent.host.engines.standby.spawn", lambda *_, **how: other)
    dead = StandbyProcess(tmp_path / "log")
    dead.prepare_for(wanted)
    assert dead.take_for(wanted, tmp_path / "engine.log") is None
    dead.stop()
