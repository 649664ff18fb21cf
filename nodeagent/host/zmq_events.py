"""Reads what a ZeroMQ publisher sends to a Unix socket (ZMTP 3.0, RFC 23, without security).

A small part of the protocol, enough to subscribe to an engine on this machine: one publisher, all
topics, whole messages. The engine is not trusted: sizes are bounded.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
_NO_SECURITY: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = _SIGNATURE + bytes([3, 0]) + _NO_SECURITY + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_READY: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
_SUBSCRIBE_TO_ALL: Final = b"\x01"
FRAMES_MAX: Final = 16


class WrongFrames(Exception):
    """The peer does not speak the protocol, or sends more than is read."""


class Subscription:
    """The messages of one publisher, from the subscription on."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_max: int
    ) -> None:
        self._reader, self._writer = reader, writer
        self._bytes_max = bytes_max

    async def open(self) -> None:
        """Exchange greetings, and subscribe. Raises WrongFrames, OSError or EOFError."""
        self._writer.write(_GREETING)
        greeting = await self._reader.readexactly(len(_GREETING))
        is_open = greeting[12:32] == _NO_SECURITY
        if greeting[:1] != b"\xff" or greeting[10] < 3 or not is_open:
            raise WrongFrames("the greeting is not of ZMTP 3")
        self._write(_COMMAND, _READY)
        flags, content = await self._read_frame(self._bytes_max)
        if not flags & _COMMAND or not content.startswith(b"\x05READY"):
            raise WrongFrames("the publisher is not ready")
        self._write(0, _SUBSCRIBE_TO_ALL)
        await self._writer.drain()

    async def receive(self) -> list[bytes]:
        """Return the next message's frames. Raises WrongFrames, OSError or EOFError."""
        frames: list[bytes] = []
        left = self._bytes_max
        while True:
            flags, content = await self._read_frame(left)
            if flags & _COMMAND:
                # Heartbeats, which publishers send only if they are configured to.
                continue
            frames.append(content)
            left -= len(content)
            if not flags & _MORE:
                return frames
            if len(frames) == FRAMES_MAX:
                raise WrongFrames("a message has too many frames")

    def _write(self, flags: int, content: bytes) -> None:
        self._writer.write(bytes([flags, len(content)]) + content)

    async def _read_frame(self, bytes_max: int) -> tuple[int, bytes]:
        (flags,) = await self._reader.readexactly(1)
        size = int.from_bytes(await self._reader.readexactly(8 if flags & _LONG else 1), "big")
        if flags > _MORE | _LONG | _COMMAND or size > bytes_max:
            raise WrongFrames(f"a frame has {size} bytes and the flags {flags}")
        return flags, await self._reader.readexactly(size)


@asynccontextmanager
async def subscribed(socket: Path, bytes_max: int) -> AsyncIterator[Subscription]:
    """Subscribe to all messages of the publisher at `socket`, of up to `bytes_max`.

    Raises WrongFrames, OSError or EOFError.
    """
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        subscription = Subscription(reader, writer, bytes_max)
        await subscription.open()
        yield subscription
    finally:
        writer.close()
