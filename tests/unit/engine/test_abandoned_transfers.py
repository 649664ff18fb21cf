"""Requests that wait for KV and are abandoned leave no block, task or memory at the receiver."""

import asyncio
import hashlib
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from isochrone.wire.errors import ApiError
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.kv.transfer_frames import TransferHead, encode_block, encode_head
from nodeagent.engine.core.kv_transfers import KvTransfers
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.server.kv.kv_receiving import KvReceiver
from tests.unit.engine.test_kv_receiving import a_stream, turns
from tests.unit.engine.test_kv_transfers import Memory

ABANDONED = 20_000
"""A tenth of a millisecond each. Their blocks alone are abandoned more often in
test_kv_transfers."""

AT_ONCE = 8
"""Requests that wait at the same time, as many as may."""

BLOCKS_TOTAL = 64
PROMPT = list(range(1, 50))
"""Three full blocks and a token."""


class InlineWorker:
    """A step thread that makes every call at once."""

    def __init__(self, transfers: KvTransfers) -> None:
        self._core: Any = SimpleNamespace(kv_transfers=transfers)

    def call(self, function: Callable[[Any], object]) -> Future[object]:
        result: Future[object] = Future()
        result.set_result(function(self._core))
        return result

    call_beside_steps = call


async def fingerprint() -> bytes:
    return b"f" * 16


class Receiving:
    """A receiver of one engine, and what its transfers hold."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS_TOTAL)
        self.transfers = KvTransfers(self.pool, Memory(BLOCKS_TOTAL), None)
        form: Any = SimpleNamespace(
            block_bytes=4,
            dtype=torch.float32,
            shape=(1,),
            read_fingerprint=fingerprint,
        )
        worker: Any = InlineWorker(self.transfers)
        self.receiver = KvReceiver(form, worker, self.transfers, AT_ONCE, staging=StagingMemory(64))
        self.peak_blocks = 0

    async def abandon(self, number: int) -> None:
        """Open a request, and abandon it: at once, in the middle of its blocks, or after a wrong
        one."""
        transfer = f"{number:032x}"
        prepared: Any = SimpleNamespace(
            prompts=[SimpleNamespace(tokens=PROMPT)], salt=b"s%d" % (number % 7), adapter=None
        )

        async def answer() -> None:
            async with self.receiver.hold(transfer, prepared):
                assert number % 100 < 3, "nobody lets it begin"

        request = asyncio.create_task(answer())
        while transfer not in self.receiver._waiting:
            await turns(1)
        if number % 100 < 3:
            await self._send_part(transfer, is_wrong=number % 2 == 1)
        self.peak_blocks = max(self.peak_blocks, self.transfers.held_blocks)
        request.cancel()
        await asyncio.wait({request})

    async def _send_part(self, transfer: str, *, is_wrong: bool) -> None:
        """Send the head and two of the blocks that the receiver lacks, and no more."""
        waiting = self.receiver._waiting[transfer]
        first = waiting.held.on_device
        content = a_stream()
        head = TransferHead(
            fingerprint=b"f" * 16,
            block_bytes=4,
            first_block=first,
            blocks=len(waiting.wire_digests) - first,
        )
        content.feed_data(encode_head(head))
        for digest in waiting.wire_digests[first : first + 2]:
            name = hashlib.sha256(digest).digest() if is_wrong else digest
            content.feed_data(b"".join(map(bytes, encode_block(name, b"abcd"))))
        content.feed_eof()
        http: Any = SimpleNamespace(
            match_info={"transfer": transfer}, query={}, headers={}, content=content
        )
        with pytest.raises(ApiError, match="cannot use these KV blocks: "):
            await self.receiver._receive(http)


async def test_a_transfer_is_that_of_one_request() -> None:
    """Two that came at once shared it, and the blocks of one were never let go of."""
    receiving = Receiving()
    receiver, transfer = receiving.receiver, "f" * 32
    prepared: Any = SimpleNamespace(
        prompts=[SimpleNamespace(tokens=PROMPT)], salt=b"s", adapter=None
    )

    async def answer() -> None:
        async with receiver.hold(transfer, prepared):
            raise AssertionError("nobody lets it begin")

    async with receiver._changed:
        # A description looks for its request just now.
        first, second = (asyncio.create_task(answer()) for _ in range(2))
        await turns()
    await turns()
    assert second.done()
    with pytest.raises(ApiError, match="cannot use transfer id"):
        second.result()
    assert receiver.counts()["kv_transfers_waiting"] == 1
    first.cancel()
    await asyncio.wait({first})
    assert receiver.counts()["kv_transfers_waiting"] == 0
    assert receiving.transfers.held_blocks == receiving.pool.used_blocks == 0


async def test_of_a_long_prompt_as_many_blocks_are_named_as_a_query_may_have() -> None:
    """Holders and the store refused the whole query of a prompt of more than 262,144 tokens, and
    its copies paused those of all other prompts."""
    receiving, transfer = Receiving(), "f" * 32
    tokens = list(range(16 * (kv_sharing.CHAIN_BLOCKS_MAX + 1) + 1))
    prepared: Any = SimpleNamespace(
        prompts=[SimpleNamespace(tokens=tokens)], salt=b"s", adapter=None
    )

    async def answer() -> None:
        async with receiving.receiver.hold(transfer, prepared):
            raise AssertionError("nobody lets it begin")

    request = asyncio.create_task(answer())
    await turns()
    http: Any = SimpleNamespace(match_info={"transfer": transfer}, query={"digests": "1"})
    described: Any = await receiving.receiver._describe(http)
    expected = msgspec.json.decode(described.body, type=kv_transfer.ExpectedPrompt)
    assert expected.blocks == kv_sharing.CHAIN_BLOCKS_MAX + 1
    query = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=expected.digests))
    assert len(query) <= kv_sharing.QUERY_BYTES_MAX
    assert msgspec.msgpack.decode(query, type=kv_sharing.BlockQuery).digests == expected.digests
    request.cancel()
    await asyncio.wait({request})


async def test_abandoned_requests_leave_nothing() -> None:
    receiving = Receiving()

    async def abandon(first: int, end: int) -> None:
        for start in range(first, end, AT_ONCE):
            await asyncio.gather(
                *[receiving.abandon(number) for number in range(start, min(end, start + AT_ONCE))]
            )

    await abandon(0, 1000)
    tracemalloc.start()
    try:
        await abandon(1000, 1200)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await abandon(1200, ABANDONED - 200)
        tracemalloc.start()
        await abandon(ABANDONED - 200, ABANDONED)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after < before + 100_000
    assert receiving.transfers.held_blocks == receiving.pool.used_blocks == 0
    assert 0 < receiving.peak_blocks <= 3 * AT_ONCE
    assert receiving.receiver.counts()["kv_transfers_waiting"] == 0
    assert receiving.receiver.counts()["kv_transfers_wrong_total"] > 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
