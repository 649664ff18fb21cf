"""A control connection's WebSocket: it reads small messages only, until its peer has registered."""

import asyncio
from typing import Final

from aiohttp import WSMessage, WSMsgType, web
from aiohttp.http_websocket import WebSocketReader

from isochrone.wire import codec

REGISTER_BYTES_MAX: Final = 64 * 1024
"""The largest message before registration: several times a certificate with its signature."""

PING_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 2.0
"""How long to wait until a peer has taken the reason of its refusal."""

CONTROL_FRAME_PAUSE_S: Final = 0.1
"""The pause after each ping or pong. A peer sends two of them in ten seconds."""


class ControlSocket(web.WebSocketResponse):
    """Refuses a frame by its header, so that a stranger cannot have it buffered."""

    def __init__(self) -> None:
        # No compression: an unverified peer's bytes must not inflate to many more.
        super().__init__(
            max_msg_size=REGISTER_BYTES_MAX,
            heartbeat=PING_S,
            compress=False,
            timeout=CLOSE_TIMEOUT_S,
            autoping=False,
        )

    async def receive(self, timeout: float | None = None) -> WSMessage:
        """Return the next message that is neither a ping nor a pong.

        aiohttp answers pings in a loop without a pause. The 40,000 pings of one read from a
        stranger's connection would keep the scheduler from anything else for a second.
        """
        while True:
            message: WSMessage = await super().receive(timeout)
            if message.type is WSMsgType.PING:
                await self.pong(message.data)
            elif message.type is not WSMsgType.PONG:
                return message
            await asyncio.sleep(CONTROL_FRAME_PAUSE_S)

    def accept_large_messages(self, request: web.Request) -> None:
        """Read messages of up to FRAME_BYTES_MAX from now on.

        aiohttp fixes the limit when the connection is upgraded, so its parser is replaced. Messages
        that were received stay in the queue. The part of one that is still arriving is lost, and
        the connection breaks; but a peer waits for its welcome before it sends more.
        """
        protocol = request.protocol
        assert self._reader is not None
        assert protocol._payload_parser is self._parser
        self._parser = WebSocketReader(
            self._reader, codec.FRAME_BYTES_MAX, compress=False, decode_text=True
        )
        protocol._payload_parser = self._parser
