"""What one scheduler process holds in memory: its lease, who is connected, what it published.

Everything here can be lost: it is rebuilt from Postgres and from what peers say again.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import msgspec
from aiohttp import web

from isochrone.service.identity import Authority
from isochrone.wire import codec
from isochrone.wire.control import PeerRole, Refused, RefusedCode
from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation, NodeId, PopId
from isochrone.wire.report import Pulse
from isochrone.wire.routes import RouteTable
from scheduler import metrics
from scheduler.config import SchedulerConfig
from scheduler.decide.cluster import ClusterState, DemandRate
from scheduler.decide.demand import raised
from scheduler.store.cluster import read_cluster
from scheduler.store.lease import MARGIN_S, Lease
from scheduler.store.nodes import read_assignment
from scheduler.store.pool import Connection, Pool, using

log = logging.getLogger(__name__)

OUTBOX_MAX: Final = 64
PULSES_BUFFERED_MAX: Final = 50_000


class NotActing(Exception):
    """Another scheduler acts, or the database cannot be asked."""


class Connected:
    """One peer's open conversation: a bounded outbox, and one task that empties it."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        *,
        role: PeerRole,
        name: str,
        pop: PopId,
        boot_id: BootId,
    ) -> None:
        self.role = role
        self.name = name
        self.pop = pop
        self.boot_id = boot_id
        self.generation = Generation(0)
        self.has_reported = False
        self._socket = socket
        self._transport = transport
        self._outbox: asyncio.Queue[msgspec.Struct] = asyncio.Queue(OUTBOX_MAX)

    def tell(self, message: msgspec.Struct) -> None:
        """Queue a message; a peer that takes nothing for long is cut, and will dial again."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("peer takes no messages", extra={"fields": {"peer": self.name}})
            if self._transport is not None:
                self._transport.abort()

    async def empty_outbox(self) -> None:
        """Send what is queued, for as long as the conversation lasts."""
        while True:
            message = await self._outbox.get()
            await self._socket.send_bytes(codec.encode(message))

    async def end(self, refused: Refused) -> None:
        """Say why, and close."""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(2.0):
                await self._socket.send_bytes(codec.encode(refused))
                await self._socket.close()


class Acting:
    """The process's state. `is_acting` is judged by the monotonic clock passed in."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        pool: Pool,
        reserved: Pool,
        authority: Authority,
        cluster_id: ClusterId,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.holder = f"{config.name}/{secrets.token_hex(4)}"
        self.pool = pool
        self.reserved = reserved
        self.authority = authority
        self.cluster_id = cluster_id
        self.clock = clock
        self.table: RouteTable | None = None
        self.frozen = ""
        self.unmet: tuple[tuple[str, str], ...] = ()
        self.foretold: list[DemandRate] = []
        self.peers: dict[tuple[PeerRole, str], Connected] = {}
        self.nudge_place: Callable[[], None] = _nobody
        self.nudge_publish: Callable[[], None] = _nobody
        self._lease: Lease | None = None
        self._renewed_at = 0.0
        self._trusted_until = 0.0
        self._heard: dict[NodeId, float] = {}
        self._pulses: dict[NodeId, Pulse] = {}

    @property
    def is_acting(self) -> bool:
        """Say whether this process may decide now."""
        return self._lease is not None and self.clock() < self._trusted_until

    @property
    def epoch(self) -> Epoch:
        """Return the epoch to write with, or raise NotActing."""
        if self._lease is None or not self.is_acting:
            raise NotActing("this scheduler is not acting")
        return self._lease.epoch

    @property
    def acting_for_s(self) -> float:
        """Return how long this process has acted."""
        if self._lease is None:
            return 0.0
        return self._lease.acting_for_s + self.clock() - self._renewed_at

    def renewed(self, lease: Lease, asked_at: float) -> bool:
        """Take a lease that was asked for at `asked_at`; say whether its epoch is a new one."""
        is_new = self._lease is None or self._lease.epoch != lease.epoch
        self._lease = lease
        self._renewed_at = asked_at
        self._trusted_until = asked_at + self.config.lease_ttl_s - MARGIN_S
        metrics.ACTING.set(1)
        metrics.EPOCH.set(lease.epoch)
        if is_new:
            self.table = None
            self.foretold = []
            for peer in self.peers.values():
                peer.has_reported = False
            log.info("acting", extra={"fields": {"epoch": lease.epoch}})
        return is_new

    async def step_down(self) -> None:
        """Another scheduler acts: send every peer there."""
        if self._lease is not None:
            log.warning("stepping down", extra={"fields": {"epoch": self._lease.epoch}})
        self._lease = None
        metrics.ACTING.set(0)
        refused = Refused(code=RefusedCode.NOT_ACTING, reason="another scheduler acts now")
        peers, self.peers = list(self.peers.values()), {}
        self._heard.clear()
        self._pulses.clear()
        async with asyncio.TaskGroup() as tasks:
            for peer in peers:
                tasks.create_task(peer.end(refused))

    def add_peer(self, peer: Connected) -> Connected | None:
        """Enter a conversation and return the one it takes the place of, if any."""
        before = self.peers.get((peer.role, peer.name))
        self.peers[peer.role, peer.name] = peer
        self._count_peers()
        return before

    def remove_peer(self, peer: Connected) -> None:
        """Forget a conversation that ended, unless a newer one took its place."""
        if self.peers.get((peer.role, peer.name)) is peer:
            del self.peers[peer.role, peer.name]
        self._count_peers()

    def agent(self, node_id: NodeId) -> Connected | None:
        """Return the conversation with a node."""
        return self.peers.get((PeerRole.AGENT, node_id))

    def routers(self) -> list[Connected]:
        """Return the conversations with routers."""
        return [peer for peer in self.peers.values() if peer.role is PeerRole.ROUTER]

    def agents(self) -> list[Connected]:
        """Return the conversations with nodes."""
        return [peer for peer in self.peers.values() if peer.role is PeerRole.AGENT]

    async def send_assignment(self, peer: Connected) -> None:
        """Tell a node everything it should run."""
        async with using(self.pool) as connection:
            peer.tell(
                await read_assignment(
                    connection,
                    NodeId(peer.name),
                    cluster_id=self.cluster_id,
                    epoch=self.epoch,
                )
            )

    async def picture(
        self, connection: Connection, acting_for_s: float | None = None
    ) -> ClusterState:
        """Return what placement decides from: the fleet, and demand raised to what is foretold."""
        cluster = await read_cluster(
            connection,
            acting_for_s=self.acting_for_s if acting_for_s is None else acting_for_s,
            silent_s=self.silent_s(),
        )
        live = {deployment.deployment_id for deployment in cluster.deployments}
        foretold = [row for row in self.foretold if row.deployment_id in live]
        return msgspec.structs.replace(cluster, demand=raised(cluster.demand, foretold))

    def heard_from(self, node_id: NodeId, pulse: Pulse | None = None) -> None:
        """Note a sign of life; a pulse also waits to be written."""
        self._heard[node_id] = self.clock()
        if pulse is not None and len(self._pulses) < PULSES_BUFFERED_MAX:
            self._pulses[node_id] = pulse

    def take_pulses(self) -> list[Pulse]:
        """Return the pulses to write, the newest of each node, and forget them."""
        pulses, self._pulses = self._pulses, {}
        return list(pulses.values())

    def silent_s(self) -> Mapping[NodeId, float]:
        """Return how long each node heard by this process has been silent."""
        now = self.clock()
        return {node_id: now - at for node_id, at in self._heard.items()}

    def _count_peers(self) -> None:
        routers = len(self.routers())
        metrics.PEERS.labels("router").set(routers)
        metrics.PEERS.labels("agent").set(len(self.peers) - routers)


def now() -> datetime:
    """Return the wall clock, for certificates alone."""
    return datetime.now(UTC)


def _nobody() -> None:
    """Stand in for a duty until the house is put together."""
