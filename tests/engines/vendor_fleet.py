"""A whole fleet with a vendor's engines on its one node, and what they must do on any engine.

The parts of the stories in test_vllm_fleet.py and test_llama_cpp_fleet.py that are the same.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import pytest

from isochrone.cli.manifest import artifact_of, config_values
from nodeagent.drivers.driver import read_prometheus
from nodeagent.host.engines.engine_record import EngineRecord
from router.pipeline import RESUMED_COMMENT
from tests.builders import GIB
from tests.engines.real_engines import EXIT_S, READY_S, group_members, is_running
from tests.system.harness import Fleet, a_fleet, until

NODE: Final = "node-ams"
ONE_REPLICA: Final = {"replicas_min": 1, "replicas_max": 1, "allow": ["ams"]}
TWO_REPLICAS: Final = {"replicas_min": 2, "replicas_max": 2, "allow": ["ams"]}

STORY_TOKENS: Final = 400
"""A fast engine takes two seconds to write them."""


@asynccontextmanager
async def a_vendor_fleet(
    commands: Path,
    model: Path,
    deployment: dict[str, Any],
    memory_gib: int,
    settings: dict[str, dict[str, Any]] | None = None,
) -> AsyncIterator[Fleet]:
    """Run a fleet whose replicas are warm and known; `commands` has the engine's programs.

    `settings` are those of its processes, by their names.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
        async with a_fleet(comes_up=False, in_memory=False) as fleet:
            fleet.settings[NODE] = {"cpu_memory_bytes": memory_gib * GIB, "engine_threads": 2}
            fleet.settings["router-ams"] = {"stream_idle_timeout_s": 8.0}
            fleet.settings |= settings or {}
            await fleet.up()
            await add_model(fleet, deployment["model_id"], model)
            await fleet.ask("POST", "/v1/deployments", deployment)
            await fleet.until_warm(READY_S, deployment["policy"]["replicas_min"])
            yield fleet


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


async def busy_engine(fleet: Fleet, gauge: str) -> EngineRecord:
    """Return the engine that processes a stream by its `gauge`.

    While the agent tests another engine, that one is busy, too: then it looks again.
    """

    async def find() -> EngineRecord | None:
        busy = []
        for record in records(fleet).values():
            socket = record.command.socket
            connector = aiohttp.UnixConnector(socket) if socket else None
            url = "http://localhost" if socket else record.command.base_url
            async with (
                aiohttp.ClientSession(connector=connector) as http,
                http.get(f"{url}/metrics") as response,
            ):
                if read_prometheus(await response.read()).get(gauge):
                    busy.append(record)
        return busy[0] if len(busy) == 1 else None

    found: EngineRecord = await until("an engine works", find)
    return found


class StreamEnd(NamedTuple):
    """What a client received: the text, the last usage, and whether the stream was complete."""

    text: str
    usage: dict[str, Any]
    has_comment: bool
    is_done: bool


async def chat(
    fleet: Fleet, prompt: str, began: asyncio.Event | None = None, **fields: Any
) -> StreamEnd:
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


async def post(fleet: Fleet, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a request's answer."""
    body = {"model": "smol", "messages": [{"role": "user", "content": "Rain?"}], **fields}
    sent = {"authorization": f"Bearer {fleet.key}"}
    url = f"{fleet.endpoint('ams')}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=sent) as response:
        return response.status, await response.json()


async def begin_chat(fleet: Fleet, prompt: str, tokens: int) -> asyncio.Task[StreamEnd]:
    """Return a stream of so many tokens, some of which have come."""
    began = asyncio.Event()
    answer = asyncio.create_task(chat(fleet, prompt, began, max_tokens=tokens, ignore_eos=True))
    async with asyncio.timeout(EXIT_S):
        await began.wait()
    return answer


async def check_a_broken_stream_is_resumed(
    fleet: Fleet, gauge: str, number: signal.Signals, victim: Callable[[EngineRecord], int]
) -> None:
    """Break the engine of a stream with a signal to its process `victim`.

    The answer goes on at the other replica, which the client is told. The engine is replaced.
    """
    before = records(fleet)
    answer = await begin_chat(fleet, "Tell a long story.", STORY_TOKENS)
    broken = await busy_engine(fleet, gauge)
    pids = group_members(broken.pid)
    os.kill(victim(broken), number)
    async with asyncio.timeout(READY_S):
        end = await answer
    assert (end.is_done, end.has_comment) == (True, True)
    assert end.usage["completion_tokens"] >= STORY_TOKENS - 10
    assert "cached_tokens" in end.usage["prompt_tokens_details"]

    async def is_replaced() -> bool:
        now = records(fleet).get(broken.spec.replica_id)
        return now is not None and now.pid != broken.pid and await fleet.is_warm(2)

    await until("the engine is replaced", is_replaced, READY_S)
    assert not [pid for pid in pids if is_running(pid)], "processes of the broken engine are left"
    (other,) = before.keys() - {broken.spec.replica_id}
    assert records(fleet)[other] == before[other], "the neighbour was not disturbed"
    await fleet.routers_know()


async def check_a_restarted_agent_adopts(fleet: Fleet) -> None:
    """Kill the agent: the engines run on, and the next agent adopts them."""
    before = records(fleet)
    await fleet.kill(NODE)
    assert all(group_members(record.pid) for record in before.values())
    await fleet.start_node("ams")

    await until("both are warm again", lambda: fleet.is_warm(2), READY_S)
    assert records(fleet) == before
    answers = [await chat(fleet, f"Question {n}: what is rain?", max_tokens=8) for n in range(3)]
    assert all(answer.is_done for answer in answers)


async def check_a_truncated_model_is_explained(
    fleet: Fleet, model: Path, weights: str, kept_bytes: int, deployment: dict[str, Any], why: str
) -> None:
    """Deploy a copy of `model` whose `weights` are cut off; the reason must have `why`.

    The last line of the log is not the reason: it says only that the engine ends.
    """
    folder = fleet.folder / "truncated"
    shutil.copytree(model, folder)
    (file,) = folder.glob(weights)
    file.write_bytes(file.read_bytes()[:kept_bytes])
    await add_model(fleet, "broken", folder)
    name = {"deployment_id": "broken", "model_id": "broken", "policy": ONE_REPLICA}
    before = records(fleet)
    await fleet.ask("POST", "/v1/deployments", {**deployment, **name})

    async def explained() -> str:
        here = (await fleet.ask("GET", "/v1/deployments/broken/explain"))["here"]
        return next((str(row["state_reason"]) for row in here if row["state_reason"]), "")

    reason = await until("the reason is known", explained, READY_S)
    assert why in reason, reason
    await fleet.ask("DELETE", "/v1/deployments/broken")

    async def is_gone() -> bool:
        return records(fleet).keys() == before.keys()

    await until("it has ended", is_gone, EXIT_S)
    assert records(fleet) == before


async def check_a_drained_replica_finishes(fleet: Fleet) -> None:
    """Delete the deployment during an answer: that is finished, and no process is left."""
    pids = [pid for record in records(fleet).values() for pid in group_members(record.pid)]
    answer = await begin_chat(fleet, "Tell a story.", 60)
    await fleet.ask("DELETE", "/v1/deployments/smol")
    end = await answer
    assert (end.is_done, end.has_comment) == (True, False)
    assert end.usage["completion_tokens"] == 60

    async def are_gone() -> bool:
        return not records(fleet) and not any(is_running(pid) for pid in pids)

    await until("no process is left", are_gone, EXIT_S)
