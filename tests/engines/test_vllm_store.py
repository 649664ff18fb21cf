"""Two real vLLM share KV through Mooncake's store: both under our agent, each on its own node.

`python -m ops.engines.mooncake` installs Mooncake. The agents run the store's master and relay the
engines' connections to it. The tests build on each other's state, so they run in this order.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import pytest
import pytest_asyncio

from isochrone.wire.http import headers
from isochrone.wire.ids import DeviceId, ReplicaId
from isochrone.wire.models.model import EngineSettings
from nodeagent import metrics
from tests.builders import GIB, a_spec
from tests.engines.real_engines import MODEL, READY_S, VLLM_COMMANDS, needs_vllm
from tests.engines.store_nodes import (
    StoreNode,
    move_master,
    needs_mooncake,
    runs_only_at,
    serving,
)
from tests.integration.nodeagent.test_two_legs import artifact_of, is_warm
from tests.system.harness import until

PROMPT_TOKENS: Final = 579
STORED_TOKENS: Final = 512
"""vLLM on a CPU caches blocks of 128 tokens."""
TOKENS: Final = 8
FOUND_S: Final = 60.0

pytestmark = [
    needs_vllm,
    pytest.mark.timeout(900),
    needs_mooncake,
    pytest.mark.asyncio(loop_scope="session"),
]


class VllmNode(StoreNode):
    """A node with a vLLM."""

    async def ask(self, prompt: list[int], tenant: str = "t") -> dict[str, Any]:
        """Send a request as a router does; return the answer, complete and of status 200."""
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        sent = {
            headers.REPLICA: self.name,
            headers.CACHE_SALT: tenant,
            headers.TOKENS: f"p={len(prompt)};o={TOKENS}",
        }
        async with self.node.http.post("/v1/completions", json=body, headers=sent) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
        assert answer["usage"]["completion_tokens"] == TOKENS
        return answer

    async def cached(self, prompt: list[int], tenant: str = "t") -> int:
        """Return how many tokens of a prompt were cached here."""
        usage = (await self.ask(prompt, tenant))["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def is_idle(self) -> bool:
        admission = self.node.supervisor.replicas[ReplicaId(self.name)].admission
        return admission.load() == headers.ReportedLoad(0, 0, 0, 0, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[VllmNode, ...]]:
    artifact = artifact_of(MODEL)
    engine = EngineSettings(
        driver="vllm",
        kv_memory_bytes=GIB // 4,
        tokens_in_flight_max=100_000,
        options={"kv_store_bytes": str(GIB // 4)},
        share_kv=True,
    )
    folder = tmp_path_factory.mktemp("store")
    nodes = tuple(VllmNode(name, folder / name) for name in ("a", "b"))
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PATH", f"{VLLM_COMMANDS}:{os.environ['PATH']}")
        patch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
        await stack.enter_async_context(serving(nodes))
        for one in nodes:
            spec = a_spec(
                one.name,
                engine=engine,
                device_ids=(DeviceId("cpu"),),
                memory_bytes=3 * GIB,
                artifact=artifact,
                context_tokens=1024,
            )
            one.node.supervisor.start(spec)
        for one in nodes:
            await until(f"{one.name} is warm", partial(is_warm, one.node), READY_S)
        yield nodes


def a_prompt(seed: int) -> list[int]:
    return [1000 + (37 * n + 101 * seed) % 5000 for n in range(PROMPT_TOKENS)]


async def found_by_other(first: VllmNode, second: VllmNode, seeds: range) -> int:
    """Have `first` read new prompts until `second` finds one of them in the store.

    Returns how many tokens it found. A block is written after its answer.
    """
    for seed in seeds:
        await first.ask(a_prompt(seed))
        await asyncio.sleep(1.0)
        if found := await second.cached(a_prompt(seed)):
            return found
    return 0


def store_tokens() -> float:
    return float(metrics.KV_FOUND_TOKENS.labels("store")._value.get())


async def test_what_one_engine_has_read_another_finds_in_the_store(
    pop: tuple[VllmNode, ...],
) -> None:
    a, b = pop
    before = store_tokens()
    answer = await a.ask(a_prompt(1))

    async def is_found() -> bool:
        # Another tenant's request would make B store what it has computed itself.
        return await b.cached(a_prompt(1)) == STORED_TOKENS

    await asyncio.sleep(2.0)
    assert await is_found()
    again = await b.ask(a_prompt(1))
    assert again["choices"][0]["text"] == answer["choices"][0]["text"] != ""

    async def is_counted() -> bool:
        return store_tokens() >= before + STORED_TOKENS

    await until("the tokens from the store are counted", is_counted, 20.0)
    # A's other tenants have read the same prompt; B's must compute it.
    assert await a.cached(a_prompt(1), "another") == 0
    assert await b.cached(a_prompt(1), "a third") == 0


async def test_requests_go_on_without_the_master_and_hits_return_with_it(
    pop: tuple[VllmNode, ...],
) -> None:
    a, b = pop
    pid = a.master._record.pid if a.master._record else 0
    assert pid
    asking = [asyncio.create_task(one.ask(a_prompt(10 + n))) for n, one in enumerate((a, b, a, b))]
    os.kill(pid, signal.SIGKILL)
    for task in asking:
        await task
    assert a.master._record is not None
    assert await found_by_other(a, b, range(20, 32)) == STORED_TOKENS
    assert a.master._record.pid != pid
    assert a.is_idle() and b.is_idle()


async def test_hits_return_after_the_master_has_moved_to_another_node(
    pop: tuple[VllmNode, ...],
) -> None:
    a, b = pop
    move_master(pop, b)
    await until("the master runs at b", partial(runs_only_at, b, a), 20.0)
    assert await found_by_other(a, b, range(40, 52)) == STORED_TOKENS


async def test_a_lost_member_takes_only_its_own_blocks_along(pop: tuple[VllmNode, ...]) -> None:
    a, b = pop
    seeds = range(60, 70)
    for seed in seeds:
        await a.ask(a_prompt(seed))
    await asyncio.sleep(2.0)
    replica = a.node.supervisor.replicas[ReplicaId("a")]
    assert replica.engine is not None
    os.killpg(replica.engine.pid, signal.SIGKILL)
    started_s = time.monotonic()
    found = [await b.cached(a_prompt(seed)) for seed in seeds]
    assert any(found), "blocks of A's prompts that lay in B's memory are still there"
    assert time.monotonic() - started_s < FOUND_S
    # All of it is in B's own cache now, whether it was found or computed again.
    assert [await b.cached(a_prompt(seed)) for seed in seeds] == [STORED_TOKENS] * len(seeds)
    assert b.is_idle()
