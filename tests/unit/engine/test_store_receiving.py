"""A waiting request takes blocks from the PoP's store: those that are there, and no more."""

import asyncio
import json
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isochrone.wire.errors import ApiError
from nodeagent.engine.server.kv.kv_store import KvStoreRoutes
from tests.unit.engine.test_abandoned_transfers import PROMPT, Receiving
from tests.unit.engine.test_kv_receiving import turns

TRANSFER = "0" * 32
FETCHED_OFTEN = 1_000


class StoreReads:
    """The store: it has `stored` blocks of the prompt, and gives two at a time."""

    def __init__(self) -> None:
        self.stored = 3
        self.asked: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.given = 0

    def read(self, digests: Sequence[bytes]) -> torch.Tensor:
        self.asked.append(len(digests))
        self.may_answer.wait()
        blocks = min(2, len(digests), self.stored - self.given)
        self.given += blocks
        return torch.ones(blocks, 1).view(torch.uint8)


class Waiting:
    """A request that waits at a receiver with a store."""

    def __init__(self) -> None:
        self.receiving = Receiving()
        self.store = StoreReads()
        store: Any = self.store
        sharing: Any = None
        receiver = self.receiving.receiver
        self.routes = KvStoreRoutes(receiver._form, store, receiver, sharing)
        self.request: asyncio.Task[None]

    async def begin(self) -> None:
        prepared: Any = SimpleNamespace(
            prompts=[SimpleNamespace(tokens=PROMPT)], salt=b"s", adapter=None
        )

        async def answer() -> None:
            async with self.receiving.receiver.hold(TRANSFER, prepared):
                pass

        self.request = asyncio.create_task(answer())
        await turns()

    async def fetch(self, wanted: str) -> int:
        http: Any = SimpleNamespace(match_info={"transfer": TRANSFER}, query={"blocks": wanted})
        response: Any = await self.routes._fetch(http)
        return int(json.loads(response.body)["blocks"])

    async def held(self) -> tuple[int, int]:
        return self.receiving.receiver.get(TRANSFER).held

    async def leave(self) -> None:
        self.request.cancel()
        await asyncio.wait({self.request})
        assert self.receiving.transfers.held_blocks == self.receiving.pool.used_blocks == 0
        assert self.receiving.receiver.counts()["kv_transfers_waiting"] == 0


async def test_blocks_are_taken_part_by_part_and_found_by_the_request() -> None:
    waiting = Waiting()
    await waiting.begin()
    assert await waiting.fetch("3") == 3
    assert waiting.store.asked == [3, 1]
    assert await waiting.held() == (3, 3)
    assert waiting.receiving.transfers.held_blocks == 3
    # Nothing is missing any more.
    assert (await waiting.fetch("3"), waiting.store.asked) == (0, [3, 1])
    await waiting.leave()


async def test_a_request_takes_no_more_than_there_are_or_than_it_wants() -> None:
    waiting = Waiting()
    waiting.store.stored = 1
    await waiting.begin()
    assert await waiting.fetch("3") == 1
    assert await waiting.held() == (1, 1)
    waiting.store.stored = 3
    assert await waiting.fetch("1") == 1
    assert await waiting.held() == (2, 2)
    await waiting.leave()


@pytest.mark.parametrize("wanted", ["", "-1", "x", "9" * 6, "٣"])
async def test_a_wrong_number_of_blocks_is_refused(wanted: str) -> None:
    waiting = Waiting()
    await waiting.begin()
    with pytest.raises(ApiError, match="cannot fetch"):
        await waiting.fetch(wanted)
    await waiting.leave()


async def test_for_a_request_that_is_gone_nothing_is_fetched() -> None:
    waiting = Waiting()
    with pytest.raises(ApiError, match="cannot find this transfer"):
        await waiting.fetch("3")
    await waiting.begin()
    waiting.store.may_answer.clear()
    fetching = asyncio.create_task(waiting.fetch("3"))
    await turns()
    await waiting.leave()
    waiting.store.may_answer.set()
    with pytest.raises(ApiError, match="cannot take KV blocks"):
        await fetching
    assert waiting.receiving.pool.used_blocks == 0


async def test_for_a_request_that_has_begun_nothing_is_fetched() -> None:
    """It begins while the fetch waits for the end of another transfer."""
    waiting = Waiting()
    await waiting.begin()
    prompt = waiting.receiving.receiver.get(TRANSFER)
    async with prompt.receiving:
        fetching = asyncio.create_task(waiting.fetch("3"))
        await turns()
        prompt.may_begin.set()
    with pytest.raises(ApiError, match="cannot find this transfer"):
        await fetching
    assert waiting.store.asked == []
    await waiting.leave()


async def test_fetches_that_are_given_up_leave_nothing() -> None:
    waiting = Waiting()
    waiting.store.stored = 10**9
    for number in range(FETCHED_OFTEN):
        await waiting.begin()
        waiting.store.may_answer.clear()
        fetching = asyncio.create_task(waiting.fetch("3"))
        await turns(3)
        if number % 2:
            # It goes on in part before it is given up.
            waiting.store.may_answer.set()
            await turns(2)
        fetching.cancel()
        await asyncio.wait({fetching})
        waiting.store.may_answer.set()
        await waiting.leave()
        waiting.receiving.pool.forget_cached()
    assert asyncio.all_tasks() == {asyncio.current_task()}
