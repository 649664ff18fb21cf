"""Counts a listener's connections, in all and by client network, with TLS handshakes in progress.

Rule 1: asyncio reports a TLS connection to its protocol only once the handshake is done. Clients
that never finish one would otherwise be uncounted and could hold file descriptors without a limit.
Rule 2: when few more connections fit, those that have been idle for longest are closed. Strangers
who hold idle connections from several networks would otherwise keep all others out.
"""

import asyncio
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from heapq import nsmallest
from itertools import chain
from operator import attrgetter
from ssl import SSLContext
from typing import Final, Protocol, cast

SPARE_SHARE: Final = 16
"""One in so many places is kept free of idle connections."""

LOOK_PAUSE_S: Final = 0.1
"""Idle connections are looked for this often at most: of 20,000 it takes some milliseconds."""

ProtocolFactory = Callable[[], asyncio.Protocol]


class Closable(Protocol):
    """A connection that may be idle."""

    @property
    def is_idle(self) -> bool:
        """Whether the client has sent no whole request head that is not answered yet."""

    @property
    def idle_since_s(self) -> float:
        """When it became idle, on a monotonic clock."""

    def abort(self) -> None:
        """Close it at once."""


class ConnectionCount:
    """Counts open connections, with a limit on their total and one for each client network."""

    def __init__(self, connections_max: int, per_network_max: int) -> None:
        self._connections_max = connections_max
        self._per_network_max = per_network_max
        self._spare = max(1, connections_max // SPARE_SHARE)
        self._by_network: Counter[str] = Counter()
        self._count = 0
        self._look_at_s = 0.0

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

    def close_idlest(self, connections: Callable[[], Iterable[Closable]], now_s: float) -> None:
        """Close those of `connections` that have been idle for longest if few more fit."""
        if self._count < self._connections_max - self._spare or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_PAUSE_S
        idle = (connection for connection in connections() if connection.is_idle)
        for connection in nsmallest(self._spare, idle, key=attrgetter("idle_since_s")):
            connection.abort()


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
    open_connections: Callable[[], Iterable[Closable]] = tuple,
) -> AsyncIterator[ProtocolFactory]:
    """Yield the factory to give to a server: that of `factory`, behind TLS if there is a context.

    `open_connections` returns those that `connections` counts after their handshakes, too. On exit,
    handshakes in progress are cancelled.
    """
    if context is None:
        yield factory
        return
    handshakes: set[_TlsAcceptor] = set()

    def closable() -> Iterable[Closable]:
        return chain(handshakes, open_connections())

    def acceptor() -> _TlsAcceptor:
        return _TlsAcceptor(
            factory, context, connections, handshake_timeout_s, handshakes, closable
        )

    try:
        yield acceptor
    finally:
        tasks = [handshake.task for handshake in handshakes if handshake.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _TlsAcceptor(asyncio.Protocol):
    """Counts a connection that was just accepted, then performs its handshake in a task."""

    def __init__(
        self,
        factory: ProtocolFactory,
        context: SSLContext,
        connections: ConnectionCount,
        handshake_timeout_s: float,
        handshakes: "set[_TlsAcceptor]",
        closable: Callable[[], Iterable[Closable]],
    ) -> None:
        self._factory = factory
        self._context = context
        self._connections = connections
        self._handshake_timeout_s = handshake_timeout_s
        self._handshakes = handshakes
        self._closable = closable
        self.is_idle = False
        """Whether the handshake has begun: a task that has not begun cleans nothing up."""
        self.idle_since_s = 0.0
        self.task: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Cancel the handshake."""
        if self.task is not None:
            self.task.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        network, loop = client_network(transport), asyncio.get_running_loop()
        self.idle_since_s = loop.time()
        self._connections.close_idlest(self._closable, self.idle_since_s)
        accepted = _duplicate_socket(transport) if self._connections.add(network) else None
        cast(asyncio.Transport, transport).abort()
        if accepted is None:
            self._connections.remove(network)
            return
        self.task = loop.create_task(self._handshake(accepted, network))
        self._handshakes.add(self)
        self.task.add_done_callback(lambda _: self._handshakes.discard(self))

    async def _handshake(self, accepted: socket.socket, network: str) -> None:
        self.is_idle = True
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
