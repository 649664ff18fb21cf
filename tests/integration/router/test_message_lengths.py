"""Anthropic's `max_tokens` may be more than fits beside the prompt, as clients' defaults are."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from multidict import CIMultiDict

from isochrone.wire.http.headers import REQUEST_ID
from tests.integration.router.fleet_of import a_bench
from tests.integration.router.mock_node import MockNode
from tests.integration.router.test_anthropic_sdk import a_client

CONTEXT_TOKENS = 4096
"""Of the route table's deployment, and so of the node."""

PROMPT: list[Any] = [{"role": "user", "content": "one two three four"}]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Any]:
    async with a_bench(tmp_path, [MockNode(CONTEXT_TOKENS)]) as started:
        yield started


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("max_tokens", "stop_reason", "attempts"),
    [
        (20, "max_tokens", 1),
        (CONTEXT_TOKENS - 1, "model_context_window_exceeded", 2),
        (CONTEXT_TOKENS, "model_context_window_exceeded", 1),
        (20_000, "model_context_window_exceeded", 1),
    ],
)
async def test_an_answer_ends_with_max_tokens_or_with_the_context(
    bench: Any, streams: bool, max_tokens: int, stop_reason: str, attempts: int
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": max_tokens, "messages": PROMPT}
    async with a_client(bench) as client:
        if streams:
            async with client.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked)
    assert message.stop_reason == stop_reason
    # Without a limit the mock engine generates 256 tokens.
    assert message.usage.output_tokens == min(max_tokens, 256)
    (node,) = bench.nodes
    ids = {CIMultiDict(sent)[REQUEST_ID] for sent in node.request_headers}
    assert len(ids) == len(node.request_headers) == attempts


async def test_a_prompt_that_does_not_fit_is_refused(bench: Any) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * CONTEXT_TOKENS}]
    async with a_client(bench) as client:
        for max_tokens in (20, 20_000):
            wording = r"prompt is too long: \d+ tokens > 4096 maximum; This model's maximum"
            with pytest.raises(anthropic.BadRequestError, match=wording):
                await client.messages.create(model="tiny", max_tokens=max_tokens, messages=long)
