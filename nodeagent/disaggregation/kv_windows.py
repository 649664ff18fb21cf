"""Windows of this node: memory through which its engines exchange KV blocks with each other, and
with other nodes through their agents.

A transfer between two replicas of one deployment on this node gets the lease of a window that the
sending engine fills and the receiving one reads. If the replicas are on two nodes, the agent at
each end shares a window with its own engine: one writes blocks to the other node from memory that
its engine fills, and the other puts them into memory that its engine reads.

The request for blocks goes through the data plane like any other, so that it is admitted, counted
and cancelled like any other. Only the contents of blocks take the shorter way.

Rule 1: a lease is relayed only to the engine that it was issued for: what other nodes name is no
lease.
Rule 2: after a transfer through a window has failed, that engine's blocks come through the sockets
for a while.
Rule 3: an engine of a release that knows no such windows has no socket of that name: its blocks go
through the sockets.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
from aiohttp import web

from isochrone.service.windows.received_window import ReceivedWindow, take_window
from isochrone.service.windows.shared_window import MappedWindows
from isochrone.service.windows.window_pool import WindowPool
from isochrone.wire.ids import DeploymentId, ReplicaId
from isochrone.wire.kv import kv_transfer
from nodeagent import metrics
from nodeagent.decide.pauses import Pauses
from nodeagent.disaggregation.window_filling import WindowFiller
from nodeagent.managed_replica import ManagedReplica

PAUSE_S: Final = 30.0
PAUSES_MAX: Final = 256
KEPT_MAX: Final = 8
"""The windows of engines that the agent keeps mapped."""


class EngineBody(NamedTuple):
    """The request to the receiving engine: the stream of blocks, and its headers."""

    pieces: AsyncIterator[bytes]
    headers: Mapping[str, str]


class WindowLease(NamedTuple):
    """The lease of one transfer, and the sending engine's socket; "" for a transfer without.

    Without a lease, the agent may fill a window of its `pool` for the receiving engine.
    """

    name: str = ""
    socket: str = ""
    record_failure: Callable[[], None] = lambda: None
    """Called if the blocks have not all arrived."""
    pool: WindowPool | None = None
    deployment: DeploymentId = DeploymentId("")
    """That of the receiving engine: a window is filled again for engines of the same one only."""
    mapped: MappedWindows | None = None

    def answered_with(self, answered: Mapping[str, str]) -> "WindowLease":
        """Return the lease as the headers of the sender's answer leave it: it may have no window
        free, and then sends the blocks through its socket."""
        return WindowLease() if answered.get(kv_transfer.WINDOW) == kv_transfer.NO_WINDOW else self

    @property
    def to_sender(self) -> dict[str, str]:
        """The headers of the request for blocks."""
        return {kv_transfer.WINDOW: self.name} if self.name else {}

    async def take(self) -> ReceivedWindow:
        """Take the window for the agent itself. Raises WindowLost."""
        window = await take_window(self.socket, self.name, self.mapped, on_loop=True)
        metrics.KV_WINDOW_TRANSFERS.labels("sent").inc()
        return window

    @asynccontextmanager
    async def passed_on(
        self,
        answer: aiohttp.ClientResponse,
        pieces: AsyncIterator[bytes],
        block_bytes: int,
    ) -> AsyncIterator[EngineBody]:
        """Yield what the receiving engine is sent of an answer, whose body is `pieces`."""
        if self.name:
            named = {kv_transfer.WINDOW: self.name, kv_transfer.WINDOW_SOCKET: self.socket}
            yield EngineBody(pieces, {**length_header(answer), **named})
            return
        if self.pool is None or block_bytes <= 0:
            yield EngineBody(pieces, length_header(answer))
            return
        name = secrets.token_hex(16)
        async with self.pool.lease(name, block_bytes, self.deployment) as window:
            if window is None:
                yield EngineBody(pieces, length_header(answer))
                return
            metrics.KV_WINDOW_TRANSFERS.labels("received").inc()
            path = str(self.pool.path)
            named = {kv_transfer.WINDOW: name, kv_transfer.WINDOW_SOCKET: path}
            yield EngineBody(WindowFiller(window).fill(pieces), named)


class WindowLeases:
    """The leases of one node, and the windows that its agent fills."""

    def __init__(
        self,
        find_replica: Callable[[ReplicaId], ManagedReplica | None],
        clock: Callable[[], float],
        folder: Path,
    ) -> None:
        """`find_replica` returns a replica of this node. `clock` returns monotonic seconds. The
        agent's socket for windows is in `folder`."""
        self._find_replica = find_replica
        self._clock = clock
        self._issued: dict[str, ReplicaId] = {}
        self._pauses: Pauses[ReplicaId] = Pauses(PAUSE_S, PAUSES_MAX)
        self.pool = WindowPool(folder / kv_transfer.WINDOW_SOCKET_NAME)
        self._mapped = MappedWindows(KEPT_MAX)

    def attach(self, app: web.Application) -> None:
        """Listen for engines while the application runs."""

        async def start(_: web.Application) -> None:
            await self.pool.start()

        async def close(_: web.Application) -> None:
            await self.pool.close()

        app.on_startup.append(start)
        app.on_cleanup.append(close)

    @contextmanager
    def lease(self, source: ReplicaId, receiver: ManagedReplica) -> Iterator[WindowLease]:
        """Issue a lease for one transfer, if both replicas are here and of one deployment."""
        sender = self._find_replica(source)
        is_same = sender is not None and sender.spec.deployment_id == receiver.spec.deployment_id
        socket = self._socket_of(sender) if is_same else ""
        if not socket:
            pool = self.pool if self._socket_of(receiver) else None
            failure = self._failure_of(receiver.spec.replica_id)
            deployment = receiver.spec.deployment_id
            yield WindowLease("", "", failure, pool, deployment)
            return
        lease = WindowLease(secrets.token_hex(16), socket, self._failure_of(source))
        self._issued[lease.name] = source
        try:
            yield lease
        finally:
            del self._issued[lease.name]

    def agent_lease(self, source: ReplicaId) -> WindowLease:
        """Return a lease for the agent itself, which sends the blocks of `source` to another
        node."""
        socket = self._socket_of(self._find_replica(source))
        if not socket:
            return WindowLease()
        name, failure = secrets.token_hex(16), self._failure_of(source)
        return WindowLease(name, socket, failure, mapped=self._mapped)

    def is_issued(self, lease: str, replica: ReplicaId) -> bool:
        """Return whether this node issued the lease with which blocks of a replica are fetched."""
        return bool(lease) and self._issued.get(lease) == replica

    def _failure_of(self, replica: ReplicaId) -> Callable[[], None]:
        return partial(self._record_failure, replica)

    def _record_failure(self, replica: ReplicaId) -> None:
        self._pauses.begin(replica, self._clock())

    def _socket_of(self, replica: ManagedReplica | None) -> str:
        """Return the socket at which the engine of a replica gives windows away; "" for none."""
        engine = replica.engine if replica is not None else None
        if replica is None or engine is None:
            return ""
        is_paused = self._pauses.is_paused(replica.spec.replica_id, self._clock())
        if is_paused or not (engine.sends_kv and engine.record.command.socket):
            return ""
        path = Path(engine.record.command.socket).with_name(kv_transfer.WINDOW_SOCKET_NAME)
        return str(path) if path.is_socket() else ""


def length_header(answer: aiohttp.ClientResponse, more_bytes: int = 0) -> dict[str, str]:
    """Return the Content-Length of an answer's body that is passed on after `more_bytes`.

    Without it the body is copied into chunks.
    """
    length = answer.content_length
    return {} if length is None else {"content-length": str(length + more_bytes)}
