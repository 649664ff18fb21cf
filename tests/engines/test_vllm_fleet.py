"""Two vLLM replicas on one node of a whole fleet: our agent's supervisor runs them.

The tests are in the order of one story, from the first start to the last drain. They take about
four minutes and 8 GB of memory.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from isochrone.cli.manifest import artifact_of, config_values
from nodeagent.drivers.driver import read_prometheus
from nodeagent.host.engines.engine_record import EngineRecord
from router.pipeline import RESUMED_COMMENT
from tests.builders import GIB
from tests.engines.real_engines import (
    EXIT_S,
    MODEL,
    READY_S,
    VLLM_COMMANDS,
    group_members,
    is_running,
    needs_vllm,
)
from tests.system.harness import Fleet, a_fleet, until

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="session")]

NODE: Final = "node-ams"
LONG_PROMPT: Final = "Name the colours of the rainbow, in their order. " * 40
KV_BYTES: Final = GIB // 4
DEPLOYMENT: Final = {
    "deployment_id": "smol",
    "model_id": "smol",
    "engine": {"driver": "vllm", "kv_memory_bytes": KV_BYTES, "context_tokens_max": 2048},
    "policy": {"replicas_min": 2, "replicas_max": 2, "allow": ["ams"]},
}


class StreamEnd(NamedTuple):
    """What a client received: the text, the last usage, and whether the stream was complete."""

    text: str
    usage: dict[str, Any]
    has_comment: bool
    is_done: bool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet() -> AsyncIterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{VLLM_COMMANDS}:{os.environ['PATH']}")
        async with a_fleet(comes_up=False, in_memory=False) as running:
            running.settings[NODE] = {"cpu_memory_bytes": 12 * GIB, "engine_threads": 2}
            running.settings["router-ams"] = {"stream_idle_timeout_s": 8.0}
            await running.up()
            await add_model(running, "smol", MODEL)
            await running.ask("POST", "/v1/deployments", DEPLOYMENT)
            await until("two replicas are warm", lambda: running.is_warm(2), READY_S)
            await running.routers_know()
            yield running


async def add_model(fleet: Fleet, name: str, folder: Path) -> None:
    artifact = artifact_of(folder, f"file:{folder}")
    size = {"weights_bytes": artifact.size_bytes, "artifact": msgspec.to_builtins(artifact)}
    model = {"model_id": name, **config_values(folder), **size}
    await fleet.ask("PUT", f"/v1/models/{name}", model)


def records(fleet: Fleet) -> dict[str, EngineRecord]:
    """Return the node's engines by replica id."""
    paths = (fleet.folder / NODE / "engines").glob("*/process.json")
    found = [msgspec.json.decode(path.read_bytes(), type=EngineRecord) for path in paths]
    return {record.spec.replica_id: record for record in found if record.pid}


async def busy_engine(fleet: Fleet) -> EngineRecord:
    """Return the engine that processes a request, once there is one."""

    async def find() -> EngineRecord | None:
        for record in records(fleet).values():
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"{record.command.base_url}/metrics") as response,
            ):
                if read_prometheus(await response.read()).get("vllm:num_requests_running"):
                    return record
        return None

    found: EngineRecord = await until("an engine works", find)
    return found


def processes_named(group: int, name: str) -> list[int]:
    """Return the processes of an engine whose title has `name`, such as EngineCore or Worker."""
    found = []
    for pid in group_members(group):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        if name.encode() in title:
            found.append(pid)
    return found


async def chat(fleet: Fleet, prompt: str, began: asyncio.Event | None = None, **fields: Any) -> Any:
    """Stream an answer; set `began` after some tokens."""
    body = {
        "model": "smol",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    sent = {"authorization": f"Bearer {fleet.key}", "x-session-affinity": "s1"}
    url = f"{fleet.endpoint('ams')}/v1/chat/completions"
    usage: dict[str, Any] = {}
    text, has_comment, is_done, frames = "", False, False, 0
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=sent) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            has_comment |= line.strip() == RESUMED_COMMENT.strip()
            data = line.strip().removeprefix(b"data: ")
            if not line.startswith(b"data: "):
                continue
            if data == b"[DONE]":
                is_done = True
                continue
            frame = msgspec.json.decode(data)
            assert "error" not in frame, frame
            usage = frame.get("usage") or usage
            for choice in frame["choices"]:
                text += choice["delta"].get("content") or ""
                frames += 1
            if began is not None and frames == 8:
                began.set()
    return StreamEnd(text, usage, has_comment, is_done)


async def test_two_replicas_share_a_node_within_their_planned_memory(fleet: Fleet) -> None:
    rows = (await fleet.ask("GET", "/v1/placements"))["data"]
    assert [row["node_id"] for row in rows] == ["ams-1", "ams-1"]
    engines = records(fleet)
    assert len(engines) == 2
    assert sum(record.spec.memory_bytes for record in engines.values()) <= 12 * GIB
    for replica_id, record in engines.items():
        arguments = record.command.arguments
        assert arguments[arguments.index("--kv-cache-memory-bytes") + 1] == str(KV_BYTES)
        log = fleet.folder / NODE / "engines" / replica_id / "engine.log"
        assert "Explicitly set (0.25" in log.read_text(errors="replace")
        assert len(group_members(record.pid)) >= 3


async def test_cached_tokens_are_in_the_usage_of_each_answer(fleet: Fleet) -> None:
    counts = []
    for _ in range(2):
        end = await chat(fleet, LONG_PROMPT, max_tokens=2)
        counts.append(end.usage["prompt_tokens_details"]["cached_tokens"])
    assert counts[0] == 0
    assert counts[1] >= 128


async def post(fleet: Fleet, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a request's answer."""
    body = {"model": "smol", "messages": [{"role": "user", "content": "Rain?"}], **fields}
    sent = {"authorization": f"Bearer {fleet.key}"}
    url = f"{fleet.endpoint('ams')}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=sent) as response:
        return response.status, await response.json()


async def test_a_model_whose_template_has_no_tools_takes_requests_with_tools(fleet: Fleet) -> None:
    tool = {"name": "rain", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": tool}]
    for choice in ("auto", "required"):
        status, body = await post(fleet, tools=tools, tool_choice=choice, max_tokens=24)
        assert status == 200, body
        (answer,) = body["choices"]
        assert answer["finish_reason"] in ("stop", "length", "tool_calls")


async def test_an_error_of_the_engine_has_a_code_for_programs(fleet: Fleet) -> None:
    for fields, code in (
        ({"max_tokens": 100_000}, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "rain " * 5000}]}, "context_length_exceeded"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_request"),
    ):
        status, body = await post(fleet, **{"max_tokens": 4, **fields})
        assert (status, body["error"]["code"]) == (400, code), body
        assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "number"),
    [("EngineCore", signal.SIGKILL), ("Worker", signal.SIGSTOP)],
    ids=["a killed engine core", "a hung worker"],
)
async def test_a_broken_stream_is_resumed_and_the_engine_replaced(
    fleet: Fleet, name: str, number: signal.Signals
) -> None:
    """The answer goes on at the other replica, which the client is told: bf16 is not exact."""
    before = records(fleet)
    began = asyncio.Event()
    fields = {"max_tokens": 250, "ignore_eos": True}
    answer = asyncio.create_task(chat(fleet, "Tell a long story.", began, **fields))
    async with asyncio.timeout(EXIT_S):
        await began.wait()
    broken = await busy_engine(fleet)
    pids = group_members(broken.pid)
    (victim,) = processes_named(broken.pid, name)
    os.kill(victim, number)
    async with asyncio.timeout(READY_S):
        end: StreamEnd = await answer
    assert end.is_done
    assert end.has_comment
    assert end.usage["completion_tokens"] >= 240
    assert "cached_tokens" in end.usage["prompt_tokens_details"]

    async def is_replaced() -> bool:
        now = records(fleet).get(broken.spec.replica_id)
        return now is not None and now.pid != broken.pid and await fleet.is_warm(2)

    await until("the engine is replaced", is_replaced, READY_S)
    assert not [pid for pid in pids if is_running(pid)], "processes of the broken engine are left"
    (other,) = before.keys() - {broken.spec.replica_id}
    assert records(fleet)[other] == before[other], "the neighbour was not disturbed"
    await fleet.routers_know()


async def test_engines_are_adopted_by_a_restarted_agent(fleet: Fleet) -> None:
    before = records(fleet)
    await fleet.kill(NODE)
    assert all(group_members(record.pid) for record in before.values())
    await fleet.start_node("ams")

    await until("both are warm again", lambda: fleet.is_warm(2), READY_S)
    assert records(fleet) == before
    answers = [await chat(fleet, f"Question {n}: what is rain?", max_tokens=8) for n in range(3)]
    assert all(answer.is_done for answer in answers)


async def test_the_error_of_an_engine_that_cannot_load_is_explained(fleet: Fleet) -> None:
    """Its worker fails. The last lines of the log say only that the engine core did not start."""
    folder = fleet.folder / "truncated"
    shutil.copytree(MODEL, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 20])
    await add_model(fleet, "broken", folder)
    one = {"replicas_min": 1, "replicas_max": 1, "allow": ["ams"]}
    broken = {**DEPLOYMENT, "deployment_id": "broken", "model_id": "broken", "policy": one}
    before = records(fleet)
    await fleet.ask("POST", "/v1/deployments", broken)

    async def explained() -> str:
        here = (await fleet.ask("GET", "/v1/deployments/broken/explain"))["here"]
        return next((str(row["state_reason"]) for row in here if row["state_reason"]), "")

    reason = await until("the reason is known", explained, READY_S)
    assert "SafetensorError" in reason, reason
    await fleet.ask("DELETE", "/v1/deployments/broken")

    async def is_gone() -> bool:
        return records(fleet).keys() == before.keys()

    await until("it has ended", is_gone, EXIT_S)
    assert records(fleet) == before


async def test_a_drained_replica_finishes_its_answers_and_leaves_no_process(fleet: Fleet) -> None:
    engines = records(fleet)
    pids = [pid for record in engines.values() for pid in group_members(record.pid)]
    began = asyncio.Event()
    answer = asyncio.create_task(
        chat(fleet, "Tell a story.", began, max_tokens=60, ignore_eos=True)
    )
    async with asyncio.timeout(EXIT_S):
        await began.wait()
    await fleet.ask("DELETE", "/v1/deployments/smol")
    end = await answer
    assert end.is_done
    assert not end.has_comment
    assert end.usage["completion_tokens"] == 60

    async def are_gone() -> bool:
        return not any(is_running(pid) for pid in pids)

    await until("no process is left", are_gone, EXIT_S)
    assert records(fleet) == {}
