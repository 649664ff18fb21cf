"""Two llama.cpp servers on one node of a whole fleet: our agent's supervisor runs them.

The tests are in the order of one story, from the first start to the last drain.
"""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from tests.builders import GIB
from tests.engines.real_engines import LLAMA_CPP_COMMANDS, LLAMA_CPP_MODEL, needs_llama_cpp
from tests.engines.vendor_fleet import (
    TWO_REPLICAS,
    a_vendor_fleet,
    check_a_broken_stream_is_resumed,
    check_a_drained_replica_finishes,
    check_a_restarted_agent_adopts,
    check_a_truncated_model_is_explained,
    post,
    records,
)
from tests.system.harness import Fleet

pytestmark = [needs_llama_cpp, pytest.mark.asyncio(loop_scope="session")]

SLOTS: Final = 4
DEPLOYMENT: Final = {
    "deployment_id": "smol",
    "model_id": "smol",
    "engine": {
        "driver": "llama_cpp",
        "context_tokens_max": 2048,
        # 23,040 bytes a token.
        "kv_memory_bytes": SLOTS * 2048 * 23_040,
    },
    "policy": TWO_REPLICAS,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet() -> AsyncIterator[Fleet]:
    async with a_vendor_fleet(
        LLAMA_CPP_COMMANDS, LLAMA_CPP_MODEL, DEPLOYMENT, memory_gib=4
    ) as running:
        yield running


async def test_two_replicas_share_a_node_within_their_planned_memory(fleet: Fleet) -> None:
    engines = records(fleet).values()
    assert len(engines) == 2
    assert sum(record.spec.memory_bytes for record in engines) <= 4 * GIB
    for record in engines:
        arguments = record.command.arguments
        assert arguments[arguments.index("--parallel") + 1] == str(SLOTS)
        assert arguments[arguments.index("--ctx-size") + 1] == str(SLOTS * 2048)
        memory_bytes = rss_bytes(record.pid)
        assert memory_bytes < record.spec.memory_bytes, "more than the planner counts"


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": [{"role": "user", "content": "rain " * 5000}]}, "context_length_exceeded"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_request"),
        ({"n": SLOTS + 1}, "invalid_request"),
        ({"repeat_last_n": 2**31 - 1, "repeat_penalty": 1.1}, "invalid_request"),
        ({"model": "smol:adapter"}, "adapters_unsupported"),
        # The engine would abort.
        ({"grammar": 'root ::= "a" [b-a]', "top_k": 1}, "invalid_request"),
    ],
)
async def test_an_error_of_the_engine_has_a_code_for_programs(
    fleet: Fleet, fields: dict[str, Any], code: str
) -> None:
    status, body = await post(fleet, **{"max_tokens": 4, **fields})
    assert (400 <= status < 500, body["error"]["code"]) == (True, code), body


async def test_an_answer_ends_at_the_limit_that_the_router_has_checked(fleet: Fleet) -> None:
    """Not at a second name of it, which only the engine knows."""
    status, body = await post(fleet, max_tokens=3, n_predict=40, n_cmpl=2, ignore_eos=True)
    assert status == 200, body
    assert (body["usage"]["completion_tokens"], len(body["choices"])) == (3, 1)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP], ids=["a killed engine", "a hung engine"]
)
async def test_a_broken_stream_is_resumed_and_the_engine_replaced(
    fleet: Fleet, number: signal.Signals
) -> None:
    gauge = "llamacpp:requests_processing"
    await check_a_broken_stream_is_resumed(fleet, gauge, number, lambda record: record.pid)


async def test_engines_are_adopted_by_a_restarted_agent(fleet: Fleet) -> None:
    await check_a_restarted_agent_adopts(fleet)


async def test_the_error_of_an_engine_that_cannot_load_is_explained(fleet: Fleet) -> None:
    await check_a_truncated_model_is_explained(
        fleet, LLAMA_CPP_MODEL, "*.gguf", 50 << 20, DEPLOYMENT, "not within the file bounds"
    )


async def test_a_drained_replica_finishes_its_answers_and_leaves_no_process(fleet: Fleet) -> None:
    await check_a_drained_replica_finishes(fleet)
