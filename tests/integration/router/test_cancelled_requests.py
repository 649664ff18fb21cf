"""A key cannot have prompts read beyond its limits by leaving before they are answered."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from isochrone.wire.peers.routes import KeyLimits
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import a_bench

PROMPT = "x" * 8_000


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_prompts_of_clients_that_leave_count_against_the_limits(
    tmp_path: Path, is_stream: bool
) -> None:
    node = FakeNode()
    node.ttft_s = 60.0
    limits = KeyLimits(tokens_per_day=1_000)
    async with a_bench(tmp_path, [node], limits=limits, first_byte_timeout_s=30) as bench:

        async def chat() -> int:
            fields = {"max_tokens": 1, "stream": is_stream}
            async with bench.chat(PROMPT, **fields) as response:
                return int(response.status)

        leaving = asyncio.create_task(chat())
        await node.until(lambda: node.running == 1)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        await node.until(lambda: node.cancelled == 1)
        assert await chat() == 429
        assert node.requests == 1
