"""A real vLLM for CPUs, started with the command of our driver by the agent's own code.

`make test-engines` installs it and runs this. Without `.engines` the tests are skipped. They take
about two minutes and 4 GB of memory.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import pytest_asyncio

from isochrone.wire import headers
from isochrone.wire.ids import DeviceId
from isochrone.wire.model import EngineSettings
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import CHAT_PATH
from nodeagent.host.devices import DeviceReader
from nodeagent.host.engines import EngineProcess, EngineProcesses, last_error
from tests.builders import GIB, a_spec

ENGINES: Final = Path(os.environ.get("ISOCHRONE_ENGINES", Path(__file__).parents[2] / ".engines"))
COMMANDS: Final = ENGINES / "vllm" / "bin"
MODEL: Final = ENGINES / "smollm2"
READY_S: Final = 300.0
"""Twice what two engines that start at once need on two cores."""
EXIT_S: Final = 10.0

pytestmark = [
    pytest.mark.skipif(
        not ((ENGINES / "vllm" / ".complete").exists() and (MODEL / "config.json").exists()),
        reason=f"no vLLM below {ENGINES}: run `make test-engines`, which installs it",
    ),
    pytest.mark.asyncio(loop_scope="module"),
]

SPEC: Final = a_spec(
    name="smol",
    context_tokens=2048,
    device_ids=(DeviceId("cpu"),),
    memory_bytes=3 * GIB,
    engine=EngineSettings(
        driver="vllm",
        kv_memory_bytes=GIB // 4,
        options={
            "enforce_eager": "true",
            "enable_auto_tool_choice": "",
            "tool_call_parser": "hermes",
        },
    ),
)
LONG_PROMPT: Final = "Name the colours of the rainbow, in their order. " * 40
"""Several blocks of 128 tokens, the unit in which vLLM caches on a CPU."""
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    """A warm engine, and its whole process group ended afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{COMMANDS}:{os.environ['PATH']}")
        patch.setenv("KMP_BLOCKTIME", "0")
        assert DRIVERS["vllm"].missing() == ""
        processes = EngineProcesses(
            tmp_path_factory.mktemp("engines"),
            2,
            device_memory=DeviceReader(0, open_nvml=lambda: None).memory,
        )
        engine = await processes.start(SPEC, MODEL)
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


async def ask(engine: EngineProcess, salt: str = "", **fields: Any) -> dict[str, Any]:
    """Return the answer to a chat request, sent as the agent sends it."""
    fields = {"model": "smol", "temperature": 0, "max_tokens": 16, **fields}
    body = engine.salted(CHAT_PATH, msgspec.json.encode(fields), salt)
    sent = {"content-type": "application/json"}
    async with engine.http.post(CHAT_PATH, data=body, headers=sent) as response:
        text = await response.text()
        assert response.status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def cached_tokens(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


async def test_it_answers_a_chat(engine: EngineProcess) -> None:
    answer = await ask(engine, messages=user("What is the capital of France?"))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0


async def test_a_stream_ends_with_its_usage(engine: EngineProcess) -> None:
    await ask(engine, "stream", messages=user(LONG_PROMPT))
    fields = {
        "model": "smol",
        "messages": user(LONG_PROMPT),
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = engine.salted(CHAT_PATH, msgspec.json.encode(fields), "stream")
    sent = {"content-type": "application/json"}
    async with engine.http.post(CHAT_PATH, data=body, headers=sent) as response:
        lines = (await response.text()).split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    texts = [c["choices"][0]["delta"].get("content") for c in chunks if c["choices"]]
    assert sum(bool(text) for text in texts) > 1
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert cached_tokens(chunks[-1]) >= 128


async def test_tenants_do_not_share_cached_prompts(engine: EngineProcess) -> None:
    messages = user(f"A prompt of this test alone. {LONG_PROMPT}")
    counts = [
        cached_tokens(await ask(engine, salt, messages=messages, max_tokens=1))
        for salt in ("a", "b", "a")
    ]
    # The template's first tokens are in no block of their own: nothing is shared between salts.
    assert counts[:2] == [0, 0]
    assert counts[2] >= 128


async def test_an_answer_follows_a_json_schema(engine: EngineProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "population": {"type": "integer"}},
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = await ask(
        engine, messages=user("A city in JSON."), response_format=form, max_tokens=64
    )
    content = answer["choices"][0]["message"]["content"]
    if answer["choices"][0]["finish_reason"] == "stop":
        assert json.loads(content)["city"] in ("Paris", "Rome")
    assert content.lstrip().startswith("{")


async def test_tools_are_accepted_with_tool_choice_auto(engine: EngineProcess) -> None:
    """A model of 135M seldom calls a tool by itself. The engine must accept the request, which it
    refuses without a parser; and with a named tool it must call it."""
    fields: dict[str, Any] = {
        "messages": user("What is the weather in Paris?"),
        "tools": [TOOL],
    }
    auto = await ask(engine, "", **fields, tool_choice="auto")
    assert auto["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
    named = {"type": "function", "function": {"name": "get_weather"}}
    forced = await ask(engine, "", **fields, tool_choice=named, max_tokens=48)
    (call,) = forced["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    # vLLM does not hold a named call to the schema of its parameters.
    assert "Paris" in call["function"]["arguments"]


async def test_its_statistics_are_read(engine: EngineProcess) -> None:
    before = await engine.stats()
    await ask(engine, messages=user("Count to ten."), max_tokens=16)
    stats = await engine.stats()
    assert before is not None
    assert stats is not None
    assert stats.tokens_out_total > before.tokens_out_total
    assert stats.prompt_tokens_total > before.prompt_tokens_total
    assert stats.steps_total > before.steps_total
    assert stats.prefix_hit_tokens_total >= 128
    assert (stats.running, stats.waiting) == (0, 0)
    assert "vllm:num_requests_running" in await engine.metrics()


async def test_the_planned_kv_memory_is_what_it_uses(engine: EngineProcess) -> None:
    log = engine.log.read_text(errors="replace")
    assert "Explicitly set (0.25" in log


async def test_a_resumed_answer_is_not_promised_to_be_the_same(engine: EngineProcess) -> None:
    assert engine.resumes == headers.INEXACT


async def test_a_killed_server_leaves_no_process(engine: EngineProcess) -> None:
    """Last in this module. The engine core and the worker outlive a killed API server."""
    before = group_members(engine.pid)
    assert len(before) >= 3, "API server, engine core and worker"
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(EXIT_S):
        await engine.exited.wait()
    assert engine.exit_reason == "the engine was killed by SIGKILL"
    await engine.stop(kill=True)
    deadline_s = time.monotonic() + EXIT_S
    while left := [pid for pid in before if is_running(pid)]:
        assert time.monotonic() < deadline_s, f"processes {left} are left"
        await asyncio.sleep(0.1)
    assert group_members(engine.pid) == []


def group_members(group: int) -> list[int]:
    """Return the processes of a process group, without zombies."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if is_running(pid, group)]


def is_running(pid: int, group: int | None = None) -> bool:
    """Say whether a process runs, and is of `group` if one is given."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and (group is None or int(fields[2]) == group)
