"""Bad input gets a clear 4xx in OpenAI's format, in time and without using memory."""

import asyncio
import gzip
import io
import json
import resource
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from tests.integration.router.fleet_of import KEY, Bench, a_bench

HELLO = [{"role": "user", "content": "hello"}]
DEEP = b"[" * 100_000


def a_body(**fields: object) -> bytes:
    return json.dumps({"model": "tiny", "messages": HELLO, **fields}).encode()


BAD = {
    "empty": b"",
    "not-json": b"{",
    "not-an-object": b"[]",
    "null": b"null",
    "bad-utf8": b'{"model":"\xff"}',
    "nan": a_body()[:-1] + b',"temperature":NaN}',
    "deep": DEEP,
    "deep-inside": b'{"model":"tiny","messages":' + DEEP,
    "deep-unknown": a_body()[:-1] + b',"x":' + DEEP + b"]" * 100_000 + b"}",
    "deep-objects": b'{"a":' * 100_000,
    "no-model": json.dumps({"messages": HELLO}).encode(),
    "no-messages": b'{"model":"tiny"}',
    "empty-messages": a_body(messages=[]),
    "messages-a-string": a_body(messages="hi"),
    "role": a_body(messages=[{"role": "boss", "content": "x"}]),
    "content-a-number": a_body(messages=[{"role": "user", "content": 5}]),
    "million-messages": b'{"model":"tiny","messages":[' + b"{}," * 1_000_000 + b"{}]}",
    "max-tokens-huge": a_body(max_tokens=10**12),
    "max-tokens-zero": a_body(max_tokens=0),
    "max-tokens-a-string": a_body(max_tokens="5"),
    "max-tokens-huger": b'{"model":"tiny","max_tokens":1' + b"0" * 5000 + b"}",
    "n": a_body(n=1000),
    "temperature": a_body(temperature=9),
    "stream-a-string": a_body(stream="yes"),
    "stream-options": a_body(stream=True, stream_options=7),
    "model-a-number": a_body(model=7),
    "options": a_body(options=[]),
}


async def still_serves(bench: Bench) -> None:
    async with bench.chat() as response:
        assert response.status == 200


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_body_gets_400_with_the_reason(tmp_path: Path, name: str) -> None:
    async with a_bench(tmp_path) as bench:
        path = f"{bench.url}/v1/chat/completions"
        async with (
            asyncio.timeout(30),
            bench.http.post(path, data=io.BytesIO(BAD[name])) as response,
        ):
            assert response.status == 400
            error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("cannot ")
        assert bench.nodes[0].requests == 0
        await still_serves(bench)


METHODS_OF = {
    "/v1/chat/completions": "POST",
    "/v1/files": "GET, POST",
    "/v1/responses/r": "GET, DELETE",
    "/ai/run/@cf/a/b": "POST",
    "/ai/v1/embeddings": "POST",
    "/client/v4/accounts/x/ai/finetunes/f": "DELETE",
    "/ai/models/search": "GET",
    "/v1/models": "GET",
    "/nothing": "GET, POST, DELETE",
}


@pytest.mark.parametrize("path", METHODS_OF)
async def test_a_path_names_the_methods_that_it_has(tmp_path: Path, path: str) -> None:
    expected = METHODS_OF[path]
    headers = {"authorization": f"Bearer {KEY}"}
    async with a_bench(tmp_path) as bench:
        async with bench.http.options(bench.url + path) as response:
            assert response.headers["allow"] == f"{expected}, OPTIONS"
        for method in ("PUT", "TRACE") if path != "/nothing" else ():
            async with bench.http.request(method, bench.url + path, headers=headers) as response:
                assert response.status == 405
                allowed = {name.strip() for name in response.headers["allow"].split(",")}
                assert allowed - {"HEAD"} == set(expected.split(", "))
                assert (await response.json()).keys() & {"error", "errors"}


async def test_a_method_that_no_path_has_is_refused_with_those_that_some_have(
    tmp_path: Path,
) -> None:
    async with (
        a_bench(tmp_path) as bench,
        bench.http.request("QUERY", f"{bench.url}/v1/models") as response,
    ):
        assert (response.status, response.headers["allow"]) == (405, "GET, POST, DELETE, OPTIONS")


async def test_errors_for_unknown_paths_and_methods_have_openais_format(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        expected = {
            ("GET", "/nowhere"): (404, "not_found"),
            ("POST", "/v1/nowhere?x=1"): (404, "not_found"),
            ("GET", "/v1/chat/completions"): (405, "method_not_allowed"),
            ("DELETE", "/v1/models"): (405, "method_not_allowed"),
            ("GET", "/v1/models/none"): (404, "model_not_found"),
        }
        for (method, path), (status, code) in expected.items():
            async with bench.http.request(method, bench.url + path) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (status, code)
                assert response.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Basic abc", "Bearer " + "x" * 5000, "Bearer " + KEY + "x", KEY],
    ids=["none", "bare", "blank", "basic", "long", "garbled", "no-scheme"],
)
async def test_a_missing_or_garbled_key_gets_401(tmp_path: Path, authorization: str) -> None:
    headers = {"authorization": authorization} if authorization else {}
    async with a_bench(tmp_path) as bench, aiohttp.ClientSession() as http:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
            async with http.request(method, bench.url + path, headers=headers) as response:
                assert response.status == 401
                assert response.headers["x-request-id"].startswith("req-")
                text = await response.text()
                assert json.loads(text)["error"]["code"] == "invalid_api_key"
                assert KEY[20:40] not in text


async def test_huge_bodies_and_zip_bombs_get_413_without_using_memory(tmp_path: Path) -> None:
    bomb = gzip.compress(b"\0" * 300_000_000, compresslevel=1)

    async def hundred_megabytes() -> AsyncIterator[bytes]:
        for _ in range(1600):
            yield b"x" * 65_536

    async with a_bench(tmp_path, body_timeout_s=30, parse_bytes_per_key_per_s=2**40) as bench:
        path = f"{bench.url}/v1/chat/completions"
        await still_serves(bench)
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gzipped = {"content-encoding": "gzip"}
        async with bench.http.post(path, data=io.BytesIO(bomb), headers=gzipped) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "request_too_large"
        announced = {"content-length": str(100_000_000)}
        with suppress(aiohttp.ClientError, ConnectionError):
            async with bench.http.post(path, data=hundred_megabytes()) as response:
                assert response.status == 413
        with suppress(aiohttp.ClientError, ConnectionError):
            async with bench.http.post(
                path, data=hundred_megabytes(), headers=announced
            ) as response:
                assert response.status == 413
        after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert after_kib - before_kib < 64 * 1024
        await still_serves(bench)


async def raw(bench: Bench, sent: bytes) -> bytes:
    """Send raw bytes; return all that is received until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.app.port)
    writer.write(sent)
    async with asyncio.timeout(30):
        received = await reader.read()
    writer.close()
    return received


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % KEY.encode()
)


async def test_idle_connections_are_closed_and_slow_requests_get_408(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        assert await raw(bench, b"") == b""
        for sent in (b"POST", HEAD, HEAD + b"X-slow: "):
            assert (await raw(bench, sent)).startswith(b"HTTP/1.1 408 ")
        received = await raw(bench, HEAD + b"Content-Length: 100\r\n\r\n{")
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in received
        await still_serves(bench)


@pytest.mark.parametrize("target", [b"/v1/uploads", b"/v1/chat/completions/", b"/healthz"])
async def test_routes_without_a_key_accept_only_small_bodies(tmp_path: Path, target: bytes) -> None:
    head = b"POST " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    chunks = b"Transfer-Encoding: chunked\r\n\r\n20000\r\n" + b"x" * 0x20000
    async with a_bench(tmp_path) as bench:
        for large in (b"Content-Length: 1000000\r\n\r\n", chunks):
            received = await raw(bench, head + large)
            assert received.startswith(b"HTTP/1.1 413 ")
        small = await raw(bench, head + b"Content-Length: 2\r\n\r\n{}")
        assert small[9:12] in (b"404", b"405")


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        HEAD + b"".join(b"X-%d: 1\r\n" % n for n in range(10_000)) + b"\r\n",
        HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["line", "10^4-headers", "100kB-header", "smuggling"],
)
async def test_malformed_http_gets_400_in_openais_format(tmp_path: Path, sent: bytes) -> None:
    async with a_bench(tmp_path) as bench:
        received = await raw(bench, sent)
        assert received.split(b" ", 2)[1] == b"400"
        body = json.loads(received.partition(b"\r\n\r\n")[2])
        assert body["error"]["type"] == "invalid_request_error"
        assert bench.nodes[0].requests == 0
        await still_serves(bench)


async def test_a_long_session_name_is_refused(tmp_path: Path) -> None:
    headers = {"x-session-affinity": "s" * 300}
    async with a_bench(tmp_path) as bench, bench.chat(headers=headers) as response:
        assert response.status == 400


async def test_logs_contain_no_prompt_and_no_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_bench(tmp_path) as bench:
        bench.nodes[0].plain_garbage = True
        async with bench.chat("my-marker-prompt") as response:
            assert response.status == 502
        async with bench.http.post(
            f"{bench.url}/v1/chat/completions", data=a_body(model="x-marker-model", n=99)
        ) as response:
            assert response.status == 400
    for marker in ("my-marker", "x-marker", KEY[17:50]):
        assert marker not in caplog.text


async def test_a_long_url_or_header_writes_nothing_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was a traceback, which strangers could send without end."""
    async with a_bench(tmp_path, 1) as bench:
        for path, sent in (("/v1/" + "a" * 20_000, {}), ("/v1/models", {"accept": "a" * 20_000})):
            async with bench.http.get(bench.url + path, headers=sent) as answer:
                assert answer.status == 400
                assert "more than 8000 bytes" in (await answer.json())["error"]["message"]
    assert "Traceback" not in caplog.text
