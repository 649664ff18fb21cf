"""`/ai/run/{model}` through the router: envelope, frames and errors."""

import json
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, a_bench

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("prefix", ["", "/client/v4/accounts/acme"])
async def test_a_complete_answer_has_the_envelope(tmp_path: Path, prefix: str) -> None:
    async with a_bench(tmp_path) as bench:
        body = {"messages": USER, "max_tokens": 3}
        async with bench.http.post(f"{bench.url}{prefix}/ai/run/tiny", json=body) as response:
            answer = await response.json()
            assert response.status == 200
            assert response.headers["x-isochrone-node"] == "n1"
        assert answer["success"] is True
        assert answer["errors"] == []
        assert answer["result"]["response"] == "t0 t1 t2"
        assert answer["result"]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_a_stream_has_workers_ai_frames(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        body = {"prompt": "hi", "stream": True, "max_tokens": 3}
        async with bench.http.post(f"{bench.url}/ai/run/tiny", json=body) as response:
            text = await response.text()
        frames = [line[6:] for line in text.split("\n\n") if line]
        assert frames[-1] == "[DONE]"
        bodies = [json.loads(frame) for frame in frames[:-1]]
        assert "".join(frame["response"] for frame in bodies) == "t0 t1 t2 "
        assert bodies[-1]["usage"]["completion_tokens"] == 3


async def test_errors_have_workers_ai_numbers_and_format(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        expected = {
            ("tiny", b'{"prompt":'): (400, 5006),
            ("none", b'{"prompt":"hi"}'): (404, 3042),
            ("", b'{"prompt":"hi"}'): (400, 5006),
            ("m" * 200, b'{"prompt":"hi"}'): (400, 5006),
            ("tiny", b'{"text":"hi"}'): (400, 5006),
        }
        for (model, body), (status, number) in expected.items():
            async with bench.http.post(f"{bench.url}/ai/run/{model}", data=body) as response:
                answer = await response.json()
                assert (response.status, answer["errors"][0]["code"]) == (status, number)
                assert answer["success"] is False
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{bench.url}/ai/run/tiny", json={"prompt": "hi"}) as response,
        ):
            answer = await response.json()
            assert (response.status, answer["errors"][0]["code"]) == (401, 10000)
        bench.nodes[0].refuse = "busy"
        busy = {"prompt": "hi", "options": {"rejectIfBusy": True}}
        async with bench.http.post(f"{bench.url}/ai/run/tiny", json=busy) as response:
            answer = await response.json()
            assert (response.status, answer["errors"][0]["code"]) == (429, 3040)


@pytest.mark.parametrize("path", ["/client/v4/accounts/a/ai/models/search", "/ai/nothing"])
async def test_unknown_paths_answer_in_workers_ais_format(tmp_path: Path, path: str) -> None:
    async with a_bench(tmp_path) as bench:
        async with bench.http.get(f"{bench.url}{path}") as response:
            answer = await response.json()
            assert (response.status, answer["errors"][0]["code"]) == (404, 7003)
            assert answer["success"] is False
        async with bench.http.get(f"{bench.url}/client/v4/accounts/a/ai/v1/nothing") as response:
            assert (await response.json())["error"]["code"] == "not_found"


async def test_a_broken_stream_ends_with_an_error_event(tmp_path: Path) -> None:
    node = FakeNode()
    node.cut_at = 2
    async with a_bench(tmp_path, [node]) as bench:
        body = {"prompt": "hi", "stream": True}
        async with bench.http.post(f"{bench.url}/ai/run/tiny", json=body) as response:
            text = await response.text()
        last = text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert json.loads(last.partition("data: ")[2])["errors"][0]["code"] == 10502
        assert "[DONE]" not in text


@pytest.mark.parametrize("prefix", ["", "/client/v4/accounts/acme"])
async def test_openai_clients_of_workers_ai_only_change_the_host(
    tmp_path: Path, prefix: str
) -> None:
    async with a_bench(tmp_path) as bench:
        base = f"{bench.url}{prefix}/ai/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
            answer = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3
            )
            assert answer.choices[0].message.content == "t0 t1 t2"
            assert [model.id async for model in client.models.list()] == ["tiny"]
            with pytest.raises(openai.NotFoundError, match="cannot find the model"):
                await client.completions.create(model="none", prompt="hi")
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
                await client.embeddings.create(model="tiny", input="hi")
