"""What a real vLLM for CPUs does beyond the conformance suite, when our driver starts it.

`make test-engines` installs it and runs this. Without `.engines` the tests are skipped. They take
about two minutes and 4 GB of memory.
"""

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from isochrone.wire.http import headers
from isochrone.wire.models.model import Artifact, ArtifactFile
from isochrone.wire.peers.adapter import ADAPTER_FILES, RequestAdapter
from nodeagent.drivers.driver import CHAT_PATH
from nodeagent.host.engines.engine_adapters import EngineAdapters
from nodeagent.host.engines.engine_process import EngineProcess
from tests.engines.lora import write_adapter
from tests.engines.real_engines import (
    EXIT_S,
    JSON,
    MODEL,
    ask,
    group_members,
    is_running,
    needs_vllm,
    post,
    until,
    user,
)

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="session")]

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
CALL: Final = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


async def test_the_parser_for_tool_calls_fits_the_chat_template(vllm: EngineProcess) -> None:
    """The deployment names none. A model of 135M seldom calls a tool by itself: its answer is
    constrained to the text of a call, which the parser must find."""
    log = vllm.log.read_text(errors="replace")
    assert "'tool_call_parser': 'hermes'" in log
    answer = await ask(
        vllm,
        messages=user("What is the weather in Paris?"),
        tools=[TOOL],
        tool_choice="auto",
        structured_outputs={"choice": [CALL]},
        max_tokens=64,
    )
    assert answer.status == 200, answer.body
    (choice,) = answer.body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


async def test_an_adapter_is_loaded_and_unloaded_while_it_runs(
    vllm: EngineProcess, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", MODEL)
    messages = user("Name the colours of the rainbow.")
    bare = (await ask(vllm, messages=messages)).text
    fields = {"lora_name": "made-up", "lora_path": str(adapter)}

    async def change(path: str) -> int:
        async with vllm.http.post(path, json=fields) as response:
            return response.status

    assert await change("/v1/load_lora_adapter") == 200
    adapted = await ask(vllm, messages=messages, model="made-up")
    assert adapted.status == 200, adapted.body
    assert adapted.text != bare
    assert (await ask(vllm, messages=messages)).text == bare
    assert await change("/v1/unload_lora_adapter") == 200
    gone = await ask(vllm, messages=messages, model="made-up")
    assert gone.status == 404, gone.body


async def test_the_agent_loads_the_adapter_that_a_request_names(
    vllm: EngineProcess, tmp_path: Path
) -> None:
    """By the agent's own code, twice: the second agent finds it loaded by the first."""
    folder = write_adapter(tmp_path / "named", MODEL)
    file = ArtifactFile(path=ADAPTER_FILES[0], size_bytes=1, sha256="a" * 64)
    artifact = Artifact(source="cluster:adapters/ft-1", files=(file,), digest="b" * 64)
    adapter = RequestAdapter(
        adapter_id="ft-1", model_id=vllm.record.spec.model_id, artifact=artifact
    )

    async def fetch(_: RequestAdapter) -> Path:
        return folder

    messages = user("Name the colours of the rainbow.")
    texts = []
    for adapters in (EngineAdapters(), EngineAdapters()):
        async with adapters.fetched(adapter, fetch) as fetched, fetched.loaded(vllm) as loaded:
            assert loaded.loaded.adapter_ids == ("ft-1",)
            answer = await ask(vllm, messages=messages, model=loaded.name)
            assert answer.status == 200, answer.body
            assert answer.body["model"] == loaded.name
            texts.append(answer.text)
    assert texts[0] == texts[1] != (await ask(vllm, messages=messages)).text


async def test_a_more_urgent_request_is_answered_first(vllm: EngineProcess) -> None:
    """While the engine works on a long batch, two requests wait. The later one is more urgent."""
    assert "--scheduling-policy" in vllm.record.command.arguments
    ended: list[str] = []

    async def answer(name: str, priority: str, **fields: Any) -> None:
        values = {"model": "smol", "messages": user(name), "temperature": 0, **fields}
        done = await post(vllm, CHAT_PATH, msgspec.json.encode(values), name, priority)
        assert done.status == 200, done.body
        ended.append(name)

    async with asyncio.TaskGroup() as tasks:
        for number in range(280):  # more than the 256 sequences of a step
            tasks.create_task(answer(f"load {number}", "50", max_tokens=8, ignore_eos=True))
        while ((await vllm.stats()) or pytest.fail("no statistics")).waiting == 0:
            await asyncio.sleep(0.01)
        tasks.create_task(answer("patient", "10", max_tokens=8, ignore_eos=True))
        tasks.create_task(answer("urgent", "50", max_tokens=8, ignore_eos=True))
    assert ended.index("urgent") < ended.index("patient")
    assert ended[-1] == "patient"


async def test_the_planned_kv_memory_is_what_it_uses(vllm: EngineProcess) -> None:
    assert "Explicitly set (0.25" in vllm.log.read_text(errors="replace")


async def test_its_threads_are_those_of_the_agents_settings(vllm: EngineProcess) -> None:
    """With its own binding a second replica would use the same cores."""
    assert "VLLM_CPU_OMP_THREADS_BIND='nobind'" in vllm.log.read_text(errors="replace")
    assert vllm.record.command.environment["OMP_NUM_THREADS"] == "2"


async def test_the_first_log_probabilities_wait_for_no_compiler(vllm: EngineProcess) -> None:
    """vLLM compiled a part of its sampler for them, and all requests waited."""
    assert "TORCH_COMPILE_DISABLE is set" in vllm.log.read_text(errors="replace")
    answer = await ask(vllm, messages=user("Rain?"), logprobs=True, top_logprobs=2)
    assert answer.status == 200, answer.body


async def test_a_resumed_answer_is_not_promised_to_be_the_same(vllm: EngineProcess) -> None:
    assert vllm.driver.resumes == headers.INEXACT


async def test_a_client_that_disconnects_frees_its_place(vllm: EngineProcess) -> None:
    fields = {"model": "smol", "messages": user("Tell a story."), "stream": True}
    body = msgspec.json.encode({**fields, "max_tokens": 1500, "ignore_eos": True})
    async with vllm.http.post(CHAT_PATH, data=body, headers=JSON) as response:
        await response.content.readany()
        stats = await vllm.stats()
        assert stats is not None
        assert stats.running == 1
    async with asyncio.timeout(EXIT_S):
        while (await vllm.stats() or stats).running:
            await asyncio.sleep(0.1)


async def test_a_killed_server_leaves_no_process_and_no_file(vllm: EngineProcess) -> None:
    """Last in this module. The engine core and the worker outlive a killed API server."""
    temporary = Path(vllm.record.command.environment["TMPDIR"])
    assert any(path.is_socket() for path in temporary.iterdir())
    assert not sockets_elsewhere(vllm), "sockets outside the engine's folder"
    before = group_members(vllm.pid)
    assert len(before) >= 3, "API server, engine core and worker"
    os.kill(vllm.pid, signal.SIGKILL)
    async with asyncio.timeout(EXIT_S):
        await vllm.exited.wait()
    assert vllm.exit_reason == "the engine was killed by SIGKILL"
    await vllm.stop(kill=True)
    await until(
        lambda: not any(is_running(pid) for pid in before),
        EXIT_S,
        lambda: f"processes {[pid for pid in before if is_running(pid)]} are left",
    )
    assert group_members(vllm.pid) == []
    assert not temporary.exists()
    assert not vllm.log.parent.exists()


def sockets_elsewhere(engine: EngineProcess) -> set[str]:
    """Return the paths of Unix sockets of the engine's processes outside its own folder."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = {fields[6]: fields[7] for fields in lines if len(fields) > 7}
    found = set()
    for pid in group_members(engine.pid):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inode = str(descriptor.readlink()).removeprefix("socket:[").rstrip("]")
                found.add(paths.get(inode, ""))
    own = str(engine.log.parent)
    return {path for path in found if path.startswith("/") and not path.startswith(own)}
