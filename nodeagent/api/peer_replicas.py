"""Client of the data-plane servers of the PoP's other nodes: reads their queues, relays requests.

Rule 1: a handoff must not cost more time than it can save. A probe ends within PROBE_TIMEOUT_S, or
a share of the time that a prefill leg can save. A node that is silent or fails is not tried again
for BACKOFF_S.
Rule 2: a request is handed off at most once: it is relayed without its list of peer replicas.
Rule 3: while an answer is awaited, its node is pinged. After two unanswered pings in a row the
replica counts as lost.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any, Final

import aiohttp

from isochrone.sequence_wait import sequence_wait_ms
from isochrone.service.network.name_cache import CachedResolver, NameCache
from isochrone.service.trust.tls import node_url
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent.api.request.answer_relay import request_data
from nodeagent.decide.pauses import Pauses
from nodeagent.decide.requests.handoff import PeerReplicaLost, queued_before
from nodeagent.host.interim_answers import with_few_interim_answers

PROBE_TIMEOUT_S: Final = 0.05
PROBE_HEADERS: Final = {headers.ROUTER: "a-node"}
"""A name that no router has, so that the reported load counts all routers' requests as others'."""

LOAD_MAX_AGE_S: Final = 0.01
"""Loads are reused for this long: requests that arrive together share one probe."""

BACKOFF_S: Final = 5.0
PING_TIMEOUT_S: Final = 2.0
MISSED_PINGS_MAX: Final = 2
NODES_MAX: Final = 256
CONNECTIONS_MAX: Final = 1024
CONNECTIONS_PER_NODE_MAX: Final = 512
"""A node that answers nothing leaves connections to the others."""


class PeerReplicaClient:
    """Connects to the nodes that routers name as holders of peer replicas."""

    def __init__(
        self,
        context: SSLContext | None,
        clock: Callable[[], float],
        ping_timeout_s: float = PING_TIMEOUT_S,
    ) -> None:
        """Use TLS if there is a `context`. `clock` returns monotonic seconds."""
        self._context = context
        self._clock = clock
        self._ping_timeout_s = ping_timeout_s
        self._names = NameCache()
        self._http = aiohttp.ClientSession(
            connector=with_few_interim_answers(
                aiohttp.TCPConnector(
                    limit=CONNECTIONS_MAX,
                    limit_per_host=CONNECTIONS_PER_NODE_MAX,
                    resolver=CachedResolver(self._names),
                    use_dns_cache=False,
                )
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PROBE_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        # By node: when its loads were read, and the loads.
        self._loads: dict[NodeId, tuple[float, Mapping[ReplicaId, headers.ReportedLoad]]] = {}
        self._pauses: Pauses[NodeId] = Pauses(BACKOFF_S, NODES_MAX)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()
        await self._names.aclose()

    async def queued_tokens(
        self, replicas: Sequence[PeerReplica], timeout_s: float = 0.0
    ) -> dict[ReplicaId, int]:
        """Return the tokens queued at each replica whose node answers in time, with other waits.

        The time is `timeout_s`, or PROBE_TIMEOUT_S if that is longer.
        """
        timeout_s = max(timeout_s, PROBE_TIMEOUT_S)
        by_node = {peer.node_id: peer for peer in replicas if self._may_probe(peer.node_id)}
        async with asyncio.TaskGroup() as tasks:
            probes = {
                node_id: tasks.create_task(self._node_loads(peer, timeout_s))
                for node_id, peer in by_node.items()
            }
        loads = {
            # A node says nothing about the replicas of others.
            peer: probes[peer.node_id].result().get(peer.replica_id)
            for peer in replicas
            if peer.node_id in probes
        }
        return {
            peer.replica_id: _queued_before(peer, load)
            for peer, load in loads.items()
            # A node of an older release reports -1 and gets no handoffs.
            if load is not None and load.others_pending_prefill_tokens >= 0
        }

    @asynccontextmanager
    async def relay(
        self, peer: PeerReplica, path: str, body: bytes, sent: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Relay a request and yield its answer. Raises PeerReplicaLost if there is none to use."""
        try:
            answer = await self._answer_head(peer, path, body, sent)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._back_off(peer.node_id)
            raise PeerReplicaLost(
                f"cannot reach node {peer.node_id}: {type(error).__name__}"
            ) from error
        async with answer:
            # A request that may have made the peer's engine fail must not be tried here too.
            is_lost = answer.status >= 500 and headers.ENGINE_LOST not in answer.headers
            if is_lost or headers.REFUSED in answer.headers:
                # The load that led to this handoff is out of date.
                self._loads.pop(peer.node_id, None)
                raise PeerReplicaLost(
                    f"cannot hand off to {peer.replica_id}: it answered {answer.status}"
                )
            yield answer

    async def _answer_head(
        self, peer: PeerReplica, path: str, body: bytes, sent: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a request and wait for the head of its answer for as long as pings are answered.

        Raises TimeoutError if they are not.
        """
        async with asyncio.timeout(None) as timeout:
            pinging = asyncio.create_task(self._expire_when_silent(peer, timeout))
            try:
                return await self._request(
                    "POST", peer, path, data=request_data(body), headers=sent
                )
            finally:
                pinging.cancel()
                await asyncio.wait({pinging})

    async def _expire_when_silent(self, peer: PeerReplica, timeout: asyncio.Timeout) -> None:
        """Ping the node, and expire `timeout` once MISSED_PINGS_MAX pings in a row are missed."""
        missed = 0
        while missed < MISSED_PINGS_MAX:
            if not missed:
                await asyncio.sleep(self._ping_timeout_s)
            try:
                await self._ping(peer, self._ping_timeout_s)
                missed = 0
            except (aiohttp.ClientError, OSError, TimeoutError):
                missed += 1
        timeout.reschedule(asyncio.get_running_loop().time())

    async def _ping(
        self, peer: PeerReplica, timeout_s: float
    ) -> Mapping[ReplicaId, headers.ReportedLoad]:
        """Return the loads of all replicas on the peer replica's node."""
        async with asyncio.timeout(timeout_s):
            return headers.parse_loads(await self.read_loads(peer.node_id, peer.address))

    async def read_loads(self, node_id: NodeId, address: str) -> str:
        """Ping a node; return the header with the loads of its replicas."""
        async with self._http.get(
            f"{node_url(address, self._context)}/ping",
            headers=PROBE_HEADERS,
            server_hostname=node_id,
            ssl=self._context or True,
            allow_redirects=False,
        ) as pong:
            return pong.headers.get(headers.LOADS, "")

    @asynccontextmanager
    async def socket(
        self, node_id: NodeId, address: str, path: str, heartbeat_s: float
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket to a node and yield it. Raises aiohttp.ClientError or OSError."""
        async with self._http.ws_connect(
            f"{node_url(address, self._context)}{path}",
            server_hostname=node_id,
            ssl=self._context or True,
            heartbeat=heartbeat_s,
        ) as socket:
            yield socket

    async def _node_loads(
        self, peer: PeerReplica, timeout_s: float
    ) -> Mapping[ReplicaId, headers.ReportedLoad]:
        """Return the loads on the peer replica's node, {} if it does not answer in time."""
        read_s, loads = self._loads.get(peer.node_id, (-LOAD_MAX_AGE_S, {}))
        if self._clock() - read_s < LOAD_MAX_AGE_S:
            return loads
        try:
            loads = await self._ping(peer, timeout_s)
        except (aiohttp.ClientError, OSError, TimeoutError):
            self._back_off(peer.node_id)
            return {}
        self._loads[peer.node_id] = (self._clock(), loads)
        return loads

    def _may_probe(self, node_id: NodeId) -> bool:
        if len(self._loads) > NODES_MAX:
            # Routers name the nodes, and nodes come and go, so the table is bounded.
            self._loads.clear()
        return not self._pauses.is_paused(node_id, self._clock())

    def _back_off(self, node_id: NodeId) -> None:
        self._loads.pop(node_id, None)
        self._pauses.begin(node_id, self._clock())

    async def _request(
        self, method: str, peer: PeerReplica, path: str, **options: Any
    ) -> aiohttp.ClientResponse:
        """Send a request to the node that proves to be `peer.node_id`; redirects are refused."""
        return await self._http.request(
            method,
            f"{node_url(peer.address, self._context)}{path}",
            server_hostname=peer.node_id,
            ssl=self._context or True,
            allow_redirects=False,
            **options,
        )


def _queued_before(replica: PeerReplica, load: headers.ReportedLoad) -> int:
    """Return the tokens queued at a replica, with its other waits, as it answered a ping."""
    clients = load.running - load.batch_items
    wait_ms = sequence_wait_ms(clients, load.sequences_max, load.sequence_ms)
    return queued_before(replica, load.others_pending_prefill_tokens, load.wake_ms, wait_ms)
