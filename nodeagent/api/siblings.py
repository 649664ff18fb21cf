"""The doors of a PoP's other nodes: asked what waits there, and passed what begins sooner there.

Rule 1: nothing here may cost a request more than it can save: asking ends within ASK_TIMEOUT_S, and
who was silent or broke is left alone for a while.
Rule 2: what is passed on goes no further: its siblings are not told with it.
Rule 3: while an answer is waited for, its node is pinged: one that answers no ping, twice, is lost.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any, Final

import aiohttp

from isochrone.service.tls import node_url
from isochrone.wire import headers
from isochrone.wire.headers import Sibling
from isochrone.wire.ids import NodeId, ReplicaId

ASK_TIMEOUT_S: Final = 0.05
AS_A_NODE: Final = {headers.ROUTER: "a-node"}
"""Nothing there was sent by who asks so: all of it is others'."""

FRESH_S: Final = 0.01
SILENCE_S: Final = 5.0
PING_TIMEOUT_S: Final = 2.0
NODES_MAX: Final = 256
CONNECTIONS_MAX: Final = 1024


class SiblingLost(Exception):
    """This sibling does not answer in the place of the replica asked."""


class Siblings:
    """Other nodes of the PoP, as routers name them."""

    def __init__(
        self,
        context: SSLContext | None,
        clock: Callable[[], float],
        ping_timeout_s: float = PING_TIMEOUT_S,
    ) -> None:
        """Dial with `context`, where the doors are TLS. `clock` gives monotonic seconds."""
        self._context = context
        self._clock = clock
        self._ping_timeout_s = ping_timeout_s
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=ASK_TIMEOUT_S),
            auto_decompress=False,
        )
        self._told: dict[NodeId, tuple[float, Mapping[ReplicaId, headers.Load]]] = {}
        self._silent_until_s: dict[NodeId, float] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def unread(self, siblings: Sequence[Sibling]) -> dict[ReplicaId, int]:
        """Return how much waits to be read at each that tells in time."""
        nodes = {one.node_id: one for one in siblings if self._answers(one.node_id)}
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._loads(one)) for one in nodes.values()]
        names = {one.replica_id for one in siblings}
        return {
            name: load.others_unread
            for task in asked
            for name, load in task.result().items()
            # A node of an older release does not tell it, and is passed nothing.
            if name in names and load.others_unread >= 0
        }

    @asynccontextmanager
    async def answering(
        self, sibling: Sibling, path: str, body: bytes, sent: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Pass a request on and give the answer's head; raise SiblingLost where it is no answer."""
        try:
            answer = await self._head(sibling, path, body, sent)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._note_silence(sibling.node_id)
            raise SiblingLost(f"cannot reach {sibling.node_id}: {type(error).__name__}") from error
        async with answer:
            if answer.status >= 500 or headers.REFUSED in answer.headers:
                # What it told of its load is out of date.
                self._told.pop(sibling.node_id, None)
                raise SiblingLost(f"{sibling.replica_id} answered {answer.status}")
            yield answer

    async def _head(
        self, sibling: Sibling, path: str, body: bytes, sent: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Ask, and wait for as long as pings are answered; TimeoutError where they are not."""
        async with asyncio.timeout(None) as patience:
            watching = asyncio.create_task(self._watch(sibling, patience))
            try:
                return await self._request("POST", sibling, path, data=body, headers=sent)
            finally:
                watching.cancel()
                await asyncio.wait({watching})

    async def _watch(self, sibling: Sibling, patience: asyncio.Timeout) -> None:
        """End `patience` once two pings in a row go unanswered."""
        missed = 0
        while missed < 2:
            if not missed:
                await asyncio.sleep(self._ping_timeout_s)
            try:
                await self._ping(sibling, self._ping_timeout_s)
                missed = 0
            except (aiohttp.ClientError, OSError, TimeoutError):
                missed += 1
        patience.reschedule(asyncio.get_running_loop().time())

    async def _ping(self, sibling: Sibling, timeout_s: float) -> Mapping[ReplicaId, headers.Load]:
        """Return the loads of the replicas on a sibling's node."""
        async with asyncio.timeout(timeout_s):
            async with await self._request("GET", sibling, "/ping", headers=AS_A_NODE) as pong:
                return headers.parse_loads(pong.headers.get(headers.LOADS, ""))

    async def _loads(self, sibling: Sibling) -> Mapping[ReplicaId, headers.Load]:
        at_s, loads = self._told.get(sibling.node_id, (-FRESH_S, {}))
        if self._clock() - at_s < FRESH_S:
            return loads
        try:
            loads = await self._ping(sibling, ASK_TIMEOUT_S)
        except (aiohttp.ClientError, OSError, TimeoutError):
            self._note_silence(sibling.node_id)
            return {}
        self._told[sibling.node_id] = (self._clock(), loads)
        return loads

    def _answers(self, node_id: NodeId) -> bool:
        if len(self._told) + len(self._silent_until_s) > NODES_MAX:
            # They are the routers' word: nodes come and go, and a table of them is bounded.
            self._told.clear()
            self._silent_until_s.clear()
        return self._silent_until_s.get(node_id, 0.0) <= self._clock()

    def _note_silence(self, node_id: NodeId) -> None:
        self._told.pop(node_id, None)
        self._silent_until_s[node_id] = self._clock() + SILENCE_S

    async def _request(
        self, method: str, sibling: Sibling, path: str, **sent: Any
    ) -> aiohttp.ClientResponse:
        """Ask the node itself: whoever is met at its address, or told of by it, is another."""
        return await self._http.request(
            method,
            f"{node_url(sibling.address, self._context)}{path}",
            server_hostname=sibling.node_id,
            ssl=self._context or True,
            allow_redirects=False,
            **sent,
        )
