"""The pool of connections to nodes: opened on demand, kept alive between requests, limited.

With TLS a node proves its own name, because an address proves nothing. Connections are therefore
kept by node, and never used for another node at the same address.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from functools import lru_cache
from ssl import SSLContext
from typing import Final, cast

from isochrone.fair_shares import FairShares
from isochrone.service.failure_log import RepeatedWarning
from isochrone.service.network.name_cache import NameCache
from isochrone.service.network.shortage import LACKS_PORT, shortage
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.peers.routes import Route
from router.config import RouterConfig
from router.dataplane import http1, sse
from router.dataplane.deadlines import Deadlines
from router.dataplane.exchange import AttemptFailed, NodeExchange, NodeRequest
from router.dataplane.node_connection import NodeConnection
from router.dataplane.token_gatherer import TokenGatherer
from router.dataplane.token_pump import TokenPump
from router.decide.attempt import FailureCause
from router.decide.liveness.dial_pauses import EVERY_NODE, DialPauses

log = logging.getLogger(__name__)

KEEPALIVE_S: Final = 20.0
"""Shorter than the 75 s of a node, so that no connection is reused just as the node closes it."""

IDLE_PER_NODE_MAX: Final = 256
CLOSE_TIMEOUT_S: Final = 5.0
NO_REPLICAS: Final[Set[ReplicaId]] = frozenset()


class Upstream:
    """The connections to all nodes."""

    def __init__(
        self,
        config: RouterConfig,
        deadlines: Deadlines,
        clock: Callable[[], float],
        ssl_context: SSLContext | None = None,
    ) -> None:
        """Open no connection yet. `clock` returns monotonic seconds."""
        self.in_process: dict[NodeId, Callable[[], socket.socket]] = {}
        """Functions that connect a socket to a server of this process, by its name."""
        self.on_connection: Callable[[NodeId], None] | None = None
        """Called with a node that gets a free connection while others cannot be opened."""
        self.clock = clock
        self.deadlines = deadlines
        gather_s = config.token_gather_ms / 1000
        self.gatherer = TokenGatherer(gather_s, clock)
        self.pump = TokenPump(gather_s)
        self.answers = FairShares(config.answers_held_bytes_max)
        """The bytes of complete answers that each node has sent so far."""
        self._config = config
        self._shortage = RepeatedWarning(log, "cannot connect to nodes, requests wait")
        self._dial_pauses = DialPauses()
        self._names = NameCache(clock=clock)
        self._ssl = ssl_context
        self._idle: dict[NodeId, list[NodeConnection]] = {}
        self._open: set[NodeConnection] = set()
        self._all_closed = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def send(
        self,
        node_id: NodeId,
        address: str,
        request: NodeRequest,
        timeout_s: float,
        bytes_max: int,
        relay: sse.StreamRelay | None = None,
        *,
        is_resumption: bool = False,
    ) -> NodeExchange:
        """Send a request to a node and return its exchange; see NodeExchange for the rest."""
        body = request.body
        head = http1.request_head(
            request.method, request.path, _host(address), request.header_lines, len(body)
        )
        exchange = NodeExchange(
            self, node_id, address, head, body, bytes_max, relay, is_resumption=is_resumption
        )
        exchange.set_timeout(timeout_s)
        self.gatherer.note_other()
        idle = self._idle.get(node_id)
        if idle:
            exchange.start(idle.pop())
        else:
            if self._dial_pauses:
                self._dial_pauses.record_dial(node_id, self.clock())
            exchange.dial()
        return exchange

    def unconnected(self, routes: Iterable[Route]) -> Set[ReplicaId]:
        """Return the replicas whose nodes have no free connection and must not be dialled now."""
        if not self._dial_pauses:
            return NO_REPLICAS
        now_s = self.clock()
        self._dial_pauses.drop_old(now_s)
        return {
            route.replica_id
            for route in routes
            if not self._idle.get(route.node_id)
            and self._dial_pauses.is_paused(route.node_id, now_s)
        }

    async def fetch(
        self,
        node_id: NodeId,
        address: str,
        request: NodeRequest,
        timeout_s: float,
        bytes_max: int,
    ) -> NodeExchange:
        """Send a request and wait for the complete response; raise AttemptFailed otherwise."""
        exchange = self.send(node_id, address, request, timeout_s, bytes_max)
        try:
            await exchange.opened
            exchange.response_head()
        finally:
            exchange.abandon()
        return exchange

    async def connect(self, node_id: NodeId, address: str) -> NodeConnection:
        """Open a connection; raise AttemptFailed if that is not possible."""
        connection = NodeConnection(self, node_id)
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._dial(connection, node_id, address)
        except (OSError, ValueError) as error:
            what = f"cannot reach {node_id}"
            if lack := shortage(error, is_bound=bool(self._config.source_address)):
                now_s = self.clock()
                self._shortage.record(lack, now_s)
                self._dial_pauses.record_lack(node_id if lack == LACKS_PORT else EVERY_NODE, now_s)
                raise AttemptFailed(FailureCause.EXHAUSTED, f"{what}: {lack}") from error
            raise AttemptFailed(FailureCause.UNREACHABLE, what) from error
        if not connection.is_open:
            raise AttemptFailed(FailureCause.BROKEN, f"{node_id} closed the new connection")
        # Not earlier: uvloop does not report a cancelled dial as a lost connection.
        self._open.add(connection)
        self.deadlines.add(connection)
        if self._dial_pauses and self._dial_pauses.record_open(node_id):
            self._notify_connection(node_id)
        return connection

    def keep(self, connection: NodeConnection) -> None:
        """Take back a connection whose exchange ended well."""
        idle = self._idle.setdefault(connection.node_id, [])
        if len(idle) >= IDLE_PER_NODE_MAX:
            connection.close()
            return
        connection.due_s = self.clock() + KEEPALIVE_S
        idle.append(connection)
        if self._dial_pauses:
            self._notify_connection(connection.node_id)

    def on_closed(self, connection: NodeConnection) -> None:
        """Forget a connection that is closed."""
        self._open.discard(connection)
        self.deadlines.discard(connection)
        idle = self._idle.get(connection.node_id)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.node_id]
        if not self._open:
            self._all_closed.set()

    def close_idle(self, node_id: NodeId) -> None:
        """Close the idle connections to a node: they may be broken without any sign of it."""
        for connection in self._idle.pop(node_id, ()):
            connection.close()

    def fail_exchanges(
        self, node_id: NodeId, since_s: float, may_retry: Callable[[], bool]
    ) -> None:
        """Fail the exchanges with a lost node that has sent them nothing since `since_s`.

        The longest wait comes first. An exchange without a first token goes on waiting unless
        `may_retry` allows it another attempt.
        """
        exchanges = [
            connection.exchange
            for connection in self._open
            if connection.node_id == node_id and connection.exchange is not None
        ]
        for exchange in sorted(exchanges, key=NodeExchange.last_heard_s):
            if exchange.last_heard_s() < since_s and (exchange.is_answered or may_retry()):
                # Each in its own callback, because the waiting inline task resumes inside `fail`.
                failure = AttemptFailed(FailureCause.GONE, f"{node_id} answers no ping")
                asyncio.get_running_loop().call_soon(exchange.fail, failure)

    async def close(self) -> None:
        """Close every connection."""
        await self._names.aclose()
        for connection in list(self._open):
            connection.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._open:
                    self._all_closed.clear()
                    await self._all_closed.wait()
        self.pump.close()

    def _notify_connection(self, node_id: NodeId) -> None:
        if self.on_connection is not None:
            self.on_connection(node_id)

    async def _dial(self, connection: NodeConnection, node_id: NodeId, address: str) -> None:
        def protocol() -> asyncio.Protocol:
            return cast(asyncio.Protocol, connection)

        loop = asyncio.get_running_loop()
        if node_id in self.in_process:
            await loop.create_connection(protocol, sock=self.in_process[node_id]())
            return
        host, _, port = _host(address).rpartition(":")
        addresses = await self._names.addresses(host.strip("[]"))
        for number, ip_address in enumerate(addresses, 1):
            try:
                await loop.create_connection(
                    protocol,
                    ip_address,
                    int(port),
                    ssl=self._ssl,
                    server_hostname=node_id if self._ssl is not None else None,
                    local_addr=(self._config.source_address, 0)
                    if self._config.source_address
                    else None,
                )
                return
            except OSError:
                if number == len(addresses):
                    raise


@lru_cache(maxsize=1024)
def _host(address: str) -> str:
    """Return `host:port` of an address, which may be a URL."""
    return address.rpartition("://")[2].rstrip("/")
