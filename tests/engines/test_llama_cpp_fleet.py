"""Two llama.cpp servers on one node of a whole fleet: our agent's supervisor runs them.

The tests are in the order of one story, from the first start to the last drain.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio

from nodeagent.drivers.driver import read_prometheus
from nodeagent.host.engines.engine_record import EngineRecord
from tests.builders import GIB
from tests.engines.real_engines import (
    EXIT_S,
    LLAMA_CPP_COMMANDS,
    LLAMA_CPP_MODEL,
    READY_S,
    group_members,
    is_running,
    needs_llama_cpp,
)
from tests.engines.test_vllm_fleet import NODE, StreamEnd, add_model, chat, post, records
from tests.system.harness import Fleet, a_fleet, until

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
    "policy": {"replicas_min": 2, "replicas_max": 2, "allow": ["ams"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet() -> AsyncIterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{LLAMA_CPP_COMMANDS}:{os.environ['PATH']}")
        async with a_fleet(comes_up=False, in_memory=False) as running:
            running.settings[NODE] = {"cpu_memory_bytes": 4 * GIB, "engine_threads": 2}
            running.settings["router-ams"] = {"stream_idle_timeout_s": 8.0}
            await running.up()
            await add_model(running, "smol", LLAMA_CPP_MODEL)
            await running.ask("POST", "/v1/deployments", DEPLOYMENT)
            await until("two replicas are warm", lambda: running.is_warm(2), READY_S)
            await running.routers_know()
            yield running


async def busy_engine(fleet: Fleet) -> EngineRecord:
    """Return the engine that processes a request, once there is one."""

    async def find() -> EngineRecord | None:
        for record in records(fleet).values():
            connector = aiohttp.UnixConnector(record.command.socket)
            async with (
                aiohttp.ClientSession(connector=connector) as http,
                http.get("http://localhost/metrics") as response,
            ):
                if read_prometheus(await response.read()).get("llamacpp:requests_processing"):
                    return record
        return None

    found: EngineRecord = await until("an engine works", find)
    return found


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
    before = records(fleet)
    began = asyncio.Event()
    fields = {"max_tokens": 250, "ignore_eos": True}
    answer = asyncio.create_task(chat(fleet, "Tell a long story.", began, **fields))
    async with asyncio.timeout(EXIT_S):
        await began.wait()
    broken = await busy_engine(fleet)
    os.kill(broken.pid, number)
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
    assert not is_running(broken.pid)
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
    """The last line of the log says only that the server ends."""
    folder = fleet.folder / "truncated"
    shutil.copytree(LLAMA_CPP_MODEL, folder)
    (weights,) = folder.glob("*.gguf")
    weights.write_bytes(weights.read_bytes()[: 50 << 20])
    await add_model(fleet, "broken", folder)
    one = {"replicas_min": 1, "replicas_max": 1, "allow": ["ams"]}
    broken = {**DEPLOYMENT, "deployment_id": "broken", "model_id": "broken", "policy": one}
    before = records(fleet)
    await fleet.ask("POST", "/v1/deployments", broken)

    async def explained() -> str:
        here = (await fleet.ask("GET", "/v1/deployments/broken/explain"))["here"]
        return next((str(row["state_reason"]) for row in here if row["state_reason"]), "")

    reason = await until("the reason is known", explained, READY_S)
    assert "not within the file bounds" in reason, reason
    await fleet.ask("DELETE", "/v1/deployments/broken")

    async def is_gone() -> bool:
        return records(fleet).keys() == before.keys()

    await until("it has ended", is_gone, EXIT_S)
    assert records(fleet) == before


async def test_a_drained_replica_finishes_its_answers_and_leaves_no_process(fleet: Fleet) -> None:
    pids = [pid for record in records(fleet).values() for pid in group_members(record.pid)]
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
        return not records(fleet) and not any(is_running(pid) for pid in pids)

    await until("no process is left", are_gone, EXIT_S)
