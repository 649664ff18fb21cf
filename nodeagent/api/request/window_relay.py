"""Relays blocks from an engine's window to another node, written from the memory that both map.

The engine's answer has only the head and the end. The other node gets the same stream as without a
window, with digests and checksums as the engine made them.

Rule 1: a slot is released once the connection's buffer holds nothing of it any more.
Rule 2: if the engine breaks off, the connection is aborted: it may hold memory of the window while
the other node reads nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final, NamedTuple, cast

import aiohttp
from aiohttp import web

from isochrone.service.windows.received_window import (
    WINDOW_BYTES_MAX,
    ReceivedWindow,
    WindowLost,
)
from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.kv.transfer_frames import (
    END,
    FRAME_HEAD_BYTES,
    PLACED_BLOCK_BYTES,
    SMALL_FRAME_BYTES_MAX,
    WrongTransfer,
    decode_head,
    payload_bytes,
    take_from_window,
    transfer_bytes,
)
from nodeagent.api.request.answer_relay import response_head
from nodeagent.disaggregation.kv_windows import WindowLease, WindowLeases
from nodeagent.host.engines.open_session import read_answer

_LEASE: Final = web.RequestKey("window_lease", WindowLease)


class RelayedAnswer(NamedTuple):
    """The head of an answer, and its body."""

    response: web.StreamResponse
    chunks: AsyncIterator[bytes]


def window_headers(
    request: web.Request, windows: WindowLeases, replica: ReplicaId
) -> dict[str, str]:
    """Return the header with the lease for an engine, if the request is for blocks."""
    if kv_transfer.LEG not in request.headers and request.path != kv_sharing.BLOCKS_PATH:
        return {}
    lease = request.headers.get(kv_transfer.WINDOW, "")
    if windows.is_issued(lease, replica):
        return {kv_transfer.WINDOW: lease}
    own = request[_LEASE] = windows.agent_lease(replica)
    return own.to_sender


async def relayed_answer(
    request: web.Request,
    answer: aiohttp.ClientResponse,
    names: Sequence[str],
) -> RelayedAnswer:
    """Return an engine's answer as it goes on, with the named headers.

    Raises aiohttp.ClientError if the engine breaks off before its first block.
    """
    response = response_head(answer, names)
    lease = request.get(_LEASE)
    if lease is None or not lease.name:
        return RelayedAnswer(response, answer.content.iter_any())
    has_window = response.headers.pop(kv_transfer.WINDOW, "") != kv_transfer.NO_WINDOW
    if not has_window or answer.status != 200 or answer.content_type != kv_transfer.CONTENT_TYPE:
        return RelayedAnswer(response, answer.content.iter_any())
    try:
        frame = await head_frame(answer.content)
        response.content_length = transfer_bytes(decode_head(frame))
    except (asyncio.IncompleteReadError, WrongTransfer) as error:
        raise aiohttp.ClientPayloadError(f"the engine sent no head: {error}") from error
    return RelayedAnswer(response, _with_blocks(request, answer, lease, frame))


async def head_frame(content: aiohttp.StreamReader) -> bytes:
    """Return the first frame of a stream. Raises WrongTransfer if it is none that can go on."""
    begun = await content.readexactly(FRAME_HEAD_BYTES)
    size = payload_bytes(begun)
    if size > SMALL_FRAME_BYTES_MAX:
        raise WrongTransfer(f"a head of {size} bytes")
    frame = begun + await content.readexactly(size)
    head = decode_head(frame)
    is_possible = 0 < head.block_bytes <= WINDOW_BYTES_MAX and head.blocks >= 0
    if not is_possible:
        raise WrongTransfer(f"{head.blocks} blocks of {head.block_bytes} bytes")
    return frame


async def _with_blocks(
    request: web.Request, answer: aiohttp.ClientResponse, lease: WindowLease, frame: bytes
) -> AsyncIterator[bytes]:
    """Yield a stream's first frame, the blocks of its window, and the end of the engine's answer.

    Raises aiohttp.ClientError if not all of them come.
    """
    yield frame
    head = decode_head(frame)
    try:
        window = await lease.take()
    except WindowLost as error:
        lease.record_failure()
        raise aiohttp.ClientPayloadError(str(error)) from error
    ending = asyncio.ensure_future(read_answer(answer))
    ending.add_done_callback(partial(_end_reading, request, window))
    try:
        left, arrived = head.blocks, b""
        while left > 0:
            if len(arrived) < PLACED_BLOCK_BYTES:
                frames = await window.next_frames()
                if not frames:
                    raise aiohttp.ClientPayloadError("blocks are missing in the engine's window")
                arrived += frames
                continue
            block = take_from_window(arrived[:PLACED_BLOCK_BYTES], head.block_bytes)
            arrived = arrived[PLACED_BLOCK_BYTES:]
            yield block.head
            # A connection takes any memory.
            yield cast(bytes, window.memory[block.place : block.place + head.block_bytes])
            await _flush(request)
            window.release(1)
            left -= 1
        yield await ending
    except WindowLost as error:
        raise aiohttp.ClientPayloadError(str(error)) from error
    finally:
        window.close()
        ending.cancel()


def _end_reading(
    request: web.Request, window: ReceivedWindow, ending: "asyncio.Future[bytes]"
) -> None:
    """Wait for no more blocks than have come, now that the engine's answer has ended.

    The answer also ends when the request does; the blocks are then left where they are. An engine
    that gives up ends the answer with the text of an error.
    """
    if ending.cancelled():
        return
    if ending.exception() is None and ending.result()[:1] == bytes((END,)):
        window.interrupt()
        return
    if request.transport is not None:
        request.transport.abort()
    window.abandon()


async def _flush(request: web.Request) -> None:
    """Wait until the connection's buffer is empty: it does not copy what it is given.

    Raises aiohttp.ClientConnectionResetError if the connection ends before.
    """
    transport = request.transport
    if transport is None or not transport.get_write_buffer_size():
        return
    # With this limit, `drain` waits for all but one byte.
    transport.set_write_buffer_limits(1)
    while not transport.is_closing() and transport.get_write_buffer_size():
        await request.writer.drain()
        await asyncio.sleep(0)
    if transport.is_closing():
        raise aiohttp.ClientConnectionResetError("the other node has disconnected")
    transport.set_write_buffer_limits()
