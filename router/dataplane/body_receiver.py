"""Receives the rest of a large body where it stays: the event loop reads the socket into it.

Otherwise the event loop makes an object of each part, which is copied once more when the body is
whole. The compiled request path has the buffer in C (`body_buffer.c`), because no code in Python
can fill a bytes object. Without it the parts are joined.
"""

import asyncio
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

DROPPED_BYTES: Final = 64 * 1024


class BodyBuffer(Protocol):
    """A body of known length, `count` bytes of which have come. Its buffer is for the next ones."""

    count: int

    def add(self, data: bytes) -> None:
        """Append bytes that were read elsewhere."""

    def advance(self, count: int) -> None:
        """Note that `count` bytes were read into the buffer."""

    def take(self) -> bytes:
        """Return the body, which is whole. The buffer must not be used afterwards."""


open_buffer: Callable[[int], BodyBuffer] | None = None
"""Opens the buffer of a body of so many bytes; None without the code in C."""

with suppress(ImportError):
    open_buffer = importlib.import_module("router.dataplane.body_buffer").open_buffer


class BufferingReader(Protocol):
    """Has the buffer of the body that it reads, None at all other times."""

    @property
    def buffer(self) -> BodyBuffer | None:
        """Where the rest of the body is to be read."""


class BodyReceiver(asyncio.BufferedProtocol):
    """The protocol of a connection from when a large body began until it is whole."""

    def __init__(
        self, transport: asyncio.Transport, own: asyncio.Protocol, reader: BufferingReader
    ) -> None:
        """Pass everything on to `own`, the protocol of the rest of the time."""
        self._transport = transport
        self._own = own
        self._reader = reader
        self.connection_lost = own.connection_lost  # type: ignore[method-assign]
        self.eof_received = own.eof_received  # type: ignore[method-assign]
        self.pause_writing = own.pause_writing  # type: ignore[method-assign]
        self.resume_writing = own.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return what is read into next; if the request was refused, this is dropped."""
        buffer: Any = self._reader.buffer
        return memoryview(bytearray(DROPPED_BYTES) if buffer is None else buffer)

    def buffer_updated(self, nbytes: int) -> None:
        """Let the reader count what was read, and end when the body is whole or refused."""
        buffer = self._reader.buffer
        if buffer is not None:
            buffer.advance(nbytes)
            self._own.data_received(b"")
        if self._reader.buffer is None:
            self._transport.set_protocol(self._own)


def read_into_buffer(
    transport: asyncio.Transport | None, own: asyncio.Protocol, reader: BufferingReader
) -> None:
    """Let the event loop read the rest of a body into its buffer, then continue with `own`."""
    if transport is not None:
        transport.set_protocol(BodyReceiver(transport, own, reader))
