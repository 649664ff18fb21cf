"""Reads a peer's frames, and tells a peer why it is refused."""

import asyncio
from contextlib import suppress
from typing import Any, Final

from aiohttp import WSMsgType, web

from isochrone.service.network.http_server import json_error
from isochrone.wire import codec
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.control import RefusedCode, Register, RegistrationRefused
from scheduler import metrics
from scheduler.api.control.control_socket import REGISTER_BYTES_MAX

REGISTER_TIMEOUT_S: Final = 5.0
RETRY_REFUSED_S: Final = 30.0
"""The delay before a retry if only an operator can fix the cause."""


class PeerRefused(Exception):
    """A peer is refused and its connection closed."""

    def __init__(self, code: RefusedCode, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.refused = RegistrationRefused(code=code, reason=reason, retry_after_s=retry_after_s)


def too_many_unregistered() -> web.Response:
    """Refuse a connection before its upgrade, and close it: a stranger must cost little."""
    metrics.REFUSED.labels("unregistered").inc()
    reason = "cannot register now: too many peers that have not registered are connected; try again"
    response = json_error(ApiError(ErrorCode.UNAVAILABLE, reason, retry_after_s=1.0))
    response.force_close()
    return response


async def send_refusal(socket: web.WebSocketResponse, refusal: PeerRefused) -> None:
    """Tell a peer why it is refused, and close its connection."""
    metrics.REFUSED.labels(refusal.refused.code.value).inc()
    # A connection that broke, or sent too large a frame, is closed already.
    with suppress(ConnectionError):
        await socket.send_bytes(codec.encode(refusal.refused))
        await socket.close()


async def receive_registration(socket: web.WebSocketResponse, decoder: Any) -> Register:
    """Return the first message of a peer. Raises PeerRefused if it is no registration."""
    try:
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            frame = await receive(socket)
    except TimeoutError:
        frame = None
    if frame is None:
        reason = (
            f"no registration of at most {REGISTER_BYTES_MAX} bytes in {REGISTER_TIMEOUT_S:g} s"
        )
        raise PeerRefused(RefusedCode.MALFORMED, reason)
    register = decode(frame, decoder)
    if not isinstance(register, Register):
        raise PeerRefused(RefusedCode.MALFORMED, "the first message must be a registration")
    return register


async def receive(socket: web.WebSocketResponse) -> bytes | None:
    """Return the next frame; None when the connection has closed."""
    frame = await socket.receive()
    if frame.type is WSMsgType.BINARY:
        return bytes(frame.data)
    if frame.type is WSMsgType.TEXT:
        raise PeerRefused(RefusedCode.MALFORMED, "cannot read frame: text, expected msgpack")
    return None


def decode(frame: bytes, decoder: Any) -> Any:
    """Decode a frame. Raises PeerRefused."""
    try:
        return codec.decode(frame, decoder)
    except codec.MalformedFrame as error:
        raise PeerRefused(RefusedCode.MALFORMED, str(error)) from error
