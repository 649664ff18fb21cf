"""A receiver that stops reading ends the stream of a transfer, also at its last bytes."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.transfer_frames import TransferEnd
from nodeagent.engine.server.kv.kv_windows import PART_BYTES, KvWindows
from nodeagent.engine.server.kv.kv_writing import BlockWriter

BLOCK_BYTES = PART_BYTES // 4
FORM: Any = SimpleNamespace(block_bytes=BLOCK_BYTES, dtype=torch.uint8, shape=(BLOCK_BYTES,))


class DeafResponse:
    """A response whose receiver reads all that is written but the end."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    async def write(self, piece: bytes) -> None:
        self.written.append(piece)

    async def write_eof(self) -> None:
        await asyncio.Event().wait()


def a_writer(blocks_max: int = 0) -> BlockWriter:
    windows = KvWindows(FORM, Path("unused"), StagingMemory(0))
    request: Any = None
    return BlockWriter(request, windows, None, 0.0, blocks_max)


async def test_a_receiver_that_does_not_read_the_end_is_given_up() -> None:
    writer = a_writer()
    response: Any = DeafResponse()
    writer.response = response
    with pytest.raises(ConnectionResetError, match="does not read"):
        await writer.end(TransferEnd(cached_tokens=0))
    assert len(response.written) == 1


async def test_parts_begin_small_and_grow_up_to_the_most() -> None:
    writer = a_writer(blocks_max=12)
    rooms = [await writer.room(count) for count in (100, 100, 100, 5)]
    assert [room.blocks for room in rooms] == [4, 8, 12, 5]
    assert all(room.out.shape == (room.blocks, BLOCK_BYTES) for room in rooms)
    same = a_writer()
    assert [(await same.room(100)).blocks for _ in range(3)] == [4, 4, 4]
