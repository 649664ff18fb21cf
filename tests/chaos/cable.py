"""A TCP or Unix-socket proxy between two parts of a fleet, for injecting network faults.

A test can hold, cut, slow or shorten the connections. Held bytes are delivered on release, as after
a network partition: bytes of a stream are lost only by a reset.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

CHUNK_BYTES: Final = 64 * 1024
SLOW_STEP_S: Final = 0.05
"""A slow cable delivers bytes at this interval."""


class CableDirection:
    """The current faults of one direction of a cable. They apply to all its connections at once."""

    delay_s: float
    bytes_per_s: float
    bytes_max: int | None
    """A connection is reset after this many bytes."""

    def __init__(self) -> None:
        self._released = asyncio.Event()
        self.mend()

    def mend(self) -> None:
        """Remove all faults."""
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.bytes_max = None
        self._released.set()

    def hold(self) -> None:
        """Accept bytes and deliver none."""
        self._released.clear()

    def let_go(self) -> None:
        """Deliver the held bytes, and those that follow."""
        self._released.set()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until it ends. Raises ConnectionResetError after `bytes_max`."""
        relayed = 0
        while data := await reader.read(self._chunk_bytes()):
            await self._released.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            is_last = self.bytes_max is not None and relayed + len(data) >= self.bytes_max
            if is_last:
                data = data[: (self.bytes_max or 0) - relayed]
            writer.write(data)
            await writer.drain()
            relayed += len(data)
            if is_last:
                raise ConnectionResetError
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
        await self._released.wait()
        if writer.can_write_eof():
            writer.write_eof()

    def _chunk_bytes(self) -> int:
        return max(1, int(self.bytes_per_s * SLOW_STEP_S)) if self.bytes_per_s else CHUNK_BYTES


class Cable:
    """A proxy to `target`: a port of this machine, or the path of a Unix socket."""

    def __init__(self, target: int | Path) -> None:
        self.port = 0
        self.dialled = 0
        self.refuses = False
        """If true, new connections are reset."""
        self.up = CableDirection()
        """From the client to the target."""
        self.down = CableDirection()
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()

    def hold(self) -> None:
        """Hold both directions: no bytes pass and no connection is closed."""
        self.up.hold()
        self.down.hold()

    def let_go(self) -> None:
        """Release both directions."""
        self.up.let_go()
        self.down.let_go()

    def mend(self) -> None:
        """Remove all faults."""
        self.refuses = False
        self.up.mend()
        self.down.mend()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._open):
            _reset(writer)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection."""
        self.dialled += 1
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        self._open.add(writer)
        try:
            await self._relay(reader, writer)
        finally:
            self._open.discard(writer)
            self._relays.discard(task)

    async def close(self) -> None:
        """Reset all connections and stop relaying."""
        self.cut()
        relays = list(self._relays)
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            _reset(writer)
            return
        try:
            if isinstance(self._target, int):
                target_reader, target_writer = await asyncio.open_connection(
                    "127.0.0.1", self._target
                )
            else:
                target_reader, target_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            _reset(writer)
            return
        self._open.add(target_writer)
        directions = [
            asyncio.ensure_future(self.up.relay(reader, target_writer)),
            asyncio.ensure_future(self.down.relay(target_reader, writer)),
        ]
        try:
            # One direction may end alone (a half-close); a reset ends both.
            ended, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_EXCEPTION)
            if any(direction.exception() for direction in ended):
                _reset(writer)
                _reset(target_writer)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            self._open.discard(target_writer)
            for end in (writer, target_writer):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    # A writer that is closed already has no socket.
    with suppress(OSError, AttributeError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def a_cable(target: int | Path, *, at: Path | None = None) -> AsyncIterator[Cable]:
    """Start a cable to `target`. Clients connect to its `port`, or to a Unix socket at `at`."""
    cable = Cable(target)
    if at is None:
        server = await asyncio.start_server(cable.accept, "127.0.0.1", 0)
        cable.port = server.sockets[0].getsockname()[1]
    else:
        server = await asyncio.start_unix_server(cable.accept, at)
    try:
        yield cable
    finally:
        server.close()
        await cable.close()
        await server.wait_closed()
