"""One peer's conversation: who it is, what was last heard of it, and an outbox that is bounded."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

import msgspec
from aiohttp import web

from isochrone.service.identity import Certificate
from isochrone.wire import codec
from isochrone.wire.control import PeerRole, RegistrationRefused
from isochrone.wire.ids import BootId, Generation, PopId
from isochrone.wire.report import Report

log = logging.getLogger(__name__)

OUTBOX_MAX: Final = 64
LARGE_BYTES: Final = 256 * 1024


class Connected:
    """One peer's open conversation: a bounded outbox, and one task that empties it."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        *,
        role: PeerRole,
        name: str,
        pop: PopId,
        boot_id: BootId,
        certificate: Certificate,
        large: asyncio.Semaphore,
    ) -> None:
        self._large = large
        self.certificate = certificate
        self.role = role
        self.name = name
        self.pop = pop
        self.boot_id = boot_id
        self.generation = Generation(0)
        self.has_reported = False
        self.written: Report | None = None
        self.written_at = 0.0
        self._socket = socket
        self._transport = transport
        self._outbox: asyncio.Queue[msgspec.Struct | bytes] = asyncio.Queue(OUTBOX_MAX)

    def tell(self, message: msgspec.Struct | bytes) -> None:
        """Queue a message, or one encoded already for many; a peer that takes nothing for long is
        cut, and will dial again."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("peer takes no messages", extra={"fields": {"peer": self.name}})
            if self._transport is not None:
                self._transport.abort()

    async def empty_outbox(self) -> None:
        """Send what is queued, for as long as the conversation lasts."""
        while True:
            message = await self._outbox.get()
            frame = message if isinstance(message, bytes) else codec.encode(message)
            if len(frame) < LARGE_BYTES:
                await self._socket.send_bytes(frame)
                continue
            # Each copy waits in memory until its peer has taken it: never all of them at once.
            async with self._large:
                await self._socket.send_bytes(frame)

    async def end(self, refused: RegistrationRefused) -> None:
        """Say why, and close."""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(2.0):
                await self._socket.send_bytes(codec.encode(refused))
                await self._socket.close()
