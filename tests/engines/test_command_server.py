"""A server of the operator's own behind a router: `transformers serve`, as `[commands.hf]`.

It is the one that comes with vLLM's installation. The test takes one to three minutes.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import openai
import pytest
import pytest_asyncio

from tests.builders import GIB
from tests.engines.real_engines import MODEL, READY_S, VLLM_COMMANDS, group_members, needs_vllm
from tests.engines.vendor_fleet import add_model, records
from tests.system.harness import Fleet, a_fleet, until

pytestmark = [
    needs_vllm,
    pytest.mark.asyncio(loop_scope="session"),
    # The server starts in two of them.
    pytest.mark.timeout(2 * READY_S),
]

NODE: Final = "node-ams"
SERVE: Final = "from transformers.cli.transformers import main; main()"
COMMAND: Final = {
    "arguments": [
        *(str(VLLM_COMMANDS / "python"), "-c", SERVE, "serve", "{model}", "--device", "cpu"),
        *("--host", "127.0.0.1", "--port", "{port}"),
    ],
    "ready_path": "/health",
    "model_name": "{model}",
    "environment": {"HF_HUB_OFFLINE": "1"},
}
DEPLOYMENT: Final = {
    "deployment_id": "own",
    "model_id": "own",
    "engine": {
        "driver": "command",
        "memory_bytes": 2 * GIB,
        "context_tokens_max": 512,
        "tokens_in_flight_max": 4096,
        "options": {
            "command": "hf",
            "surfaces": "chat,completions",
            "concurrency": "2",
            "shared_prompt_cache": "true",
        },
    },
    "policy": {"replicas_min": 1, "replicas_max": 1, "allow": ["ams"]},
}
MESSAGES: Final[Any] = [{"role": "user", "content": "Name the colours of the rainbow."}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served() -> AsyncIterator[Fleet]:
    """A fleet with one replica of the operator's own server."""
    async with a_fleet(comes_up=False) as running:
        running.settings[NODE] = {
            "cpu_memory_bytes": 8 * GIB,
            "engine_threads": 2,
            "commands": {"hf": COMMAND},
        }
        # On a busy machine an answer takes seconds: those that wait must not get a 429.
        running.settings["router-ams"] = {"queue_timeout_s": READY_S}
        await running.up()
        await add_model(running, "own", MODEL)
        await running.ask("POST", "/v1/deployments", DEPLOYMENT)
        await running.until_warm(READY_S)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(served: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.endpoint('ams')}/v1", api_key=served.key, max_retries=0, timeout=READY_S
    ) as made:
        yield made


async def chat(client: openai.AsyncOpenAI) -> str:
    answer = await client.chat.completions.create(
        model="own", messages=MESSAGES, max_tokens=8, temperature=0
    )
    assert answer.model == "own", "clients never see the server's own name of the model"
    return answer.choices[0].message.content or ""


async def test_it_answers_chats_streamed_or_not(client: openai.AsyncOpenAI) -> None:
    whole = await chat(client)
    assert len(whole.split()) >= 2, whole
    stream = await client.chat.completions.create(
        model="own", messages=MESSAGES, max_tokens=8, temperature=0, stream=True
    )
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces).strip() == whole.strip()
    assert {chunk.model for chunk in chunks} == {"own"}


async def test_more_requests_than_it_takes_wait_and_are_answered(
    client: openai.AsyncOpenAI,
) -> None:
    answers = await asyncio.gather(*(chat(client) for _ in range(5)))
    assert len(set(answers)) == 1


async def test_what_the_deployment_does_not_claim_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tools.*its engine \(command\)"):
        await client.chat.completions.create(
            model="own",
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    with pytest.raises(openai.BadRequestError, match=r"embeddings|kind"):
        await client.embeddings.create(model="own", input="hi")


async def test_it_is_started_again_after_it_was_killed(
    served: Fleet, client: openai.AsyncOpenAI
) -> None:
    first = await chat(client)
    (before,) = records(served).values()
    os.kill(before.pid, signal.SIGKILL)

    async def is_back() -> bool:
        pids = {record.pid for record in records(served).values()}
        if not pids or before.pid in pids:
            return False
        with suppress(openai.APIError):
            return await chat(client) == first
        return False

    await until("the server is back", is_back, READY_S)
    assert group_members(before.pid) == []
