"""The acting scheduler dies, or hangs, at each moment while it writes the results of a batch."""

import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import openai
import pytest

from tests.chaos.slow_disk import SlowDisks
from tests.system.harness import LEASE_S, Fleet, a_fleet, until

ITEMS = 60
WAIT_S = 120.0
SLOW_S = 1.0
"""How long each operation on the disk takes while a scheduler is struck."""

FOLDER = "batches"
OPERATIONS = (3, 8)
"""A scheduler is struck after it has begun so many operations. Writing both files of results takes
about ten: to open, write, sync and rename each, and to sync the folder."""


class TwoSchedulers(NamedTuple):
    """A fleet whose schedulers store files on one disk."""

    fleet: Fleet
    disks: SlowDisks

    async def acting(self) -> str:
        async def acts() -> str:
            for name in self.fleet.schedulers_started():
                if await self.fleet.acts(name):
                    return name
            return ""

        return str(await until("a scheduler acts", acts, LEASE_S + 30.0))


@pytest.fixture
async def schedulers() -> AsyncIterator[TwoSchedulers]:
    async with a_fleet(comes_up=False) as running:
        disks = SlowDisks(running)
        for name in ("scheduler-a", "scheduler-b"):
            running.environment[name] = disks.environment(FOLDER)
            running.settings[name] = {
                "batch_folder": str(running.folder / FOLDER),
                "batches": {"lease_s": 4.0},
                "lease_ttl_s": 4.0,
            }
        await running.up()
        await running.deploy(replicas=2)
        await running.start_scheduler("b")
        yield TwoSchedulers(running, disks)


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_batch_ends_once_whatever_happens_to_the_scheduler(
    schedulers: TwoSchedulers, strike: signal.Signals
) -> None:
    fleet = schedulers.fleet
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.endpoint('ams')}/v1",
        api_key=fleet.key,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        for operations in OPERATIONS:
            await end_batch(schedulers, client, strike, operations)


async def end_batch(
    schedulers: TwoSchedulers, client: openai.AsyncOpenAI, strike: signal.Signals, operations: int
) -> None:
    """Strike the scheduler that ends a batch, and check the batch."""
    fleet, disks = schedulers
    acting = await schedulers.acting()
    batch_id = await begin_batch(client)

    async def answered(count: int) -> bool:
        counts = (await client.batches.retrieve(batch_id)).request_counts
        assert counts is not None
        return counts.total == ITEMS and counts.completed >= count

    await until("items are answered", lambda: answered(1), WAIT_S)
    disks.set(FOLDER, SLOW_S)

    async def is_writing() -> bool:
        return disks.waits(FOLDER).all >= operations

    await until("it writes the results", is_writing, WAIT_S)
    # A disk that hangs must not stop the event loop.
    assert disks.waits(FOLDER).event_loop == 0
    pid = fleet.processes.pid(f"scheduler-{acting}")
    os.kill(pid, strike)
    disks.set(FOLDER, 0.0)
    try:
        batch = await until("the batch has ended", lambda: ended(client, batch_id), WAIT_S)
        await check_batch(client, batch)
    finally:
        if strike is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        else:
            await fleet.processes.stop(f"scheduler-{acting}")
            await fleet.start_scheduler(acting)

    async def stands_by() -> bool:
        return [await fleet.acts(name) for name in ("a", "b")].count(True) == 1

    await until("one of them acts", stands_by, LEASE_S + 30.0)
    # Nor does the one that was struck change anything later.
    await check_batch(client, await client.batches.retrieve(batch_id))


async def begin_batch(client: openai.AsyncOpenAI) -> str:
    lines = [
        {
            "custom_id": f"item {number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "mock",
                "max_tokens": 4,
                "messages": [{"role": "user", "content": f"item {number}"}],
            },
        }
        for number in range(ITEMS)
    ]
    text = "\n".join(json.dumps(line) for line in lines)

    async def begun() -> Any:
        try:
            file = await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
            return await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        except openai.APIStatusError as error:
            if error.status_code != 503:
                raise
            return None

    return str((await until("a batch begins", begun, WAIT_S)).id)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """Return a batch once it has ended; None before, and while no scheduler acts."""
    try:
        batch = await client.batches.retrieve(batch_id)
    except openai.APIStatusError as error:
        if error.status_code != 503:
            raise
        return None
    return batch if batch.status not in ("validating", "in_progress", "finalizing") else None


async def check_batch(client: openai.AsyncOpenAI, batch: Any) -> None:
    """Check that each item has one answer, in the one file of results."""
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", ITEMS, 0)
    assert batch.error_file_id is None
    content = await client.files.content(batch.output_file_id)
    answers = [json.loads(line) for line in content.text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"item {n}" for n in range(ITEMS)]
    assert all(answer["response"]["status_code"] == 200 for answer in answers)
    file = await client.files.retrieve(batch.output_file_id)
    assert file.bytes == len(content.content)
