"""Counts a listener's connections, in all and by client network, with TLS handshakes in progress.

asyncio reports a TLS connection to its protocol only once the handshake is done. Clients that never
finish one would otherwise be uncounted and could hold file descriptors without a limit.
"""

import asyncio
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from ssl import SSLContext
from typing import cast

ProtocolFactory = Callable[[], asyncio.Protocol]


class ConnectionCount:
    """Counts open connections, with a limit on their total and one for each client network."""

    def __init__(self, connections_max: int, per_network_max: int) -> None:
        self._connections_max = connections_max
        self._per_network_max = per_network_max
        self._by_network: Counter[str] = Counter()
        self._count = 0

    def add(self, network: str) -> bool:
        """Count a connection until `remove`; say whether it is within both limits."""
        self._count += 1
        self._by_network[network] += 1
        return (
            self._count <= self._connections_max
            and self._by_network[network] <= self._per_network_max
        )

    def remove(self, network: str) -> None:
        """Count a closed connection no longer."""
        self._count -= 1
        self._by_network[network] -= 1
        if not self._by_network[network]:
            del self._by_network[network]


def client_network(transport: asyncio.BaseTransport) -> str:
    """Return the network of a connection's other end; "unix" for a Unix socket."""
    peer = transport.get_extra_info("peername")
    return network_of(str(peer[0])) if isinstance(peer, tuple) and peer else "unix"


def network_of(address: str) -> str:
    """Return the network that one client controls: an IPv4 address, or the /64 of an IPv6 address.

    An IPv6 client has a whole /64, so limits by its full address would not limit it.
    """
    if ":" not in address:
        return address
    ipv6 = ipaddress.IPv6Address(address.partition("%")[0])
    if ipv6.ipv4_mapped is not None:
        return str(ipv6.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(ipv6) >> 64 << 64)}/64"


@asynccontextmanager
async def tls_protocol_factory(
    factory: ProtocolFactory,
    context: SSLContext | None,
    connections: ConnectionCount,
    handshake_timeout_s: float,
) -> AsyncIterator[ProtocolFactory]:
    """Yield the factory to give to a server: that of `factory`, behind TLS if there is a context.

    On exit, handshakes in progress are cancelled.
    """
    if context is None:
        yield factory
        return
    handshakes: set[asyncio.Task[None]] = set()
    try:
        yield lambda: _TlsAcceptor(factory, context, connections, handshake_timeout_s, handshakes)
    finally:
        for task in handshakes:
            task.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)


class _TlsAcceptor(asyncio.Protocol):
    """Counts a connection that was just accepted, then performs its handshake in a task."""

    def __init__(
        self,
        factory: ProtocolFactory,
        context: SSLContext,
        connections: ConnectionCount,
        handshake_timeout_s: float,
        handshakes: set[asyncio.Task[None]],
    ) -> None:
        self._factory = factory
        self._context = context
        self._connections = connections
        self._handshake_timeout_s = handshake_timeout_s
        self._handshakes = handshakes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        network = client_network(transport)
        accepted = _duplicate_socket(transport) if self._connections.add(network) else None
        cast(asyncio.Transport, transport).abort()
        if accepted is None:
            self._connections.remove(network)
            return
        task = asyncio.get_running_loop().create_task(self._handshake(accepted, network))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, accepted: socket.socket, network: str) -> None:
        try:
            # A client that speaks another protocol, is too slow or leaves needs no answer.
            with suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._factory,
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._handshake_timeout_s,
                )
        finally:
            self._connections.remove(network)


def _duplicate_socket(transport: asyncio.BaseTransport) -> socket.socket | None:
    """Return the connection's socket for a new transport; None if descriptors have run out.

    The plain transport is aborted: uvloop's would go on reading what belongs to the handshake.
    """
    with suppress(OSError):
        return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    return None
