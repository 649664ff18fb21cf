"""Files and batches with the official `openai` client: router, scheduler, Postgres, fake nodes."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from isochrone.service.trust.joining import join
from isochrone.wire.client_keys.keys import format_key
from isochrone.wire.http import headers
from isochrone.wire.ids import Generation, KeyId, ModelId, TenantId
from isochrone.wire.kv.kv_transfer import ENGINE_FIELDS
from isochrone.wire.models.model import Artifact, ArtifactFile, Deprecation
from isochrone.wire.peers.adapter import CONFIG_FILE, AdapterEntry, parse_request_adapter
from isochrone.wire.peers.control import PeerRole
from router.app import RouterApp, open_router
from scheduler.store.pool import Pool, using
from tests.integration.admin.conftest import Admin, admin
from tests.integration.router.catalogue import add_deployment
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY, a_config, a_key, a_route, a_table
from tests.system.harness import until

__all__ = ["admin"]

OTHER_KEY = format_key(KeyId("o" * 12), b"\x03" * 32)
WAIT_S = 60.0


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of the scheduler."""
    return {"batch_folder": tmp_path / "batches"}


class BatchBench:
    """A router that is registered with a scheduler, its node, and clients of two tenants."""

    def __init__(
        self, app: RouterApp, node: FakeNode, client: openai.AsyncOpenAI, other: openai.AsyncOpenAI
    ) -> None:
        self.app = app
        self.node = node
        self.client = client
        self.other = other
        self.keys = [
            a_key(),
            msgspec.structs.replace(a_key(OTHER_KEY), tenant_id=TenantId("other")),
        ]

    @property
    def url(self) -> str:
        """The router's address."""
        return f"http://127.0.0.1:{self.app.port}"

    async def upload(self, *lines: Any, client: openai.AsyncOpenAI | None = None) -> str:
        """Upload a file with one line each; a string is a line as it is."""
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        file = await (client or self.client).files.create(
            file=("in.jsonl", text.encode()), purpose="batch"
        )
        return file.id

    async def run(self, *lines: Any, endpoint: Any = "/v1/chat/completions") -> Any:
        """Run a batch to its end; return it."""
        created = await self.client.batches.create(
            input_file_id=await self.upload(*lines),
            endpoint=endpoint,
            completion_window="24h",
        )
        return await self.ended(created.id)

    async def ended(self, batch_id: str) -> Any:
        """Wait until a batch has ended; return it."""

        async def has_ended() -> Any:
            batch = await self.client.batches.retrieve(batch_id)
            is_open = batch.status in ("validating", "in_progress", "finalizing", "cancelling")
            return None if is_open else batch

        return await until("the batch ends", has_ended, WAIT_S)

    async def lines(self, file_id: str | None) -> list[Any]:
        """Return the decoded lines of a file."""
        assert file_id is not None
        content = await self.client.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]


def a_line(name: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": name}], "max_tokens": 3}
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {**body, **fields},
    }


@asynccontextmanager
async def a_client(url: str, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        yield client


@pytest.fixture
async def bench(admin: Admin, tmp_path: Path) -> AsyncIterator[BatchBench]:
    await admin.pop()
    await add_deployment(admin, "tiny", "embedded", "tiny")
    body = {"pop": "ams", "role": "router"}
    token = (await admin.ask("POST", "/v1/join-tokens", body)).body["token"]
    identity = await join(
        urls=[admin.control_url],
        token=token,
        role=PeerRole.ROUTER,
        name="r",
        folder=tmp_path / "identity",
    )
    node = FakeNode()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_node(node))
        config = a_config(tmp_path, schedulers=(admin.control_url,))
        app = await stack.enter_async_context(open_router(config, identity))

        async def has_table() -> bool:
            is_known = app.fleet.directory.deployment("tiny") is not None
            return is_known and bool(app.scheduler_client.access.token)

        await until("the router has a table", has_table, WAIT_S)
        url = f"http://127.0.0.1:{app.port}"
        client = await stack.enter_async_context(a_client(url, KEY))
        other = await stack.enter_async_context(a_client(url, OTHER_KEY))
        bench = BatchBench(app, node, client, other)
        app.fleet.adopt(a_table([a_route(node)], generation=1_000, keys=bench.keys))
        yield bench


async def test_a_batch_is_answered_line_by_line(bench: BatchBench) -> None:
    batch = await bench.run(
        a_line("one"),
        "",
        "this is not JSON",
        a_line("two"),
        a_line("one"),
        a_line("other model", model="large"),
        a_line("streamed", stream=True),
        a_line("bad", temperature=9),
        {**a_line("elsewhere"), "url": "/v1/embeddings"},
    )
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (8, 2, 6)
    output = await bench.lines(batch.output_file_id)
    assert [line["custom_id"] for line in output] == ["one", "two"]
    for line in output:
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["message"]["content"] == "t0 t1 t2"
        assert line["error"] is None
    errors = await bench.lines(batch.error_file_id)
    codes = [(line["error"] or {}).get("code") for line in errors]
    assert codes == [
        *("invalid_json_line", "duplicate_custom_id", "model_not_found", "invalid_request"),
        *(None, "invalid_url"),
    ]
    assert errors[4]["response"]["status_code"] == 400
    assert errors[4]["response"]["body"]["error"]["param"] == "temperature"
    assert bench.node.requests == 2
    assert {sent["x-isochrone-priority"] for sent in bench.node.request_headers} == {"0"}


async def test_a_preempted_item_is_sent_again_and_says_how_often(bench: BatchBench) -> None:
    bench.node.refuse = headers.PREEMPTED
    created = await bench.client.batches.create(
        input_file_id=await bench.upload(a_line("one")),
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )

    async def is_sent_twice() -> bool:
        return len(bench.node.request_headers) >= 2

    await until("the item is sent again", is_sent_twice, WAIT_S)
    bench.node.refuse = ""
    batch = await bench.ended(created.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    sent = [headers_sent[headers.PREEMPTIONS] for headers_sent in bench.node.request_headers]
    assert sent == [str(number) for number in range(len(sent))]
    # A client's request says nothing of it, and a preempted item is no failure of its replica.
    await bench.client.chat.completions.create(
        model="tiny", max_tokens=3, messages=[{"role": "user", "content": "hi"}]
    )
    assert headers.PREEMPTIONS not in bench.node.request_headers[-1]


async def test_a_line_cannot_name_hosts_to_pull_kv_from(bench: BatchBench) -> None:
    named = dict.fromkeys(ENGINE_FIELDS, "evil")
    batch = await bench.run(a_line("one", **named, vllm_xargs={**named, "kept": 1}))
    assert batch.request_counts.completed == 1
    (body,) = bench.node.bodies
    assert b"evil" not in body
    assert json.loads(body)["vllm_xargs"] == {"kept": 1}


async def test_all_endpoints_are_answered(bench: BatchBench) -> None:
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 3}
    line = {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": body}
    batch = await bench.run(line, endpoint="/v1/responses")
    (answered,) = await bench.lines(batch.output_file_id)
    assert answered["response"]["body"]["output"][0]["content"][0]["text"] == "t0 t1 t2"
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    batch = await bench.run(line, endpoint="/v1/completions")
    assert batch.request_counts.completed == 1


async def test_files_belong_to_their_tenant(bench: BatchBench) -> None:
    file_id = await bench.upload(a_line("mine"))
    assert (await bench.client.files.content(file_id)).text == json.dumps(a_line("mine"))
    described = await bench.client.files.retrieve(file_id)
    assert (described.filename, described.purpose) == ("in.jsonl", "batch")
    for call in (
        bench.other.files.retrieve(file_id),
        bench.other.files.content(file_id),
        bench.other.files.delete(file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.BadRequestError, match="cannot find the file"):
        await bench.other.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    theirs = [await bench.upload(a_line("t"), client=bench.other) for _ in range(3)]
    listed = [file.id async for file in bench.other.files.list(limit=2)]
    assert listed == theirs[::-1]
    assert [file.id async for file in bench.client.files.list()] == [file_id]
    await bench.other.files.delete(theirs[1])
    with pytest.raises(openai.BadRequestError, match="cannot use 'after'") as unknown:
        # An empty page would end a client's loop that deletes what it lists.
        await bench.other.files.list(after=theirs[1])
    assert unknown.value.param == "after"
    with pytest.raises(openai.BadRequestError, match="cannot use 'limit'"):
        await bench.other.files.list(limit=0)
    assert (await bench.client.files.delete(file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await bench.client.files.content(file_id)


async def test_workers_ai_queues_runs(bench: BatchBench) -> None:
    url = f"http://127.0.0.1:{bench.app.port}/client/v4/accounts/acme/ai/run/tiny"
    authorization = {"authorization": f"Bearer {KEY}"}

    async def ask(body: Any, status: int = 200, at: str = url) -> Any:
        async with (
            aiohttp.ClientSession(headers=authorization) as http,
            http.post(f"{at}?queueRequest=true", json=body) as response,
        ):
            assert response.status == status
            answer = await response.json()
            return answer["result"] if answer["success"] else answer["errors"]

    queued = await ask(
        {
            "requests": [
                {"prompt": "one", "max_tokens": 3, "external_reference": "my one"},
                {"prompt": "two", "unheard_of": 1},
                {"messages": [{"role": "user", "content": "three"}], "max_tokens": 2},
                {"input": "four", "max_output_tokens": 4},
                {"prompt": "five", "options": {"rejectIfBusy": True}},
            ]
        }
    )
    assert (queued["status"], queued["model"]) == ("queued", "tiny")
    names = ("tiny", "another")
    table = a_table([a_route(bench.node)], generation=1_001, keys=bench.keys, names=names)
    bench.app.fleet.adopt(table)
    other = url.replace("tiny", "another")
    (unknown,) = await ask({"request_id": queued["request_id"]}, 404, other)
    assert (unknown["code"], queued["request_id"] in unknown["message"]) == (7003, True)

    async def has_responses() -> Any:
        answer = await ask({"request_id": queued["request_id"]})
        assert "responses" in answer or answer["status"] in ("queued", "running")
        return answer if "responses" in answer else None

    answer = await until("the runs are answered", has_responses, WAIT_S)
    one, two, three, four, five = answer["responses"]
    assert (one["id"], one["external_reference"], one["success"]) == (0, "my one", True)
    assert one["result"]["response"] == "t0 t1 t2"
    assert (two["success"], two["result"], two["external_reference"]) == (False, None, None)
    assert "unheard_of" in two["errors"][0]["message"]
    assert three["result"]["response"] == "t0 t1"
    assert four["result"]["object"] == "response"
    assert "rejectIfBusy" in five["errors"][0]["message"]
    assert answer["usage"] == {
        "prompt_tokens": 33, "completion_tokens": 9, "total_tokens": 42,
    }  # fmt: skip
    assert (await ask({"request_id": "batch_none"}, 404))[0]["code"] == 7003
    assert (await ask({}, 400))[0]["code"] == 5006
    assert (await ask({"requests": [{"external_reference": 3}]}, 400))[0]["code"] == 5006
    (misplaced,) = await ask({"prompt": "one"}, 400)
    assert misplaced["code"] == 5006
    assert "a queued request: put each run into the list 'requests'" in misplaced["message"]
    # Once the model is retired none are queued, and earlier ones are still returned.
    entry = msgspec.structs.replace(
        table.deployments[0], deprecation=Deprecation(announced_at=1, sunset_at=86_400)
    )
    bench.app.fleet.adopt(
        msgspec.structs.replace(table, generation=Generation(1_002), deployments=(entry,))
    )
    assert (await ask({"requests": [{"prompt": "one"}]}, 410))[0]["code"] == 5028
    assert (await has_responses()) == answer


async def run_queued(bench: BatchBench, *requests: Any, model: str = "tiny") -> list[Any]:
    """Queue requests as Workers AI's clients do; return the responses."""
    url = f"http://127.0.0.1:{bench.app.port}/client/v4/accounts/acme/ai/run/{model}"
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:

        async def ask(body: Any) -> Any:
            async with http.post(f"{url}?queueRequest=true", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return answer["result"]

        queued = await ask({"requests": requests})

        async def has_responses() -> Any:
            return (await ask({"request_id": queued["request_id"]})).get("responses")

        answered: list[Any] = await until("the runs are answered", has_responses, WAIT_S)
        return answered


def adopt_adapters(bench: BatchBench) -> None:
    """Let the router know an adapter of each tenant."""
    artifact = Artifact(
        source="cluster:adapters/ft-1",
        files=(ArtifactFile(path=CONFIG_FILE, size_bytes=1, sha256="a" * 64),),
        digest="b" * 64,
    )
    adapters = tuple(
        AdapterEntry(
            adapter_id=adapter_id,
            name=name,
            tenant_id=TenantId(tenant),
            model_id=ModelId("m"),
            rank=4,
            artifact=artifact,
        )
        for adapter_id, name, tenant in (("ft-1", "mine", "acme"), ("ft-2", "theirs", "other"))
    )
    table = bench.app.fleet.directory.table
    assert table is not None
    deployments = tuple(
        msgspec.structs.replace(entry, adapter_rank_max=16) for entry in table.deployments
    )
    bench.app.fleet.adopt(
        msgspec.structs.replace(
            table,
            adapters=adapters,
            deployments=deployments,
            generation=Generation(table.generation + 1),
        )
    )


def adapters_used(node: FakeNode) -> list[str]:
    """Return the adapters of a node's requests, empty for those without one, in any order."""
    sent = [given.get(headers.ADAPTER) for given in node.request_headers]
    return sorted(parse_request_adapter(one).adapter_id if one else "" for one in sent)


async def test_a_line_names_an_adapter_of_its_tenant(bench: BatchBench) -> None:
    adopt_adapters(bench)
    batch = await bench.run(
        a_line("by name", model="tiny:mine"),
        a_line("by id", model="tiny:ft-1"),
        a_line("plain"),
        a_line("of another tenant", model="tiny:theirs"),
        a_line("deleted", model="tiny:ft-gone"),
    )
    output = await bench.lines(batch.output_file_id)
    assert [line["custom_id"] for line in output] == ["by name", "by id", "plain"]
    assert adapters_used(bench.node) == ["", "ft-1", "ft-1"]
    errors = await bench.lines(batch.error_file_id)
    for line, name in zip(errors, ("theirs", "ft-gone"), strict=True):
        assert line["response"]["status_code"] == 404
        error = line["response"]["body"]["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert f"cannot find the adapter '{name}'" in error["message"]


async def test_a_model_with_an_adapter_of_the_tenant_is_described(bench: BatchBench) -> None:
    with pytest.raises(openai.NotFoundError, match="cannot find the model 'tiny:mine'"):
        await bench.client.models.retrieve("tiny:mine")
    adopt_adapters(bench)
    assert (await bench.client.models.retrieve("tiny:mine")).id == "tiny:mine"
    with pytest.raises(openai.NotFoundError, match="cannot find the adapter 'theirs'"):
        await bench.client.models.retrieve("tiny:theirs")


async def test_a_queued_run_names_an_adapter_of_its_tenant(bench: BatchBench) -> None:
    adopt_adapters(bench)
    names = ("mine", "ft-1", "theirs", "gone")
    responses = await run_queued(bench, *[{"prompt": "hi", "lora": name} for name in names])
    assert [one["success"] for one in responses] == [True, True, False, False]
    assert adapters_used(bench.node) == ["ft-1", "ft-1"]
    for response, name in zip(responses[2:], names[2:], strict=True):
        (error,) = response["errors"]
        assert error["code"] == 3042
        assert f"cannot find the adapter '{name}'" in error["message"]
    (response,) = await run_queued(bench, {"prompt": "hi"}, model="tiny:mine")
    assert response["success"]
    assert adapters_used(bench.node) == ["ft-1"] * 3


async def test_large_files_are_streamed(bench: BatchBench) -> None:
    bench.app.server.bodies.uploads._file_bytes_max = 30_000_000
    text = b"0123456789abcdef" * 1_500_000
    file = await bench.client.files.create(file=("large", text), purpose="batch")
    assert file.bytes == len(text)
    async with bench.client.files.with_streaming_response.content(file.id) as response:
        digest, size = hashlib.sha256(), 0
        async for part in response.iter_bytes():
            digest.update(part)
            size += len(part)
    assert (size, digest.hexdigest()) == (len(text), hashlib.sha256(text).hexdigest())
    with pytest.raises(openai.APIStatusError) as refused:
        await bench.client.files.create(file=("larger", text + text), purpose="batch")
    assert refused.value.status_code == 413
    # Nothing is left of either: the limit of all uploads is free again.
    assert bench.app.server.bodies.uploads._size_bytes == 0


async def test_what_cannot_be_used_is_refused(bench: BatchBench) -> None:
    with pytest.raises(openai.BadRequestError, match="expected 'batch'"):
        await bench.client.files.create(file=("a.txt", b"a"), purpose="user_data")
    for unused in (
        {"extra_body": {"colour": "red"}},
        {"expires_after": {"anchor": "last_active_at", "seconds": 3600}},
    ):
        with pytest.raises(openai.BadRequestError, match=r"colour|anchor"):
            given: Any = unused
            await bench.client.files.create(file=("a.txt", b"a"), purpose="batch", **given)
    file_id = await bench.upload(a_line("one"))
    for fields in ({"endpoint": "/v1/moderations"}, {"completion_window": "1h"}):
        wanted: Any = {"endpoint": "/v1/completions", "completion_window": "24h", **fields}
        with pytest.raises(openai.BadRequestError):
            await bench.client.batches.create(input_file_id=file_id, **wanted)
    with pytest.raises(openai.NotFoundError):
        await bench.client.batches.retrieve("batch_none")
    with pytest.raises(openai.AuthenticationError):
        await bench.client.with_options(api_key="none").files.list()
    # Postgres stores no NUL.
    with pytest.raises(openai.BadRequestError, match="contains a NUL"):
        await bench.client.files.list(after="file-\0")
    with pytest.raises(openai.BadRequestError, match="contains a NUL"):
        await bench.client.batches.create(
            input_file_id="\0", endpoint="/v1/completions", completion_window="24h"
        )
    empty = await bench.run("", "  ")
    assert (empty.status, empty.errors.data[0].code) == ("failed", "empty_file")


async def test_a_batch_is_cancelled(bench: BatchBench) -> None:
    bench.node.ttft_s = 0.3
    created = await bench.client.batches.create(
        input_file_id=await bench.upload(*[a_line(f"n{number}") for number in range(200)]),
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"team": "a"},
    )
    await bench.node.until(lambda: bench.node.requests >= 8)
    with pytest.raises(openai.ConflictError, match="a batch is reading it"):
        await bench.client.files.delete(created.input_file_id)
    cancelled = await bench.client.batches.cancel(created.id)
    assert (cancelled.status, cancelled.metadata) == ("cancelling", {"team": "a"})
    batch = await bench.ended(created.id)
    assert batch.status == "cancelled"
    answered = await bench.lines(batch.output_file_id)
    unanswered = await bench.lines(batch.error_file_id)
    assert len(answered) == batch.request_counts.completed
    assert len(answered) + len(unanswered) == 200
    assert {line["error"]["code"] for line in unanswered} == {"batch_cancelled"}
    assert [each.id async for each in bench.client.batches.list()] == [batch.id]
    assert [each.id async for each in bench.other.batches.list()] == []
    with pytest.raises(openai.BadRequestError, match="cannot use 'after'"):
        await bench.other.batches.list(after=batch.id)


async def test_a_batch_expires_with_what_it_has(bench: BatchBench, pool: Pool) -> None:
    bench.node.refuse = "busy"
    created = await bench.client.batches.create(
        input_file_id=await bench.upload(a_line("one")),
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    # A node without capacity is no error of the item: it waits.
    await bench.node.until(lambda: bench.node.requests >= 2)
    async with using(pool) as connection:
        await connection.execute("UPDATE batch SET expires_at = now()")
    batch = await bench.ended(created.id)
    assert (batch.status, batch.output_file_id) == ("expired", None)
    (line,) = await bench.lines(batch.error_file_id)
    assert line["error"]["code"] == "batch_expired"


def dies(bench: BatchBench) -> None:
    """Let the only node refuse connections."""
    gone = FakeNode("gone")
    gone.port = 9
    bench.app.fleet.adopt(a_table([a_route(gone)], generation=1_001, keys=bench.keys))


def fails(bench: BatchBench) -> None:
    """Let the engine answer each request with an error."""
    bench.node.status = 500


def is_full(bench: BatchBench) -> None:
    """Let the engine answer each request with its own 429."""
    bench.node.status = 429


@pytest.mark.parametrize(("fault", "attempts"), [(dies, 0), (is_full, 0), (fails, 1)])
async def test_only_what_an_item_may_have_caused_is_an_attempt(
    bench: BatchBench, pool: Pool, fault: Any, attempts: int
) -> None:
    """Otherwise all items of a batch fail for good within seconds while no node is there."""
    fault(bench)
    created = await bench.client.batches.create(
        input_file_id=await bench.upload(a_line("one")),
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )

    async def postponed() -> Any:
        async with using(pool) as connection:
            return await connection.fetchrow(
                "SELECT attempts, is_done FROM batch_item"
                " WHERE is_done OR lease_id = '' AND available_at > '-infinity'"
            )

    row = await until("the item waits", postponed, WAIT_S)
    assert (row["attempts"], row["is_done"]) == (attempts, False)
    bench.node.status = 200
    bench.app.fleet.adopt(a_table([a_route(bench.node)], generation=1_002, keys=bench.keys))
    batch = await bench.ended(created.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)


async def test_tenants_take_turns(bench: BatchBench) -> None:
    bench.node.ttft_s = 0.05
    many = await bench.client.batches.create(
        input_file_id=await bench.upload(*[a_line(f"many{number}") for number in range(300)]),
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    await bench.node.until(lambda: bench.node.requests >= 8)
    few = await bench.other.batches.create(
        input_file_id=await bench.upload(a_line("few"), client=bench.other),
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )

    async def few_has_ended() -> bool:
        return (await bench.other.batches.retrieve(few.id)).status == "completed"

    await until("the small batch ends", few_has_ended, WAIT_S)
    assert (await bench.client.batches.retrieve(many.id)).status == "in_progress"
    await bench.client.batches.cancel(many.id)
