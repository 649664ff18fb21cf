"""Blocks are stored while later ones arrive, in order, and nothing goes on after an error."""

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
import torch

from isochrone.wire.errors import ApiError
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.transfer_frames import (
    ReceivedBlock,
    TransferEnd,
    TransferHead,
    TransferReader,
    WrongTransfer,
    encode_block,
    encode_end,
    encode_head,
)
from nodeagent.engine.server.kv.kv_reading import read_blocks
from nodeagent.engine.server.kv.kv_receiving import KvReceiver, WaitingPrompt

BYTES = 64
FORM = b"f" * 16
DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(6)]
HEAD = encode_head(TransferHead(fingerprint=FORM, block_bytes=BYTES, first_block=0, blocks=6))
END = encode_end(TransferEnd(cached_tokens=0))


def block(number: int) -> bytes:
    return b"".join(bytes(part) for part in encode_block(DIGESTS[number], bytes([number]) * BYTES))


def a_stream() -> aiohttp.StreamReader:
    protocol: Any = Mock()
    return aiohttp.StreamReader(protocol, 2**16, loop=asyncio.get_running_loop())


class Store:
    """Stores blocks once it may."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.stored: list[int] = []
        self.may_store = asyncio.Event()
        self.running = 0

    @property
    def begun(self) -> list[int]:
        return [number for part in self.parts for number in part]

    async def __call__(self, blocks: Sequence[ReceivedBlock]) -> None:
        self.parts.append([one.number for one in blocks])
        self.running += 1
        try:
            await self.may_store.wait()
            self.stored += [one.number for one in blocks]
        finally:
            self.running -= 1


async def turns(count: int = 20) -> None:
    """Let every other task run as far as it can."""
    for _ in range(count):
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()


async def test_later_blocks_are_read_while_earlier_ones_are_stored() -> None:
    content, store = a_stream(), Store()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0)
    reading = asyncio.create_task(read_blocks(content, reader, 2, store))
    content.feed_data(HEAD + block(0) + block(1))
    await turns()
    assert store.begun == [0, 1]
    content.feed_data(block(2))
    await turns()
    assert reader.next_block == 3, "it reads on"
    content.feed_data(block(3) + block(4) + block(5))
    await turns()
    assert (store.begun, store.running) == ([0, 1], 1), "one part at a time"
    store.may_store.set()
    content.feed_data(END)
    content.feed_eof()
    assert (await reading).cached_tokens == 0
    assert (store.stored, store.running) == (list(range(6)), 0)


async def test_what_has_arrived_is_stored_once_the_part_before_it_is() -> None:
    content, store = a_stream(), Store()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0, part_blocks=4)
    reading = asyncio.create_task(read_blocks(content, reader, 4, store, 1))
    content.feed_data(HEAD + block(0))
    await turns()
    assert store.begun == [0], "nothing is being stored, so it waits for no more"
    content.feed_data(block(1) + block(2))
    await turns()
    assert store.begun == [0]
    store.may_store.set()
    await turns()
    content.feed_data(block(3) + block(4))
    await turns()
    assert store.parts[:2] == [[0], [1, 2, 3]], "a part ends where the reader's memory does"
    content.feed_data(block(5) + END)
    content.feed_eof()
    assert (await reading).cached_tokens == 0
    assert (store.stored, store.running) == (list(range(6)), 0)


async def test_nothing_is_stored_any_more_after_a_wrong_block() -> None:
    content, store = a_stream(), Store()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0)
    reading = asyncio.create_task(read_blocks(content, reader, 2, store))
    content.feed_data(HEAD + block(0) + block(1))
    await turns()
    content.feed_data(block(5))
    await turns()
    assert not reading.done(), "the wrong blocks are forgotten after the last one is stored"
    store.may_store.set()
    with pytest.raises(WrongTransfer):
        await reading
    assert (store.stored, store.running) == ([0, 1], 0)


async def test_a_store_that_fails_ends_the_transfer() -> None:
    async def no_room(blocks: Sequence[ReceivedBlock]) -> None:
        raise ConnectionError("no room")

    content = a_stream()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0)
    content.feed_data(HEAD + b"".join(block(number) for number in range(4)))
    content.feed_eof()
    with pytest.raises(ConnectionError):
        await read_blocks(content, reader, 2, no_room)
    cut, store = a_stream(), Store()
    store.may_store.set()
    cut.feed_data(HEAD + block(0))
    cut.feed_eof()
    with pytest.raises(ApiError, match="no end"):
        await read_blocks(cut, TransferReader(FORM, BYTES, DIGESTS, 0), 2, store)
    assert store.stored == [0]


class Worker:
    """Calls between steps: none is made until the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Future[bool]] = []

    def call(self, function: object) -> Any:
        result: Future[bool] = Future()
        self.waiting.append(result)
        return result


async def test_one_copy_is_made_between_two_steps_whatever_the_number_of_transfers() -> None:
    worker: Any = Worker()
    form: Any = SimpleNamespace(block_bytes=BYTES, dtype=torch.uint8, shape=(BYTES,))
    receiver = KvReceiver(form, worker, None, 4, staging=StagingMemory(64))
    prompts = [WaitingPrompt(100, DIGESTS, DIGESTS) for _ in range(3)]
    stores = [
        asyncio.create_task(
            receiver._store(str(number), prompt, [ReceivedBlock(0, memoryview(bytearray(BYTES)))])
        )
        for number, prompt in enumerate(prompts)
    ]
    for done in range(3):
        await turns()
        assert len(worker.waiting) == done + 1
        worker.waiting[done].set_result(True)
    await asyncio.gather(*stores)
