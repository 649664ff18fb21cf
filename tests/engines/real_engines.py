"""Starts real engines with the agent's own code, and sends them requests as the agent does."""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from isochrone.wire.http import headers
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.api.request.event_tokens import EventTokens
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import CHAT_PATH, EngineCommand, EngineDriver, EngineLaunch
from nodeagent.host.confinement import engine_confinement
from nodeagent.host.devices import DeviceReader
from nodeagent.host.engines.engine_log import last_error
from nodeagent.host.engines.engine_process import EngineProcess, EngineProcesses
from router.dataplane.response_checks import client_error_body

ROOT: Final = Path(__file__).parents[2]
ENGINES: Final = Path(os.environ.get("ISOCHRONE_ENGINES", ROOT / ".engines"))
VLLM_COMMANDS: Final = ENGINES / "vllm" / "bin"
MODEL: Final = ENGINES / "smollm2"
"""SmolLM2-135M-Instruct in bf16, as a Hugging Face folder."""

READY_S: Final = 400.0
"""Several times what two engines that start at once need on two cores."""
EXIT_S: Final = 60.0
JSON: Final = {"content-type": "application/json"}

needs_vllm: Final = pytest.mark.skipif(
    not ((ENGINES / "vllm" / ".complete").exists() and (MODEL / "config.json").exists()),
    reason=f"no vLLM below {ENGINES}: run `make test-engines`, which installs it",
)
LLAMA_CPP_COMMANDS: Final = ENGINES / "llama_cpp" / "bin"
LLAMA_CPP_MODEL: Final = ENGINES / "smollm2-gguf" / "published"
needs_llama_cpp: Final = pytest.mark.skipif(
    not ((ENGINES / "llama_cpp" / ".complete").exists() and LLAMA_CPP_MODEL.exists()),
    reason=f"no llama.cpp below {ENGINES}: run `python -m ops.engines.llama_cpp`",
)


async def installed(driver: str) -> None:
    """Wait until an engine's program answers: on a busy machine its interpreter may be slow."""
    reason = ""

    def is_there() -> bool:
        nonlocal reason
        reason = DRIVERS[driver].missing()
        return not reason

    await until(is_there, EXIT_S, lambda: reason)


class FakeVendor:
    """A driver that starts vendor_server.py with the command line of the engine."""

    def __init__(self, driver: EngineDriver, name: str) -> None:
        self._driver, self._name = driver, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the driver's command with another program."""
        command = self._driver.command(launch)
        program = (sys.executable, "-m", "tests.engines.vendor_server", self._name)
        return msgspec.structs.replace(
            command,
            arguments=(*program, *command.arguments),
            environment={**command.environment, "PYTHONPATH": str(ROOT)},
        )


@asynccontextmanager
async def running_engine(
    spec: ReplicaSpec, model: Path, folder: Path
) -> AsyncIterator[EngineProcess]:
    """Start an engine, wait until it is warm, and kill its whole process group afterwards."""
    devices = DeviceReader(0, open_nvml=lambda: None)
    # Tests write adapters to temporary folders, also after the start.
    confinement = engine_confinement("auto", [folder], Path(tempfile.gettempdir()))
    processes = EngineProcesses(folder, 2, device_memory=devices.memory, confinement=confinement)
    engine = await processes.start(spec, model)
    try:
        deadline_s = time.monotonic() + READY_S
        while not await engine.is_ready():
            assert not engine.exited.is_set(), last_error(engine.log)
            assert time.monotonic() < deadline_s, last_error(engine.log)
            await asyncio.sleep(0.5)
        assert await engine.canary("chat")
        yield engine
    finally:
        await engine.stop(kill=True)


class Answer(msgspec.Struct, frozen=True):
    """An engine's answer: its status and its body, which is {} if it is not a JSON object."""

    status: int
    body: dict[str, Any]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        choice = self.body["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    @property
    def error(self) -> dict[str, Any]:
        """The error as a router gives it to the client. Raises ApiError if it has no message."""
        body = client_error_body(json.dumps(self.body).encode(), self.status)
        found: dict[str, Any] = json.loads(body)["error"]
        return found

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens that were in the prefix cache."""
        details = self.body["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


async def post(
    engine: EngineProcess, path: str, body: bytes, salt: str = "", priority: str = "50"
) -> Answer:
    """Send a body as the agent sends it."""
    data = engine.salted(path, body, salt, priority)
    sent = {**JSON, headers.CACHE_SALT: salt, headers.PRIORITY: priority}
    async with engine.http.post(path, data=data, headers=sent) as response:
        text = await response.text()
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {}
        return Answer(response.status, answer if isinstance(answer, dict) else {})


async def ask(
    engine: EngineProcess, salt: str = "t", path: str = CHAT_PATH, **fields: Any
) -> Answer:
    """Return the answer to a request, greedy and short unless `fields` say otherwise."""
    values = {"model": engine.record.spec.name, "temperature": 0, "max_tokens": 16, **fields}
    return await post(engine, path, msgspec.json.encode(values), salt)


async def stream(
    engine: EngineProcess, salt: str = "t", path: str = CHAT_PATH, **fields: Any
) -> list[dict[str, Any]]:
    """Return the chunks of a streamed answer, which ends in `[DONE]`."""
    values = {
        "model": engine.record.spec.name,
        "temperature": 0,
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    data = engine.salted(path, msgspec.json.encode(values), salt)
    sent = {**JSON, headers.CACHE_SALT: salt}
    async with engine.http.post(path, data=data, headers=sent) as response:
        received = await response.read()
        text = (EventTokens().feed(received) if engine.driver.counts_tokens else received).decode()
        assert response.status == 200, text
        assert response.content_type == "text/event-stream"
    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def user(text: str) -> list[dict[str, str]]:
    """Return the messages of a conversation with one question."""
    return [{"role": "user", "content": text}]


def text_of(chunks: list[dict[str, Any]]) -> str:
    """Return the text of a streamed answer's first choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if not choice["index"]]
    parts = [c["delta"].get("content") if "delta" in c else c.get("text") for c in choices]
    return "".join(part or "" for part in parts)


async def until(
    condition: Callable[[], bool], timeout_s: float, problem: Callable[[], str] = lambda: ""
) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, problem()
        await asyncio.sleep(0.1)


def group_members(group: int) -> list[int]:
    """Return the processes of a process group, without zombies."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if is_running(pid, group)]


def is_running(pid: int, group: int | None = None) -> bool:
    """Return whether a process runs, and is of `group` if one is given."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and (group is None or int(fields[2]) == group)
