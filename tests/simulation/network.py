"""Control connections between simulated processes: WebSockets without sockets.

Within one direction of one connection frames keep their order, as in TCP; everything else may
overtake. While a direction is cut, its frames wait, and the pings notice it after a while.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import WSMessage, WSMsgType

from tests.simulation.event_loop import CURRENT, SimLoop, SimProcess

PING_NOTICES_S: Final = (11.0, 16.0)
"""A ping every ten seconds, and five seconds for its answer."""

CONNECT_TIMEOUT_S: Final = 5.0
FRAME_BYTES_MAX: Final = 32 * 1024
"""A receiver closes the connection at a longer frame, as the real ones do at 16 MiB."""

PART_BYTES_MAX: Final = 8 * 1024
"""Parts of tables are smaller by as much."""

CLOSED: Final = WSMessage(WSMsgType.CLOSED, None, None)

Accept = Callable[["ServerEnd", str], Awaitable[object]]
"""Serves a new connection; called with the connection's end and the path of its URL."""


class End:
    """One end of a connection, with the part of aiohttp's interface that is used."""

    def __init__(self, connection: "SimConnection", process: SimProcess) -> None:
        self.process = process
        self.closed = False
        self.close_code = 1006
        self.inbox: asyncio.Queue[WSMessage] = asyncio.Queue()
        self.delivered_at = 0.0
        self._connection = connection

    async def receive(self) -> WSMessage:
        if self.closed and self.inbox.empty():
            return CLOSED
        message = await self.inbox.get()
        if message is CLOSED:
            self.closed = True
        return message

    async def send_bytes(self, frame: bytes) -> None:
        if self.closed or not self.process.is_alive:
            raise ConnectionResetError("cannot write to closing transport")
        self._connection.send(self, WSMessage(WSMsgType.BINARY, bytes(frame), None))

    async def close(self) -> None:
        self._connection.close(self)

    def exception(self) -> None:
        return None


class ServerEnd(End):
    """The scheduler's end, in place of its ControlSocket."""

    def __init__(self, connection: "SimConnection", process: SimProcess) -> None:
        super().__init__(connection, process)
        self.upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def prepare(self, request: object) -> None:
        self._connection.answer_upgrade()

    def refuse(self) -> None:
        """Let the client's attempt fail, if it still waits for an answer."""
        if not self.upgraded.done():
            self.upgraded.set_exception(ConnectionResetError("the server closed the connection"))

    def accept_large_messages(self, request: object) -> None:
        """There is no limit here."""


class SimConnection:
    """A connection from a peer to a scheduler."""

    def __init__(self, network: "Network", client: SimProcess, server: SimProcess) -> None:
        self._network = network
        self.client, self.server = End(self, client), ServerEnd(self, server)
        self.waiting: list[tuple[End, WSMessage]] = []
        """Frames that were sent while their direction is cut."""
        self.is_checked = False

    def other(self, end: End) -> End:
        return self.server if end is self.client else self.client

    def answer_upgrade(self) -> None:
        """Answer the client's request for a WebSocket, as soon as the answer gets through."""
        network, server = self._network, self.server
        if network.is_cut(server.process.name, self.client.process.name):
            network.loop.after(1.0, self.answer_upgrade)
        elif not server.upgraded.done():
            server.upgraded.set_result(None)

    def send(self, end: End, message: WSMessage) -> None:
        """Deliver a message to the other end after the latency, in order."""
        loop, target = self._network.loop, self.other(end)
        at = max(loop.now_s + self._network.latency_s(), target.delivered_at + 1e-6)
        target.delivered_at = at
        loop.after(at - loop.now_s, self._deliver, end, message)

    def _deliver(self, end: End, message: WSMessage) -> None:
        target = self.other(end)
        is_cut = self._network.is_cut(end.process.name, target.process.name)
        if is_cut or any(sender is end for sender, _ in self.waiting):
            self.waiting.append((end, message))
            if is_cut:
                self.check_pings()
        elif not target.closed and target.process.is_alive:
            if message is not CLOSED and len(message.data) > FRAME_BYTES_MAX:
                self.close(target)
            else:
                target.inbox.put_nowait(message)

    def deliver_waiting(self) -> None:
        """Deliver what waited, after a cut has ended."""
        waiting, self.waiting = self.waiting, []
        for end, message in waiting:
            self._deliver(end, message)

    def check_pings(self) -> None:
        """Close both ends if a cut or a pause lasts as long as pings take to notice."""
        if not self.is_checked:
            self.is_checked = True
            delay_s = self._network.rng.uniform(*PING_NOTICES_S)
            self._network.loop.after(delay_s, self._check)

    def _check(self) -> None:
        self.is_checked = False
        if self.client.closed and self.server.closed:
            return
        client, server = self.client.process, self.server.process
        is_cut = self._network.is_cut(client.name, server.name)
        is_cut = is_cut or self._network.is_cut(server.name, client.name)
        if is_cut or client.is_paused or server.is_paused or not server.is_alive:
            for end in (self.client, self.server):
                if not end.closed:
                    end.inbox.put_nowait(CLOSED)
                    end.closed = True
            self._network.forget(self)

    def close(self, end: End) -> None:
        """Close one end; the other learns it, if a line is left."""
        if not end.closed:
            end.closed = True
            end.inbox.put_nowait(CLOSED)
            self.send(end, CLOSED)


class Network:
    """All hosts, by the name of their process; a pair in `cut` loses what goes from a to b."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.slow_s = 0.0
        self.servers: dict[str, tuple[SimProcess, Accept]] = {}
        self._cut: set[tuple[str, str]] = set()
        self._connections: list[SimConnection] = []

    def latency_s(self) -> float:
        """Draw the latency of one message."""
        return self.rng.uniform(0.001, 0.04) + self.rng.random() * self.slow_s

    def is_cut(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) in self._cut

    def cut(self, sender: str, receiver: str) -> None:
        """Let nothing pass from one host to another."""
        self._cut.add((sender, receiver))
        for connection in list(self._connections):
            connection.check_pings()

    def heal(self, sender: str = "", receiver: str = "") -> None:
        """End one cut, or all."""
        self._cut = {pair for pair in self._cut if sender and pair != (sender, receiver)}
        for connection in list(self._connections):
            connection.deliver_waiting()

    def paused(self, process: SimProcess) -> None:
        """Let the pings of a paused process's peers go unanswered."""
        for connection in list(self._connections):
            if process in (connection.client.process, connection.server.process):
                connection.check_pings()

    def crashed(self, process: SimProcess) -> None:
        """Reset the connections of a process that has crashed."""
        for connection in list(self._connections):
            for end in (connection.client, connection.server):
                if end.process is process:
                    connection.close(end)
            if connection.server.process is process:
                connection.server.refuse()

    def forget(self, connection: SimConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    async def connect(self, url: str) -> SimConnection:
        """Open a connection from the running process; raises OSError or TimeoutError."""
        client = CURRENT.get()
        assert client is not None
        host = urlsplit(url).hostname or ""
        await asyncio.sleep(self.latency_s())
        if self.is_cut(client.name, host) or self.is_cut(host, client.name):
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            raise TimeoutError("cannot connect in time")
        server = self.servers.get(host)
        if server is None or not server[0].is_alive or not client.is_alive:
            raise ConnectionRefusedError(f"cannot connect to {host}")
        process, accept = server
        connection = SimConnection(self, client, process)
        self._connections.append(connection)
        # The kernel of a paused process accepts connections, too: nothing answers on them then.
        process.spawn(self._serve(connection, accept, urlsplit(url).path))
        await connection.server.upgraded
        return connection

    async def _serve(self, connection: SimConnection, accept: Accept, path: str) -> None:
        try:
            await accept(connection.server, path)
        finally:
            connection.server.refuse()
            connection.close(connection.server)


class SimSession:
    """In place of aiohttp.ClientSession."""

    network: Network

    def __init__(self, **options: object) -> None:
        """Take a real session's options."""

    async def __aenter__(self) -> "SimSession":
        return self

    async def __aexit__(self, *error: object) -> None:
        """There is nothing to close."""

    @asynccontextmanager
    async def ws_connect(self, url: str, **options: object) -> AsyncIterator[End]:
        connection = await self.network.connect(url)
        try:
            yield connection.client
        finally:
            connection.close(connection.client)
            self.network.forget(connection)


def simulated_aiohttp() -> SimpleNamespace:
    """Return aiohttp with simulated connections."""
    names: dict[str, Any] = {
        **vars(aiohttp), "ClientSession": SimSession, "TCPConnector": SimpleNamespace,
    }  # fmt: skip
    return SimpleNamespace(**names)
