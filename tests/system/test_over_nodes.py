"""A model over two nodes of a PoP: same answers, and its parts start and fail together."""

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from isochrone.cli.manifest import artifact_of
from ops.golden import tiny
from tests.integration.engine.conftest import end, launch, wait_ready
from tests.ports import free_port
from tests.system.harness import CITIES, Fleet, a_fleet, until

ASKED = [{"prompt": prompt, "temperature": 0, "max_tokens": 12} for prompt in ([3, 5, 8], [1, 9])]
KV_BYTES = 4 << 20
OVERHEAD_BYTES = 256 << 20
ENDED_S = 10.0
WARM_S = 120.0
"""Two processes load torch at once, while other suites use the machine."""


async def alone(model: Path, folder: Path) -> list[str]:
    """Return the answer of a single process."""
    folder.mkdir()
    process = launch(folder, model_path=str(model), served_name="large", threads=1)
    try:
        engine = await asyncio.to_thread(wait_ready, process, folder)
        async with engine.session() as http:
            return [await text_of(http, "/v1/completions", body) for body in ASKED]
    finally:
        await asyncio.to_thread(end, process)


async def text_of(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    async with http.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        text: str = (await response.json())["choices"][0]["text"]
        return text


async def two_small_nodes_and_another_city(fleet: Fleet, weights: int) -> None:
    await fleet.start_postgres()
    await fleet.start_scheduler("a")
    await until("it acts", fleet.acts)
    for pop, (country, latitude, longitude) in CITIES.items():
        body = {"city": pop, "country": country, "latitude": latitude, "longitude": longitude}
        await fleet.ask("PUT", f"/v1/pops/{pop}", body)
    first = free_port()
    small = {
        "cpu_memory_bytes": OVERHEAD_BYTES + KV_BYTES + weights * 3 // 4,
        "plaintext_rank_ports": [first, first],
        "engine_threads": 1,
    }
    await asyncio.gather(
        fleet.start_node("ams", 1, **small),
        fleet.start_node("ams", 2, **small),
        fleet.start_node("sin"),
        fleet.start_router("sin"),
    )
    fleet.key = (await fleet.ask("POST", "/v1/keys", {"tenant_id": "test"}))["key"]


async def deployed(fleet: Fleet, model: Path, weights: int, nodes: int) -> None:
    """Deploy the model in Amsterdam, on this many nodes."""
    engine = {
        "driver": "embedded",
        "kv_memory_bytes": KV_BYTES,
        "devices": nodes,
        "nodes": nodes,
        "context_tokens_max": 128,
    }
    policy = {"replicas_min": 1, "replicas_max": 1, "allow": ["ams"]}
    deployment = {"model_id": "large", "engine": engine, "policy": policy}
    if nodes == 1:
        catalogued = {
            "model_id": "large",
            "architecture": "Qwen3MoeForCausalLM",
            "artifact": msgspec.to_builtins(artifact_of(model, f"file:{model}")),
            "context_tokens": 128,
            "weights_bytes": weights,
        }
        await fleet.ask("PUT", "/v1/models/large", catalogued)
        await fleet.ask("POST", "/v1/deployments", {"deployment_id": "large", **deployment})
    else:
        await fleet.ask("PUT", "/v1/deployments/large", deployment)


def ranks(fleet: Fleet) -> dict[str, int]:
    """Return the process of each part of the large model, by its node."""
    found = {}
    for path in fleet.folder.glob("node-*/engines/large-*/process.json"):
        started = json.loads(path.read_bytes())
        if Path(f"/proc/{started['pid']}").exists():
            found[path.parts[-4]] = started["pid"]
    return found


async def parts(fleet: Fleet) -> dict[str, str]:
    """Return the state of each part."""
    rows = (await fleet.ask("GET", "/v1/placements"))["data"]
    mine = [row for row in rows if row["deployment_id"] == "large" and not row["ending"]]
    return {row["node_id"]: row["state"] for row in mine}


async def test_the_parts_of_a_replica_start_and_fail_together() -> None:
    async with a_fleet(comes_up=False) as fleet:
        model = fleet.folder / "large"
        model.mkdir()
        tiny.write_folder(model, "qwen3_moe")
        tiny.write_tokenizer(model)
        weights = sum(path.stat().st_size for path in model.iterdir())
        wanted = asyncio.create_task(alone(model, fleet.folder / "alone"))
        await two_small_nodes_and_another_city(fleet, weights)
        await fleet.deploy(1, allow=["sin"])
        await deployed(fleet, model, weights, nodes=1)

        async def is_refused() -> bool:
            said = (await fleet.ask("GET", "/v1/deployments/large"))["unmet"]
            return any("ams-1: needs 0.25 GiB" in reason for reason in said)

        await until("one node is too small", is_refused)
        await deployed(fleet, model, weights, nodes=2)

        async def is_up() -> bool:
            return await parts(fleet) == {"ams-1": "warm", "ams-2": "warm"}

        await until("both parts are warm", is_up, WARM_S)
        headers = {"authorization": f"Bearer {fleet.key}"}
        async with aiohttp.ClientSession(fleet.endpoint("sin"), headers=headers) as http:

            async def said(model: str = "large") -> list[str]:
                bodies = [{"model": model, **body} for body in ASKED]
                return [await text_of(http, "/v1/completions", body) for body in bodies]

            async def says_again() -> list[str]:
                with suppress(AssertionError):
                    return await said()
                return []

            assert await until("it answers", says_again) == await wanted
            # A rank on the second node dies: the first goes with it, and both come again.
            before = ranks(fleet)
            assert set(before) == {"node-ams", "node-ams-2"}
            os.kill(before["node-ams-2"], signal.SIGKILL)

            async def has_ended() -> bool:
                return not Path(f"/proc/{before['node-ams']}").exists()

            await until("the leader ended too", has_ended, ENDED_S)
            assert await said("mock")

            async def is_back() -> bool:
                now = ranks(fleet)
                fresh = len(now) == 2 and not set(now.values()) & set(before.values())
                return fresh and await is_up()

            await until("it is back", is_back, WARM_S)
            assert await until("it answers again", says_again) == await wanted
            # The second node's agent dies and comes back: its part never left.
            held = ranks(fleet)
            await fleet.kill("node-ams-2")
            assert await said() == await wanted
            await fleet.processes.start(
                "node-ams-2", ("nodeagent", "--config", f"{fleet.folder}/node-ams-2.toml")
            )
            await until("its agent is back", lambda: fleet.is_up("node-ams-2", "/healthz"))
            assert ranks(fleet) == held
            assert await said() == await wanted
            # It comes back unwilling to hold a part, and its part is gone: the leader, which would
            # wait half an hour for it, is ended, and why is told.
            await fleet.kill("node-ams-2")
            os.kill(held["node-ams-2"], signal.SIGKILL)
            written = fleet.folder / "node-ams-2.toml"
            kept = [line for line in written.read_text().splitlines() if "rank_ports" not in line]
            written.write_text("\n".join(kept))
            await fleet.processes.start("node-ams-2", ("nodeagent", "--config", str(written)))

            async def has_said_why() -> bool:
                rows = (await fleet.ask("GET", "/v1/events"))["data"]
                return any(
                    "plaintext_rank_ports is not set on this node" in row["reason"] for row in rows
                )

            await until("it is told why", has_said_why, ENDED_S)

            async def is_given_back() -> bool:
                return not ranks(fleet) and not await parts(fleet)

            await until(
                "the leader is ended, and both seats are given back", is_given_back, ENDED_S
            )
            told = (await fleet.ask("GET", "/v1/deployments/large"))["unmet"]
            assert any(
                "ams-2: it takes no part of a replica over several nodes" in one for one in told
            )
            assert await said("mock")
