"""The engine as its agent uses it: a process, a Unix socket, the OpenAI API."""

import asyncio
import io
import json
import resource
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.http.headers import PROMPT_TOKENS
from tests.integration.engine.conftest import EngineProcess, end, launch, wait_ready

pytestmark = pytest.mark.model

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
WAIT_S = 40.0
LONG = "Tell me the long story of the sea, the moon and the lighthouse, in many parts."


def chat(content: str = "What is the capital of France?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "smollm2", "messages": messages, "temperature": 0, **fields}


async def post(http: aiohttp.ClientSession, path: str, body: Any, **headers: str) -> Any:
    async with http.post(path, json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yield each event's body; the end mark must be there."""
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise AssertionError("the stream ended without its mark")


async def stream(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    async with http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return [event async for event in events(response)]


async def stats(http: aiohttp.ClientSession) -> Any:
    async with http.get("/stats") as response:
        return await response.json()


async def until(http: aiohttp.ClientSession, **wanted: float) -> None:
    """Poll /stats until it shows `wanted`."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        seen = await stats(http)
        if all(seen[name] == value for name, value in wanted.items()):
            return
        assert time.monotonic() < deadline_s, seen
        await asyncio.sleep(0.02)


def text_of(chunks: list[Any]) -> str:
    return "".join(c["delta"].get("content", "") for e in chunks for c in e["choices"])


async def test_a_chat_is_answered(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=chat(), headers={"x-request-id": "r-1"}) as response:
        answer = await response.json()
        assert response.headers["x-request-id"] == "r-1"
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "The capital of France is Paris.",
        "refusal": None,
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37
    assert answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["total_tokens"] == 44
    async with http.post(CHAT, json=chat(stream=True)) as response:
        assert response.headers[PROMPT_TOKENS] == "37"


async def test_a_stream_has_the_shape_of_openai(http: aiohttp.ClientSession) -> None:
    chunks = await stream(http, CHAT, chat(stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == "The capital of France is Paris."
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    without = await stream(http, CHAT, chat())
    assert all("usage" not in chunk for chunk in without)


@pytest.mark.parametrize("speculate", [True, False])
async def test_min_and_max_tokens_limit_the_answer(
    http: aiohttp.ClientSession, speculate: bool
) -> None:
    async def said(**fields: Any) -> tuple[str, int]:
        answer = await post(http, CHAT, chat(speculate=speculate, **fields))
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]

    plain, tokens = await said()
    longer, more = await said(min_tokens=tokens + 5, max_tokens=tokens + 6)
    assert longer.startswith(plain)
    assert more >= tokens + 5
    # What else ends it waits too.
    assert (await said(min_tokens=tokens, stop=["Paris"]))[0] == plain
    assert (await said(min_tokens=2, stop=["Paris"]))[0] == plain.partition("Paris")[0]
    assert (await said(min_tokens=tokens, max_tokens=tokens, stop_token_ids=[30]))[1] == tokens
    for fields in ({"max_tokens": 4}, {"response_format": {"type": "json_object"}}):
        async with http.post(CHAT, json=chat(min_tokens=5, **fields)) as refused:
            assert refused.status == 400
            assert (await refused.json())["error"]["param"] == "min_tokens"


async def test_a_plain_completion_takes_text_or_tokens(http: aiohttp.ClientSession) -> None:
    by_text = await post(http, PLAIN, {"prompt": "1 2 3 4", "max_tokens": 6, "temperature": 0})
    assert by_text["usage"]["completion_tokens"] == 6
    assert by_text["choices"][0]["finish_reason"] == "length"
    tokens = [33, 216, 34]
    by_tokens = {"prompt": tokens, "max_tokens": 3, "temperature": 0}
    whole = await post(http, PLAIN, by_tokens)
    assert whole["usage"]["prompt_tokens"] == 3
    chunks = await stream(http, PLAIN, by_tokens)
    assert "".join(e["choices"][0]["text"] for e in chunks) == whole["choices"][0]["text"]


async def test_a_prefix_is_reused_only_within_its_tenant(http: aiohttp.ClientSession) -> None:
    body = chat("A question about prefixes. " * 6, max_tokens=2)

    async def cached(salt: str) -> int:
        answer = await post(http, CHAT, body, **{"x-isochrone-cache-salt": salt})
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached("tenant-a") == 0
    again = await cached("tenant-a")
    assert again >= 48
    assert again % 16 == 0
    assert await cached("tenant-b") == 0


async def test_eight_concurrent_streams_equal_each_stream_alone(
    http: aiohttp.ClientSession,
) -> None:
    questions = [f"Write one sentence about the number {n}." for n in range(8)]
    bodies = [chat(question, max_tokens=16) for question in questions]
    together = await asyncio.gather(*(stream(http, CHAT, body) for body in bodies))
    alone = [await stream(http, CHAT, body) for body in (bodies[0], bodies[5])]
    assert text_of(together[0]) == text_of(alone[0])
    assert text_of(together[5]) == text_of(alone[1])
    seen = await stats(http)
    assert seen["decode_tokens_per_s"] > 0
    assert seen["prefill_tokens_per_s"] > 0


async def test_a_client_that_disconnects_frees_its_blocks(http: aiohttp.ClientSession) -> None:
    await until(http, running=0, kv_blocks_used=0)
    body = {**chat(LONG), "stream": True, "ignore_eos": True, "max_tokens": 1000}
    async with http.post(CHAT, json=body) as response:
        async for event in events(response):
            if event["choices"][0]["delta"].get("content"):
                break
        seen = await stats(http)
        assert seen["running"] == 1
        assert seen["kv_blocks_used"] > 0
        assert seen["decode_tokens_in_flight"] > 900
        response.close()
    await until(http, running=0, waiting=0, kv_blocks_used=0, open=0)
    # The same for one that waits for a whole answer.
    task = asyncio.create_task(post(http, CHAT, {**body, "stream": False}))
    await until(http, running=1)
    task.cancel()
    await until(http, running=0, kv_blocks_used=0, open=0)


async def test_stop_strings_end_the_output_and_are_not_in_it(http: aiohttp.ClientSession) -> None:
    for stop, wanted in ((" is Par", "The capital of France"), (["zzz", "Fr"], "The capital of ")):
        answer = await post(http, CHAT, chat(stop=stop))
        assert answer["choices"][0]["message"]["content"] == wanted
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert text_of(await stream(http, CHAT, chat(stop=stop))) == wanted
    # What only looked like the beginning of a stop string is told in the end.
    answer = await post(http, CHAT, chat(stop="Paris.\nBut"))
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


async def test_a_seed_gives_the_same_output_in_any_batch(http: aiohttp.ClientSession) -> None:
    seeded = chat("Invent a name for a ship.", temperature=1.2, seed=42, max_tokens=12)
    others = [chat(LONG, temperature=1.0, max_tokens=12) for _ in range(3)]
    alone = await post(http, CHAT, seeded)
    crowd = await asyncio.gather(*(post(http, CHAT, body) for body in (seeded, *others)))
    content = alone["choices"][0]["message"]["content"]
    assert crowd[0]["choices"][0]["message"]["content"] == content
    other = await post(http, CHAT, {**seeded, "seed": 43})
    assert other["choices"][0]["message"]["content"] != content


async def test_bias_and_penalties_change_the_output_and_the_engine_lives(
    http: aiohttp.ClientSession,
) -> None:
    count = "Count: one, one, one, one, one, one, one,"

    async def said(**knobs: Any) -> str:
        body = {"prompt": count, "max_tokens": 12, "temperature": 0, **knobs}
        return str((await post(http, PLAIN, body))["choices"][0]["text"])

    plain = await said()
    assert plain.startswith(" one")
    for knobs in (
        {"logit_bias": {"582": -100}},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 2.0},
    ):
        assert await said(**knobs) != plain
    assert await said() == plain


async def test_logprobs_are_returned(http: aiohttp.ClientSession) -> None:
    answer = await post(http, CHAT, chat(logprobs=True, top_logprobs=2, max_tokens=3))
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["The", " capital", " of"]
    for entry in entries:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert bytes(entry["bytes"]).decode() == entry["token"]
    plain = {"prompt": "One two three", "max_tokens": 2, "temperature": 0, "logprobs": 1}
    told = (await post(http, PLAIN, plain))["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "said"),
    [
        (CHAT, b"{", 400, "invalid_request", "its JSON ends early"),
        (PLAIN, b'{"prompt":"\xff"}', 400, "invalid_request", "cannot use the request body"),
        (CHAT, b'{"messages":' + b"[" * 100_000, 400, "invalid_request", "cannot use field"),
        (CHAT, chat(model="other"), 404, "model_not_found", "'other'"),
        (CHAT, chat(n=9), 400, "invalid_request", "cannot give 9 answers"),
        (PLAIN, {"prompt": ["a"] * 5, "n": 2}, 400, "invalid_request", "cannot give 10 answers"),
        (PLAIN, {"prompt": []}, 400, "invalid_request", "cannot use field 'prompt'"),
        (CHAT, chat(tools=[{}]), 400, "invalid_request", "a tool needs"),
        (
            CHAT,
            chat(max_tokens=5000),
            400,
            "context_length_exceeded",
            "(37 in the messages, 5000 in",
        ),
        (CHAT, chat("word " * 4000), 400, "context_length_exceeded", "length is 2048 tokens. How"),
        (CHAT, chat("word " * 700_000), 400, "context_length_exceeded", "tokens or more"),
        (PLAIN, {"prompt": ""}, 400, "invalid_request", "it has no tokens"),
        (PLAIN, {"prompt": [10**6]}, 400, "invalid_request", "between 0 and 49151"),
        (
            PLAIN,
            {"prompt": [1], "logit_bias": {"99999": 1}},
            400,
            "invalid_request",
            "99999 is not between",
        ),
        (
            PLAIN,
            # With `min_tokens` the sampler writes to the logits of these tokens.
            {"prompt": [1], "min_tokens": 2, "stop_token_ids": [5, 49152]},
            400,
            "invalid_request",
            "49152 is not between",
        ),
        ("/v1/nothing", {}, 404, "not_found", "no such path"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_invalid_requests_are_refused_in_the_shape_of_openai(
    http: aiohttp.ClientSession, path: str, body: Any, status: int, code: str, said: str
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(path, data=io.BytesIO(data)) as response:
        error = (await response.json())["error"]
        assert response.status == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    # Clients recognise a prompt that is too long by OpenAI's wording.
    is_too_long = code == "context_length_exceeded"
    opening = "This model's maximum context length is " if is_too_long else "cannot "
    assert error["message"].startswith(opening)
    assert "max_tokens 1" not in error["message"]
    assert said in error["message"]


async def test_a_body_with_a_wrong_content_encoding_is_a_client_error(
    http: aiohttp.ClientSession,
) -> None:
    async with http.post(CHAT, data=b"{}", headers={"content-encoding": "gzip"}) as response:
        assert response.status == 400
        assert "broken encoding" in (await response.json())["error"]["message"]


async def test_a_body_over_the_limit_is_refused_before_its_end(engine: EngineProcess) -> None:
    reader, writer = await asyncio.open_unix_connection(str(engine.socket))
    try:
        async with asyncio.timeout(WAIT_S):
            length = 64 * 1024 * 1024
            writer.write(
                f"POST {CHAT} HTTP/1.1\r\nhost: e\r\ncontent-length: {length}\r\n\r\n".encode()
            )
            for _ in range(9):
                writer.write(b" " * 1024 * 1024)
                await writer.drain()
            assert b" 413 " in await reader.readline()
    finally:
        writer.transport.abort()


async def test_a_full_queue_refuses_with_retry_after(http: aiohttp.ClientSession) -> None:
    body = {**chat(LONG), "stream": True, "ignore_eos": True, "max_tokens": 600}
    responses = [await http.post(CHAT, json=body) for _ in range(8)]
    waiting = [asyncio.create_task(post(http, CHAT, chat())) for _ in range(4)]
    await until(http, open=12)
    async with http.post(CHAT, json=chat()) as refused:
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert (await refused.json())["error"]["code"] == "out_of_capacity"
    for response in responses:
        response.close()
    answers = await asyncio.gather(*waiting)
    assert {a["choices"][0]["message"]["content"] for a in answers} == {
        "The capital of France is Paris."
    }
    await until(http, open=0, kv_blocks_used=0)


async def test_health_models_and_metrics(
    http: aiohttp.ClientSession, engine: EngineProcess
) -> None:
    async with http.get("/health") as response:
        health = await response.json()
        assert response.status == 200
    assert health["status"] == "ok"
    assert health["model"] == "smollm2"
    async with http.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["smollm2"]
    await post(http, PLAIN, {"prompt": "one", "max_tokens": 2})
    async with http.get("/metrics") as response:
        page = await response.text()
    told = dict(line.split(" ") for line in page.splitlines() if not line.startswith("#"))
    numbers = {name.removeprefix("isochrone_engine_"): float(n) for name, n in told.items()}
    for name in (
        "running", "waiting", "kv_blocks_used", "kv_blocks_total", "prefix_hit_tokens_total",
        "prefix_evicted_age_s", "prompt_tokens_total", "prefill_tokens_per_s",
        "decode_tokens_per_s", "draft_acceptance",
    ):  # fmt: skip
        assert numbers[name] >= 0
    assert numbers["step_rows_total"] >= numbers["steps_total"] > 0
    assert numbers["step_seconds_total"] > 0
    assert numbers["tokens_out_total"] > 0
    async with http.get("/stats") as response:
        stats = await response.json()
    # The embedded engine belongs to no vendor's store.
    fields = {field.name for field in msgspec.structs.fields(EngineStats)}
    assert fields - {"store_hit_tokens_total"} <= set(stats)
    assert msgspec.convert(stats, EngineStats).kv_blocks_total == engine.ready["kv_blocks"]
    # Of all layers in one C call, too: that is how a long step differs from a hang.
    assert stats["layers_computed_total"] >= 30 * stats["steps_total"] > 0
    assert stats["is_waiting_for_peers"] is False
    assert engine.ready["ready"] is True
    assert 0 < engine.ready["weights_bytes"] <= 538_060_032


async def test_sigterm_drains_and_exits_zero(model_path: Path, short_folder: Path) -> None:
    process = launch(
        short_folder, model_path=str(model_path), served_name="smollm2", client_queue_max=8
    )
    try:
        engine = await asyncio.to_thread(wait_ready, process, short_folder)
        async with engine.session() as http:
            body = {**chat(LONG), "stream": True, "ignore_eos": True, "max_tokens": 80}
            async with http.post(CHAT, json=body) as response:
                process.send_signal(signal.SIGTERM)
                async with http.post("/drain") as drain:
                    assert (await drain.json())["open"] == 1
                async with http.post(CHAT, json=chat()) as refused:
                    assert refused.status == 503
                assert len([event async for event in events(response)]) >= 2
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
        assert not engine.socket.exists()
    finally:
        await asyncio.to_thread(end, process)
    log = (short_folder / "log").read_text()
    assert "lighthouse" not in log


async def test_near_its_memory_ceiling_it_refuses_and_survives(
    model_path: Path, short_folder: Path
) -> None:
    kv_bytes = 16 * 1024 * 1024
    # Enough for weights and KV, which is what loading checks; the process itself takes more.
    ceiling = 538_060_032 + kv_bytes
    process = launch(
        short_folder,
        model_path=str(model_path),
        served_name="smollm2",
        kv_memory_bytes=kv_bytes,
        memory_max_bytes=ceiling,
        quantisation="none",
    )
    try:
        engine = await asyncio.to_thread(wait_ready, process, short_folder)
        async with engine.session() as http:
            async with http.post(CHAT, json=chat()) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (429, "out_of_capacity"), error
                assert int(response.headers["retry-after"]) >= 1
                assert f"limit is {ceiling}" in error["message"]
            seen = await stats(http)
            assert seen["memory_full"] is True
            assert seen["memory_ceiling_bytes"] == ceiling < seen["memory_used_bytes"]
            assert seen["memory_refused_total"] == 1
            async with http.get("/health") as health:
                assert health.status == 200
    finally:
        await asyncio.to_thread(end, process)


async def test_concurrent_bodies_do_not_exceed_the_memory_ceiling(
    model_path: Path, short_folder: Path, engine: EngineProcess
) -> None:
    allowed, piece = 256 * 1024 * 1024, b"a " * 100_000
    ceiling = psutil.Process(engine.process.pid).memory_info().rss + allowed
    process = launch(
        short_folder, model_path=str(model_path), served_name="smollm2", memory_max_bytes=ceiling
    )
    writers: list[asyncio.StreamWriter] = []
    try:
        one = await asyncio.to_thread(wait_ready, process, short_folder)
        length = 38 * len(piece)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: e\r\ncontent-length: {length + 1}\r\n\r\n"
        for _ in range(100):
            _, writer = await asyncio.open_unix_connection(str(one.socket))
            writer.write(head.encode())
            writers.append(writer)
        watched, most = psutil.Process(process.pid), 0
        # None of them comes to its end: together they would take three times what is allowed.
        for _ in range(length // len(piece)):
            for writer in writers:
                if not writer.is_closing():
                    writer.write(piece)
            await asyncio.sleep(0.05)
            most = max(most, watched.memory_info().rss)
        assert most < ceiling + allowed // 2
        async with one.session() as http:
            assert (await stats(http))["memory_refused_total"] > 0
    finally:
        for writer in writers:
            writer.transport.abort()
        await asyncio.to_thread(end, process)


async def test_an_expired_deadline_and_an_invalid_priority_are_refused(
    http: aiohttp.ClientSession,
) -> None:
    for name, value, status, code in (
        ("x-isochrone-deadline-ms", "0", 429, "out_of_capacity"),
        ("x-isochrone-priority", "101", 400, "invalid_request"),
        ("x-isochrone-priority", "high", 400, "invalid_request"),
        ("x-isochrone-ttft-ms", "soon", 400, "invalid_request"),
    ):
        async with http.post(CHAT, json=chat(), headers={name: value}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (status, code), error
    late = {"x-isochrone-deadline-ms": "60000", "x-isochrone-priority": "90"}
    late |= {"x-isochrone-ttft-ms": "0", "x-isochrone-prefill-ms": "odd"}
    assert (await post(http, CHAT, chat(max_tokens=2), **late))["choices"]


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: +5\r\n\r\n12345",
        b"GET /health HTTP/1.1\r\nhost: e\r\nx: " + b"a" * 20_000 + b"\r\n\r\n",
    ],
    ids=["line", "signed-length", "20kB"],
)
async def test_malformed_http_is_refused_in_the_shape_of_openai_and_not_logged(
    engine: EngineProcess, sent: bytes
) -> None:
    reader, writer = await asyncio.open_unix_connection(str(engine.socket))
    writer.write(sent)
    async with asyncio.timeout(WAIT_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.split(b" ")[1] == b"400"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in (engine.socket.parent / "log").read_text()


async def test_idle_connections_cannot_keep_the_agent_out(
    model_path: Path, short_folder: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    process = launch(short_folder, model_path=str(model_path), served_name="smollm2")
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    idle = []
    try:
        engine = wait_ready(process, short_folder)
        for _ in range(300):
            with suppress(ConnectionError):
                idle.append(await asyncio.open_unix_connection(str(engine.socket)))
        missed = 0
        # As often as an agent looks: after three misses in a row it would end the engine.
        for _ in range(6):
            try:
                async with engine.session() as http, http.get("/stats") as response:
                    assert response.status == 200
                missed = 0
            except aiohttp.ClientError:
                missed += 1
            assert missed < 3
            await asyncio.sleep(1)
        assert not missed
        # A step needs some too: for what it draws from, for KV's files.
        async with engine.session() as many:
            body = {"prompt": "one", "max_tokens": 5, "temperature": 1}
            asked = [many.post(PLAIN, json=body) for _ in range(1000)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            served = [one.status for one in answers if not isinstance(one, BaseException)]
            assert 200 in served
        assert process.poll() is None
    finally:
        for _, writer in idle:
            writer.transport.abort()
        end(process)
