"""Reads a stream of KV blocks: the event loop receives it, a thread checks and stores the blocks.

Rule 1: one thread takes all blocks of a transfer, and waits there until each part is stored.
Rule 2: what is received and not yet taken is bounded by INBOX_BYTES and one piece.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import aiohttp
import torch

from isochrone.service.threads import start_thread, wait_to_completion
from isochrone.service.windows.received_window import ReceivedWindow, WindowLost
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.kv.transfer_frames import TransferEnd, is_whole_frame, split_frame
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.kvcache.transfer_reader import ReceivedBlock, TransferReader

STORE_BYTES_MAX: Final = 4 * 1024 * 1024
"""How much is copied to the device at once. Where the step thread copies, it decodes nothing
meanwhile."""

SHARED_BYTES_MAX: Final = 16 * 1024 * 1024
"""The same for blocks that the PoP shares. Each part may wait for a step on both sides, and
computing them instead would take a hundred times as long as copying them."""

INBOX_BYTES: Final = 4 * 1024 * 1024

Store = Callable[[Sequence[ReceivedBlock]], None]
"""Stores blocks, and returns once they are. Called on the thread of the transfer."""


class _Inbox:
    """The bytes of a stream between the event loop and the thread that takes them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = threading.Condition()
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._has_ended = False
        self._has_capacity = asyncio.Event()

    async def fill(self, content: aiohttp.StreamReader) -> None:
        """Receive the stream."""
        async for piece in content.iter_any():
            while self._bytes >= INBOX_BYTES:
                self._has_capacity.clear()
                if self._bytes >= INBOX_BYTES:
                    await self._has_capacity.wait()
            with self._arrived:
                self._pieces.append(piece)
                self._bytes += len(piece)
                self._arrived.notify()

    def end(self) -> None:
        """Note that no more will come."""
        with self._arrived:
            self._has_ended = True
            self._arrived.notify()

    def take(self) -> list[bytes]:
        """Wait for bytes; return all that have arrived, none at the end. For the thread."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._pieces or self._has_ended)
            pieces, self._pieces = self._pieces, []
            was_full, self._bytes = self._bytes >= INBOX_BYTES, 0
        if was_full:
            self._loop.call_soon_threadsafe(self._has_capacity.set)
        return pieces


async def read_blocks(
    content: aiohttp.StreamReader,
    reader: TransferReader,
    store_blocks_max: int,
    store: Store,
    store_blocks_min: int = 0,
    window: ReceivedWindow | None = None,
) -> TransferEnd:
    """Store the blocks of a stream as they come; return its end.

    A part has `store_blocks_max` blocks; with `store_blocks_min`, what has arrived when the part
    before it is stored, but not less than that. With a `window`, they come there.

    Raises WrongTransfer at the first wrong byte, and ApiError if the stream has no end. Storing has
    stopped when it returns or raises.
    """
    inbox = _Inbox()
    arriving = _pieces_of(inbox, reader, window)
    taking = start_thread(
        "kv-receive", lambda: _take(arriving, reader, store_blocks_max, store, store_blocks_min)
    )

    def end() -> None:
        # A sender ends the stream after the last block: all that will come in a window is there.
        inbox.end()
        if window is not None:
            window.interrupt()

    filling = asyncio.ensure_future(inbox.fill(content))
    for part in (taking, filling):
        # If the sender has left, nothing waits for their errors, which asyncio would log.
        part.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait({taking, filling}, return_when=asyncio.FIRST_COMPLETED)
        if filling.done():
            end()
            await wait_to_completion(asyncio.wait({taking}))
    finally:
        filling.cancel()
        end()
        await wait_to_completion(asyncio.wait({taking, filling}))
    await taking
    await filling
    if reader.end is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, "cannot use these KV blocks: no end")
    return reader.end


def _pieces_of(
    inbox: _Inbox, reader: TransferReader, window: ReceivedWindow | None
) -> Iterator[list[bytes]]:
    """Yield what arrives: between the head and the end of a stream, the frames of its window."""
    if window is not None:
        # The end may be there already, too.
        begun = b""
        while not is_whole_frame(begun) and (pieces := inbox.take()):
            begun += b"".join(pieces)
        head, rest = split_frame(begun)
        yield [head]
        while reader.lacks_blocks:
            frames = window.receive()
            if not frames:
                raise WindowLost("cannot take KV from another process: blocks are missing")
            yield [frames]
        yield [rest]
    while pieces := inbox.take():
        yield pieces


def _take(
    arriving: Iterator[list[bytes]],
    reader: TransferReader,
    blocks_max: int,
    store: Store,
    blocks_min: int,
) -> None:
    """Check and store the blocks of a stream until it ends."""
    arrived: list[ReceivedBlock] = []
    part_left = blocks_max
    for pieces in arriving:
        for piece in pieces:
            arrived += reader.feed(piece)
            # A part ends where the reader's memory does, so that its blocks lie side by side.
            while len(arrived) >= part_left:
                store(arrived[:part_left])
                del arrived[:part_left]
                part_left = blocks_max
        if 0 < blocks_min <= len(arrived):
            store(arrived)
            part_left -= len(arrived)
            arrived = []
    while arrived:
        store(arrived[:part_left])
        del arrived[:part_left]
        part_left = blocks_max


def contents_of(blocks: Sequence[ReceivedBlock], form: KvBlockForm) -> torch.Tensor:
    """Return the contents of blocks [blocks, ...]; not copied if they lie in one part."""
    first = blocks[0].content
    part = first.obj
    flat = torch.frombuffer(part, dtype=torch.uint8)
    offset = torch.frombuffer(first, dtype=torch.uint8).data_ptr() - flat.data_ptr()
    size = form.block_bytes * len(blocks)
    last = torch.frombuffer(blocks[-1].content, dtype=torch.uint8).data_ptr() - flat.data_ptr()
    is_whole = all(block.content.obj is part for block in blocks)
    if not is_whole or last + form.block_bytes != offset + size:
        part, offset = bytearray().join(block.content for block in blocks), 0
        flat = torch.frombuffer(part, dtype=torch.uint8)
    return flat[offset : offset + size].view(form.dtype).view(-1, *form.shape)
