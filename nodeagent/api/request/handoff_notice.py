"""Tells a router which replica of the PoP has its request, before there is an answer.

The notice is an interim response (103 Early Hints, RFC 8297) with the header that the final
response will carry. Without it the router learns of a handoff with the first token, and until then
counts the request's tokens and its prompt at the wrong replica. A router of an older release skips
interim responses.
"""

from contextlib import suppress

import aiohttp
from aiohttp import web

from isochrone.wire.http import headers
from isochrone.wire.ids import ReplicaId


async def announce_replica(request: web.Request, replica_id: ReplicaId) -> None:
    """Say which replica has the request."""
    await _send(request, headers.HANDOFF_REPLICA, replica_id)


async def announce_prefill(request: web.Request, replica_id: ReplicaId) -> None:
    """Say which replica reads the prompt of the request."""
    await _send(request, headers.PREFILL_REPLICA, replica_id)


async def _send(request: web.Request, name: str, replica_id: ReplicaId) -> None:
    """Send the notice. If the router has disconnected, the request is cancelled as usual."""
    lines = f"HTTP/1.1 103 Early Hints\r\n{name}: {replica_id}\r\n\r\n"
    with suppress(aiohttp.ClientConnectionResetError):
        await request.writer.write(lines.encode("latin-1", "replace"))
        # aiohttp counts only the bytes of the final response.
        request.writer.output_size = 0
