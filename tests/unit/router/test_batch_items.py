"""What becomes of an item of a batch that is not answered."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import BootId, KeyId, TenantId
from isochrone.wire.peers.batches import ItemRef, ItemResult, LeasedItem, LeasedItems
from isochrone.wire.peers.responses import (
    FinishResponse,
    LeasedResponse,
    LeasedResponses,
    LeaseResponses,
    ResponseRef,
)
from isochrone.wire.peers.routes import KeyEntry
from router.apis.batches.answer import ItemAnswerer
from router.apis.leased_work import later_attempt
from router.apis.request_ids import RequestIds
from router.apis.responses.background import BackgroundAnswerer
from router.apis.responses.stored import BackgroundRun
from router.decide.attempt import NoNodeReached
from router.loops.answer_batches import HOLDS_MAX, AnswerBatches, DeploymentWork
from router.loops.answer_responses import AnswerResponses
from router.scheduler_client import SchedulerAccess


def not_read(*given: Any) -> NoReturn:
    raise AssertionError(f"read although its key is not known: {given}")


A_KEY = KeyEntry(key_id=KeyId("k"), secret_sha256="", tenant_id=TenantId("acme"))


async def fail(*given: Any) -> NoReturn:
    """Fail in a way that the router does not expect, as with an answer of another shape."""
    raise KeyError("index")


async def answer(
    *, is_key_valid: bool, keys: Sequence[KeyEntry] = (), read: Any = not_read
) -> ItemResult:
    """Return the result of an item, whose key the router does not know without `keys`."""
    answerer = ItemAnswerer(
        keys=lambda: KeyTable.of(keys),
        read=read,
        serve=fail,
        request_ids=RequestIds(BootId("boot")),
        clock=lambda: 0.0,
        unix_clock=lambda: 0.0,
    )
    item = LeasedItem(
        ref=ItemRef("batch", 0, "lease"),
        tenant_id=TenantId("acme"),
        key_id=KeyId("k"),
        endpoint="/v1/chat/completions",
        body=b"{}",
        is_key_valid=is_key_valid,
    )
    result = await answerer.answer(item, 0)
    assert isinstance(result, ItemResult)
    return result


async def test_an_item_waits_until_its_router_knows_its_key() -> None:
    """A key reaches routers one after the other, and another one has accepted the batch."""
    waits = await answer(is_key_valid=True)
    assert (waits.retry_after_s, waits.counts_as_attempt) == (5.0, False)
    ends = await answer(is_key_valid=False)
    assert (ends.status_code, ends.retry_after_s) == (401, 0.0)


async def test_an_item_that_fails_unexpectedly_counts_as_an_attempt() -> None:
    """Without a result it was leased, answered and paid for each minute again."""
    inference = SimpleNamespace(preemptions=-1)
    result = await answer(is_key_valid=True, keys=[A_KEY], read=lambda *_: (inference, None))
    assert (result.retry_after_s, result.counts_as_attempt) == (5.0, True)


async def end_in_background(
    *, is_key_valid: bool, keys: Sequence[KeyEntry] = (), openai: Any = None
) -> FinishResponse:
    """Return how a background response ends, whose key the router does not know without `keys`."""
    read: Any = openai or SimpleNamespace(unix_clock=lambda: 0.0)
    answerer = BackgroundAnswerer(
        openai=read,
        serve=fail,
        keys=lambda: KeyTable.of(keys),
        request_ids=RequestIds(BootId("boot")),
        clock=lambda: 0.0,
    )
    leased = LeasedResponse(
        ref=ResponseRef("resp", "lease"),
        tenant_id=TenantId("acme"),
        key_id=KeyId("k"),
        body=b"{}",
        context_items=b"[]",
        run=msgspec.msgpack.encode(BackgroundRun(b'{"model":"tiny","input":"hi"}', {})),
        is_key_valid=is_key_valid,
    )
    return await answerer.answer(leased)


async def test_a_background_response_waits_until_its_router_knows_its_key() -> None:
    waits = await end_in_background(is_key_valid=True)
    assert (waits.status, waits.retry_after_s, waits.counts_as_attempt) == ("", 5.0, False)
    assert (await end_in_background(is_key_valid=False)).status == "failed"


async def test_a_background_response_that_fails_unexpectedly_counts_as_an_attempt() -> None:
    openai = SimpleNamespace(unix_clock=lambda: 0.0, read_translated=lambda *_: None)
    ended = await end_in_background(is_key_valid=True, keys=[A_KEY], openai=openai)
    assert (ended.status, ended.retry_after_s, ended.counts_as_attempt) == ("", 5.0, True)


def an_item(line: int) -> LeasedItem:
    return LeasedItem(
        ref=ItemRef("batch", line, "lease"),
        tenant_id=TenantId("acme"),
        key_id=KeyId("k"),
        endpoint="/v1/chat/completions",
        body=b'{"model":"tiny"}',
        is_key_valid=True,
    )


class Renewals:
    """A client of a scheduler that notes what routers hold and want."""

    def __init__(self) -> None:
        self.access = SchedulerAccess("http://scheduler", "token")
        self.is_connected = True
        self.messages: list[Any] = []
        self.leased: tuple[LeasedItem, ...] = ()

    async def post(self, _: str, message: Any) -> bytes:
        self.messages.append(message)
        return msgspec.msgpack.encode(LeasedItems(items=self.leased))

    async def lease(self, message: LeaseResponses) -> LeasedResponses:
        self.messages.append(message)
        return LeasedResponses()


async def test_all_leases_of_items_are_renewed() -> None:
    """Beyond the limit of one message, items were leased to other routers and answered again."""
    client = Renewals()
    directory = SimpleNamespace(deployments=[], deployment=lambda _: None)
    job = AnswerBatches(
        client=client,  # type: ignore[arg-type]
        fleet=SimpleNamespace(directory=directory, clock=lambda: 0.0),  # type: ignore[arg-type]
        answer=not_read,
        is_busy=lambda: True,
        is_draining=lambda: False,
        per_replica_max=None,
    )
    refs = {ItemRef("batch", line, "lease") for line in range(2 * HOLDS_MAX + 1)}
    pending = asyncio.create_task(asyncio.Event().wait())
    work = job._work.setdefault("tiny", DeploymentWork())
    work.running.update(dict.fromkeys(refs, pending))  # type: ignore[arg-type]
    await job.run_once()
    pending.cancel()
    held = [ref for message in client.messages for ref in message.holds]
    assert (len(held), set(held)) == (len(refs), refs)
    assert max(len(message.holds) for message in client.messages) == HOLDS_MAX


async def test_a_router_that_drains_leases_and_starts_no_more_items() -> None:
    """It cancels what still runs when it ends, so other routers had to wait for the lease."""
    client = Renewals()
    client.leased = (an_item(2),)
    is_draining = False
    started: list[ItemRef] = []
    has_started = asyncio.Event()

    async def run(item: LeasedItem, _: int) -> NoReturn:
        started.append(item.ref)
        has_started.set()
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    entry = SimpleNamespace(name="tiny", deployment_id="d")
    route = SimpleNamespace(replica_id="r", tokens_in_flight_max=10_000)
    load = SimpleNamespace(sequences_max=8, requests=0, others_requests=0)
    in_flight = SimpleNamespace(
        load_of=lambda _: load, tokens_at=lambda *_: SimpleNamespace(tokens=0)
    )
    fleet: Any = SimpleNamespace(
        directory=SimpleNamespace(
            deployments=[entry], deployment=lambda _: entry, base_of=lambda _: "tiny"
        ),
        routing=lambda _: SimpleNamespace(routes=[route]),
        in_flight=in_flight,
        clock=lambda: 0.0,
    )
    job = AnswerBatches(
        client=client,  # type: ignore[arg-type]
        fleet=fleet,
        answer=run,
        is_busy=lambda: False,
        is_draining=lambda: is_draining,
        per_replica_max=1,
    )
    await job.run_once()
    await has_started.wait()
    assert started == [an_item(2).ref]
    assert client.messages[-1].wanted == {"tiny": 2}

    job._work["tiny"].waiting.append(an_item(3))
    is_draining, client.leased = True, ()
    await job.run_once()
    assert client.messages[-1].wanted == {}
    assert job._work["tiny"].refs == [an_item(2).ref]
    await job.run_once()
    assert client.messages[-1].holds == (an_item(2).ref,)
    job.close()


async def test_a_router_without_a_table_leases_no_background_responses() -> None:
    """It knows no model, so each would fail for good."""
    client, tables = Renewals(), [False, True]
    job = AnswerResponses(
        client=client,  # type: ignore[arg-type]
        answer=not_read,
        open_refs={ResponseRef("resp", "lease")},
        running_max=8,
        may_lease=lambda: tables.pop(0),
        clock=lambda: 0.0,
    )
    await job.run_once()
    await job.run_once()
    assert [(message.wanted, len(message.holds)) for message in client.messages] == [(0, 1), (8, 1)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ApiError(ErrorCode.OUT_OF_CAPACITY, "full", retry_after_s=2.0), (2.0, False)),
        (ApiError(ErrorCode.RATE_LIMITED, "limit", retry_after_s=900.0), (60.0, False)),
        (ApiError(ErrorCode.UNAVAILABLE, "no replica"), (5.0, False)),
        (NoNodeReached(ErrorCode.UPSTREAM, "none reached", retry_after_s=1.0), (1.0, False)),
        (ApiError(ErrorCode.UPSTREAM, "broken", retry_after_s=0.1), (1.0, True)),
        (ApiError(ErrorCode.INTERNAL, "a bug"), (5.0, True)),
        (ApiError(ErrorCode.INVALID_REQUEST, "no"), None),
        (ApiError(ErrorCode.REQUEST_SUSPENDED, "two engines failed"), None),
    ],
    ids=str,
)
def test_an_attempt_counts_if_the_item_may_be_the_cause(
    error: ApiError, expected: tuple[float, bool] | None
) -> None:
    assert later_attempt(error, 60.0) == expected
