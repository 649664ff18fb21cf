"""One real vLLM reads prompts for another: both under our agent, each on a node of its own.

The engines move KV with NIXL (`python -m ops.engines.vllm_cpu --nixl`) or with Mooncake's connector
(`python -m ops.engines.mooncake`). Each takes two minutes and 8 GB of memory. With NIXL a thread of
each engine is busy while it waits, so two cores are few.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import msgspec
import pytest
import pytest_asyncio

from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Role
from nodeagent.drivers.vllm import KV_LEASE_S
from tests.builders import GIB, a_spec
from tests.engines.real_engines import ENGINES, MODEL, READY_S, VLLM_COMMANDS, needs_vllm
from tests.engines.store_nodes import needs_mooncake
from tests.integration.nodeagent.test_data_plane import Node, a_node
from tests.integration.nodeagent.test_two_legs import TwoLegs, artifact_of, is_warm, outcomes
from tests.system.harness import until

NIXL: Final = ENGINES / "nixl"
PROMPT_TOKENS: Final = 579

needs_nixl: Final = pytest.mark.skipif(
    not (NIXL / "nixl").exists(),
    reason=f"no NIXL in {NIXL}: run `python -m ops.engines.vllm_cpu --nixl`",
)
CONNECTORS: Final = [
    pytest.param("nixl", marks=needs_nixl),
    pytest.param("mooncake", marks=needs_mooncake),
]
ENDS_AT_ONCE: Final = {"ignore_eos": False, "logit_bias": {"2": 100}}
"""Makes the end of the answer, token 2 of the model, the first token."""

pytestmark = [
    needs_vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=CONNECTORS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[TwoLegs]:
    artifact = artifact_of(MODEL)
    engine = EngineSettings(
        driver="vllm",
        kv_memory_bytes=GIB // 4,
        tokens_in_flight_max=100_000,
        # A prompt is computed in other batches when a part of it is cached. By bf16 some prompt
        # then has another likeliest token.
        options={"kv_connector": request.param, "dtype": "float32"},
    )
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PATH", f"{VLLM_COMMANDS}:{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", str(NIXL))
        patch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
        patch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_MIN_S", 120.0)
        # Each engine's busy thread may keep the other one's step waiting for seconds.
        # Test requests of the agent would count as prompt tokens.
        starting = [a_node(READY_S, stall_s=60.0, canary_interval_s=3600.0) for _ in range(2)]
        nodes = [await stack.enter_async_context(one) for one in starting]
        for node, name in zip(nodes, ("d", "p1"), strict=True):
            spec = a_spec(
                name,
                engine=engine,
                device_ids=(DeviceId("cpu"),),
                memory_bytes=3 * GIB,
                artifact=artifact,
                context_tokens=1024,
            )
            role = Role.DECODE if name == "d" else Role.PREFILL
            node.supervisor.start(msgspec.structs.replace(spec, role=role))
        for node in nodes:
            await until("warm", partial(is_warm, node), READY_S)
        yield TwoLegs(nodes)


async def tokens_by_source(node: Node) -> dict[str, float]:
    """Return the prompt tokens that an engine counts, by where their KV came from."""
    (replica,) = node.supervisor.replicas.values()
    assert replica.engine is not None
    page = await replica.engine.metrics()
    found = re.findall(r'vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)', page)
    return {source: float(value) for source, value in found}


async def counted(node: Node, source: str, before: Mapping[str, float]) -> dict[str, float]:
    """Return the counts once a prompt is in them: an engine counts a little after it answers."""

    async def all_of_it() -> dict[str, float] | None:
        now = await tokens_by_source(node)
        grown = now.get(source, 0.0) - before.get(source, 0.0)
        return now if grown >= PROMPT_TOKENS - 1 else None

    try:
        found: dict[str, float] = await until("the prompt is counted", all_of_it, 20.0)
    except AssertionError as error:
        raise AssertionError(log_of(node)) from error
    return found


def log_of(node: Node) -> str:
    """Return what an engine says of transfers, and the end of its log."""
    (replica,) = node.supervisor.replicas.values()
    assert replica.engine is not None
    lines = replica.engine.log.read_text(errors="replace").splitlines()
    of_transfers = [line for line in lines if re.search("nixl|mooncake", line.lower())]
    return "\n".join(of_transfers[-20:] + lines[-60:])


async def test_a_prompt_is_read_by_one_vllm_and_answered_by_the_other(pair: TwoLegs) -> None:
    decode = pair.nodes[0]
    for stream in (False, True):
        prompt = [1000 + (37 * n + stream) % 5000 for n in range(PROMPT_TOKENS)]
        before = await tokens_by_source(decode)
        alone = await pair.ask(prompt, tenant="another", stream=stream)
        assert alone.heads == ["200"], log_of(decode)
        computed = await counted(decode, "local_compute", before)
        legs = outcomes().get("prefill", 0.0)
        answer = await pair.ask(prompt, "p1", stream=stream)
        assert answer.heads == ["103", "p1", "200"], answer
        after = await counted(decode, "external_kv_transfer", computed)
        assert after["local_compute"] <= computed["local_compute"] + 1
        assert outcomes()["prefill"] == legs + 1
        assert answer.cached_tokens == 0, "the prefill engine had nothing of it"
        assert answer.text == alone.text != ""
    await until("tokens are released", pair.is_idle, 30.0)


async def test_an_answer_that_ends_with_its_first_token_does_not_wait_for_kv(pair: TwoLegs) -> None:
    prompt = [1500 + (43 * n) % 5000 for n in range(PROMPT_TOKENS)]
    before = await tokens_by_source(pair.nodes[0])
    async with asyncio.timeout(KV_LEASE_S):
        answer = await pair.ask(prompt, "p1", fields=ENDS_AT_ONCE)
    assert (answer.heads[-1], answer.text) == ("200", ""), answer
    await counted(pair.nodes[0], "local_compute", before)
    await until("tokens are released", pair.is_idle, 30.0)


async def test_a_prompt_is_read_by_the_decode_engine_if_the_other_is_gone(pair: TwoLegs) -> None:
    (replica,) = pair.nodes[1].supervisor.replicas.values()
    assert replica.engine is not None
    await replica.engine.stop(kill=True)
    prompt = [2000 + (41 * n) % 5000 for n in range(PROMPT_TOKENS)]
    before = await tokens_by_source(pair.nodes[0])
    answer = await pair.ask(prompt, "p1")
    assert (answer.heads[-1], len(answer.text) > 0) == ("200", True)
    await counted(pair.nodes[0], "local_compute", before)
