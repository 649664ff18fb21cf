"""`/ai/run/{model}` through the router: envelope, frames and errors."""

import json
from pathlib import Path

import aiohttp
import jsonschema  # type: ignore[import-untyped]
import msgspec
import openai
import pytest

from isochrone.wire.ids import ModelId, TenantId
from isochrone.wire.models.model import Artifact, Deprecation
from isochrone.wire.peers.adapter import AdapterEntry
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, a_bench, a_route, a_table

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


async def test_a_model_that_embeds_may_be_named_with_an_adapter(tmp_path: Path) -> None:
    adapter = AdapterEntry(
        adapter_id="lora-1",
        name="mine",
        tenant_id=TenantId("acme"),
        model_id=ModelId("m"),
        rank=4,
        artifact=Artifact(source="cluster:adapters/lora-1", files=(), digest="b" * 64),
    )
    async with a_bench(tmp_path) as bench:
        table = a_table([a_route(bench.nodes[0])], generation=2)
        embedding = [
            msgspec.structs.replace(entry, kind="embedding", adapter_rank_max=16)
            for entry in table.deployments
        ]
        bench.app.fleet.adopt(
            msgspec.structs.replace(table, adapters=(adapter,), deployments=tuple(embedding))
        )
        body = {"text": "hi"}
        async with bench.http.post(f"{bench.url}/ai/run/tiny:mine", json=body) as response:
            answer = await response.json()
        assert answer["result"]["data"] == [[0.6, 0.8]], answer


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
            ("tiny", b'{"text":"hi"}'): (400, 5007),
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
        in_query = "/client/v4/accounts/a/ai/run/tiny?rejectIfBusy=true"
        for path, sent in (
            ("/ai/run/tiny", busy),
            (in_query, {"prompt": "hi"}),
            (in_query, {"input": "hi"}),
        ):
            async with bench.http.post(f"{bench.url}{path}", json=sent) as response:
                answer = await response.json()
                assert (response.status, answer["errors"][0]["code"]) == (429, 3040)


@pytest.mark.parametrize(
    ("method", "path", "name", "number"),
    [
        ("POST", "/client/v4/accounts/a/ai/run/@cf%2Fmeta%2Ftiny?seed=1", "seed", 5006),
        ("POST", "/ai/run/tiny?rejectIfBusy=1", "rejectIfBusy", 5006),
        ("GET", "/ai/finetunes?limit=1", "limit", 5006),
        ("GET", "/ai/tomarkdown/supported?x=", "x", 5006),
        ("POST", "/ai/v1/chat/completions?rejectIfBusy=true", "rejectIfBusy", None),
        ("POST", "/v1/responses?include[]=x", "include[]", None),
        ("GET", "/v1/batches?status=failed", "status", None),
    ],
)
async def test_a_query_parameter_that_does_nothing_is_refused_by_name(
    tmp_path: Path, method: str, path: str, name: str, number: int | None
) -> None:
    async with a_bench(tmp_path) as bench:
        async with bench.http.request(
            method,
            f"{bench.url}{path}",
            headers={"x-request-id": "mine"},
            json={"prompt": "hi"},
        ) as response:
            answer = await response.json()
            assert (response.status, response.headers["x-request-id"]) == (400, "mine")
        error = answer["errors"][0] if number else answer["error"]
        assert f"'{name}'" in error["message"]
        assert error["code"] == (number or "invalid_request")
        assert number or error["param"] == name


@pytest.mark.parametrize("path", ["/client/v4/accounts/a/ai/nothing", "/ai/nothing"])
async def test_unknown_paths_answer_in_workers_ais_format(tmp_path: Path, path: str) -> None:
    async with a_bench(tmp_path) as bench, bench.http.get(f"{bench.url}{path}") as response:
        answer = await response.json()
        assert (response.status, answer["errors"][0]["code"]) == (404, 7003)
        assert answer["success"] is False


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/client/v4/accounts/a/ai/v1/nothing", 404),
        ("POST", "/ai/v1/chat", 404),
        ("GET", "/ai/v1/messages/m", 404),
        ("GET", "/ai/v1/chat/completions", 405),
        ("PUT", "/ai/v1/files", 405),
    ],
)
async def test_an_error_names_the_path_that_the_client_sent(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async with a_bench(tmp_path) as bench:
        async with bench.http.request(method, f"{bench.url}{path}") as response:
            message = (await response.json())["error"]["message"]
        assert response.status == status
        assert f" {path}:" in message


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


async def test_the_lists_name_what_the_key_may_use(tmp_path: Path) -> None:
    names = ("@cf/meta/tiny", "@cf/baai/other", "plain")
    async with a_bench(tmp_path) as bench:
        bench.app.fleet.adopt(a_table([a_route(bench.nodes[0])], generation=2, names=names))
        found: list[str] = []
        for page in (1, 2, 3):
            url = f"{bench.url}/client/v4/accounts/a/ai/models/search?per_page=2&page={page}"
            async with bench.http.get(url) as response:
                answer = await response.json()
                assert answer["result_info"]["total_count"] == 3
                found += [model["name"] for model in answer["result"]]
        assert found == list(names)
        async with bench.http.get(f"{bench.url}/ai/models/search?author=meta") as response:
            (model,) = (await response.json())["result"]
            assert model["name"] == "@cf/meta/tiny"
            assert model["task"]["name"] == "Text Generation"
            assert {"property_id": "context_window", "value": "4096"} in model["properties"]
        async with bench.http.get(f"{bench.url}/ai/tasks/search") as response:
            assert [task["id"] for task in (await response.json())["result"]] == ["chat"]
        async with bench.http.get(f"{bench.url}/ai/authors/search") as response:
            authors = [author["name"] for author in (await response.json())["result"]]
            assert authors == ["baai", "meta"]
        for path, pages in (("tasks", [["chat"], []]), ("authors", [["baai"], ["meta"], []])):
            for number, expected in enumerate(pages, 1):
                url = f"{bench.url}/ai/{path}/search?per_page=1&page={number}"
                async with bench.http.get(url) as response:
                    assert [row["id"] for row in (await response.json())["result"]] == expected


async def test_a_models_schema_accepts_what_the_model_answers(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        body = {"prompt": "hi", "max_tokens": 3}
        async with bench.http.post(f"{bench.url}/ai/run/tiny", json=body) as response:
            result = (await response.json())["result"]
        async with bench.http.get(f"{bench.url}/ai/models/schema?model=tiny") as response:
            schema = (await response.json())["result"]
        jsonschema.Draft202012Validator(schema["input"]).validate(body)
        jsonschema.Draft202012Validator(schema["output"]).validate(result)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema["input"]).validate({"max_tokens": 3})


@pytest.mark.parametrize(
    ("method", "path", "status", "number"),
    [
        ("GET", "/ai/models/search?colour=red", 400, 5006),
        ("GET", "/ai/models/search?page=0", 400, 5006),
        ("GET", "/ai/authors/search?colour=red", 400, 5006),
        ("GET", "/ai/models/schema?model=none", 404, 3042),
        ("POST", "/ai/tasks/search", 405, 10405),
    ],
)
async def test_the_lists_refuse_in_the_envelope(
    tmp_path: Path, method: str, path: str, status: int, number: int
) -> None:
    async with (
        a_bench(tmp_path) as bench,
        bench.http.request(method, f"{bench.url}{path}") as response,
    ):
        answer = await response.json()
        assert (response.status, answer["errors"][0]["code"]) == (status, number)
        assert answer["success"] is False


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"text": "hi", "target_lang": "fr"}, "translated_text", "into fr"),
        ({"text": "hi", "source_lang": "de", "target_lang": "fr"}, "translated_text", "from de"),
        ({"input_text": "hi", "max_length": 7}, "summary", "at most 7 words"),
    ],
)
async def test_a_chat_model_translates_and_summarises(
    tmp_path: Path, body: dict[str, object], field: str, said: str
) -> None:
    async with a_bench(tmp_path) as bench:
        async with bench.http.post(f"{bench.url}/ai/run/tiny", json=body) as response:
            answer = await response.json()
            assert set(answer["result"]) == {field}
            assert answer["result"][field].startswith("t0 t1")
        instruction, text = json.loads(bench.nodes[0].bodies[0])["messages"]
        assert said in instruction["content"]
        assert text == {"role": "user", "content": "hi"}


async def test_an_input_makes_it_a_responses_request(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        url = f"{bench.url}/ai/run/tiny"
        body = {"input": "hi", "max_output_tokens": 3}
        async with bench.http.post(url, json=body) as response:
            answer = await response.json()
            assert answer["success"] is True
            assert answer["result"]["object"] == "response"
            assert answer["result"]["output"][0]["content"][0]["text"] == "t0 t1 t2"
        async with bench.http.post(url, json={**body, "stream": True}) as response:
            events = [line for line in (await response.text()).split("\n") if line[:6] == "event:"]
            assert events[0] == "event: response.created"
            assert events[-1] == "event: response.completed"
        async with bench.http.post(url, json={**body, "colour": "red"}) as response:
            answer = await response.json()
            assert (response.status, answer["success"]) == (400, False)
            assert "colour" in answer["errors"][0]["message"]
        for field, value in (("model", "other"), ("store", True)):
            async with bench.http.post(url, json={**body, field: value}) as response:
                (error,) = (await response.json())["errors"]
                assert (response.status, error["code"]) == (400, 5006)
                assert f"cannot use field '{field}'" in error["message"]
                assert "in a batch:" not in error["message"]


async def test_a_request_without_a_body_is_incomplete(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench, bench.http.post(f"{bench.url}/ai/run/tiny") as response:
        assert (response.status, (await response.json())["errors"][0]["code"]) == (400, 3003)


async def test_an_announced_end_is_shown_and_then_enforced(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:

        async def adopt(generation: int, deprecation: Deprecation) -> None:
            table = a_table([a_route(bench.nodes[0])], generation=generation)
            entry = msgspec.structs.replace(table.deployments[0], deprecation=deprecation)
            bench.app.fleet.adopt(msgspec.structs.replace(table, deployments=(entry,)))

        await adopt(2, Deprecation(announced_at=1_700_000_000, sunset_at=4_102_444_800))
        async with bench.chat() as response:
            assert response.status == 200
            assert response.headers["deprecation"] == "@1700000000"
            assert response.headers["sunset"] == "Fri, 01 Jan 2100 00:00:00 GMT"
        async with bench.http.get(f"{bench.url}/ai/models/search") as response:
            properties = (await response.json())["result"][0]["properties"]
            assert {"property_id": "planned_deprecation_date", "value": "2100-01-01"} in properties
        await adopt(3, Deprecation(announced_at=1, sunset_at=86_400, replacement="large"))
        async with bench.http.post(f"{bench.url}/ai/run/tiny", json={"prompt": "hi"}) as response:
            error = (await response.json())["errors"][0]
            assert (response.status, error["code"]) == (410, 5028)
            assert response.headers["deprecation"] == "@1"
            assert response.headers["sunset"] == "Fri, 02 Jan 1970 00:00:00 GMT"
            assert "retired on 1970-01-02; use 'large'" in error["message"]
        async with bench.http.get(f"{bench.url}/ai/models/search") as response:
            assert (await response.json())["result"] == []
        listed = f"{bench.url}/ai/models/search?include_deprecated=true"
        async with bench.http.get(listed) as response:
            assert len((await response.json())["result"]) == 1


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/ai/models/search"])
async def test_a_key_may_be_in_x_api_key_on_routes_without_inference(
    tmp_path: Path, path: str
) -> None:
    async with a_bench(tmp_path) as bench, aiohttp.ClientSession() as http:
        for sent, status in ((KEY, 200), ("iso_wrong", 401), ("", 401)):
            async with http.get(f"{bench.url}{path}", headers={"x-api-key": sent}) as response:
                assert response.status == status
