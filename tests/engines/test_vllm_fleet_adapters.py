"""LoRA adapters through a router to a real vLLM, which an agent runs.

The tests are in the order of one story. They take three to six minutes and 4 GB of memory.
"""

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import cloudflare
import openai
import pytest
import pytest_asyncio

from isochrone.wire.peers.adapter import ADAPTER_FILES
from tests.builders import GIB
from tests.engines.lora import write_adapter
from tests.engines.real_engines import MODEL, READY_S, VLLM_COMMANDS, needs_vllm
from tests.engines.vendor_fleet import NODE, ONE_REPLICA, a_vendor_fleet, records
from tests.system.harness import Fleet, until

pytestmark = [
    needs_vllm,
    pytest.mark.asyncio(loop_scope="session"),
    # vLLM starts in two of them.
    pytest.mark.timeout(2 * READY_S),
]

PROMPT: Final = "Name the colours of the rainbow."
RANK_MAX: Final = 8
DEPLOYMENT: Final = {
    "deployment_id": "smol",
    "model_id": "smol",
    "engine": {
        "driver": "vllm",
        "kv_memory_bytes": GIB // 8,
        "context_tokens_max": 512,
        "options": {"enable_lora": "true", "max_lora_rank": str(RANK_MAX)},
    },
    "policy": ONE_REPLICA,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A fleet with one vLLM that takes adapters."""
    folder = tmp_path_factory.mktemp("batches")
    settings = {"scheduler-a": {"batch_folder": str(folder)}}
    async with a_vendor_fleet(VLLM_COMMANDS, MODEL, DEPLOYMENT, 8, settings) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(served: Fleet) -> AsyncIterator[cloudflare.AsyncCloudflare]:
    async with cloudflare.AsyncCloudflare(
        base_url=f"{served.endpoint('ams')}/client/v4", api_token=served.key, max_retries=0
    ) as made:
        yield made


async def upload(client: cloudflare.AsyncCloudflare, folder: Path, name: str) -> str:
    """Upload the adapter in `folder`; return its id."""
    made = await client.ai.finetunes.create(account_id="a", model="smol", name=name)
    for path in ADAPTER_FILES:
        await client.ai.finetunes.assets.create(
            made.id, account_id="a", file_name=path, file=(folder / path).read_bytes()
        )
    return str(made.id)


async def run(client: cloudflare.AsyncCloudflare, **fields: Any) -> str:
    """Answer a prompt by `/ai/run`."""
    answer: Any = await client.ai.run(
        "smol", account_id="a", prompt=PROMPT, raw=True, temperature=0, max_tokens=12, **fields
    )
    return str(answer["response"])


async def ask(fleet: Fleet, model: str) -> Any:
    """Return status and text (or error) of a completion."""
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    sent = {"authorization": f"Bearer {fleet.key}"}
    url = f"{fleet.endpoint('ams')}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=sent) as response:
        answer = json.loads(await response.read())
        is_good = response.status == 200
        return response.status, answer["choices"][0]["text"] if is_good else answer["error"]


async def knows(fleet: Fleet, name: str) -> None:
    """Wait until the router knows that an adapter is complete."""

    async def is_known() -> bool:
        status, error = await ask(fleet, f"smol:{name}")
        code = error["code"] if status != 200 else ""
        return code not in ("model_not_found", "adapter_incomplete")

    await until("the router knows the adapter", is_known)


async def test_vllm_answers_with_the_adapter_that_a_request_names(
    served: Fleet, client: cloudflare.AsyncCloudflare, tmp_path: Path
) -> None:
    one = await upload(client, write_adapter(tmp_path / "one", MODEL), "one")
    await upload(client, write_adapter(tmp_path / "two", MODEL, seed=8), "two")
    await knows(served, "one")
    await knows(served, "two")
    base, first, second = [
        await run(client, **fields) for fields in ({}, {"lora": "one"}, {"lora": "two"})
    ]
    assert len({base, first, second}) == 3
    assert await run(client, lora=one) == first
    assert await ask(served, "smol:one") == (200, first)
    async with openai.AsyncOpenAI(
        base_url=f"{served.endpoint('ams')}/v1", api_key=served.key, max_retries=0
    ) as other:
        stream = await other.completions.create(
            model=f"smol:{one}", prompt=PROMPT, temperature=0, max_tokens=12, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == first
    assert await run(client) == base


async def test_a_bad_adapter_is_refused_with_vllms_reason_and_disturbs_nothing(
    served: Fleet, client: cloudflare.AsyncCloudflare, tmp_path: Path
) -> None:
    """The router refuses what it can tell; the modules that vLLM can change only vLLM knows."""
    await upload(client, write_adapter(tmp_path / "big", MODEL, rank=2 * RANK_MAX), "big")
    folder = write_adapter(tmp_path / "odd", MODEL, extra_module="gate_of_nothing")
    await upload(client, folder, "odd")
    await knows(served, "big")
    await knows(served, "odd")
    (before,) = records(served).values()
    status, error = await ask(served, "smol:big")
    assert (status, error["message"]) == (
        400,
        "cannot use the adapter 'big' with 'smol': its rank is 16, the limit of this deployment"
        " is 8",
    )
    for _ in range(6):
        status, error = await ask(served, "smol:odd")
        assert (status, error["code"]) == (400, "invalid_request"), error
        assert "gate_of_nothing" in error["message"], error
        assert str(served.folder) not in error["message"]
    # Neither the replica nor its route was taken for broken.
    assert (await ask(served, "smol"))[0] == 200
    (after,) = records(served).values()
    assert after.pid == before.pid
    log = (served.folder / "logs" / "router-ams.log").read_text()
    assert "ejected" not in log
    # The first of its requests let vLLM try; the others did not stop it again.
    engine_log = served.folder / NODE / "engines" / before.spec.replica_id / "engine.log"
    assert engine_log.read_text(errors="replace").count("POST /v1/load_lora_adapter") == 3


async def test_an_adapter_outlives_vllm(served: Fleet, client: cloudflare.AsyncCloudflare) -> None:
    first = await run(client, lora="one")
    (before,) = records(served).values()
    os.kill(before.pid, signal.SIGKILL)

    async def is_back() -> bool:
        pids = {record.pid for record in records(served).values()}
        if not pids or before.pid in pids:
            return False
        return bool(await ask(served, "smol:one") == (200, first))

    await until("the new engine has it, too", is_back, READY_S)
