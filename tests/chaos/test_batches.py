"""kill -9 of each part while a batch and background responses run: each is answered once."""

import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.system.harness import LEASE_S, Fleet, a_fleet, until

ITEMS = 400
RESPONSES = 5
TOKENS = 8
WAIT_S = 180.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet(comes_up=False) as running:
        for name in ("scheduler-a", "scheduler-b"):
            running.settings[name] = {
                "batch_folder": str(running.folder / "batches"),
                "batches": {"lease_s": 4.0},
                "responses": {"lease_s": 4.0},
                "lease_ttl_s": 4.0,
            }
        await running.up()
        await running.deploy(replicas=2)
        await running.start_scheduler("b")
        yield running


async def test_each_item_is_answered_once_whatever_dies(fleet: Fleet) -> None:
    lines = [
        {
            "custom_id": f"item {number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "mock",
                "max_tokens": TOKENS,
                "messages": [{"role": "user", "content": f"item {number}"}],
            },
        }
        for number in range(ITEMS)
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.endpoint('ams')}/v1",
        api_key=fleet.key,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        created = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        promised: list[str] = []

        async def promise() -> None:
            for number in range(RESPONSES):
                response = await client.responses.create(
                    model="mock", input=f"{number}", background=True, max_output_tokens=TOKENS
                )
                promised.append(response.id)

        async def state() -> Any:
            try:
                return await client.batches.retrieve(created.id)
            except openai.APIStatusError as error:
                # While no scheduler acts, or the database is gone, batches cannot be read.
                if error.status_code not in (502, 503):
                    raise
                return None

        async def completed(count: int) -> None:
            async def has() -> bool:
                batch = await state()
                return batch is not None and batch.request_counts.completed >= count

            await until(f"{count} items are answered", has, WAIT_S)

        await completed(20)
        await promise()
        os.kill(fleet.engine_pids()["node-ams"], signal.SIGKILL)
        await completed(60)
        await promise()
        await fleet.kill("router-sin")
        await completed(100)
        await fleet.start_router("sin")
        await promise()
        await fleet.kill("postgres")
        await fleet.start_postgres()
        await completed(160)
        await promise()
        await fleet.kill("scheduler-a")
        await until("the standby acts", lambda: fleet.acts("b"), LEASE_S + 30.0)
        await completed(220)
        await promise()
        await fleet.kill("node-sin")

        async def has_ended() -> Any:
            batch = await state()
            return batch if batch is not None and batch.status == "completed" else None

        batch = await until("the batch is complete", has_ended, WAIT_S)
        counts = batch.request_counts
        errors = batch.error_file_id and (await client.files.content(batch.error_file_id)).text
        assert (counts.total, counts.completed, errors) == (ITEMS, ITEMS, None)
        await are_answered(client, promised)
        content = await client.files.content(batch.output_file_id)
        answers = [json.loads(line) for line in content.text.splitlines()]
        assert [answer["custom_id"] for answer in answers] == [f"item {n}" for n in range(ITEMS)]
        expected = " ".join(f"t{number}" for number in range(TOKENS))
        for answer in answers:
            message = answer["response"]["body"]["choices"][0]["message"]
            assert message["content"].strip() == expected


async def are_answered(client: openai.AsyncOpenAI, response_ids: list[str]) -> None:
    """Check that every background response that was promised has its one answer."""
    expected = " ".join(f"t{number}" for number in range(TOKENS))
    for response_id in response_ids:

        async def has_ended(response_id: str = response_id) -> Any:
            response = await client.responses.retrieve(response_id)
            return None if response.status in ("queued", "in_progress") else response

        response = await until("the response is answered", has_ended, WAIT_S)
        assert (response.status, response.output_text.strip()) == ("incomplete", expected)
        (item,) = (await client.responses.input_items.list(response_id)).data
        assert item.type == "message"
