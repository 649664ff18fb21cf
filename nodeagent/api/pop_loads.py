"""Answers routers for the other nodes of the PoP: one node pings the others once for all routers.

Rule 1: a node is pinged at most once in REUSED_S, however many routers ask, and while a ping is
awaited no other is sent.
Rule 2: routers name the nodes, so what is remembered is bounded, and a node must prove its name.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import aiohttp
from aiohttp import web

from isochrone.service.network.http_server import read_body
from isochrone.wire import codec
from isochrone.wire.ids import NodeId
from isochrone.wire.peers.pop_loads import (
    QUERY_BYTES_MAX,
    LoadsQuery,
    NodeLoads,
    PopLoads,
    ProbedNode,
)

REUSED_S: Final = 0.25
"""A node's loads are reused for this long. Routers ask every two seconds each."""

SILENT_FOR_S: Final = 2.0
"""A node that did not answer is left out for this long, so that it does not delay the others."""

PING_TIMEOUT_S: Final = 0.5
"""Long for a ping within a PoP, and short against the two seconds that a router waits."""

BODY_TIMEOUT_S: Final = 2.0
NODES_MAX: Final = 1024
PINGS_MAX: Final = 128
"""Pings that are awaited at once, over all queries."""

_QUERY: Final = codec.decoder(LoadsQuery)

Ping = Callable[[NodeId, str], Awaitable[str]]
"""Pings a node by its id and address; returns the header with its loads."""


class _Pong(NamedTuple):
    at_s: float
    rtt_ms: float
    loads: str


class PopLoadReader:
    """Reads the loads of other nodes for routers."""

    def __init__(self, ping: Ping, clock: Callable[[], float]) -> None:
        """Ping nodes with `ping`. `clock` returns monotonic seconds."""
        self._ping = ping
        self._clock = clock
        self._pongs: dict[NodeId, _Pong] = {}
        self._silent_since_s: dict[NodeId, float] = {}
        self._reading: dict[NodeId, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(PINGS_MAX)

    async def handle(self, request: web.Request) -> web.Response:
        """Answer `POST /loads`."""
        body = await read_body(request, bytes_max=QUERY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        try:
            query: LoadsQuery = codec.decode(body, _QUERY, bytes_max=QUERY_BYTES_MAX)
        except codec.MalformedFrame as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        return web.Response(body=codec.encode(await self.read(query)))

    async def read(self, query: LoadsQuery) -> PopLoads:
        """Return the loads of the queried nodes that answer."""
        if len(self._pongs) + len(self._silent_since_s) > NODES_MAX:
            self._pongs.clear()
            self._silent_since_s.clear()
        pings = [ping for node in query.nodes if (ping := self._ping_if_due(node)) is not None]
        if pings:
            await asyncio.wait(pings)
        now_s = self._clock()
        return PopLoads(
            tuple(
                NodeLoads(node.node_id, 1000 * (now_s - pong.at_s), pong.rtt_ms, pong.loads)
                for node in query.nodes
                if (pong := self._pongs.get(node.node_id)) is not None
            )
        )

    def _ping_if_due(self, node: ProbedNode) -> asyncio.Task[None] | None:
        pong = self._pongs.get(node.node_id)
        if pong is not None and self._clock() - pong.at_s < REUSED_S:
            return None
        if self._clock() - self._silent_since_s.get(node.node_id, -SILENT_FOR_S) < SILENT_FOR_S:
            return None
        ping = self._reading.get(node.node_id)
        if ping is None:
            ping = asyncio.create_task(self._read_one(node))
            self._reading[node.node_id] = ping
        return ping

    async def _read_one(self, node: ProbedNode) -> None:
        try:
            async with self._slots:
                began_s = self._clock()
                async with asyncio.timeout(PING_TIMEOUT_S):
                    loads = await self._ping(node.node_id, node.address)
                now_s = self._clock()
                self._pongs[node.node_id] = _Pong(now_s, 1000 * (now_s - began_s), loads)
                self._silent_since_s.pop(node.node_id, None)
        except (aiohttp.ClientError, OSError, TimeoutError):
            # Left out of the answer: the router pings it itself.
            self._pongs.pop(node.node_id, None)
            self._silent_since_s[node.node_id] = self._clock()
        finally:
            del self._reading[node.node_id]
