"""Stored responses and conversations with the official SDK: router, scheduler, Postgres, a node."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from isochrone.wire.peers.routes import KeyLimits
from router.apis.linked_images.fetcher import ImageFetcher
from router.decide.admission.body_limits import ParseBudget
from scheduler.api.client_objects import conversations as conversation_endpoints
from scheduler.api.client_objects import responses as response_endpoints
from scheduler.decide.response_limits import ResponseLimits
from tests.integration.admin.conftest import admin
from tests.integration.router.fleet_of import a_key, a_route, a_table
from tests.integration.router.image_origin import GIF_URL, allow, an_origin
from tests.integration.router.test_batches import WAIT_S, BatchBench, bench
from tests.system.harness import until

__all__ = ["admin", "bench"]

GIF = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the scheduler: no folder for batches, and leases that run out soon."""
    limits = ResponseLimits(lease_s=3.0, tenant_count_max=6, context_bytes_max=4000)
    return {"responses": limits}


def sent_messages(bench: BatchBench) -> list[Any]:
    """Return the messages of the request that the node got last."""
    return [
        (message["role"], message["content"])
        for message in json.loads(bench.node.bodies[-1])["messages"]
    ]


async def ended(bench: BatchBench, response_id: str) -> Any:
    async def has_ended() -> Any:
        response = await bench.client.responses.retrieve(response_id)
        return None if response.status in ("queued", "in_progress") else response

    return await until("the response ends", has_ended, WAIT_S)


async def test_a_stored_response_is_read_continued_and_deleted(bench: BatchBench) -> None:
    responses = bench.client.responses
    first = await responses.create(model="tiny", input="one", store=True, max_output_tokens=2)
    assert (first.to_dict()["store"], first.output_text) == (True, "t0 t1")
    read = await responses.retrieve(first.id)
    assert read.to_dict() == first.to_dict()
    second = await responses.create(
        model="tiny",
        input=[{"role": "user", "content": "two"}],
        previous_response_id=first.id,
        instructions="be brief",
        max_output_tokens=2,
    )
    assert second.previous_response_id == first.id
    conversation = [("user", "one"), ("assistant", "t0 t1"), ("user", "two")]
    assert sent_messages(bench) == [("system", "be brief"), *conversation]
    # The instructions of an earlier response do not carry over, its items do.
    await responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(first.id)
    create: Any = responses.create
    stream = await create(
        model="tiny", input="three", previous_response_id=second.id, stream=True, store=False
    )
    events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    assert sent_messages(bench) == [*conversation, ("assistant", "t0 t1"), ("user", "three")]
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(events[-1].response.id)
    items = [item async for item in responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message"] * 3
    with pytest.raises(openai.BadRequestError, match="cannot use 'after'"):
        await responses.input_items.list(second.id, after="gone")
    newest = await responses.input_items.list(second.id, limit=1)
    assert newest.has_more
    assert json.loads(newest.data[0].to_json())["content"][0]["text"] == "two"


async def test_items_of_stored_responses_are_referred_to(bench: BatchBench) -> None:
    create: Any = bench.client.responses.create
    answers = [
        await create(model="tiny", input=text, store=True, max_output_tokens=2) for text in "ab"
    ]
    refs = [{"type": "item_reference", "id": answer.output[0].id} for answer in answers]
    given = [{"type": "item_reference", "id": "rs_resp_req-1_0"}, *refs, {"content": "c"}]
    for fields in ({}, {"store": True}, {"previous_response_id": answers[0].id, "store": False}):
        last = await create(model="tiny", input=given, max_output_tokens=2, **fields)
        assert last.output_text == "t0 t1"
        texts = ["t0 t1"] * (3 if "previous_response_id" in fields else 2)
        sent = [("assistant", "\n".join(texts)), ("user", "c")]
        assert sent_messages(bench)[-2:] == sent
        if fields == {"store": True}:
            # What is stored are the items.
            listed = [item.type async for item in bench.client.responses.input_items.list(last.id)]
            assert listed == ["message"] * 3
    theirs: Any = bench.other.responses.create
    with pytest.raises(openai.BadRequestError, match=r"'input\[0\]': no stored response has"):
        await theirs(model="tiny", input=refs)
    assert sent_messages(bench)[-2:] == sent


async def test_a_stream_is_stored_before_its_last_event(bench: BatchBench) -> None:
    create: Any = bench.client.responses.create
    fields = {"model": "tiny", "input": "one", "store": True, "stream": True}
    events = [event async for event in await create(**fields, max_output_tokens=3)]
    assert events[-1].type == "response.completed"
    stored = await bench.client.responses.retrieve(events[-1].response.id)
    assert stored.to_dict() == events[-1].response.to_dict()
    bench.node.itl_s = 60.0
    stream = await create(**fields)
    response_id = (await anext(stream)).response.id
    assert (await bench.client.responses.retrieve(response_id)).status == "in_progress"
    await stream.close()
    # A client that leaves ends its response.
    assert (await ended(bench, response_id)).status == "cancelled"


async def test_responses_belong_to_their_tenant(bench: BatchBench) -> None:
    mine = await bench.client.responses.create(model="tiny", input="one", store=True)
    theirs = bench.other.responses
    for call in (
        theirs.retrieve(mine.id),
        theirs.delete(mine.id),
        theirs.cancel(mine.id),
        theirs.input_items.list(mine.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.BadRequestError, match="there is no stored response"):
        await theirs.create(model="tiny", input="two", previous_response_id=mine.id)
    conversation = await bench.client.conversations.create()
    with pytest.raises(openai.NotFoundError):
        await theirs.create(model="tiny", input="two", conversation=conversation.id)
    with pytest.raises(openai.NotFoundError):
        await bench.other.conversations.items.list(conversation.id)


async def test_a_background_response_is_polled_followed_and_cancelled(bench: BatchBench) -> None:
    responses = bench.client.responses
    queued = await responses.create(model="tiny", input="one", background=True)
    assert (queued.status, queued.background) == ("queued", True)
    done = await ended(bench, queued.id)
    assert (done.status, done.id, done.background) == ("completed", queued.id, True)
    assert done.output_text.startswith("t0 t1")
    create: Any = responses.create
    stream = await create(
        model="tiny", input="two", background=True, stream=True, max_output_tokens=2
    )
    events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type.endswith("_text.delta")) == "t0 t1"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    retrieve: Any = responses.retrieve
    followed = await retrieve(events[0].response.id, stream=True, starting_after=3)
    assert [event.sequence_number async for event in followed] == list(range(4, len(events)))
    bench.node.ttft_s = 60.0
    slow = await responses.create(model="tiny", input="three", background=True)

    async def runs() -> bool:
        return (await responses.retrieve(slow.id)).status == "in_progress"

    await until("it is answered", runs, WAIT_S)
    assert (await responses.cancel(slow.id)).status == "cancelled"
    assert (await responses.retrieve(slow.id)).status == "cancelled"

    async def is_stopped() -> bool:
        return not bench.app.stored.job._running

    await until("the router has stopped answering it", is_stopped, WAIT_S)
    bench.node.ttft_s = 0.0
    direct = await responses.create(model="tiny", input="four", store=True)
    with pytest.raises(openai.BadRequestError, match="only background responses"):
        await responses.cancel(direct.id)


async def test_a_conversation_grows_with_its_responses(bench: BatchBench) -> None:
    conversations = bench.client.conversations
    made = await conversations.create(
        metadata={"topic": "x"}, items=[{"type": "message", "role": "user", "content": "zero"}]
    )
    await bench.client.responses.create(
        model="tiny", input="one", conversation={"id": made.id}, max_output_tokens=1
    )
    answer = await bench.client.responses.create(
        model="tiny", input="two", conversation=made.id, max_output_tokens=1
    )
    assert answer.conversation is not None and answer.conversation.id == made.id
    assert sent_messages(bench) == [
        *(("user", "zero\none"), ("assistant", "t0"), ("user", "two")),
    ]
    added = await conversations.items.create(
        made.id, items=[{"type": "message", "role": "user", "content": "three"}]
    )
    items = [item async for item in conversations.items.list(made.id, order="asc", limit=2)]
    assert len(items) == 6
    assert items[-1].id == added.data[0].id
    assert (
        await conversations.items.retrieve(items[0].id or "", conversation_id=made.id)
    ) == items[0]
    await conversations.items.delete(items[0].id or "", conversation_id=made.id)
    newest = [item.id async for item in conversations.items.list(made.id)]
    assert newest == [item.id for item in items[:0:-1]]
    updated = await conversations.update(made.id, metadata={"topic": "y"})
    assert (await conversations.retrieve(made.id)).metadata == updated.metadata == {"topic": "y"}
    assert (await conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await conversations.retrieve(made.id)
    # Responses stay when their conversation is deleted.
    assert (await bench.client.responses.retrieve(answer.id)).id == answer.id


async def test_metadata_has_short_names_because_no_limit_of_the_tenant_counts_it(
    bench: BatchBench,
) -> None:
    conversations = bench.client.conversations
    longest, longer = {"k" * 64: "v" * 512}, {"k" * 65: "v"}
    made = await conversations.create(metadata=longest)
    assert made.metadata == longest
    with pytest.raises(openai.BadRequestError, match="metadata"):
        await conversations.create(metadata=longer)
    with pytest.raises(openai.BadRequestError, match="metadata"):
        await conversations.update(made.id, metadata=longer)
    assert (await conversations.retrieve(made.id)).metadata == longest


async def test_items_added_under_one_request_id_are_all_kept(bench: BatchBench) -> None:
    """Clients may give all requests of a trace one id; an item needs one that is its own."""
    conversations = bench.client.conversations
    made = await conversations.create()
    trace = {"x-request-id": "0f8fad5b.d9cd.469f.a165.70867728950e"}
    for text in ("one", "two"):
        item: Any = {"type": "message", "role": "user", "content": text}
        await conversations.items.create(made.id, items=[item], extra_headers=trace)
    items = [item async for item in conversations.items.list(made.id, order="asc")]
    assert [item.to_dict()["content"][0]["text"] for item in items] == ["one", "two"]  # type: ignore[index]
    for kept in items:
        found = await conversations.items.retrieve(kept.id or "", conversation_id=made.id)
        assert found == kept


async def test_a_large_conversation_is_never_in_memory_as_a_whole(
    bench: BatchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant may store 256 MiB in one; each list of items and each response read all of it."""
    monkeypatch.setattr(conversation_endpoints, "PAGE_BYTES_MAX", 4000)
    conversations = bench.client.conversations
    made = await conversations.create()
    for _ in range(3):
        item = {"type": "message", "role": "user", "content": "x" * 2_500}
        await conversations.items.create(made.id, items=[item])  # type: ignore[list-item]
    page = await conversations.items.list(made.id, limit=100)
    assert (len(page.data), page.has_more) == (2, True), "up to PAGE_BYTES_MAX, and an item"
    assert len([item async for item in conversations.items.list(made.id, order="asc")]) == 3

    async def read_all(*_: object) -> list[bytes]:
        pytest.fail("its items are read before their size is known")

    monkeypatch.setattr(response_endpoints, "all_items", read_all)
    with pytest.raises(openai.BadRequestError, match="start a new one"):
        await bench.client.responses.create(model="tiny", input="one", conversation=made.id)


async def test_what_cannot_be_stored_is_refused(bench: BatchBench) -> None:
    responses = bench.client.responses
    create: Any = responses.create
    for fields, match in (
        ({"background": True, "store": False}, "'store'"),
        ({"conversation": "c", "previous_response_id": "r"}, "'conversation'"),
        ({"previous_response_id": "resp_none"}, "there is no stored response"),
        ({"store": True, "input": "x" * 5000}, "start a new one"),
    ):
        with pytest.raises(openai.BadRequestError, match=match):
            await create(**{"model": "tiny", "input": "a", **fields})
    with pytest.raises(openai.BadRequestError, match="are not supported"):
        await bench.client.conversations.create(items=[{"type": "item_reference", "id": "x"}])
    with pytest.raises(openai.NotFoundError, match="cannot find the model"):
        await create(model="none", input="a", store=True)
    with pytest.raises(openai.InternalServerError, match="batch_folder"):
        await bench.client.files.list()
    for _ in range(6):
        last = await create(model="tiny", input="a", store=True)
    with pytest.raises(openai.RateLimitError, match="delete some"):
        await create(model="tiny", input="a", store=True)
    await create(model="tiny", input="a")
    await responses.delete(last.id)
    await create(model="tiny", input="a", store=True)


@pytest.mark.parametrize("fault", ["an error", "declined", "rate limit", "its context"])
async def test_a_response_that_is_refused_takes_no_space(
    bench: BatchBench, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has no id to delete it by, and a tenant may store six."""
    create: Any = bench.client.responses.create
    fields: dict[str, Any] = {"model": "tiny", "input": "a", "store": True}
    if fault == "an error":
        bench.node.status = 500
    elif fault == "declined":
        bench.node.status = 400
    elif fault == "rate limit":
        limited = a_key(limits=KeyLimits(requests_per_min=1))
        bench.app.fleet.adopt(a_table([a_route(bench.node)], generation=1_001, keys=[limited]))
    else:
        # The images of a request and of what it continues are too many together.
        monkeypatch.setattr("router.apis.openai.images.IMAGES_MAX", 1)
        image = {"type": "input_image", "image_url": f"data:image/gif;base64,{GIF}"}
        fields["input"] = [{"role": "user", "content": [image]}]
    answered = 0
    if fault in ("rate limit", "its context"):
        fields["previous_response_id"] = (await create(**fields)).id
        answered = 1
    for _ in range(8):
        with pytest.raises(openai.APIStatusError) as refused:
            await create(**fields)
        assert "delete some" not in str(refused.value)
    bench.node.status = 200
    bench.app.fleet.adopt(a_table([a_route(bench.node)], generation=1_002, keys=bench.keys))

    async def is_free() -> bool:
        return not bench.app.stored.routes.stored._finishing

    await until("what was refused is deleted", is_free, WAIT_S)
    for _ in range(6 - answered):
        await create(model="tiny", input="a", store=True)
    with pytest.raises(openai.RateLimitError, match="delete some"):
        await create(model="tiny", input="a", store=True)


async def test_another_router_answers_what_a_dead_one_has_begun(bench: BatchBench) -> None:
    bench.node.ttft_s = 60.0
    queued = await bench.client.responses.create(model="tiny", input="b", background=True)

    async def runs() -> bool:
        return (await bench.client.responses.retrieve(queued.id)).status == "in_progress"

    await until("it is answered", runs, WAIT_S)
    # Like a router that died: nothing renews the lease, and nobody says how it ended.
    job = bench.app.stored.job
    job.close()
    bench.node.ttft_s = 0.0
    assert (await ended(bench, queued.id)).output_text.startswith("t0")


async def test_stored_items_are_charged_to_the_parse_budget(
    bench: BatchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of a few bytes may continue 8 MiB, or refer to more."""
    create: Any = bench.client.responses.create
    first = await create(model="tiny", input="x" * 1500, store=True, instructions="y" * 3000)
    reference = {"type": "item_reference", "id": first.output[0].id}
    for fields in (
        {"input": "more", "previous_response_id": first.id, "store": False},
        {"input": [reference]},
    ):
        monkeypatch.setattr(bench.app.server.bodies, "_budget", ParseBudget(100.0))
        assert (await create(model="tiny", **fields)).output_text
        with pytest.raises(openai.RateLimitError, match="need more work than"):
            await create(model="tiny", **fields)


async def test_a_link_to_an_image_is_stored_as_it_was_sent(
    bench: BatchBench, tmp_path: Path
) -> None:
    create: Any = bench.client.responses.create
    add: Any = bench.client.conversations.create
    async with an_origin(tmp_path) as (origin, trust):
        image = {"type": "input_image", "image_url": origin.url(), "detail": "auto"}
        given = [{"type": "message", "role": "user", "content": [image]}]
        for refused in (create(model="tiny", input=given, store=True), add(items=given)):
            with pytest.raises(openai.BadRequestError, match="expected a `data:` URL"):
                await refused
        surface = bench.app.surface
        surface.image_fetcher = ImageFetcher(
            2**20, lambda: bench.app.server.bodies, bench.app.metrics
        )
        allow(surface, origin, trust)
        first = await create(model="tiny", input=given, store=True, max_output_tokens=2)
        (item,) = (await bench.client.responses.input_items.list(first.id)).data
        assert item.to_dict()["content"] == [image]
        for number in (2, 3):
            background = await create(
                model="tiny",
                input="more",
                previous_response_id=first.id,
                background=number == 3,
                max_output_tokens=2,
            )
            await ended(bench, background.id)
            (_, content), *_ = sent_messages(bench)
            assert content[0]["image_url"]["url"] == GIF_URL
            assert len(origin.requests) == number
        conversation = await add(items=given)
        origin.answers.clear()
        with pytest.raises(openai.BadRequestError, match="its host answered 404"):
            await create(model="tiny", input="more", conversation=conversation.id)
