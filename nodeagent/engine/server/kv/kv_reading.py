"""Reads a stream of KV blocks, and has them stored in parts while later ones arrive."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import aiohttp
import torch

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.kvcache.transfer_frames import ReceivedBlock, TransferEnd, TransferReader

STORE_BYTES_MAX: Final = 4 * 1024 * 1024
"""How much is copied to the device at once: the step thread decodes nothing meanwhile."""

SHARED_BYTES_MAX: Final = 16 * 1024 * 1024
"""The same for blocks that the PoP shares. Each part waits for a step on both sides, and computing
them instead would take a hundred times as long as copying them."""


async def read_blocks(
    content: aiohttp.StreamReader,
    reader: TransferReader,
    store_blocks_max: int,
    store: Callable[[Sequence[ReceivedBlock]], Awaitable[None]],
    store_blocks_min: int = 0,
) -> TransferEnd:
    """Store the blocks of a stream as they come, one part while the next arrives; return its end.

    A part has `store_blocks_max` blocks; with `store_blocks_min`, what has arrived when the part
    before it is stored, but not less than that.

    Raises WrongTransfer at the first wrong byte, and ApiError if the stream has no end. Storing has
    stopped when it returns or raises.
    """
    arrived: list[ReceivedBlock] = []
    storing: asyncio.Future[None] | None = None
    room = store_blocks_max
    try:
        async for data in content.iter_any():
            arrived += reader.feed(data)
            # A part ends where the reader's memory does, so that its blocks lie side by side.
            while len(arrived) >= room or 0 < store_blocks_min <= len(arrived):
                if storing is not None:
                    if len(arrived) < room and not storing.done():
                        break
                    await storing
                part = arrived[:room]
                storing = asyncio.ensure_future(store(part))
                del arrived[:room]
                room = room - len(part) or store_blocks_max
        if storing is not None:
            await storing
        while arrived:
            part = arrived[:room]
            await store(part)
            del arrived[:room]
            room = store_blocks_max
    finally:
        if storing is not None:
            await asyncio.wait({storing})
            if not storing.cancelled():
                storing.exception()
    if reader.end is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, "cannot use these KV blocks: no end")
    return reader.end


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
