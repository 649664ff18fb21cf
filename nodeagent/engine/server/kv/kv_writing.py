"""Writes the stream of a transfer: blocks in the stream itself, or in a window beside it."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import torch
from aiohttp import web
from torch import Tensor

from isochrone.wire.kv import kv_transfer
from nodeagent.engine.kvcache.slot_ring import SlotRun
from nodeagent.engine.kvcache.transfer_frames import (
    TransferEnd,
    TransferHead,
    encode_block,
    encode_block_in_window,
    encode_end,
    encode_head,
    transfer_bytes,
)
from nodeagent.engine.server.kv.kv_windows import KvWindows, SenderWindow


class BlockRoom(NamedTuple):
    """Where the next `blocks` blocks are read to: slots of a window, or other host memory."""

    blocks: int
    run: SlotRun | None
    out: Tensor


class ReadPart(NamedTuple):
    """Blocks that were copied off the device, as they go into the stream."""

    blocks: int
    frames: list[bytes | memoryview]


class BlockWriter:
    """The answer to one request for blocks."""

    def __init__(
        self,
        request: web.Request,
        windows: KvWindows,
        lease: SenderWindow | None,
        stall_s: float,
        blocks_max: int = 0,
    ) -> None:
        """Give up if the receiver takes nothing for `stall_s`.

        A part of PART_BYTES is read at once; without a window each part may be twice as large as
        the one before, up to `blocks_max` blocks.
        """
        self._request = request
        self._windows = windows
        self._lease = lease
        self._stall_s = stall_s
        self._part_blocks = windows.part_blocks
        self._blocks_max = max(blocks_max, windows.part_blocks)
        self.response = web.StreamResponse(headers={"content-type": kv_transfer.CONTENT_TYPE})

    async def room(self, count_max: int) -> BlockRoom:
        """Wait for room for some of the next `count_max` blocks."""
        count = min(count_max, self._part_blocks)
        if self._lease is None:
            # A small first part: the receiver has it while the second one is read.
            self._part_blocks = min(2 * self._part_blocks, self._blocks_max)
            return BlockRoom(count, None, self._windows.staged(count))
        try:
            async with asyncio.timeout(self._stall_s):
                run = await self._lease.take(count)
        except TimeoutError as error:
            raise ConnectionResetError("the receiver does not take blocks") from error
        return BlockRoom(run.slots, run, self._lease.slots(run))

    def give_back(self, room: BlockRoom, blocks: int) -> None:
        """Give back all of `room` but that of the first `blocks`.

        Call it before room for further blocks is taken.
        """
        if self._lease is not None:
            self._lease.give_back(room.blocks - blocks)

    async def begin(self, head: TransferHead) -> None:
        """Write the head."""
        in_window = self._lease is not None
        self.response.content_length = transfer_bytes(head, in_window=in_window)
        await self.response.prepare(self._request)
        await self._write([encode_head(head)])

    async def write(self, part: ReadPart) -> None:
        """Write blocks."""
        await self._write(part.frames)

    async def end(self, end: TransferEnd) -> None:
        """End the stream, once the receiver has the window."""
        if self._lease is not None:
            try:
                await self._lease.wait_connected()
            except TimeoutError as error:
                raise ConnectionResetError("the receiver has not taken the window") from error
        await self._write([encode_end(end)], is_last=True)

    def encode(self, digests: Sequence[bytes], contents: Tensor, room: BlockRoom) -> ReadPart:
        """Return the frames of blocks that were read for `room`. For any thread.

        `digests` begins with theirs.
        """
        digests = digests[: len(contents)]
        if self._lease is None or room.run is None:
            frames: list[bytes | memoryview] = []
            for digest, content in zip(digests, contents, strict=True):
                frames += encode_block(digest, content_bytes(content))
            return ReadPart(len(contents), frames)
        if contents.data_ptr() != room.out.data_ptr():
            room.out[: len(contents)].copy_(contents)
        size, first = self._lease.block_bytes, room.run.first
        references = [
            encode_block_in_window(digest, content_bytes(slot), (first + index) * size)
            for index, (digest, slot) in enumerate(
                zip(digests, room.out[: len(contents)], strict=True)
            )
        ]
        return ReadPart(len(contents), [b"".join(references)])

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
