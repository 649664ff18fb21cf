"""Blocks are stored while later ones arrive, in order, and nothing goes on after an error."""

import asyncio
import gc
import hashlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
import torch

from isochrone.wire.errors import ApiError
from isochrone.wire.kv.transfer_frames import (
    TransferEnd,
    TransferHead,
    WrongTransfer,
    encode_block,
    encode_end,
    encode_head,
)
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.transfer_reader import ReceivedBlock, TransferReader
from nodeagent.engine.server.kv import kv_reading
from nodeagent.engine.server.kv.kv_reading import read_blocks
from nodeagent.engine.server.kv.kv_receiving import KvReceiver
from nodeagent.engine.server.kv.waiting_prompt import WaitingPrompt

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
        self.may_store = threading.Event()
        self._changed = threading.Condition()

    def __call__(self, blocks: Sequence[ReceivedBlock]) -> None:
        with self._changed:
            self.parts.append([one.number for one in blocks])
            self._changed.notify()
        self.may_store.wait()
        self.stored += [one.number for one in blocks]

    async def begun(self, parts: int) -> list[list[int]]:
        """Wait until so many parts are being stored, or were; return all."""

        def wait() -> list[list[int]]:
            with self._changed:
                self._changed.wait_for(lambda: len(self.parts) >= parts)
                return list(self.parts)

        return await asyncio.to_thread(wait)


async def turns(count: int = 20) -> None:
    """Let every other task run as far as it can."""
    for _ in range(count):
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()


async def test_later_blocks_are_received_while_earlier_ones_are_stored() -> None:
    content, store = a_stream(), Store()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0)
    reading = asyncio.create_task(read_blocks(content, reader, 2, store))
    content.feed_data(HEAD + block(0) + block(1))
    assert await store.begun(1) == [[0, 1]]
    content.feed_data(b"".join(block(number) for number in range(2, 6)))
    await turns()
    assert content.total_bytes == len(HEAD) + 6 * len(block(0))
    assert not content._buffer, "it receives on"
    assert store.parts == [[0, 1]], "one part at a time"
    content.feed_data(END)
    content.feed_eof()
    store.may_store.set()
    assert (await reading).cached_tokens == 0
    assert (store.parts, store.stored) == ([[0, 1], [2, 3], [4, 5]], list(range(6)))


async def test_what_has_arrived_is_stored_once_the_part_before_it_is() -> None:
    content, store = a_stream(), Store()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0, part_blocks=4)
    reading = asyncio.create_task(read_blocks(content, reader, 4, store, 1))
    content.feed_data(HEAD + block(0))
    assert await store.begun(1) == [[0]], "nothing is being stored, so it waits for no more"
    for number in range(1, 5):
        content.feed_data(block(number))
        await turns()
    store.may_store.set()
    assert (await store.begun(3))[1:] == [[1, 2, 3], [4]], "a part ends with the reader's memory"
    content.feed_data(block(5) + END)
    content.feed_eof()
    assert (await reading).cached_tokens == 0
    assert store.stored == list(range(6))


async def test_no_more_is_received_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reading, "INBOX_BYTES", 2 * len(block(0)))
    content, store = a_stream(), Store()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0)
    reading = asyncio.create_task(read_blocks(content, reader, 1, store))
    content.feed_data(HEAD + block(0))
    await store.begun(1)
    for number in range(1, 6):
        content.feed_data(block(number))
        await turns()
    # Two wait for the thread, the event loop has another one, and the rest stays in the stream.
    assert sum(map(len, content._buffer)) == 2 * len(block(0))
    content.feed_data(END)
    content.feed_eof()
    store.may_store.set()
    assert (await reading).cached_tokens == 0
    assert store.stored == list(range(6))


async def test_nothing_is_stored_any_more_after_a_wrong_block() -> None:
    content, store = a_stream(), Store()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0)
    reading = asyncio.create_task(read_blocks(content, reader, 2, store))
    content.feed_data(HEAD + block(0) + block(1))
    await store.begun(1)
    content.feed_data(block(5))
    await turns()
    assert not reading.done(), "the wrong blocks are forgotten after the last one is stored"
    store.may_store.set()
    with pytest.raises(WrongTransfer):
        await reading
    assert store.stored == [0, 1]


async def test_a_store_that_fails_ends_the_transfer() -> None:
    def no_block_free(blocks: Sequence[ReceivedBlock]) -> None:
        raise ConnectionError("none is free")

    content = a_stream()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0)
    content.feed_data(HEAD + b"".join(block(number) for number in range(4)))
    # The stream has not ended.
    with pytest.raises(ConnectionError):
        await read_blocks(content, reader, 2, no_block_free)
    cut, store = a_stream(), Store()
    store.may_store.set()
    cut.feed_data(HEAD + block(0))
    cut.feed_eof()
    with pytest.raises(ApiError, match="no end"):
        await read_blocks(cut, TransferReader(FORM, BYTES, DIGESTS, 0), 2, store)
    assert store.stored == [0]


async def test_a_broken_stream_keeps_what_came_and_a_cancelled_one_waits_for_its_copy() -> None:
    broken, store = a_stream(), Store()
    store.may_store.set()
    reading = asyncio.create_task(
        read_blocks(broken, TransferReader(FORM, BYTES, DIGESTS, 0), 4, store)
    )
    broken.feed_data(HEAD + block(0))
    await turns()
    broken.set_exception(aiohttp.ClientPayloadError("gone"))
    with pytest.raises(aiohttp.ClientPayloadError):
        await reading
    assert store.stored == [0]
    content, store = a_stream(), Store()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0)
    reading = asyncio.create_task(read_blocks(content, reader, 1, store))
    content.feed_data(HEAD + block(0))
    await store.begun(1)
    reading.cancel()
    await turns()
    assert not reading.done()
    store.may_store.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert store.stored == [0]


async def test_an_error_of_a_store_whose_sender_has_left_is_not_logged() -> None:
    logged, has_begun, may_end = list[Any](), threading.Event(), threading.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    def fail(blocks: Sequence[ReceivedBlock]) -> None:
        has_begun.set()
        may_end.wait()
        raise ConnectionError("none is free")

    content = a_stream()
    reader = TransferReader(FORM, BYTES, DIGESTS, 0)
    reading = asyncio.create_task(read_blocks(content, reader, 1, fail))
    content.feed_data(HEAD + block(0))
    await asyncio.to_thread(has_begun.wait)
    for _ in range(2):
        reading.cancel()
        await turns()
    may_end.set()
    await asyncio.wait({reading})
    assert reading.cancelled()
    del reading
    gc.collect()
    await turns()
    assert not logged


class Worker:
    """Calls between steps: none is made until the test says so."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[Future[bool]] = queue.Queue()

    def call(self, function: object) -> Any:
        result: Future[bool] = Future()
        self.waiting.put(result)
        return result


async def test_one_copy_is_made_between_two_steps_whatever_the_number_of_transfers() -> None:
    """Where only the step thread may copy to the device."""
    worker: Any = Worker()
    form: Any = SimpleNamespace(block_bytes=BYTES, dtype=torch.uint8, shape=(BYTES,))
    transfers: Any = SimpleNamespace(store_incoming=None)
    receiver = KvReceiver(form, worker, transfers, 4, staging=StagingMemory(64))
    prompts = [WaitingPrompt(100, DIGESTS, DIGESTS) for _ in range(3)]
    content = ReceivedBlock(0, memoryview(bytearray(BYTES)))
    stores = [
        asyncio.create_task(asyncio.to_thread(receiver._store, str(number), prompt, [content]))
        for number, prompt in enumerate(prompts)
    ]
    for _ in range(3):
        call = await asyncio.to_thread(worker.waiting.get)
        assert worker.waiting.empty()
        call.set_result(True)
    await asyncio.gather(*stores)
