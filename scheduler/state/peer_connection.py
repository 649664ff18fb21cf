"""One peer's open connection: its identity, its last stored report and a bounded send queue."""

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

QUEUED_MESSAGES_MAX: Final = 64
LARGE_FRAME_BYTES: Final = 256 * 1024
CLOSE_TIMEOUT_S: Final = 2.0


class PeerConnection:
    """A node agent's or router's WebSocket. One task runs `send_queued`."""

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
        large_frame_slots: asyncio.Semaphore,
    ) -> None:
        """Take an upgraded socket. `large_frame_slots` is shared by all peers of the process."""
        self.role = role
        self.name = name
        self.pop = pop
        self.boot_id = boot_id
        self.certificate = certificate
        self.generation = Generation(0)
        """The newest assignment or route table that the peer says it has."""
        self.has_reported = False
        """Whether the node's full report is stored; only then is it sent assignments."""
        self.stored_report: Report | None = None
        self.stored_report_at = 0.0
        self._socket = socket
        self._transport = transport
        self._large_frame_slots = large_frame_slots
        self._queue: asyncio.Queue[msgspec.Struct | bytes] = asyncio.Queue(QUEUED_MESSAGES_MAX)

    def enqueue(self, message: msgspec.Struct | bytes) -> None:
        """Queue a message or an encoded frame. A peer whose queue is full is disconnected."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            log.warning(
                "disconnecting a peer that does not read", extra={"fields": {"peer": self.name}}
            )
            if self._transport is not None:
                self._transport.abort()

    async def send_queued(self) -> None:
        """Send queued messages until cancelled."""
        while True:
            message = await self._queue.get()
            frame = message if isinstance(message, bytes) else codec.encode(message)
            if len(frame) < LARGE_FRAME_BYTES:
                await self._socket.send_bytes(frame)
                continue
            # aiohttp holds a copy until the peer has read it: bound how many exist at once.
            async with self._large_frame_slots:
                await self._socket.send_bytes(frame)

    async def refuse(self, refused: RegistrationRefused) -> None:
        """Send the reason and close the connection."""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.send_bytes(codec.encode(refused))
                await self._socket.close()
