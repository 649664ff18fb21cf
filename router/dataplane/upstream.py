"""The connections to nodes: opened when needed, kept alive between requests, bounded in number.

With TLS, whoever is dialled for a node proves that it is this node: an address proves nothing. So
connections are kept by node, and none is used for another at the same address.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from ssl import SSLContext
from typing import Final, cast

from isochrone.wire.ids import NodeId
from router.config import RouterConfig
from router.dataplane import http1, sse
from router.dataplane.deadlines import Deadlines
from router.dataplane.exchange import AttemptFailed, FailureCause, NodeExchange
from router.dataplane.node_connection import NodeConnection

KEEPALIVE_S: Final = 20.0
"""Shorter than a node's own 75 s: a connection is never taken up just as the node closes it."""

IDLE_PER_NODE_MAX: Final = 256
CLOSE_TIMEOUT_S: Final = 5.0


class Upstream:
    """The connections to nodes."""

    def __init__(
        self,
        config: RouterConfig,
        deadlines: Deadlines,
        clock: Callable[[], float],
        ssl_context: SSLContext | None = None,
    ) -> None:
        """Open no connection yet. `inside` are those who are met within this process."""
        self.inside: dict[NodeId, Callable[[], socket.socket]] = {}
        self.clock = clock
        self.deadlines = deadlines
        self._config = config
        self._ssl = ssl_context
        self._idle: dict[NodeId, list[NodeConnection]] = {}
        self._open: set[NodeConnection] = set()
        self._gone = asyncio.Event()

    def __len__(self) -> int:
        """Return how many connections are open, to whichever node."""
        return len(self._open)

    def ask(
        self,
        node_id: NodeId,
        address: str,
        request: tuple[str, str, str, bytes],
        timeout_s: float,
        bytes_max: int,
        frames: sse.StreamRelay | None = None,
        *,
        is_rest: bool = False,
    ) -> NodeExchange:
        """Send (method, path, header lines, body) to a node; what comes is the exchange's."""
        method, path, lines, body = request
        head = http1.request_head(method, path, _host(address), lines, len(body))
        exchange = NodeExchange(
            self, node_id, address, (head, body), bytes_max, frames, is_rest=is_rest
        )
        exchange.wait(timeout_s)
        idle = self._idle.get(node_id)
        if idle:
            exchange.begin(idle.pop())
        else:
            exchange.dial()
        return exchange

    async def fetch(
        self,
        node_id: NodeId,
        address: str,
        request: tuple[str, str, str, bytes],
        timeout_s: float,
        bytes_max: int,
    ) -> NodeExchange:
        """Ask, and return the exchange once its answer is whole; raise AttemptFailed else."""
        exchange = self.ask(node_id, address, request, timeout_s, bytes_max)
        try:
            await exchange.opened
            exchange.answer()
        finally:
            exchange.leave()
        return exchange

    async def connect(self, node_id: NodeId, address: str) -> NodeConnection:
        """Open a connection, or raise AttemptFailed."""
        connection = NodeConnection(self, node_id)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._dial(connection, node_id, address)
        except (OSError, ValueError) as error:
            raise AttemptFailed(FailureCause.UNREACHABLE, f"cannot reach {node_id}") from error
        if not connection.is_open:
            raise AttemptFailed(FailureCause.BROKEN, f"{node_id} closed before it was asked")
        # Counted in no sooner: uvloop never says of a dial given up that its connection is lost.
        self._open.add(connection)
        self.deadlines.add(connection)
        return connection

    def keep(self, connection: NodeConnection) -> None:
        """Take back a connection whose exchange ended well."""
        idle = self._idle.setdefault(connection.node_id, [])
        if len(idle) >= IDLE_PER_NODE_MAX:
            connection.close()
            return
        connection.due_s = self.clock() + KEEPALIVE_S
        idle.append(connection)

    def closed(self, connection: NodeConnection) -> None:
        """Count a connection out."""
        self._open.discard(connection)
        self.deadlines.discard(connection)
        idle = self._idle.get(connection.node_id)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.node_id]
        if not self._open:
            self._gone.set()

    def doubt(self, node_id: NodeId) -> None:
        """Close what is kept idle to a node: it may be broken without a word."""
        for connection in self._idle.pop(node_id, ()):
            connection.close()

    def let_go(self, node_id: NodeId, since_s: float, may_retry: Callable[[], bool]) -> None:
        """A node is gone: fail what has heard nothing of it `since_s`, the longest wait first.

        Whoever waits for a first token and may not retry goes on waiting.
        """
        waits = [c.exchange for c in self._open if c.node_id == node_id and c.exchange is not None]
        for exchange in sorted(waits, key=NodeExchange.heard_s):
            if exchange.heard_s() < since_s and (exchange.has_begun or may_retry()):
                # Each in a turn of its own, for whoever waits for it goes on within.
                failure = AttemptFailed(FailureCause.GONE, f"{node_id} answers no ping")
                asyncio.get_running_loop().call_soon(exchange.fail, failure)

    async def close(self) -> None:
        """Close every connection."""
        for connection in list(self._open):
            connection.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._open:
                    self._gone.clear()
                    await self._gone.wait()

    async def _dial(self, connection: NodeConnection, node_id: NodeId, address: str) -> None:
        def made() -> asyncio.Protocol:
            return cast(asyncio.Protocol, connection)

        loop = asyncio.get_running_loop()
        if node_id in self.inside:
            await loop.create_connection(made, sock=self.inside[node_id]())
            return
        host, _, port = _host(address).rpartition(":")
        await loop.create_connection(
            made,
            host.strip("[]"),
            int(port),
            ssl=self._ssl,
            server_hostname=node_id if self._ssl is not None else None,
            local_addr=(self._config.source_address, 0) if self._config.source_address else None,
        )


@lru_cache(maxsize=1024)
def _host(address: str) -> str:
    return address.rpartition("://")[2].rstrip("/")
