"""Links to images are fetched by the router: engines get images, and hosts of attackers nothing."""

import asyncio
import gzip
import json
import socket
import threading
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from aiohttp import web

from isochrone.wire.peers.batches import ItemRef, ItemResult, LeasedItem
from isochrone.wire.peers.routes import KeyLimits
from router.apis.linked_images import fetcher as fetching
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, Bench, a_bench, a_key, a_route, a_table
from tests.integration.router.image_origin import (
    GIF,
    GIF_URL,
    ImageOrigin,
    a_fetching_bench,
)
from tests.integration.router.test_anthropic_sdk import a_client
from tests.otlp_collector import a_collector


def chat(*urls: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return {"model": "tiny", "messages": [{"role": "user", "content": parts}], **fields}


async def ask(bench: Bench, body: Any, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    async with bench.http.post(f"{bench.url}{path}", json=body) as response:
        return response.status, await response.json()


def sent_urls(node: FakeNode) -> list[str]:
    """Return the URLs of the images that the node got last."""
    return [
        part["image_url"] if isinstance(part["image_url"], str) else part["image_url"]["url"]
        for message in json.loads(node.bodies[-1])["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if "image_url" in part
    ]


def outcomes(bench: Bench) -> dict[str, float]:
    (metric,) = bench.app.metrics.image_fetches.collect()
    return {
        sample.labels["outcome"]: sample.value
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


async def test_an_engine_gets_the_image_and_no_link(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        (node,) = bench.nodes
        status, answer = await ask(bench, chat(origin.url(), GIF_URL, origin.url()))
        assert status == 200, answer
        assert sent_urls(node) == [GIF_URL] * 3
        part = json.loads(node.bodies[-1])["messages"][0]["content"][0]
        assert part == {"type": "image_url", "image_url": {"url": GIF_URL, "detail": "low"}}
        # Fetched once, without anything of the client's.
        (request,) = origin.requests
        assert {name.lower() for name in request.headers} == {
            *("host", "accept", "accept-encoding", "user-agent", "connection"),
        }
        assert outcomes(bench) == {"fetched": 1}


async def test_each_form_of_a_link_is_found(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        (node,) = bench.nodes
        link = json.dumps(origin.url()).encode()
        escaped = link.replace(b"/", b"\\/").replace(b"images", b"im\\u0061ges")
        plain = b'"image_url":%b' % link
        forms = [
            b'"image_url":{"url":%b}' % escaped,
            plain,
            b'"image\\u005furl":{"u\\u0072l":%b}' % link,
            # Some parsers take the first of two, and some the last.
            b'"image_url":{"url":%b,"url":"%b"}' % (link, GIF_URL.encode()),
            b'"image_url":{"url":"%b","url":%b}' % (GIF_URL.encode(), link),
            b'%b,"image_url":"%b"' % (plain, GIF_URL.encode()),
            plain + b',"text":"' + b"x" * 9000 + b'"',
        ]
        for form in forms:
            body = (
                b'{"model":"tiny","messages":[{"role":"developer","content":"a"},{"role":"system",'
                b'"content":"b"},{"role":"user","content":[{"type":"image_url",%b}]}]}' % form
            )
            async with bench.http.post(f"{bench.url}/v1/chat/completions", data=body) as response:
                assert response.status == 200, await response.text()
            assert sent_urls(node) == [GIF_URL]
            assert b"https" not in node.bodies[-1].replace(b"\\", b"")


async def test_links_are_refused_unless_the_operator_allows_them(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        link = "https://images.test/a.gif"
        source = {"type": "image", "source": {"type": "url", "url": link}}
        part = {"type": "input_image", "image_url": link}
        result = {"type": "function_call_output", "call_id": "c", "output": [part]}
        message = {"model": "tiny", "max_tokens": 3}
        hello = {"role": "user", "content": "Hello"}
        asked = {"role": "user", "content": [{"type": "input_text", "text": "See"}, part]}
        seen = {"type": "tool_result", "tool_use_id": "t", "content": [source]}
        messages = [hello, {"role": "user", "content": [seen, source]}]
        inputs, outputs = "input[1].content[1].image_url", "input[1].output[0].image_url"
        items, found = "items[1].content[1].image_url", "messages[1].content[0].content[0].source"
        requests: list[tuple[str, Any, str]] = [
            ("/v1/chat/completions", chat(link), "messages[0].content[0].image_url.url"),
            ("/ai/run/tiny", {"messages": chat(link)["messages"]}, "messages[0].content[0]"),
            ("/ai/run/tiny", {"input": [hello, asked]}, inputs),
            ("/v1/responses", {"model": "tiny", "input": [hello, result]}, outputs),
            ("/v1/responses", {"model": "tiny", "input": [hello, asked], "store": True}, inputs),
            ("/v1/responses/input_tokens", {"model": "tiny", "input": [hello, asked]}, inputs),
            ("/v1/conversations", {"items": [hello, asked]}, items),
            ("/v1/messages", {**message, "messages": messages}, f"{found}.url"),
            ("/v1/messages/count_tokens", {"model": "tiny", "messages": messages}, f"{found}.url"),
        ]
        for path, body, place in requests:
            status, answer = await ask(bench, body, path)
            assert status == 400
            text = json.dumps(answer)
            assert f"cannot use field '{place}" in text
            assert "expected a `data:` URL with the file in base64" in text
        assert bench.nodes[0].requests == 0


async def test_the_sdks_send_links(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        (node,), link = bench.nodes, origin.url()
        async with openai.AsyncOpenAI(
            api_key=KEY,
            base_url=f"{bench.url}/v1",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client:
            create: Any = client.chat.completions.create
            for stream in (False, True):
                answer = await create(**chat(link), stream=stream, max_completion_tokens=3)
                if stream:
                    assert len([chunk async for chunk in answer]) >= 3
                assert sent_urls(node) == [GIF_URL]
            image = {"type": "input_image", "image_url": link, "detail": "auto"}
            call = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
            result = {"type": "function_call_output", "call_id": "c", "output": [image]}
            respond: Any = client.responses.create
            given = [{"role": "user", "content": [image]}, call, result]
            await respond(model="tiny", input=given, max_output_tokens=3)
            assert sent_urls(node) == [GIF_URL] * 2
            with pytest.raises(openai.BadRequestError) as refused:
                await create(**chat(GIF_URL, origin.url("/none.gif?secret")))
            assert refused.value.code == "invalid_image_url"
            assert refused.value.param == "messages[0].content[1].image_url"
            reason = f"cannot fetch {origin.url('/none.gif')}: its host answered 404"
            assert reason in refused.value.message
            with pytest.raises(openai.BadRequestError) as refused:
                await respond(model="tiny", input=[{"role": "user", "content": [
                    {**image, "image_url": origin.url("/none.gif")}
                ]}])  # fmt: skip
            assert refused.value.param == "input"
        async with a_client(bench) as client_:
            block: Any = {"type": "image", "source": {"type": "url", "url": link}}
            use: Any = {"type": "tool_use", "id": "t", "name": "see", "input": {}}
            seen: Any = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
            messages: Any = [
                {"role": "user", "content": [block]},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [seen]},
            ]
            await client_.messages.create(model="tiny", max_tokens=3, messages=messages)
            assert sent_urls(node) == [GIF_URL] * 2
            await client_.messages.count_tokens(model="tiny", messages=messages)
            assert sent_urls(node) == [GIF_URL] * 2
            block["source"]["url"] = origin.url("/none.gif")
            with pytest.raises(anthropic.BadRequestError, match="field 'messages': cannot fetch"):
                await client_.messages.create(model="tiny", max_tokens=3, messages=messages)
        status, answer = await ask(bench, {"messages": chat(link)["messages"]}, "/ai/run/tiny")
        assert (status, sent_urls(node)) == (200, [GIF_URL]), answer


async def test_an_item_of_a_batch_may_have_links(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        for path, status in (("/a.gif", 200), ("/none.gif", 400)):
            body = chat(origin.url(path), max_tokens=3)
            key = next(iter(bench.app.fleet.directory.keys))
            item = LeasedItem(
                ref=ItemRef("b", 0, "l"),
                key_id=key.key_id,
                tenant_id=key.tenant_id,
                endpoint="/v1/chat/completions",
                body=json.dumps(body).encode(),
            )
            result = await bench.app.answer_batches._answer(item, 0)
            assert isinstance(result, ItemResult)
            assert result.status_code == status
        assert sent_urls(bench.nodes[0]) == [GIF_URL]


async def test_the_download_is_a_step_of_the_trace(tmp_path: Path) -> None:
    async with a_collector() as collector:
        traced: dict[str, Any] = {"traces_endpoint": collector.url, "trace_sample_ratio": 1.0}
        async with a_fetching_bench(tmp_path, **traced) as (bench, origin):
            await ask(bench, chat(origin.url()))
            await ask(bench, chat(origin.url("/none")))
        found, missing = collector.named("fetch images")
        trace = collector.trace(found.trace)
        assert found.parent == trace["chat tiny"].id
        assert found.span.end_time_unix_nano <= trace["attempt"].span.start_time_unix_nano
        assert set(collector.trace(missing.trace)) == {"chat tiny", "fetch images"}


async def test_another_replica_continues_with_the_fetched_image(tmp_path: Path) -> None:
    nodes = [FakeNode("n1"), FakeNode("n2")]
    async with a_fetching_bench(tmp_path, nodes) as (bench, origin):
        for node in nodes:
            node.cut_at, node.resumes = 3, "greedy"
        async with bench.http.post(
            f"{bench.url}/v1/chat/completions", json=chat(origin.url(), stream=True, max_tokens=6)
        ) as response:
            while (first := next((n for n in nodes if n.requests), None)) is None:
                await asyncio.sleep(0.01)
            other = nodes[1 - nodes.index(first)]
            other.cut_at = None
            assert "[DONE]" in await response.text()
        assert (sent_urls(first), sent_urls(other)) == ([GIF_URL], [GIF_URL])
        assert len(origin.requests) == 1


REASONS = {
    "/none": "its host answered 404",
    "/html": "no PNG, JPEG, GIF or WebP",
    "/empty": "no PNG, JPEG, GIF or WebP",
    "/gzip": "compressed",
    "/endless": "does not fit into a body",
    "/chunked": "does not fit into a body",
    "/announced": "does not fit into a body",
    "/short": "broke off",
    "/loop": "redirects more than 3 times",
    "/metadata": "it redirects to a link that is not fetched: its host has no public address",
    "/inside": "its host has no public address",
    "/plain": "it redirects to a link that is not fetched: it is no plain `https://` link",
    "/nowhere": "it redirects to a link that is not fetched",
    "/headers": "broke off",
    "/interim": "broke off",
    "/answers": "no PNG, JPEG, GIF or WebP",
    "/tiny": "broke off",
    "/broken": "its header is broken",
}


def redirects(location: str) -> Any:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"location": location})

    return answer


def hostile_answers(origin: ImageOrigin) -> dict[str, Any]:
    async def stream(
        request: web.Request, length: int | None, first: bytes, more: bytes
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = length
        await response.prepare(request)
        await response.write(first)
        while more:
            await response.write(more)
        assert request.transport is not None
        request.transport.close()
        return response

    def raw(first: bytes, more: bytes) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            transport = request.transport
            assert transport is not None
            transport.write(first)
            while not transport.is_closing():
                if transport.get_write_buffer_size() < 2**20:
                    transport.write(more * 1000)
                await asyncio.sleep(0)
            raise ConnectionError

        return answer

    ok = b"HTTP/1.1 200 OK\r\n"
    chunked = ok + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(GIF), GIF)

    many = b"\0" * 65536
    return {
        "/html": b"<!doctype html><title>Sign in</title>",
        "/empty": b"",
        "/broken": GIF[:12],
        "/gzip": lambda _: gzipped(),
        "/endless": lambda request: stream(request, 2**40, GIF, many),
        "/chunked": lambda request: stream(request, None, GIF, many),
        "/announced": lambda request: stream(request, 2**40, b"", b""),
        "/short": lambda request: stream(request, 5000, GIF, b""),
        "/loop": redirects("/loop"),
        "/metadata": redirects(f"https://169.254.169.254:{origin.port}/latest/meta-data"),
        "/inside": redirects(f"https://mixed.test:{origin.port}/a.gif"),
        "/plain": redirects("http://images.test/a.gif"),
        "/nowhere": redirects("https://["),
        "/headers": raw(ok, b"x: y\r\n"),
        "/interim": raw(b"", b"HTTP/1.1 103 x\r\n\r\n"),
        "/answers": raw(b"", ok + b"content-length: 0\r\n\r\n"),
        "/tiny": raw(chunked, b"1\r\n\0\r\n"),
    }


async def gzipped() -> web.Response:
    bomb = gzip.compress(GIF + bytes(10_000_000))
    return web.Response(body=bomb, headers={"content-encoding": "gzip"})


@pytest.mark.parametrize("path", REASONS)
async def test_a_hostile_host_costs_one_request(tmp_path: Path, path: str) -> None:
    config = {"body_bytes_max": 1024 * 1024}
    async with a_fetching_bench(tmp_path, **config) as (bench, origin):
        origin.answers |= hostile_answers(origin)
        status, answer = await ask(bench, chat(GIF_URL, origin.url(path)))
        assert status == 400, answer
        assert answer["error"]["param"] == "messages[0].content[1].image_url"
        assert REASONS[path] in answer["error"]["message"]
        assert (await ask(bench, chat(origin.url())))[0] == 200
        assert bench.nodes[0].requests == 1
        assert_nothing_is_held(bench)


def assert_nothing_is_held(bench: Bench) -> None:
    fetcher = bench.app.surface.image_fetcher
    assert fetcher is not None
    assert fetcher._slots.total == 0
    assert bench.app.pipeline._bodies._shares.total == 0


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://mixed.test:{port}/a.gif", "no public address"),
        ("https://unknown.test:{port}/a.gif", "no public address"),
        ("https://10.0.0.1:{port}/a.gif", "no public address"),
        ("https://images.test/a.gif", "its port is not"),
        ("https://u:p@images.test:{port}/a.gif", "no plain `https://` link"),
    ],
)
async def test_a_host_inside_is_not_told_from_an_unknown_one(
    tmp_path: Path, url: str, reason: str
) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        status, answer = await ask(bench, chat(url.format(port=origin.port)))
        assert (status, answer["error"]["code"]) == (400, "invalid_image_url")
        assert reason in answer["error"]["message"]
        assert not origin.requests
        assert bench.nodes[0].requests == 0


async def test_a_name_that_resolves_to_another_address_later_is_not_asked_again(
    tmp_path: Path,
) -> None:
    """The address that was checked is the one that is connected to."""
    async with a_fetching_bench(tmp_path) as (bench, origin):
        answers = [["127.0.0.1"], ["10.0.0.1"]]
        fetcher = bench.app.surface.image_fetcher
        assert fetcher is not None

        async def look_up(_: str) -> list[str]:
            return answers.pop(0)

        fetcher.look_up = look_up
        assert (await ask(bench, chat(origin.url())))[0] == 200
        assert answers == [["10.0.0.1"]]


async def test_a_slow_host_ends_at_the_time_limit(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        fetcher = bench.app.surface.image_fetcher
        assert fetcher is not None
        fetcher.timeout_s = 0.5

        async def slow(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for number in range(len(GIF)):
                await response.write(GIF[number : number + 1])
                await asyncio.sleep(0.1)
            return response

        origin.answers["/slow"] = slow
        status, answer = await ask(bench, chat(origin.url(), origin.url("/slow")))
        assert status == 400
        assert "/slow: it did not arrive within" in answer["error"]["message"]
        assert outcomes(bench) == {"fetched": 1, "stopped": 1}
        assert_nothing_is_held(bench)


async def test_a_client_that_leaves_ends_its_fetches(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        fetcher = bench.app.surface.image_fetcher
        assert fetcher is not None
        fetcher.timeout_s = 600.0

        async def hanging(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(GIF)
            await asyncio.Event().wait()
            return response

        origin.answers["/hangs"] = hanging
        asking = asyncio.create_task(ask(bench, chat(origin.url("/hangs"))))
        await origin.until(lambda: origin.open["/hangs"])
        asking.cancel()
        await origin.until(lambda: not origin.open["/hangs"])
        for _ in range(500):
            if not bench.app.pipeline._bodies._shares.total:
                break
            await asyncio.sleep(0.01)
        assert_nothing_is_held(bench)


async def test_many_links_are_fetched_some_at_a_time(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        paths = [f"/{number}.gif" for number in range(65)]

        async def a_moment(_: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.01)
            return web.Response(body=GIF)

        origin.answers = dict.fromkeys(paths, a_moment)
        status, answer = await ask(bench, chat(*map(origin.url, paths[:64])))
        assert status == 200, answer
        assert len(origin.requests) == 64
        assert 2 <= origin.open_max <= fetching.PARALLEL_MAX
        status, answer = await ask(bench, chat(*map(origin.url, paths)))
        assert (status, len(origin.requests)) == (400, 64)
        # One link in many places is one image in many places.
        origin.answers["/large"] = GIF + bytes(700_000)
        status, answer = await ask(bench, chat(*[origin.url("/large")] * 64))
        assert status == 400
        assert "does not fit into a body" in answer["error"]["message"]
        assert len(origin.requests) == 65


async def test_nothing_is_fetched_for_a_request_that_is_refused(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        body = chat(origin.url())
        (node,) = bench.nodes
        table = a_table(
            [a_route(node)], generation=2, keys=[a_key(limits=KeyLimits(requests_per_min=1))]
        )
        bench.app.fleet.adopt(table)
        assert (await ask(bench, body))[0] == 200
        assert (await ask(bench, body))[0] == 429
        assert (await ask(bench, {**body, "model": "other"}))[0] == 404
        assert (await ask(bench, {**body, "store": True}))[0] == 400
        headers = {"authorization": "Bearer wrong"}
        url = f"{bench.url}/v1/chat/completions"
        async with bench.http.post(url, json=body, headers=headers) as response:
            assert response.status == 401
        assert len(origin.requests) == 1


async def test_an_engine_without_images_gets_no_fetch(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path) as (bench, origin):
        table = a_table([a_route(bench.nodes[0])], generation=2)
        text_only = msgspec.structs.replace(
            table.deployments[0], engine="command", engine_lacks=("images",)
        )
        bench.app.fleet.adopt(msgspec.structs.replace(table, deployments=(text_only,)))
        part = {"type": "text", "text": "x", "image_url": origin.url()}
        hidden = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
        for body in (chat(origin.url()), hidden):
            status, answer = await ask(bench, body)
            assert status == 400
            assert "does not have it" in answer["error"]["message"]
        assert not origin.requests


async def test_fetches_are_charged_to_the_budget_of_their_key(tmp_path: Path) -> None:
    async with a_fetching_bench(tmp_path, parse_bytes_per_key_per_s=64 * 1024) as (bench, origin):
        origin.answers["/b.gif"] = GIF + bytes(300_000)
        assert (await ask(bench, chat(origin.url("/b.gif"))))[0] == 200
        assert (await ask(bench, chat(origin.url())))[0] == 429
        assert len(origin.requests) == 1


async def test_hosts_get_no_cookies_and_proxies_of_the_environment_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    async with a_fetching_bench(tmp_path) as (bench, origin):

        async def to_image(_: web.Request) -> web.StreamResponse:
            response = web.Response(status=307, headers={"location": "/a.gif"})
            response.set_cookie("session", "1")
            return response

        origin.answers["/first"] = to_image
        assert (await ask(bench, chat(origin.url("/first"))))[0] == 200
        assert sent_urls(bench.nodes[0]) == [GIF_URL]
        assert [request.path for request in origin.requests] == ["/first", "/a.gif"]
        assert not any(request.cookies for request in origin.requests)


async def test_a_tenant_has_a_share_of_all_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "FETCHES_MAX", 2)
    async with a_fetching_bench(tmp_path) as (bench, origin):
        may_end = asyncio.Event()

        async def waits(_: web.Request) -> web.StreamResponse:
            await may_end.wait()
            return web.Response(body=GIF)

        origin.answers["/waits"] = waits
        first = asyncio.create_task(ask(bench, chat(origin.url("/waits"))))
        await origin.until(lambda: origin.open["/waits"])
        status, answer = await ask(bench, chat(origin.url()))
        assert (status, answer["error"]["code"]) == (429, "out_of_capacity")
        may_end.set()
        assert (await first)[0] == 200
        assert (await ask(bench, chat(origin.url())))[0] == 200


async def test_a_lookup_that_hangs_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        may_end.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "hung")

    async with a_fetching_bench(tmp_path) as (bench, origin):
        fetcher = bench.app.surface.image_fetcher
        assert fetcher is not None
        fetcher.look_up, fetcher.timeout_s = None, 0.2
        with monkeypatch.context() as patched:
            patched.setattr(fetching, "_addresses_of", hang)
            status, answer = await ask(bench, chat(origin.url()))
            assert status == 400
            assert "did not arrive" in answer["error"]["message"]
            assert fetcher._slots.total == 1
            may_end.set()
            for _ in range(500):
                if not fetcher._slots.total:
                    break
                await asyncio.sleep(0.01)
            assert_nothing_is_held(bench)
