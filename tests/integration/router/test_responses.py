"""`/v1/responses` through the router, with the official SDK."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, Bench, a_bench


@asynccontextmanager
async def a_client(bench: Bench, prefix: str = "") -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"{bench.url}{prefix}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        yield client


async def test_the_tokens_of_an_input_are_counted(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        count = await client.responses.input_tokens.count(
            model="tiny",
            input=[{"role": "user", "content": "hi"}],
            instructions="be brief",
            tools=[{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        )
        assert (count.object, count.input_tokens) == ("response.input_tokens", 3)
        sent = json.loads(bench.nodes[0].bodies[-1])
        assert [message["role"] for message in sent["messages"]] == ["system", "user"]
        assert sent["tools"][0]["function"]["name"] == "f"
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.input_tokens.count(model="tiny", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError, match="not compacted here"):
            await client.responses.compact(model="tiny", input="hi")
        with pytest.raises(openai.APIStatusError, match="use GET or DELETE") as not_here:
            await client.post("/responses/resp_1", cast_to=object)
        assert not_here.value.response.headers["allow"] == "GET, DELETE"


@pytest.mark.parametrize("prefix", ["", "/client/v4/accounts/acme/ai"])
async def test_a_complete_response(tmp_path: Path, prefix: str) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench, prefix) as client:
        answer = await client.responses.create(model="tiny", input="hi", max_output_tokens=3)
        assert (answer.status, answer.output_text) == ("completed", "t0 t1 t2")
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (11, 3)
        raw = await client.responses.with_raw_response.create(model="tiny", input="hi")
        assert raw.headers["x-isochrone-node"] == "n1"
        assert raw.headers["x-request-id"] in raw.parse().id


async def test_a_stream_of_events(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        async with client.responses.stream(model="tiny", input="hi", max_output_tokens=3) as stream:
            deltas = [
                event.delta async for event in stream if event.type == "response.output_text.delta"
            ]
            answer = await stream.get_final_response()
        assert "".join(deltas) == answer.output_text == "t0 t1 t2 "
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 3


async def test_another_replica_continues_the_stream_of_one_that_fails(
    tmp_path: Path,
) -> None:
    dying, other = FakeNode("n1"), FakeNode("n2")
    dying.cut_at, other.resumes = 2, "greedy"
    other.ttft_s = 0.05
    async with a_bench(tmp_path, [dying, other]) as bench, a_client(bench) as client:
        stream = await client.responses.create(
            model="tiny", input="hi", max_output_tokens=5, temperature=0, stream=True
        )
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text.startswith("t0 t1 t2 ")


async def test_a_stream_that_cannot_continue_ends_with_a_failure_event(tmp_path: Path) -> None:
    node = FakeNode()
    node.cut_at = 2
    async with a_bench(tmp_path, [node]) as bench, a_client(bench) as client:
        stream = await client.responses.create(model="tiny", input="hi", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert events[-1].response.output_text == "t0 t1 "


async def test_errors_have_openais_format(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        with pytest.raises(openai.InternalServerError, match="no scheduler is connected"):
            await client.responses.create(model="tiny", input="hi", previous_response_id="r")
        with pytest.raises(openai.NotFoundError, match="cannot find the model"):
            await client.responses.create(model="none", input="hi")
        with pytest.raises(openai.InternalServerError, match="no scheduler is connected"):
            await client.responses.retrieve("resp_1")
        with pytest.raises(openai.BadRequestError, match="cannot use field 'input'"):
            await client.responses.create(model="tiny", input=3)  # type: ignore[call-overload]
        async with openai.AsyncOpenAI(
            base_url=f"{bench.url}/v1", api_key="none", max_retries=0
        ) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.responses.create(model="tiny", input="hi")
