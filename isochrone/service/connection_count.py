"""Who is at a door: connections counted, in all and by address, TLS handshakes under way included.

asyncio makes a connection known only once its handshake is done: those that never end one would be
counted by nobody, and hold descriptors without a bound.
"""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from ssl import SSLContext
from typing import cast

ProtocolFactory = Callable[[], asyncio.Protocol]


class ConnectionCount:
    """How many are there, and how many there may be."""

    def __init__(self, most: int, per_address_max: int) -> None:
        self._most = most
        self._per_address_max = per_address_max
        self._by_address: Counter[str] = Counter()
        self._count = 0

    def enter(self, address: str) -> bool:
        """Count one in, until it leaves; False where it is one too many."""
        self._count += 1
        self._by_address[address] += 1
        return self._count <= self._most and self._by_address[address] <= self._per_address_max

    def leave(self, address: str) -> None:
        """Count one out."""
        self._count -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def remote_address(transport: asyncio.BaseTransport) -> str:
    """Return whence a connection comes."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else "unix"


@asynccontextmanager
async def tls_protocol_factory(
    factory: ProtocolFactory, context: SSLContext | None, census: ConnectionCount, timeout_s: float
) -> AsyncIterator[ProtocolFactory]:
    """Yield what a server makes protocols with: those of `factory`, behind TLS if there is any.

    On exit, handshakes under way are cut.
    """
    if context is None:
        yield factory
        return
    under_way: set[asyncio.Task[None]] = set()
    try:
        yield lambda: _Arrival(factory, context, census, timeout_s, under_way)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


class _Arrival(asyncio.Protocol):
    """A connection just accepted: counted, before its handshake costs anything."""

    def __init__(
        self,
        factory: ProtocolFactory,
        context: SSLContext,
        census: ConnectionCount,
        timeout_s: float,
        under_way: set[asyncio.Task[None]],
    ) -> None:
        self._factory = factory
        self._context = context
        self._census = census
        self._timeout_s = timeout_s
        self._under_way = under_way

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        address = remote_address(transport)
        accepted = _taken_from(transport) if self._census.enter(address) else None
        cast(asyncio.Transport, transport).abort()
        if accepted is None:
            self._census.leave(address)
            return
        task = asyncio.get_running_loop().create_task(self._shake_hands(accepted, address))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _shake_hands(self, accepted: socket.socket, address: str) -> None:
        try:
            # One that speaks something else, or too slowly, or leaves: there is nobody to tell.
            with suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._factory,
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._timeout_s,
                )
        finally:
            self._census.leave(address)


def _taken_from(transport: asyncio.BaseTransport) -> socket.socket | None:
    """Return the socket of a connection, for a transport to come; None where descriptors ran out.

    uvloop's transport would read what comes before another could take over.
    """
    with suppress(OSError):
        return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    return None
