"""A cable between two parts of a fleet, which a test cuts, holds, slows or shortens.

It stands before a port or a Unix socket and is dialled in its place. What is held is delivered when
it is let go, as a network does that was parted for a while: nothing of a stream is ever lost but
by a reset.
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
"""A slow cable lets something pass this often."""


class Way:
    """One direction of a cable, as it is now; every connection follows at once."""

    delay_s: float
    bytes_per_s: float
    bytes_max: int | None
    """A connection is reset after so many."""

    def __init__(self) -> None:
        self._passable = asyncio.Event()
        self.mend()

    def mend(self) -> None:
        """Carry as a new cable does."""
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.bytes_max = None
        self._passable.set()

    def hold(self) -> None:
        """Take everything and deliver nothing."""
        self._passable.clear()

    def let_go(self) -> None:
        """Deliver what was held, and what comes."""
        self._passable.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection's bytes to their end; ConnectionResetError where it is cut short."""
        carried = 0
        while data := await reader.read(self._piece_bytes()):
            await self._passable.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            is_last = self.bytes_max is not None and carried + len(data) >= self.bytes_max
            if is_last:
                data = data[: (self.bytes_max or 0) - carried]
            writer.write(data)
            await writer.drain()
            carried += len(data)
            if is_last:
                raise ConnectionResetError
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
        await self._passable.wait()
        if writer.can_write_eof():
            writer.write_eof()

    def _piece_bytes(self) -> int:
        return max(1, int(self.bytes_per_s * SLOW_STEP_S)) if self.bytes_per_s else CHUNK_BYTES


class Cable:
    """A cable to `target`: a port of this machine, or the path of a socket."""

    def __init__(self, target: int | Path) -> None:
        self.port = 0
        self.dialled = 0
        self.refuses = False
        """Resets whoever dials."""
        self.up = Way()
        """From who dials to who is dialled."""
        self.down = Way()
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._carried: set[asyncio.Task[None]] = set()

    def hold(self) -> None:
        """Carry nothing either way, and tell nobody."""
        self.up.hold()
        self.down.hold()

    def let_go(self) -> None:
        """Carry again."""
        self.up.let_go()
        self.down.let_go()

    def mend(self) -> None:
        """Be as new."""
        self.refuses = False
        self.up.mend()
        self.down.mend()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._open):
            _reset(writer)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        self.dialled += 1
        task = asyncio.current_task()
        assert task is not None
        self._carried.add(task)
        self._open.add(writer)
        try:
            await self._carry(reader, writer)
        finally:
            self._open.discard(writer)
            self._carried.discard(task)

    async def close(self) -> None:
        """End everything that is carried."""
        self.cut()
        carried = list(self._carried)
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            _reset(writer)
            return
        try:
            if isinstance(self._target, int):
                there = await asyncio.open_connection("127.0.0.1", self._target)
            else:
                there = await asyncio.open_unix_connection(self._target)
        except OSError:
            _reset(writer)
            return
        self._open.add(there[1])
        ways = [
            asyncio.ensure_future(self.up.carry(reader, there[1])),
            asyncio.ensure_future(self.down.carry(there[0], writer)),
        ]
        try:
            # Either way may end by itself (a half-close); a reset ends both.
            ended, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
            if any(way.exception() for way in ended):
                _reset(writer)
                _reset(there[1])
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._open.discard(there[1])
            for end in (writer, there[1]):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def a_cable(target: int | Path, *, at: Path | None = None) -> AsyncIterator[Cable]:
    """Lay a cable to `target`, dialled at its `port`, or at the path `at` of a socket."""
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
