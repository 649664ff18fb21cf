"""Nodes with embedded engines of a tiny model that belong to a real Mooncake Store."""

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import pytest

from isochrone.wire.http import headers
from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv import kv_sharing
from isochrone.wire.kv.kv_sharing import FoundTokens, parse_found
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.host.engines.engine_process import EngineProcess
from ops.golden import tiny
from tests.builders import a_spec
from tests.engines.real_engines import ENGINES, READY_S, VLLM_COMMANDS
from tests.engines.store_nodes import StoreNode, serving
from tests.integration.nodeagent.test_two_legs import artifact_of, is_warm
from tests.system.harness import until

PROMPT_BLOCKS: Final = 12
"""Whole blocks of a prompt of 200 tokens before its last token."""
SETTLED_S: Final = 60.0


class EmbeddedNode(StoreNode):
    """A node with an embedded engine that belongs to the store."""

    @property
    def engine(self) -> EngineProcess:
        engine = self.node.supervisor.replicas[ReplicaId(self.name)].engine
        assert engine is not None
        return engine

    async def ask(self, prompt: list[int], tenant: str = "t") -> tuple[str, FoundTokens]:
        """Send a request as a router does; return the text, and where its prompt's KV was found."""
        sent = {
            headers.REPLICA: self.name,
            headers.CACHE_SALT: tenant,
            headers.TOKENS: f"p={len(prompt)};o=8",
            headers.PENDING_PREFILL_TOKENS: str(len(prompt)),
            headers.PREFILL_MS: "4000",
        }
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        async with self.node.http.post("/v1/completions", json=body, headers=sent) as response:
            answer = await response.json()
            assert response.status == 200, answer
            found = parse_found(response.headers.get(kv_sharing.KV_FOUND, ""))
        usage = answer["usage"]
        assert usage["completion_tokens"] == 8
        assert usage["prompt_tokens_details"]["cached_tokens"] == sum(
            msgspec.structs.astuple(found)
        )
        return answer["choices"][0]["text"], found

    async def stat(self, field: str) -> float:
        async with self.engine.http.get("/stats") as response:
            return float((await response.json())[field])

    async def has_joined(self) -> bool:
        if not await is_warm(self.node):
            return False
        try:
            return await self.stat("kv_store_joined") == 1
        except (aiohttp.ClientError, OSError):
            # It was killed, and its agent has not noticed yet.
            return False

    async def stores(self, prompt: list[int]) -> str:
        """Have a prompt computed here and stored; return the answer."""
        stored = await self.stat("kv_store_put_blocks_total")
        text, found = await self.ask(prompt)
        assert found == FoundTokens()

        async def is_stored() -> bool:
            return await self.stat("kv_store_put_blocks_total") == stored + PROMPT_BLOCKS

        await until("the prompt is stored", is_stored, SETTLED_S)
        return text

    async def holds_nothing(self) -> bool:
        fields = ("kv_transfer_held_blocks", "kv_transfers_waiting", "kv_blocks_used")
        return not sum([await self.stat(field) for field in fields])

    def is_idle(self) -> bool:
        admission = self.node.supervisor.replicas[ReplicaId(self.name)].admission
        return admission.load() == headers.ReportedLoad(0, 0, 0, 0, 0)


@contextmanager
def mooncake_for_engines(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let our engines import Mooncake, which is installed beside vLLM, and nothing else of it."""
    (packages,) = (ENGINES / "vllm").resolve().glob("lib/python3*/site-packages")
    with tempfile.TemporaryDirectory() as folder:
        for found in packages.glob("mooncake*"):
            (Path(folder) / found.name).symlink_to(found)
        patch.setenv("PYTHONPATH", os.pathsep.join([folder, *sys.path]))
        patch.setenv("PATH", f"{VLLM_COMMANDS}:{os.environ['PATH']}")
        yield


def spec_of(name: str, model: Path) -> ReplicaSpec:
    engine = EngineSettings(
        driver="embedded",
        kv_memory_bytes=4 * 1024 * 1024,
        tokens_in_flight_max=100_000,
        options={"batch_tokens_max": "64", "kv_store_bytes": str(32 << 20)},
        share_kv=True,
    )
    return a_spec(name, engine=engine, artifact=artifact_of(model), context_tokens=512)


@asynccontextmanager
async def embedded_nodes(*names: str) -> AsyncIterator[tuple[EmbeddedNode, ...]]:
    """Run nodes whose engines have joined one store; the first runs its master."""
    folder = Path(tempfile.mkdtemp(prefix="iso-"))
    model = folder / "model"
    model.mkdir()
    tiny.write_folder(model, "qwen3")
    tiny.write_tokenizer(model)
    nodes = tuple(EmbeddedNode(name, folder / name) for name in names)
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(mooncake_for_engines(patch))
        # A busy machine takes longer than the store; a lost one is not left alone for long.
        patch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
        patch.setattr("nodeagent.decide.requests.kv_fetch.LOCATE_TIMEOUT_MIN_S", 10.0)
        patch.setattr("nodeagent.decide.requests.kv_fetch.LOCATE_TIMEOUT_MAX_S", 10.0)
        patch.setattr("nodeagent.decide.requests.kv_fetch.BACKOFF_S", 0.0)
        patch.setattr("nodeagent.decide.requests.kv_fetch.AGING_S", 0.0)
        patch.setattr("nodeagent.disaggregation.prompt_copies.PAUSE_S", 0.0)
        await stack.enter_async_context(serving(nodes))
        for one in nodes:
            one.node.supervisor.start(spec_of(one.name, model))
        for one in nodes:
            await until(f"{one.name} has joined the store", one.has_joined, READY_S)
        yield nodes
