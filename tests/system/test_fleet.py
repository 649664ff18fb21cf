"""The whole fleet as its users see it: the OpenAI SDK, headers, cancellation, quotas."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import asyncpg
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from isochrone.cli.client import AdminError
from isochrone.service.trust.landlock import WHOLE_VERSION, landlock_version
from tests.chaos.invariants import nothing_in_flight, salt_secrets
from tests.system.harness import Fleet, a_fleet, until


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet() as running:
        await running.deploy(replicas=2)
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.endpoint('ams')}/v1", api_key=fleet.key, max_retries=0
    ) as sdk:
        yield sdk


@pytest.mark.skipif(landlock_version() < WHOLE_VERSION, reason="needs Landlock (Linux 5.19)")
@pytest.mark.asyncio(loop_scope="module")
async def test_engines_are_confined(fleet: Fleet) -> None:
    """A confined process has given up privileges; what it cannot do is in test_confinement.py."""
    for pid in fleet.engine_pids().values():
        assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()


MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "count, please"}]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_sdk_lists_chats_and_streams_with_usage(client: openai.AsyncOpenAI) -> None:
    (model,) = [model async for model in client.models.list()]
    assert model.id == "mock"
    assert abs(time.time() - model.created) < 180
    answer = await client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        max_tokens=3,
    )
    assert answer.choices[0].message.content == "t0 t1 t2 "
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    stream = await client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, usages = [], []
    async for chunk in stream:
        texts += [choice.delta.content or "" for choice in chunk.choices]
        if chunk.usage is not None:
            usages.append(chunk.usage)
    assert "".join(texts) == "t0 t1 t2 t3 "
    assert len(usages) == 1
    assert usages[0].completion_tokens == 4
    assert usages[0].prompt_tokens_details is not None
    completion = await client.completions.create(model="mock", prompt="a b c", max_tokens=2)
    assert completion.choices[0].text == "t0 t1 "


@pytest.mark.asyncio(loop_scope="module")
async def test_the_sdk_maps_our_errors(fleet: Fleet, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown"):
        await client.chat.completions.create(model="unknown", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(
            model="mock",
            messages=MESSAGES,
            max_tokens=10**7,
        )
    stranger = client.with_options(api_key="iso_wrong")
    with pytest.raises(openai.AuthenticationError):
        await stranger.models.list()
    made = await fleet.ask("POST", "/v1/keys", {"tenant_id": "t"})
    fresh = client.with_options(api_key=made["key"])

    async def is_known() -> bool:
        try:
            await fresh.models.list()
        except openai.AuthenticationError:
            return False
        return True

    await until("a new key is honoured within seconds", is_known, 5.0)
    await fleet.ask("DELETE", f"/v1/keys/{made['key_id']}")

    async def is_refused() -> bool:
        return not await is_known()

    await until("a revoked one is refused within seconds", is_refused, 5.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cancelled_stream_frees_everything(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        max_tokens=50_000,
        stream=True,
    )
    async for _ in stream:
        break
    assert not await nothing_in_flight(fleet)
    await stream.close()
    await until("nothing in flight", lambda: nothing_in_flight(fleet), 5.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_each_city_is_served_and_the_answer_names_the_node(fleet: Fleet) -> None:
    async with aiohttp.ClientSession() as http:
        for pop in ("ams", "sin"):
            body = {"model": "mock", "messages": MESSAGES, "max_tokens": 1}
            headers = {"authorization": f"Bearer {fleet.key}", "x-request-id": f"mine-{pop}"}
            url = f"{fleet.endpoint(pop)}/v1/chat/completions"
            async with http.post(url, json=body, headers=headers) as response:
                assert response.status == 200
                assert response.headers["x-request-id"] == f"mine-{pop}"
                assert response.headers["x-isochrone-why"]
                assert response.headers["x-isochrone-node"] in ("ams-1", "sin-1")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_keeps_its_replica_and_its_cached_prefix(fleet: Fleet) -> None:
    nodes, cached = set(), []
    text = " ".join(f"word{n}" for n in range(100))
    async with aiohttp.ClientSession() as http:
        for _ in range(6):
            body = {
                "model": "mock",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 1,
            }
            headers = {"authorization": f"Bearer {fleet.key}", "x-session-affinity": "ses-1"}
            url = f"{fleet.endpoint('ams')}/v1/chat/completions"
            async with http.post(url, json=body, headers=headers) as response:
                nodes.add(response.headers["x-isochrone-node"])
                answer = await response.json()
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert len(nodes) == 1
    assert cached[0] == 0
    assert all(tokens >= 96 for tokens in cached[1:])


@pytest.mark.asyncio(loop_scope="module")
async def test_tenants_do_not_share_cached_prefixes(fleet: Fleet) -> None:
    made = await fleet.ask("POST", "/v1/keys", {"tenant_id": "other"})
    text = " ".join(f"secret{n}" for n in range(64))

    async def cached(key: str) -> int | None:
        body = {"model": "mock", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}", "x-session-affinity": "same"}
        url = f"{fleet.endpoint('ams')}/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json=body, headers=headers) as response,
        ):
            if response.status != 200:
                return None
            usage = (await response.json())["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert await cached(fleet.key) == 0
    async with asyncio.timeout(30):
        while (theirs := await cached(made["key"])) is None:
            await asyncio.sleep(0.1)
    assert theirs == 0
    assert (await cached(fleet.key) or 0) >= 64


@pytest.mark.asyncio(loop_scope="module")
async def test_a_quota_used_up_in_one_city_holds_in_the_other(fleet: Fleet) -> None:
    limits = {"tokens_per_day": 300}
    made = await fleet.ask("POST", "/v1/keys", {"tenant_id": "metered", "limits": limits})
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.endpoint('sin')}/v1", api_key=made["key"]
    ) as there:

        async def said_there() -> str:
            try:
                await there.chat.completions.create(
                    model="mock",
                    messages=MESSAGES,
                    max_tokens=1,
                )
            except openai.AuthenticationError:
                return "unknown"
            except openai.RateLimitError as error:
                return str(error.code)
            return "served"

        async def is_served() -> bool:
            return await said_there() == "served"

        async def is_used_up() -> bool:
            return await said_there() == "insufficient_quota"

        await until("the key is known there", is_served, 5.0)
        here = there.with_options(base_url=f"{fleet.endpoint('ams')}/v1")
        answer = await here.chat.completions.create(
            model="mock",
            messages=MESSAGES,
            max_tokens=300,
        )
        assert answer.usage is not None
        assert answer.usage.total_tokens >= 300
        await until("the quota is used up there too", is_used_up, 10.0)
        more = {"tokens_per_day": 100_000}
        await fleet.ask("PUT", f"/v1/keys/{made['key_id']}/limits", more)
        await until("a larger quota is granted there", is_served, 10.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_page_under_a_strangers_name_reaches_neither_admin_api_nor_node(
    fleet: Fleet,
) -> None:
    """DNS rebinding: the browser takes this server for the page's own, and sends its name."""
    async with aiohttp.ClientSession() as http:
        for port in (fleet.ports["admin-a"], fleet.ports["node-ams"]):
            for path in ("/healthz", "/metrics", "/ping", "/v1/chat/completions"):
                url = f"http://127.0.0.1:{port}{path}"
                rebound = {"host": f"evil.example:{port}"}
                async with http.get(url, headers=rebound) as response:
                    assert response.status == 403 and "evil.example" in await response.text()
                async with http.post(url, headers=rebound, json={}) as response:
                    assert response.status == 403
            async with http.get(f"http://localhost:{port}/healthz") as response:
                assert response.status == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_nodes_share_the_secret_of_cache_salts_and_nothing_shows_it(fleet: Fleet) -> None:
    keys = list(fleet.folder.glob("node-*/cluster_cache_salt.key"))
    assert len(keys) == 2 and len({key.read_bytes() for key in keys}) == 1
    forms = salt_secrets(fleet)
    document = await fleet.ask("GET", "/openapi.json")
    paths = [
        path
        for path, methods in document["paths"].items()
        if "get" in methods and path != "/metrics"
    ]
    assert len(paths) > 10
    answers = []
    for path in paths:
        # A parameter that names nothing is a 404; what is listed is whole without parameters.
        with suppress(AdminError):
            answers.append(str(await fleet.ask("GET", path.replace("{", "").replace("}", ""))))
    assert len(answers) > 5
    texts = answers + [path.read_text() for path in (fleet.folder / "logs").glob("*.log")]
    assert not [text for text in texts if any(form in text for form in forms)]
    connection = await asyncpg.connect(fleet.dsn(), timeout=5)
    try:
        row = await connection.fetchrow("SELECT * FROM cluster")
    finally:
        await connection.close()
    assert row is not None and row["cache_salt_version"] == 1
    assert not any(form in str(row) for form in forms)
