"""A node that lies about what a request used harms neither the key's quotas nor other requests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from isochrone.wire.ids import DeploymentId, NodeId
from isochrone.wire.peers.routes import KeyLimits
from router.dataplane.exchange import AttemptFailed, NodeRequest
from router.decide.choice.deployment_routing import BYTES_PER_TOKEN_MAX
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench
from tests.system.harness import until

CONTEXT_TOKENS = 4096
"""That of the deployment in `fleet_of`."""


class LyingNode(FakeNode):
    """Reports `prompt` and `output` tokens, whatever it has generated."""

    prompt = output = 2**52

    def _usage(self, count: int) -> dict[str, Any]:
        details = {"cached_tokens": 2**52}
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.output}
        return {**counts, "total_tokens": 7, "prompt_tokens_details": details}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    limits = KeyLimits(tokens_per_min=1_000_000, tokens_per_day=5_000_000)
    async with a_bench(tmp_path, [LyingNode()], limits=limits, usage_interval_s=60.0) as bench:
        yield bench


@pytest.mark.parametrize("stream", [False, True])
async def test_one_answer_does_not_use_up_a_quota(bench: Bench, stream: bool) -> None:
    for _ in range(3):
        async with bench.chat(stream=stream, max_tokens=2) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
    rows = bench.app.recorder._usage
    assert [(row.prompt_tokens, row.output_tokens) for row in rows[-1:]] == [(CONTEXT_TOKENS,) * 2]


async def test_prompts_are_not_estimated_by_a_lie(bench: Bench) -> None:
    node = bench.nodes[0]
    assert isinstance(node, LyingNode)
    node.prompt = 1
    async with bench.chat("x" * 100_000, max_tokens=2) as answer:
        assert answer.status == 200
    estimate = bench.app.fleet.routing(DeploymentId("d-1")).estimate_tokens(100_000)
    assert estimate >= 100_000 / BYTES_PER_TOKEN_MAX


class FloodingNode(FakeNode):
    """Begins each answer with a megabyte of spaces, and does not end it."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer without an end."""
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        await response.write(b" " * 2**20)
        self.sent += 1
        await self.note()
        await asyncio.Event().wait()
        return response


async def test_the_answers_of_one_node_take_half_of_the_memory_for_answers(tmp_path: Path) -> None:
    node = FloodingNode()
    async with a_bench(tmp_path, [node], answers_held_bytes_max=8 * 2**20) as bench:
        upstream = bench.app.upstream
        request = NodeRequest("POST", "/v1/chat/completions", "", b"{}")
        exchanges = [
            upstream.send(NodeId(node.name), node.address, request, 20.0, 2**26) for _ in range(10)
        ]

        async def six_are_refused() -> bool:
            return sum(one.is_over for one in exchanges) == 6

        await until("six answers are refused", six_are_refused)
        for one in exchanges:
            if one.is_over:
                with pytest.raises(AttemptFailed, match="than all its answers may take"):
                    one.response_head()
        assert upstream.answers.total <= 4 * 2**20
        for one in exchanges:
            one.abandon()
        assert upstream.answers.total == 0
