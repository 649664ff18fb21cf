"""One peer's open connection: its identity, its last stored report and a bounded send queue."""

import asyncio
import logging
from contextlib import suppress
from typing import Final, Protocol

import msgspec
from aiohttp import web

from isochrone.service.trust.identity import Certificate
from isochrone.wire import codec
from isochrone.wire.ids import BootId, Generation, PopId
from isochrone.wire.peers.control import PeerRole, RegistrationRefused
from isochrone.wire.peers.report import Report
from scheduler import metrics
from scheduler.decide.membership import PeerClock

log = logging.getLogger(__name__)

QUEUED_MESSAGES_MAX: Final = 64
QUEUED_DURING_TABLE_MAX: Final = 4096
"""How many messages may wait behind a route table in parts. A slow line takes minutes for a large
one, and the deltas that follow it are shared by all routers."""

LARGE_FRAME_BYTES: Final = 256 * 1024
CLOSE_TIMEOUT_S: Final = 2.0


class Frames(Protocol):
    """Frames that are sent one after another, each made when it is needed."""

    def frame(self, index: int) -> bytes | None:
        """Return a frame, None after the last. An empty one is not sent, but is a pause."""
        ...


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
        self.heard_at_s = 0.0
        """When its last message came, by the monotonic clock."""
        self.generation = Generation(0)
        """The newest assignment or route table that the peer says it has."""
        self.keys_held = b""
        """The sums of the keys that a router has, until it is sent a table."""
        self.capabilities: frozenset[str] = frozenset()
        self.last_error = ""
        """Why the peer's previous connection ended, as the peer says."""
        self.clock = PeerClock()
        self.relay_token = ""
        """The token with which a router uses the batch service; "" for an agent, or without that
        service."""
        self.has_reported = False
        """Whether the node's full report is stored; only then is it sent assignments."""
        self.assigning = asyncio.Lock()
        """Held while an assignment is read from the store for this node, and queued."""
        self.stored_report: Report | None = None
        self.stored_report_at = 0.0
        self._socket = socket
        self._transport = transport
        self._large_frame_slots = large_frame_slots
        self._queue: asyncio.Queue[msgspec.Struct | bytes | Frames] = asyncio.Queue()
        self._tables_queued = 0

    def record_clock(self, sent_at: float, received_at: float, now: float) -> None:
        """Note when a message was sent and received (`PeerClock.record`); log a wrong clock."""
        if self.clock.record(sent_at, received_at, now):
            fields = {"peer": self.name, "behind_s": round(self.clock.behind_s)}
            log.warning(
                "the clock of a peer differs from this scheduler's", extra={"fields": fields}
            )

    def enqueue(self, message: msgspec.Struct | bytes | Frames) -> None:
        """Queue a message, an encoded frame, or a table in parts.

        A peer whose queue is full is disconnected.
        """
        queued_max = QUEUED_DURING_TABLE_MAX if self._tables_queued else QUEUED_MESSAGES_MAX
        if self._queue.qsize() >= queued_max:
            log.warning(
                "disconnecting a peer that does not read", extra={"fields": {"peer": self.name}}
            )
            if self._transport is not None:
                self._transport.abort()
            return
        if not isinstance(message, bytes | msgspec.Struct):
            self._tables_queued += 1
        self._queue.put_nowait(message)

    async def send_queued(self) -> None:
        """Send queued messages until cancelled."""
        while True:
            message = await self._queue.get()
            if isinstance(message, bytes):
                await self._send("frame", message)
            elif isinstance(message, msgspec.Struct):
                await self._send(type(message).__name__.lower(), codec.encode(message))
            else:
                index = 0
                while (frame := message.frame(index)) is not None:
                    if frame:
                        await self._send("route_table_part", frame)
                    else:
                        await asyncio.sleep(0)
                    index += 1
                self._tables_queued -= 1

    async def _send(self, kind: str, frame: bytes) -> None:
        """Send a frame; refuse one that the peer cannot read, which would end the connection."""
        try:
            codec.check_size(frame, kind)
        except codec.FrameTooLarge as error:
            metrics.FRAMES_REFUSED.labels(kind).inc()
            fields = {"peer": self.name, "reason": str(error)}
            log.error("message not sent", extra={"fields": fields})
            return
        if len(frame) < LARGE_FRAME_BYTES:
            await self._socket.send_bytes(frame)
            return
        # aiohttp holds a copy until the peer has read it: bound how many exist at once.
        async with self._large_frame_slots:
            await self._socket.send_bytes(frame)

    async def refuse(self, refused: RegistrationRefused) -> None:
        """Send the reason and close the connection."""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.send_bytes(codec.encode(refused))
                await self._socket.close()
