"""Blocks are read ahead by a bounded number of parts, and a receiver that reads no more ends it."""

import asyncio
import gc
import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isochrone.service.windows.window_pool import PART_BYTES
from isochrone.wire.kv import kv_transfer
from isochrone.wire.kv.transfer_frames import TransferEnd
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.server.kv.kv_windows import KvWindows
from nodeagent.engine.server.kv.kv_writing import PARTS_AHEAD, BlockWriter
from tests.unit.engine.test_kv_receiving import turns

BLOCK_BYTES = PART_BYTES // 4
DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(10)]
FORM: Any = SimpleNamespace(block_bytes=BLOCK_BYTES, dtype=torch.uint8, shape=(BLOCK_BYTES,))


class Response:
    """A response: what its receiver reads, until it reads no more."""

    def __init__(self, reads: int = 1000) -> None:
        self.written: list[bytes] = []
        self._reads = reads

    async def write(self, piece: bytes) -> None:
        if len(self.written) == self._reads:
            await asyncio.Event().wait()
        self.written.append(bytes(piece))

    async def write_eof(self) -> None:
        await asyncio.Event().wait()


def a_writer(response: Any, stall_s: float = 0.0, windows: KvWindows | None = None) -> BlockWriter:
    windows = windows or KvWindows(FORM, Path("unused"), StagingMemory(0))
    request: Any = SimpleNamespace(headers={})
    writer = BlockWriter(request, windows, None, stall_s)
    writer.response = response
    return writer


def read(writer: BlockWriter, blocks: int) -> list[int]:
    """Read blocks on a transfer's thread; return how many each part has."""
    parts = list[int]()
    while sum(parts) < blocks:
        destination = writer.next_destination(blocks - sum(parts))
        writer.put(DIGESTS[sum(parts) :], destination.out.fill_(sum(parts)), destination)
        parts.append(destination.blocks)
    return parts


async def test_a_sender_without_a_free_window_says_that_blocks_are_in_the_stream() -> None:
    windows = KvWindows(FORM, Path("unused"), StagingMemory(0))
    for sent, said in (({}, None), ({kv_transfer.WINDOW: "0" * 32}, kv_transfer.NO_WINDOW)):
        async with windows.lease(sent.get(kv_transfer.WINDOW, "")) as lease:
            request: Any = SimpleNamespace(headers=sent)
            writer = BlockWriter(request, windows, lease, 0.0)
        assert lease is None
        assert writer.response.headers.get(kv_transfer.WINDOW) == said
    assert windows.pool.counts()["kv_windows_lacking_total"] == 1


async def test_a_receiver_that_does_not_read_the_end_is_given_up() -> None:
    response = Response()
    with pytest.raises(ConnectionResetError, match="does not read"):
        await a_writer(response).end(TransferEnd(cached_tokens=0))
    assert len(response.written) == 1


async def test_blocks_are_read_in_parts_and_written_in_order() -> None:
    response, parts = Response(), list[int]()
    writer = a_writer(response, 60.0)
    await writer.write_all(lambda: parts.extend(read(writer, 10)))
    assert parts == [4, 4, 2]
    assert [content[0] for content in response.written[1::2]] == [0] * 4 + [4] * 4 + [8] * 2
    assert [frame[5:37] for frame in response.written[::2]] == DIGESTS[:10]


async def test_a_reader_does_not_run_ahead_and_ends_with_the_transfer() -> None:
    begun, is_ahead = list[int](), threading.Event()
    writer = a_writer(Response(reads=1), 60.0)

    def read_on() -> None:
        while True:
            destination = writer.next_destination(4)
            begun.append(destination.blocks)
            writer.put(DIGESTS, destination.out, destination)
            if len(begun) == PARTS_AHEAD:
                is_ahead.set()

    writing = asyncio.create_task(writer.write_all(read_on))
    await asyncio.to_thread(is_ahead.wait)
    await turns()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert len(begun) == PARTS_AHEAD


async def test_an_error_of_the_reader_ends_the_stream() -> None:
    def fail() -> None:
        raise ConnectionResetError("evicted")

    stopped = list[bool]()
    with pytest.raises(ConnectionResetError, match="evicted"):
        await a_writer(Response(), 60.0).write_all(fail, lambda: stopped.append(True))
    assert stopped == [True]


async def test_an_error_of_a_reader_whose_receiver_has_left_is_not_logged() -> None:
    """The request was cancelled while its thread ended, and each one logged an error."""
    logged, is_closing, may_end = list[Any](), threading.Event(), threading.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    def fail() -> None:
        may_end.wait()
        raise ConnectionResetError("the transfer has ended")

    writing = asyncio.create_task(a_writer(Response(), 60.0).write_all(fail, is_closing.set))
    await turns()
    writing.cancel()
    await asyncio.to_thread(is_closing.wait)
    writing.cancel()
    await turns()
    may_end.set()
    await asyncio.wait({writing})
    assert writing.cancelled()
    del writing
    gc.collect()
    await turns()
    assert not logged
