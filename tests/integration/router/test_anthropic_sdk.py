"""The official `anthropic` client, unmodified, with the router."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.types import MessageParam

from isochrone.wire.models.model import Deprecation
from isochrone.wire.peers.routes import KeyLimits
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, Bench, a_bench, a_route, a_table

HELLO: list[MessageParam] = [{"role": "user", "content": "hello there"}]


@asynccontextmanager
async def a_client(bench: Bench, **fields: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    given = {"api_key": KEY, "max_retries": 0, **fields}
    async with anthropic.AsyncAnthropic(
        base_url=bench.url,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
        **given,
    ) as client:
        yield client


async def test_a_message_is_answered_with_either_kind_of_key(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        for key in ({"api_key": KEY}, {"api_key": None, "auth_token": KEY}):
            async with a_client(bench, **key) as client:
                answer = await client.messages.create(model="tiny", max_tokens=3, messages=HELLO)
                assert [block.type for block in answer.content] == ["text"]
                assert answer.content[0].type == "text"
                assert answer.content[0].text == "t0 t1 t2"
                assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 3)
                assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == 11
                assert answer.usage.cache_read_input_tokens == 3
                assert answer._request_id is not None
                assert answer._request_id in answer.id


async def test_a_stream_is_read_to_its_last_event(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        stream = await client.messages.create(
            model="tiny", max_tokens=4, messages=HELLO, stream=True
        )
        kinds = [event.type async for event in stream]
        assert kinds == [
            *("message_start", "content_block_start"),
            *["content_block_delta"] * 4,
            *("content_block_stop", "message_delta", "message_stop"),
        ]
        async with client.messages.stream(model="tiny", max_tokens=4, messages=HELLO) as helper:
            assert "".join([text async for text in helper.text_stream]) == "t0 t1 t2 t3 "
            final = await helper.get_final_message()
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 4)
        assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (8, 3)


async def test_a_stream_begins_with_the_tokens_of_the_prompt(tmp_path: Path) -> None:
    """Some clients read them there only, as LangChain for JavaScript does."""
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        for told in (11, 0):
            bench.nodes[0].prompt_tokens = told
            async with client.messages.stream(model="tiny", max_tokens=4, messages=HELLO) as stream:
                begun = await anext(aiter(stream))
                assert begun.type == "message_start"
                # Before the end of a stream nothing says how many of them were cached.
                assert begun.message.usage.input_tokens == told
                final = await stream.get_final_message()
            assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (8, 3)


async def test_tokens_are_counted_and_cost_nothing(tmp_path: Path) -> None:
    limits = KeyLimits(requests_per_min=2, tokens_per_min=1_000_000)
    async with a_bench(tmp_path, limits=limits) as bench, a_client(bench) as client:
        for _ in range(2):
            count = await client.messages.count_tokens(
                model="tiny", messages=HELLO, system="be brief"
            )
            assert count.input_tokens == 4
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.count_tokens(model="tiny", messages=HELLO)


@anthropic.beta_async_tool
async def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


async def test_the_sdks_tool_runner_continues_without_a_thread(tmp_path: Path) -> None:
    """It asks the server to keep the conversation, and sends it whole once that is refused."""
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=4,
            messages=[{"role": "user", "content": "hi there"}],
            tools=[weather],
        )
        answers = [answer async for answer in runner]
        assert [answer.stop_reason for answer in answers] == ["end_turn"]
        assert len(bench.nodes[0].bodies) == 1


async def test_models_are_listed_in_pages_and_retrieved(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(5)]
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        bench.app.fleet.adopt(a_table([a_route(bench.nodes[0])], generation=2, names=names))
        assert [model.id async for model in client.models.list(limit=2)] == names
        page = await client.models.list(limit=2, before_id="m4")
        assert ([model.id for model in page.data], page.has_more) == (["m2", "m3"], True)
        model = await client.models.retrieve("m3")
        assert (model.display_name, model.max_input_tokens, model.type) == ("m3", 4096, "model")
        assert model._request_id
        with pytest.raises(anthropic.NotFoundError, match="cannot find the model 'none'"):
            await client.models.retrieve("none")
        with pytest.raises(anthropic.BadRequestError, match="cannot use 'limit' '0'"):
            await client.models.list(limit=0)
        async with bench.http.get(f"{bench.url}/v1/models") as response:
            assert (await response.json())["object"] == "list"


async def test_models_are_listed_by_lifecycle(tmp_path: Path) -> None:
    names = ("active", "deprecated", "retired")
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        table = a_table([a_route(bench.nodes[0])], generation=2, names=names)
        ends = (None, Deprecation(announced_at=5), Deprecation(announced_at=5, sunset_at=9))
        deployments = tuple(
            msgspec.structs.replace(entry, deprecation=end)
            for entry, end in zip(table.deployments, ends, strict=True)
        )
        bench.app.fleet.adopt(msgspec.structs.replace(table, deployments=deployments))
        listed = client.models.list
        assert [model.id async for model in listed()] == ["active", "deprecated"]
        ended = [model async for model in listed(lifecycle=["deprecated", "retired"])]
        assert [(model.id, model.lifecycle) for model in ended] == [
            ("deprecated", "deprecated"),
            ("retired", "retired"),
        ]
        unknown: Any = ["new"]
        with pytest.raises(anthropic.BadRequestError, match="cannot use 'lifecycle' 'new'"):
            await listed(lifecycle=unknown)
        with pytest.raises(anthropic.BadRequestError, match="query parameter 'colour'"):
            await listed(extra_query={"colour": "red"})


async def test_a_parameter_that_is_sent_as_a_header_is_refused(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        fields: Any
        for fields in ({"workspace_id": "w"}, {"user_profile_id": "u"}):
            name = next(iter(fields)).replace("_", "-")
            with pytest.raises(anthropic.BadRequestError, match=f"header 'anthropic-{name}'"):
                await client.messages.create(model="tiny", max_tokens=3, messages=HELLO, **fields)


async def test_errors_raise_the_sdks_own_exceptions(tmp_path: Path) -> None:
    node = FakeNode()
    limits = KeyLimits(requests_per_min=4)
    async with a_bench(tmp_path, [node], limits=limits) as bench, a_client(bench) as client:
        create = client.messages.create
        async with a_client(bench, api_key="sk-ant-none") as stranger:
            with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key") as refused:
                await stranger.messages.create(model="tiny", max_tokens=3, messages=HELLO)
            assert refused.value.type == "authentication_error"
            assert refused.value.request_id
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.models.list()
        with pytest.raises(anthropic.NotFoundError, match="cannot find the model"):
            await create(model="none", max_tokens=3, messages=HELLO)
        with pytest.raises(anthropic.BadRequestError, match="cannot use field 'max_tokens'"):
            await create(model="tiny", messages=HELLO, max_tokens=0)
        with pytest.raises(anthropic.BadRequestError, match="'mcp_servers': it is not supported"):
            await client.beta.messages.create(
                model="tiny",
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=3,
                mcp_servers=[{"type": "url", "url": "https://x", "name": "x"}],
            )
        node.status = 400
        with pytest.raises(anthropic.BadRequestError, match="broken") as by_engine:
            await create(model="tiny", max_tokens=3, messages=HELLO)
        body: Any = by_engine.value.body
        assert body["request_id"] == by_engine.value.request_id
        node.status = 200
        with pytest.raises(anthropic.NotFoundError, match="the routes of this API are"):
            await client.messages.batches.list()
        node.refuse = "busy"
        with pytest.raises(anthropic.OverloadedError) as full:
            await create(model="tiny", max_tokens=3, messages=HELLO)
        assert int(full.value.response.headers["retry-after"]) >= 1
        node.refuse = ""
        for _ in range(2):
            await create(model="tiny", max_tokens=3, messages=HELLO)
        with pytest.raises(anthropic.RateLimitError, match="requests"):
            await create(model="tiny", max_tokens=3, messages=HELLO)


async def test_another_replica_continues_the_stream_of_one_that_fails(tmp_path: Path) -> None:
    dying, other = FakeNode("n1"), FakeNode("n2")
    dying.cut_at, other.resumes, other.ttft_s = 2, "greedy", 0.05
    async with a_bench(tmp_path, [dying, other]) as bench, a_client(bench) as client:
        async with client.messages.stream(
            model="tiny", max_tokens=5, messages=HELLO, extra_body={"temperature": 0}
        ) as stream:
            text = "".join([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        assert text.startswith("t0 t1 t2 ")
        assert final.stop_reason == "end_turn"


async def test_a_stream_that_cannot_continue_raises(tmp_path: Path) -> None:
    node = FakeNode()
    node.cut_at = 2
    async with a_bench(tmp_path, [node]) as bench, a_client(bench) as client:
        stream = await client.messages.create(
            model="tiny", max_tokens=5, messages=HELLO, stream=True
        )
        with pytest.raises(anthropic.APIStatusError, match="this answer after a server error"):
            [event async for event in stream]


async def test_closing_a_stream_frees_the_node(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.02
    async with a_bench(tmp_path, [node]) as bench, a_client(bench) as client:
        stream = await client.messages.create(
            model="tiny", messages=HELLO, stream=True, max_tokens=4000
        )
        async for _ in stream:
            break
        await stream.close()
        await node.until(lambda: node.cancelled == 1)


async def test_files_are_refused_in_anthropics_shape(tmp_path: Path) -> None:
    """`/v1/files` has OpenAI's objects: its answers would be read as files without a name."""
    async with a_bench(tmp_path) as bench, a_client(bench) as client:
        calls: list[Any] = [
            client.beta.files.list(),
            client.beta.files.upload(file=("a.txt", b"text")),
            client.beta.files.retrieve_metadata("file_1"),
            client.beta.files.download("file_1"),
            client.beta.files.delete("file_1"),
        ]
        for call in calls:
            with pytest.raises(anthropic.NotFoundError, match="files here are OpenAI's") as caught:
                await call
            assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
            assert caught.value.request_id


async def test_a_wrong_key_is_refused_in_anthropics_shape(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, a_client(bench, api_key="iso_wrong") as client:
        calls: list[Any] = [
            client.messages.create(model="tiny", max_tokens=3, messages=HELLO),
            client.messages.count_tokens(model="tiny", messages=HELLO),
            client.models.list(),
            client.models.retrieve("tiny"),
            client.beta.files.list(),
            client.beta.files.upload(file=("a.txt", b"text")),
            client.beta.skills.list(),
            client.beta.skills.create(files=[("a.md", b"text")]),
            client.messages.batches.list(),
        ]
        for call in calls:
            with pytest.raises((anthropic.AuthenticationError, anthropic.NotFoundError)) as caught:
                await call
            assert caught.value.type in ("authentication_error", "not_found_error")
            body: Any = caught.value.body
            assert body["request_id"] == caught.value.request_id
            assert body["request_id"]
