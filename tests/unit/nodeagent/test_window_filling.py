"""Blocks of another node are put into a window, and a wrong stream reaches the engine as it is."""

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator

import pytest

from isochrone.service.windows.received_window import WindowLost
from isochrone.service.windows.shared_window import OwnedWindow
from isochrone.service.windows.window_pool import SenderWindow
from isochrone.wire.kv.transfer_frames import (
    TransferEnd,
    TransferHead,
    WrongTransfer,
    encode_block,
    encode_end,
    encode_head,
)
from nodeagent.disaggregation.window_filling import WindowFiller
from nodeagent.engine.kvcache.transfer_reader import TransferReader

BLOCK_BYTES = 1000
DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(4)]
CONTENTS = [bytes([number]) * BLOCK_BYTES for number in range(4)]
HEAD = encode_head(
    TransferHead(fingerprint=b"f" * 16, block_bytes=BLOCK_BYTES, first_block=0, blocks=4)
)
END = encode_end(TransferEnd(cached_tokens=7))
BLOCKS = [
    b"".join(encode_block(digest, content))
    for digest, content in zip(DIGESTS, CONTENTS, strict=True)
]
SMALL_BLOCK = b"".join(encode_block(DIGESTS[1], b"short"))
PIECES = (1, 5, 61, 700, 1 << 20)


async def pieces_of(stream: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(stream), size):
        yield stream[start : start + size]


async def received(stream: bytes, size: int = 1 << 20) -> list[bytes]:
    """Return the blocks that an engine receives, which reads the head, the window and the rest."""
    owned = OwnedWindow(1 << 24)
    window = SenderWindow(owned, BLOCK_BYTES)
    link, engine = socket.socketpair()
    try:
        window.connect(link)
        engine.recv(1)
        passed_on = [piece async for piece in WindowFiller(window).fill(pieces_of(stream, size))]
        reader = TransferReader(
            b"f" * 16, BLOCK_BYTES, DIGESTS, 0, window=memoryview(owned.memory[:])
        )
        begun, *rest = passed_on or [b""]
        reader.feed(begun)
        engine.setblocking(False)
        blocks = reader.feed(_frames_at(engine)) if reader.lacks_blocks else []
        reader.feed(b"".join(rest))
    finally:
        link.close()
        engine.close()
        owned.close()
    assert reader.end is None or reader.end.cached_tokens == 7
    return [bytes(block.content) for block in blocks] if reader.end is not None else []


def _frames_at(engine: socket.socket) -> bytes:
    """Return what was sent to the engine about its window."""
    try:
        return engine.recv(1 << 16)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize("size", PIECES)
async def test_blocks_lie_in_the_window_however_the_stream_is_cut(size: int) -> None:
    assert await received(b"".join([HEAD, *BLOCKS, END]), size) == CONTENTS


@pytest.mark.parametrize("size", PIECES)
async def test_a_stream_that_ends_early_has_no_end(size: int) -> None:
    whole = b"".join([HEAD, *BLOCKS, END])
    for length in (0, 3, len(HEAD), len(HEAD) + 20, len(HEAD) + 60, len(whole) - 1):
        assert await received(whole[:length], size) == []


@pytest.mark.parametrize("size", PIECES)
@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"\x00\x00\x00\x00\x00"], "no head"),
        ([BLOCKS[0], HEAD], "no head"),
        ([END], "no head"),
        ([b"\x01\xff\xff\xff\x7f"], "a frame of kind 1 with 2147483647 bytes"),
        ([b"\x01\x02\x00\x00\x00??"], "a malformed frame"),
        ([HEAD, HEAD], "a second head"),
        ([HEAD, BLOCKS[0], b"\x09\x01\x00\x00\x00?"], "a frame of kind 9 with 1 bytes"),
        ([HEAD, BLOCKS[0], SMALL_BLOCK], "a block of 53 bytes"),
        ([HEAD, BLOCKS[0], BLOCKS[2]], "block 1 of another prompt"),
        ([HEAD, BLOCKS[0][:-1] + b"?"], "block 0 with a wrong checksum"),
        ([HEAD, BLOCKS[0], END], "an end with 3 blocks missing"),
        ([HEAD, *BLOCKS, BLOCKS[0]], "more blocks than the prompt has"),
        ([HEAD, *BLOCKS, END, END], "bytes after the end"),
    ],
)
async def test_the_engine_refuses_a_wrong_stream(frames: list[bytes], why: str, size: int) -> None:
    with pytest.raises(WrongTransfer, match=why):
        await received(b"".join([*frames, bytes(4 * BLOCK_BYTES)]), size)


@pytest.mark.parametrize(
    ("stream", "ending"), [([HEAD, *BLOCKS, END], [END]), ([HEAD, BLOCKS[0], SMALL_BLOCK], [])]
)
async def test_the_stream_ends_once_the_engine_was_told_of_all_blocks(
    stream: list[bytes], ending: list[bytes]
) -> None:
    """An engine that takes its window late found the end, no blocks, and refused the transfer."""
    owned = OwnedWindow(1 << 24)
    window = SenderWindow(owned, BLOCK_BYTES)
    link, engine = socket.socketpair()
    filling = WindowFiller(window).fill(pieces_of(b"".join(stream), 1 << 20))

    async def rest_of_stream() -> list[bytes]:
        return [piece async for piece in filling]

    try:
        assert await anext(filling) == HEAD
        rest = asyncio.create_task(rest_of_stream())
        await asyncio.wait({rest}, timeout=0)
        assert not rest.done()
        window.connect(link)
        assert await rest == ending
        engine.recv(1)
        assert _frames_at(engine)
    finally:
        link.close()
        engine.close()
        owned.close()


async def test_nothing_is_written_once_the_window_is_not_this_transfers() -> None:
    owned = OwnedWindow(1 << 24)
    window = SenderWindow(owned, BLOCK_BYTES)

    async def pieces() -> AsyncIterator[bytes]:
        yield HEAD + BLOCKS[1][:100]
        window.close()
        yield BLOCKS[1][100:]

    with pytest.raises(WindowLost):
        async for _ in WindowFiller(window).fill(pieces()):
            pass
    assert owned.memory[:BLOCK_BYTES].count(b"\x01") == 100 - 53
    owned.close()
