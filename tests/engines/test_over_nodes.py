"""A real vLLM over three nodes of a PoP: a third of the heads on each, two parts headless.

CI leaves it out, because the parts start for a minute: `pytest tests/engines` runs it.
"""

import os
import signal
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from isochrone.cli.manifest import artifact_of, config_values
from nodeagent.host.engines.engine_record import EngineRecord
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
from tests.ports import free_port
from tests.system.harness import CITIES, Fleet, a_fleet, until

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="session")]

NODES: Final = ("node-ams", "node-ams-2", "node-ams-3")
"""As many as the model has heads of keys and values."""

DEPLOYMENT: Final = {
    "deployment_id": "smol",
    "model_id": "smol",
    "engine": {
        "driver": "vllm",
        "kv_memory_bytes": GIB // 4,
        "context_tokens_max": 1024,
        "devices": 3,
        "nodes": 3,
    },
    "policy": {"replicas_min": 1, "replicas_max": 1, "allow": ["ams"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet() -> AsyncIterator[Fleet]:
    """Three nodes in Amsterdam, and the replica that spans them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{VLLM_COMMANDS}:{os.environ['PATH']}")
        async with a_fleet(comes_up=False, in_memory=False) as running:
            await start(running)
            yield running


async def start(fleet: Fleet) -> None:
    await fleet.start_postgres()
    await fleet.start_scheduler("a")
    await until("it acts", fleet.acts)
    country, latitude, longitude = CITIES["ams"]
    place = {"city": "ams", "country": country, "latitude": latitude, "longitude": longitude}
    await fleet.ask("PUT", "/v1/pops/ams", place)
    for number in (1, 2, 3):
        port = free_port()
        settings = {"plaintext_rank_ports": [port, port], "engine_threads": 1}
        await fleet.start_node("ams", number, cpu_memory_bytes=6 * GIB, **settings)
    await fleet.start_router("ams")
    fleet.key = (await fleet.ask("POST", "/v1/keys", {"tenant_id": "test"}))["key"]
    artifact = artifact_of(MODEL, f"file:{MODEL}")
    size = {"weights_bytes": artifact.size_bytes, "artifact": msgspec.to_builtins(artifact)}
    model = {"model_id": "smol", **config_values(MODEL), **size}
    await fleet.ask("PUT", "/v1/models/smol", model)
    await fleet.ask("POST", "/v1/deployments", DEPLOYMENT)
    await until("the replica is warm", lambda: fleet.is_warm(3), READY_S)
    await fleet.routers_know()


def parts(fleet: Fleet) -> list[EngineRecord]:
    """Return the engine processes of both nodes, the leader's first."""
    paths = [
        path for node in NODES for path in (fleet.folder / node).glob("engines/*/process.json")
    ]
    found = [msgspec.json.decode(path.read_bytes(), type=EngineRecord) for path in paths]
    running = [record for record in found if record.pid]
    return sorted(running, key=lambda record: not record.spec.leads)


async def answer(fleet: Fleet) -> dict[str, Any]:
    """Return the body of the answer to one question."""
    body = {
        "model": "smol",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 12,
    }
    sent = {"authorization": f"Bearer {fleet.key}"}
    url = f"{fleet.endpoint('ams')}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=sent) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def test_a_replica_over_nodes_answers(fleet: Fleet) -> None:
    leader, *others = parts(fleet)
    assert [one.spec.leads for one in (leader, *others)] == [True, False, False]
    line = " ".join(leader.command.arguments)
    assert "--tensor-parallel-size 3" in line and "--nnodes 3 --node-rank 0" in line
    assert all("--headless" in other.command.arguments for other in others)
    found = await answer(fleet)
    assert "Paris" in found["choices"][0]["message"]["content"], found


async def test_a_part_that_is_killed_takes_the_replica_with_it_and_all_start_again(
    fleet: Fleet,
) -> None:
    before = parts(fleet)
    pids = [pid for record in before for pid in group_members(record.pid)]
    os.killpg(before[1].pid, signal.SIGKILL)

    async def is_back() -> bool:
        now = parts(fleet)
        changed = len(now) == 3 and {one.pid for one in now}.isdisjoint(one.pid for one in before)
        return changed and await fleet.is_warm(3)

    await until("all parts are new", is_back, READY_S)
    assert not [pid for pid in pids if is_running(pid)]
    await fleet.routers_know()
    assert "Paris" in (await answer(fleet))["choices"][0]["message"]["content"]


async def test_all_parts_end_with_the_deployment(fleet: Fleet) -> None:
    pids = [pid for record in parts(fleet) for pid in group_members(record.pid)]
    assert len(pids) >= 6
    await fleet.ask("DELETE", "/v1/deployments/smol")

    async def are_gone() -> bool:
        return not any(is_running(pid) for pid in pids)

    await until("no process is left", are_gone, EXIT_S)
