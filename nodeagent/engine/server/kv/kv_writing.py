"""Writes the stream of a transfer: with its blocks, or with a window beside it that has them.

Rule 1: one thread reads all blocks of a transfer, and waits there for memory to read to: for slots
of the window, or until an earlier part is written. The event loop only writes what that thread has
read.
Rule 2: blocks that are read and not yet written are bounded by PARTS_AHEAD parts of PART_BYTES for
each transfer, or by its window.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from aiohttp import web
from torch import Tensor

from isochrone.service.threads import start_thread, wait_to_completion
from isochrone.service.windows.slot_ring import SlotRun
from isochrone.service.windows.window_pool import SenderWindow
from isochrone.wire.kv import kv_transfer
from isochrone.wire.kv.transfer_frames import (
    TransferEnd,
    TransferHead,
    encode_block,
    encode_block_in_window,
    encode_end,
    encode_head,
    transfer_bytes,
)
from nodeagent.engine.server.kv.kv_windows import KvWindows

PARTS_AHEAD: Final = 2
"""One part is written while the next one is read."""


class BlockDestination(NamedTuple):
    """Where the next `blocks` blocks are read to: slots of a window, or other host memory."""

    blocks: int
    run: SlotRun | None
    out: Tensor


class BlockWriter:
    """The answer to one request for blocks."""

    def __init__(
        self,
        request: web.Request,
        windows: KvWindows,
        lease: SenderWindow | None,
        stall_s: float,
    ) -> None:
        """Give up if the receiver takes nothing for `stall_s`."""
        self._request = request
        self._windows = windows
        self._lease = lease
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[list[bytes | memoryview] | None] = asyncio.Queue()
        self._written = threading.Condition()
        self._ahead = 0
        self._is_closed = False
        self.response = web.StreamResponse(headers={"content-type": kv_transfer.CONTENT_TYPE})
        if lease is None and kv_transfer.WINDOW in request.headers:
            self.response.headers[kv_transfer.WINDOW] = kv_transfer.NO_WINDOW

    async def begin(self, head: TransferHead) -> None:
        """Write the head."""
        in_window = self._lease is not None
        self.response.content_length = transfer_bytes(head, in_window=in_window)
        await self.response.prepare(self._request)
        await self._write([encode_head(head)])

    async def write_all(
        self, read: Callable[[], None], stop: Callable[[], None] = lambda: None
    ) -> None:
        """Have `read` run on a thread of its own, and write what it puts.

        Raises what `read` raises. `read` has ended when this returns or raises: `stop` ends its
        waits other than those for memory.
        """
        reading = start_thread("kv-send", read)
        reading.add_done_callback(lambda _: self._parts.put_nowait(None))
        # If the receiver has left, nothing waits for its error, which asyncio would log.
        reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            while (frames := await self._parts.get()) is not None:
                await self._write(frames)
                with self._written:
                    self._ahead -= 1
                    self._written.notify()
            await reading
        finally:
            self._close()
            stop()
            await wait_to_completion(asyncio.wait({reading}))

    async def end(self, end: TransferEnd) -> None:
        """End the stream, once the receiver has the window."""
        if self._lease is not None:
            try:
                await self._lease.wait_connected()
            except TimeoutError as error:
                raise ConnectionResetError("the receiver has not taken the window") from error
        await self._write([encode_end(end)], is_last=True)

    def next_destination(self, count_max: int) -> BlockDestination:
        """Wait for memory for some of the next `count_max` blocks. For the thread that reads.

        Raises ConnectionResetError if the transfer has ended, or the receiver takes no blocks.
        """
        count = min(count_max, self._windows.part_blocks)
        if self._lease is not None:
            try:
                run = self._lease.take(count, self._stall_s)
            except TimeoutError as error:
                raise ConnectionResetError("the receiver does not take blocks") from error
            return BlockDestination(run.slots, run, self._windows.slots(self._lease, run))
        with self._written:
            self._written.wait_for(lambda: self._ahead < PARTS_AHEAD or self._is_closed)
            if self._is_closed:
                raise ConnectionResetError("the transfer has ended")
        return BlockDestination(count, None, self._windows.staged(count))

    def put(
        self, digests: Sequence[bytes], contents: Tensor, destination: BlockDestination
    ) -> None:
        """Have blocks written that were read to `destination`. For the thread that reads.

        `digests` begins with theirs. There may be fewer of them than fit there.
        """
        digests = digests[: len(contents)]
        if self._lease is not None and destination.run is not None:
            self._put_in_window(self._lease, destination.run, digests, contents, destination.out)
            return
        frames: list[bytes | memoryview] = []
        for digest, content in zip(digests, contents, strict=True):
            frames += encode_block(digest, content_bytes(content))
        with self._written:
            self._ahead += 1
        self._loop.call_soon_threadsafe(self._parts.put_nowait, frames)

    def _put_in_window(
        self,
        lease: SenderWindow,
        run: SlotRun,
        digests: Sequence[bytes],
        contents: Tensor,
        out: Tensor,
    ) -> None:
        lease.give_back(run.slots - len(contents))
        filled = out[: len(contents)]
        if contents.data_ptr() != out.data_ptr():
            filled.copy_(contents)
        size = lease.block_bytes
        places = range(run.first * size, (run.first + len(contents)) * size, size)
        references = [
            encode_block_in_window(digest, content_bytes(slot), place)
            for digest, slot, place in zip(digests, filled, places, strict=True)
        ]
        lease.send(b"".join(references))

    def _close(self) -> None:
        """End the wait for memory."""
        if self._lease is not None:
            self._lease.close()
        with self._written:
            self._is_closed = True
            self._written.notify()

    async def _write(self, pieces: list[bytes | memoryview], *, is_last: bool = False) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                for piece in pieces:
                    await self.response.write(piece)
                if is_last:
                    await self.response.write_eof()
        except TimeoutError as error:
            raise ConnectionResetError("the receiver does not read") from error


def content_bytes(content: Tensor) -> memoryview:
    """Return the bytes of one block."""
    flat = content.contiguous().view(torch.uint8).numpy().reshape(-1)
    return memoryview(flat.data)
