"""Connects this node's engines to the master of their PoP's store of KV, wherever it runs.

Engines know one address, on loopback. The agent relays each connection to the master: its own, or
that of the node that the assignment names, over the nodes' API and its TLS. So engines keep
running when the master moves: their connections are cut, and the next ones reach the new place.

Rule: what arrives from another node goes to this node's own master only, so that no connection
goes in circles while nodes have different assignments.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import StoreMasterPlace
from nodeagent.api.peer_replicas import PeerReplicaClient

log = logging.getLogger(__name__)

MASTER_PATH: Final = "/kv/store-master"
CONNECTIONS_MAX: Final = 256
READ_BYTES: Final = 64 * 1024
MESSAGE_BYTES_MAX: Final = 1024 * 1024
HEARTBEAT_S: Final = 5.0
"""A node that does not answer a ping within half of this has lost its connections."""

Dial = Callable[[StoreMasterPlace], AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse]]
"""Connects to MASTER_PATH of another node."""


def dial_through(peers: PeerReplicaClient) -> Dial:
    """Return how to reach other nodes: over their API, as for peer replicas."""
    return lambda place: peers.socket(place.node_id, place.address, MASTER_PATH, HEARTBEAT_S)


@dataclass(eq=False)
class StoreRelay:
    """Listens on loopback for this node's engines, and on the nodes' API for other agents.

    `local_port` is that of this node's own master, 0 if it runs none.
    """

    node_id: NodeId
    place: Callable[[], StoreMasterPlace | None]
    local_port: Callable[[], int]
    dial: Dial
    _relayed: dict[asyncio.Task[None], StoreMasterPlace] = field(default_factory=dict, init=False)

    def attach(self, app: web.Application) -> None:
        """Add the route for other nodes."""
        app.router.add_get(MASTER_PATH, self._serve_node)

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[None]:
        """Accept connections of engines on loopback."""
        server = await asyncio.start_server(self._serve_engine, "127.0.0.1", port)
        try:
            yield
        finally:
            server.close()
            await self._cut(list(self._relayed))

    async def drop_stale(self) -> int:
        """Cut connections to a master that has moved; return how many."""
        place = self.place()
        stale = [task for task, target in self._relayed.items() if target != place]
        await self._cut(stale)
        return len(stale)

    async def _cut(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve_engine(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        place, task = self.place(), asyncio.current_task()
        try:
            if place is None or task is None or len(self._relayed) >= CONNECTIONS_MAX:
                return
            self._relayed[task] = place
            if place.node_id == self.node_id:
                await self._relay_here(reader, writer)
            else:
                async with self.dial(place) as socket:
                    await _relay_socket(socket, reader, writer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.info("cannot reach the KV store's master", extra={"fields": {"reason": str(error)}})
        except asyncio.CancelledError:
            # The connection ends here; the server's task has no one to tell.
            log.info("the KV store's master moved: connection cut")
        finally:
            if task is not None:
                self._relayed.pop(task, None)
            writer.close()

    async def _relay_here(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = self.local_port()
        if not port:
            return
        answers, requests = await asyncio.open_connection("127.0.0.1", port)
        try:
            await _first_of(_copy(reader, requests), _copy(answers, writer))
        finally:
            requests.close()

    async def _serve_node(self, request: web.Request) -> web.StreamResponse:
        port = self.local_port()
        if not port:
            raise ApiError(ErrorCode.NOT_FOUND, "cannot share KV: its master does not run here")
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=MESSAGE_BYTES_MAX)
        await socket.prepare(request)
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await _relay_socket(socket, reader, writer)
            finally:
                writer.close()
        await socket.close()
        return socket


async def _relay_socket(
    socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Relay between a WebSocket of binary messages and a TCP connection, until either ends."""

    async def to_socket() -> None:
        while data := await reader.read(READ_BYTES):
            await socket.send_bytes(data)

    async def from_socket() -> None:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            writer.write(message.data)
            await writer.drain()

    await _first_of(to_socket(), from_socket())


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()


async def _first_of(*directions: Coroutine[None, None, None]) -> None:
    """Run both directions of a connection until one ends; then end the other."""
    tasks = [asyncio.create_task(direction) for direction in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            # A connection that broke has ended, too.
            with suppress(asyncio.CancelledError, OSError):
                task.result()
