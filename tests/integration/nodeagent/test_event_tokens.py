"""Through the agent, an engine that counts the tokens of its events: vLLM, by a stand-in."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.wire.http import headers
from isochrone.wire.ids import ReplicaId
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import CHAT_PATH
from nodeagent.drivers.request_body import CONTINUOUS_USAGE
from router.dataplane.sse import StreamRelay, split_frames
from tests.integration.nodeagent.test_data_plane import Node, a_node

TEXTS = {"a": 1, " b c": 3, "": 1, "\u8a9e": 2}
"""The texts of the events, and the tokens that each adds."""


async def answer(request: web.Request) -> web.StreamResponse:
    """Stream the texts as vLLM does, with the usage so far if that is wanted."""
    options = (await request.json()).get("stream_options") or {}
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    total = 0
    for text, tokens in TEXTS.items():
        total += tokens
        chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text}}]}
        if options.get(CONTINUOUS_USAGE):
            chunk["usage"] = {"prompt_tokens": 5, "completion_tokens": total}
        event = f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()
        cut = 20 if total > 1 else len(event)
        await response.write(event[:cut])
        await response.write(event[cut:])
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    app = web.Application()
    app.router.add_post(CHAT_PATH, answer)
    async with a_node() as node, serve_http(app, "127.0.0.1", 0) as port:
        await node.warm(node.spec())
        engine = node.supervisor.replicas[ReplicaId("r1")].engine
        assert engine is not None
        await engine.http.close()
        engine._http = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        engine.driver = DRIVERS["vllm"]
        yield node


async def test_the_router_gets_the_number_of_tokens_and_no_usage(node: Node) -> None:
    async with node.ask(stream_options={"include_usage": True}) as response:
        assert response.headers[headers.PROMPT_TOKENS] == "5"
        body = await response.read()
    assert b"usage" not in body
    first, several, *_ = split_frames(body)
    assert json.loads(first[6:]) == {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    assert json.loads(several[6:])["choices"][0]["generated_tokens"] == 3
    relay = StreamRelay(wants_usage=False)
    relay.feed(body)
    assert relay.generated()[:2] == (7, "a b c\u8a9e")


async def test_a_client_that_asks_for_the_usage_of_each_event_gets_it(node: Node) -> None:
    async with node.ask(stream_options={CONTINUOUS_USAGE: True}) as response:
        assert headers.PROMPT_TOKENS not in response.headers
        body = await response.read()
    assert body.count(b'"usage"') == len(TEXTS)
    assert b"generated_tokens" not in body
