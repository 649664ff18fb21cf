"""Prefill and decode replicas in a whole fleet with TLS: nodes of either role drain and are lost,
and a new version takes over.

Under load no answer is lost, cut, repeated or other than what its prompt determines.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp
import msgspec

from isochrone.cli.client import AdminError
from isochrone.cli.manifest import artifact_of
from isochrone.wire.ids import NodeId
from scheduler.decide.whatif.simulation import ClusterSnapshot, LoseNode, what_if
from tests.system.counting_model import CONTEXT_TOKENS, counted_from, write_counting_model
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.tls_fleet import TlsFleet

KV_BYTES = 4 << 20
OVERHEAD_BYTES = 256 << 20
STREAMS = 4
TOKENS = 40
PROMPT_LETTERS = 300
NODES = (1, 2, 3, 4)
WARM_S = 120.0


class RoleLoad:
    """Streams of counted letters, one after another."""

    def __init__(self) -> None:
        self.open = 0
        self.complete = 0
        self.failures: list[str] = []

    async def more(self, count: int) -> None:
        """Wait until so many further answers are complete."""
        target = self.complete + count

        async def are_complete() -> bool:
            return self.complete >= target

        await until(f"{count} more answers", are_complete, WARM_S)

    async def is_running(self) -> bool:
        """Return whether most streams are open."""
        return 2 * self.open > STREAMS


async def one_answer(fleet: Fleet, http: aiohttp.ClientSession, chance: random.Random) -> str:
    """Stream an answer; return what is wrong with it, "" for nothing."""
    prompt = "".join(chr(chance.randrange(ord("A"), ord("Z"))) for _ in range(PROMPT_LETTERS))
    body = {
        "model": "counting",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, is_done = "", False
    try:
        async with http.post(f"{fleet.endpoint('ams')}/v1/completions", json=body) as response:
            if response.status != 200:
                return f"{response.status} {(await response.text())[:300]}"
            async for line in response.content:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    is_done = True
                elif data and not line.startswith(b":"):
                    frame = msgspec.json.decode(data)
                    if "error" in frame:
                        return f"after {len(text)} letters: {frame['error']}"
                    text += "".join(choice["text"] for choice in frame["choices"])
    except (aiohttp.ClientError, OSError) as error:
        return f"after {len(text)} letters: {error!r}"
    expected = counted_from(prompt[-1], TOKENS)
    return "" if is_done and text == expected else f"{text!r}, not {expected!r}"


@asynccontextmanager
async def under_role_load(fleet: Fleet) -> AsyncIterator[RoleLoad]:
    """Run STREAMS streams during the block, then finish them.

    Each rests after an answer for as long as that took, because engines start meanwhile.
    """
    load, stopping = RoleLoad(), asyncio.Event()

    async def one_after_another(number: int) -> None:
        chance = random.Random(number)
        while not stopping.is_set():
            began_s = time.monotonic()
            load.open += 1
            wrong = await one_answer(fleet, http, chance)
            load.open -= 1
            if wrong:
                load.failures.append(wrong)
            else:
                load.complete += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), max(0.1, time.monotonic() - began_s))

    key = {"authorization": f"Bearer {fleet.key}"}
    timeout = aiohttp.ClientTimeout(total=90.0)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=key) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(STREAMS):
            tasks.create_task(one_after_another(number))
        try:
            yield load
        finally:
            stopping.set()


async def start(fleet: Fleet) -> None:
    """Start a scheduler, nodes that can hold one replica each, and a router."""
    fleet.settings.setdefault("scheduler-a", {})["liveness"] = {
        "suspect_after_s": 3.0, "lost_after_s": 6.0, "grace_s": 12.0, "storm_share": 0.9,
    }  # fmt: skip
    fleet.settings.setdefault("router-ams", {}).update(connect_timeout_s=1.0, probe_timeout_s=1.0)
    await fleet.start_postgres()
    await fleet.start_scheduler("a")
    await until("it acts", fleet.acts)
    country, latitude, longitude = CITIES["ams"]
    body = {"city": "ams", "country": country, "latitude": latitude, "longitude": longitude}
    await fleet.ask("PUT", "/v1/pops/ams", body)
    fleet.key = (await fleet.ask("POST", "/v1/keys", {"tenant_id": "test"}))["key"]


async def deploy(fleet: Fleet) -> None:
    """Deploy the counting model with a replica of each role."""
    model = fleet.folder / "counting"
    model.mkdir()
    write_counting_model(model)
    artifact = artifact_of(model, f"file:{model}")
    weights = sum(file.size_bytes for file in artifact.files)
    planned = OVERHEAD_BYTES + KV_BYTES + 2 * weights
    # More than is planned for one replica, less than for two: the plan learns what an engine takes.
    settings = {"cpu_memory_bytes": planned * 3 // 2, "engine_threads": 1}
    await asyncio.gather(
        *(fleet.start_node("ams", number, **settings) for number in NODES),
        fleet.start_router("ams"),
    )
    catalogued = {
        "model_id": "counting",
        "architecture": "Qwen3ForCausalLM",
        "artifact": msgspec.to_builtins(artifact),
        "context_tokens": CONTEXT_TOKENS,
        "weights_bytes": weights,
    }
    await fleet.ask("PUT", "/v1/models/counting", catalogued)
    engine = {
        "driver": "embedded",
        "kv_memory_bytes": KV_BYTES,
        "context_tokens_max": CONTEXT_TOKENS,
        "options": {"batch_tokens_max": "16", "sequences_max": "8"},
    }
    policy = {
        "replicas_min": 2, "replicas_max": 2, "roles": "prefill=1,decode=1", "allow": ["ams"],
    }  # fmt: skip
    body = {"deployment_id": "counting", "model_id": "counting", "engine": engine}
    await fleet.ask("POST", "/v1/deployments", {**body, "policy": policy})


async def by_role(fleet: Fleet) -> dict[str, str]:
    """Return the nodes of the warm replicas that stay: by `prefill` and `generates`."""
    try:
        rows = (await fleet.ask("GET", "/v1/placements"))["data"]
    except AdminError:
        # On a busy machine the database answers late.
        return {}
    return {
        "prefill" if row["role"] == "prefill" else "generates": row["node_id"]
        for row in rows
        if row["state"] == "warm" and not row["ending"]
    }


async def until_both(fleet: Fleet, without: str = "") -> dict[str, str]:
    """Wait until both roles are warm, not on node `without`; return their nodes."""

    async def have_both() -> dict[str, str] | None:
        found = await by_role(fleet)
        return found if len(found) == 2 and without not in found.values() else None

    found: dict[str, str] = await until(
        f"both roles are warm, not on {without!r}", have_both, WARM_S
    )
    await fleet.routers_know()
    return found


async def counted(fleet: Fleet, sample: str) -> float:
    """Return a sum over the metrics of all nodes that are up."""
    total = 0.0
    async with aiohttp.ClientSession() as http:
        for number in NODES:
            name = process_of(f"ams-{number}")
            with suppress(aiohttp.ClientError, OSError):
                async with http.get(f"{fleet.url(name)}/metrics") as page:
                    lines = (await page.text()).splitlines()
                total += sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(sample))
    return total


def process_of(node_id: str) -> str:
    """Return the harness's name of a node's agent."""
    return "node-ams" if node_id == "ams-1" else f"node-{node_id}"


async def lose(fleet: Fleet, node_id: str) -> None:
    """Kill a node's agent and its engine."""
    name = process_of(node_id)
    pid = fleet.engine_pids()[name]
    await fleet.kill(name)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def come_back(fleet: Fleet, node_id: str) -> None:
    """Start a node's agent again."""
    name = process_of(node_id)
    command = ("nodeagent", "--config", f"{fleet.folder}/{name}.toml")
    await fleet.processes.start(name, command, fleet.env(name))
    await until(f"{name} is back", lambda: fleet.is_up(name, "/healthz"))


async def check_explained(fleet: Fleet, nodes: dict[str, str]) -> None:
    """`explain` names both roles; what-if replaces each in its role."""
    explained = await fleet.ask("GET", "/v1/deployments/counting/explain")
    (words,) = explained["roles"]
    assert "prefill" in words
    assert sorted(row["role"] for row in explained["here"])[-1:] == ["unified"] or "decode" in words
    assert {row["node_id"] for row in explained["here"]} == set(nodes.values())
    snapshot = msgspec.convert(await fleet.ask("GET", "/v1/snapshot"), ClusterSnapshot)
    for role, node_id in nodes.items():
        gone = what_if(snapshot, [LoseNode(node_id=NodeId(node_id))])
        starts = [move for move in gone.moves if move.kind == "start"]
        assert [move.role == "prefill" for move in starts] == [role == "prefill"], gone.moves


async def roll_out(fleet: Fleet) -> None:
    """Give all requests to a new version, which gets both roles beside the old one."""
    deployment = await fleet.ask("GET", "/v1/deployments/counting")
    options = {**deployment["engine"]["options"], "sequences_max": "6"}
    bounds = {
        "attempts_min": 20, "step_min_s": 0.0, "ttft_ratio": 10, "itl_ratio": 10,
        "error_ratio": 0.4,
    }  # fmt: skip
    made = await fleet.ask(
        "POST",
        "/v1/deployments/counting/rollouts",
        {
            "engine": {**deployment["engine"], "options": options},
            "steps": [{"share": 0.5}, {"share": 1.0}],
            "bounds": bounds,
        },
    )

    async def has_ended() -> Any:
        row = await fleet.ask("GET", f"/v1/rollouts/{made['rollout_id']}")
        return row if row["state"] not in ("running", "paused") else None

    row = await until("the rollout ends", has_ended, WARM_S)
    assert row["state"] == "done", row

    async def only_new() -> bool:
        rows = (await fleet.ask("GET", "/v1/placements"))["data"]
        return {(r["version"], r["ending"]) for r in rows} == {(row["to_version"], False)}

    await until("the old version is gone", only_new, WARM_S)
    await until_both(fleet)


async def test_nodes_of_either_role_drain_are_lost_and_roll_out_without_a_lost_token() -> None:
    make = partial(TlsFleet, nodes_in_pop=len(NODES))
    async with a_fleet(comes_up=False, make=make) as fleet:
        await start(fleet)
        await deploy(fleet)
        nodes = await until_both(fleet)
        await check_explained(fleet, nodes)
        legs = 'isochrone_node_prefill_legs_total{deployment="counting",outcome="prefill"}'
        async with under_role_load(fleet) as load:

            async def are_read_elsewhere() -> bool:
                return await counted(fleet, legs) > 0

            await until("prompts are read on the prefill replica", are_read_elsewhere, WARM_S)
            for role in ("prefill", "generates"):
                drained = nodes[role]
                await fleet.ask("POST", f"/v1/nodes/{drained}/drain", {})
                nodes = await until_both(fleet, without=drained)
                await load.more(2 * STREAMS)
                await fleet.ask("POST", f"/v1/nodes/{drained}/undrain", {})
                assert not load.failures, (role, load.failures)
            for role in ("prefill", "generates"):
                lost = nodes[role]
                await until("most streams are open", load.is_running, WARM_S)
                await lose(fleet, lost)
                # The other one answers, before the lost one is replaced.
                await load.more(STREAMS)
                nodes = await until_both(fleet, without=lost)
                await load.more(2 * STREAMS)
                assert not load.failures, (role, load.failures)
                await come_back(fleet, lost)
            await roll_out(fleet)
            legs_before = await counted(fleet, legs)

            async def are_read_by_the_new_version() -> bool:
                return await counted(fleet, legs) > legs_before

            await until("the new version has two legs", are_read_by_the_new_version, WARM_S)
            await load.more(2 * STREAMS)

        assert not load.failures, load.failures
        await until("nothing is held", lambda: holds_nothing(fleet), 30.0)


async def holds_nothing(fleet: Fleet) -> bool:
    """Return True if no engine holds blocks or waits for any."""
    held: Any = [
        await counted(fleet, f"isochrone_engine_{name}")
        for name in ("kv_transfer_held_blocks", "kv_transfers_waiting", "kv_blocks_used")
    ]
    return not any(held)
