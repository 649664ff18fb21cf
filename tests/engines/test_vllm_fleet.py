"""Two vLLM replicas on one node of a whole fleet: our agent's supervisor runs them.

The tests are in the order of one story, from the first start to the last drain. They take about
four minutes and 8 GB of memory.
"""

import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from nodeagent.host.engines.engine_record import EngineRecord
from tests.builders import GIB
from tests.engines.real_engines import MODEL, VLLM_COMMANDS, group_members, needs_vllm
from tests.engines.vendor_fleet import (
    NODE,
    TWO_REPLICAS,
    a_vendor_fleet,
    chat,
    check_a_broken_stream_is_resumed,
    check_a_drained_replica_finishes,
    check_a_restarted_agent_adopts,
    check_a_truncated_model_is_explained,
    post,
    records,
)
from tests.system.harness import Fleet

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="session")]

LONG_PROMPT: Final = "Name the colours of the rainbow, in their order. " * 40
KV_BYTES: Final = GIB // 4
DEPLOYMENT: Final = {
    "deployment_id": "smol",
    "model_id": "smol",
    "engine": {"driver": "vllm", "kv_memory_bytes": KV_BYTES, "context_tokens_max": 2048},
    "policy": TWO_REPLICAS,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet() -> AsyncIterator[Fleet]:
    async with a_vendor_fleet(VLLM_COMMANDS, MODEL, DEPLOYMENT, memory_gib=12) as running:
        yield running


def processes_named(group: int, name: str) -> list[int]:
    """Return the processes of an engine whose title has `name`, such as EngineCore or Worker."""
    found = []
    for pid in group_members(group):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        if name.encode() in title:
            found.append(pid)
    return found


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
    def victim(record: EngineRecord) -> int:
        (pid,) = processes_named(record.pid, name)
        return pid

    await check_a_broken_stream_is_resumed(fleet, "vllm:num_requests_running", number, victim)


async def test_engines_are_adopted_by_a_restarted_agent(fleet: Fleet) -> None:
    await check_a_restarted_agent_adopts(fleet)


async def test_the_error_of_an_engine_that_cannot_load_is_explained(fleet: Fleet) -> None:
    await check_a_truncated_model_is_explained(
        fleet, MODEL, "model.safetensors", 1 << 20, DEPLOYMENT, "SafetensorError"
    )


async def test_a_drained_replica_finishes_its_answers_and_leaves_no_process(fleet: Fleet) -> None:
    await check_a_drained_replica_finishes(fleet)
