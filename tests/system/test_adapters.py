"""LoRA adapters through the whole fleet, with the official clients and the embedded engine."""

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import cloudflare
import msgspec
import openai
import pytest
import pytest_asyncio

from isochrone.cli.manifest import artifact_of, config_values
from isochrone.wire.peers.adapter import ADAPTER_FILES
from ops.golden import tiny
from tests.integration.engine.test_lora import ATTENTION, MLP, write_adapter
from tests.system.harness import CITIES, Fleet, a_fleet, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL: Final = "@cf/tiny/llama"
PROMPT: Final = "ABCDEFGHIJKLMNOPQRSTUVWX"
WAIT_S: Final = 90.0
AMS: Final = next(iter(CITIES))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet(comes_up=False) as running:
        running.settings["scheduler-a"] = {"batch_folder": str(running.folder / "batches")}
        running.run_under_unit_filters()
        await running.up()
        await _deploy(running, "llama", MODEL, replicas=len(CITIES))
        await running.routers_know()
        yield running


async def _deploy(fleet: Fleet, family: str, name: str, replicas: int) -> None:
    folder = fleet.folder / family
    folder.mkdir()
    tiny.write_folder(folder, family)
    tiny.write_tokenizer(folder)
    values = config_values(folder)
    model = {
        "model_id": family,
        "architecture": family,
        "artifact": msgspec.to_builtins(artifact_of(folder, f"file:{folder}")),
        "context_tokens": values["context_tokens"],
        "weights_bytes": 1_000_000,
        "shape": values["shape"],
    }
    await fleet.ask("PUT", f"/v1/models/{family}", model)
    deployment = {
        "deployment_id": family,
        "name": name,
        "model_id": family,
        "engine": {
            "driver": "embedded",
            "kv_memory_bytes": 4_000_000,
            "context_tokens_max": 256,
        },
        "policy": {
            "replicas_min": replicas,
            "replicas_max": replicas,
            "keep_warm": list(CITIES)[:replicas],
        },
    }
    await fleet.ask("POST", "/v1/deployments", deployment)
    if replicas:
        await until("the replicas are warm", lambda: fleet.is_warm(replicas, CITIES), WAIT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[cloudflare.AsyncCloudflare]:
    async with cloudflare.AsyncCloudflare(
        base_url=f"{fleet.endpoint(AMS)}/client/v4", api_token=fleet.key, max_retries=0
    ) as made:
        yield made


async def _upload(
    client: cloudflare.AsyncCloudflare, folder: Path, name: str, **fields: Any
) -> str:
    """Upload the adapter in `folder`; return its id."""
    made = await client.ai.finetunes.create(account_id="a", model=MODEL, name=name, **fields)
    for path in ADAPTER_FILES:
        await client.ai.finetunes.assets.create(
            made.id, account_id="a", file_name=path, file=(folder / path).read_bytes()
        )
    return str(made.id)


async def _run(client: cloudflare.AsyncCloudflare, **fields: Any) -> str:
    answer: Any = await client.ai.run(
        MODEL, account_id="a", prompt=PROMPT, raw=True, temperature=0, max_tokens=12, **fields
    )
    return str(answer["response"])


async def _text(fleet: Fleet, city: str, model: str, key: str = "") -> Any:
    """Return status, text (or error) and node of a completion by a city's router."""
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    headers = {"authorization": f"Bearer {key or fleet.key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{fleet.endpoint(city)}/v1/completions", json=body, headers=headers) as response,
    ):
        answer = await response.json()
        if response.status != 200:
            return response.status, answer["error"], ""
        return 200, answer["choices"][0]["text"], response.headers["x-isochrone-node"]


async def _known(client: cloudflare.AsyncCloudflare, name: str) -> None:
    """Wait until the router knows that an adapter is complete."""

    async def is_known() -> bool:
        try:
            await _run(client, lora=name)
        except cloudflare.APIStatusError as error:
            code = json.loads(error.response.text)["errors"][0]["code"]
            if code not in (3039, 3042):
                raise
            return False
        return True

    await until("the router knows the adapter", is_known, WAIT_S)


async def test_an_adapter_answers_everywhere_and_outlives_its_engine(
    fleet: Fleet, client: cloudflare.AsyncCloudflare, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "one", "llama", 1, ATTENTION)
    write_adapter(tmp_path / "two", "llama", 2, (*ATTENTION, *MLP))
    one = await _upload(client, tmp_path / "one", "one")
    await _upload(client, tmp_path / "two", "two")
    await _known(client, "two")
    base = await _run(client)
    first, second = await _run(client, lora="one"), await _run(client, lora="two")
    assert len({base, first, second}) == 3
    assert await _run(client, lora=one) == first
    # By name in `model`, on another surface, from another city.
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.endpoint(AMS)}/v1", api_key=fleet.key, max_retries=0
    ) as other:
        stream = await other.completions.create(
            model=f"{MODEL}:one", prompt=PROMPT, temperature=0, max_tokens=12, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == first
    assert chunks[0].model == f"{MODEL}:{one}"
    # Both replicas are equally near. Its requests stay where it is loaded.
    nodes = {(await _text(fleet, AMS, f"{MODEL}:one"))[2] for _ in range(8)}
    assert len(nodes) == 1
    # A key for one country has it loaded there, too.
    keys = {}
    for city in CITIES:
        fields = {"tenant_id": "test", "regions": [city]}
        keys[city] = (await fleet.ask("POST", "/v1/keys", fields))["key"]

        async def is_answered(city: str = city) -> bool:
            status, text, node = await _text(fleet, AMS, f"{MODEL}:one", keys[city])
            return bool((status, text, node) == (200, first, f"{city}-1"))

        await until(f"{city} answers", is_answered, WAIT_S)
    # A new engine process has loaded none.
    pid = fleet.engine_pids()[f"node-{AMS}"]
    os.kill(pid, signal.SIGKILL)

    async def is_back() -> bool:
        if fleet.engine_pids().get(f"node-{AMS}", pid) == pid:
            return False
        status, text, node = await _text(fleet, AMS, f"{MODEL}:one", keys[AMS])
        return bool((status, text, node) == (200, first, f"{AMS}-1"))

    await until("the new engine has it, too", is_back, WAIT_S)
    assert await _run(client) == base


async def test_what_may_not_be_used_is_refused(
    fleet: Fleet, client: cloudflare.AsyncCloudflare, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "mine", "llama", 3, ATTENTION)
    mine = await _upload(client, tmp_path / "mine", "mine")
    await _upload(client, tmp_path / "mine", "shared", public=True)
    await client.ai.finetunes.create(account_id="a", model=MODEL, name="empty")
    await _known(client, "shared")
    with pytest.raises(cloudflare.APIStatusError) as empty:
        await _run(client, lora="empty")
    assert json.loads(empty.value.response.text)["errors"][0]["code"] == 3039
    other = (await fleet.ask("POST", "/v1/keys", {"tenant_id": "other"}))["key"]

    async def is_admitted() -> bool:
        return bool((await _text(fleet, AMS, MODEL, other))[0] == 200)

    await until("the other key is known", is_admitted, WAIT_S)
    assert (await _text(fleet, AMS, f"{MODEL}:shared", other))[0] == 200
    for name in ("mine", mine, "none"):
        status, error, _ = await _text(fleet, AMS, f"{MODEL}:{name}", other)
        assert (status, error["code"]) == (404, "model_not_found")
    await _deploy(fleet, "qwen3", "other-model", replicas=0)

    async def is_refused() -> bool:
        status, error, _ = await _text(fleet, AMS, "other-model:mine")
        return status == 400 and "another base model" in error["message"]

    await until("it is refused for another model", is_refused, WAIT_S)
