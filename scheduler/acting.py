"""What one scheduler process holds in memory: its lease, who is connected, what it published.

Everything here can be lost: it is rebuilt from Postgres and from what peers say again.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from math import inf
from typing import Final

from isochrone.service.identity import Authority
from isochrone.wire import codec
from isochrone.wire.control import PeerRole, Refused, RefusedCode
from isochrone.wire.ids import ClusterId, Epoch, NodeId
from isochrone.wire.report import Pulse
from isochrone.wire.routes import RouteTable
from scheduler import metrics
from scheduler.config import SchedulerConfig
from scheduler.connected import Connected
from scheduler.decide.admission import Admissions
from scheduler.decide.liveness import Heard
from scheduler.planner.process import Planner
from scheduler.store.lease import MARGIN_S, Lease
from scheduler.store.node_reports import NodeReportCache
from scheduler.store.nodes import read_assignment
from scheduler.store.pool import Pool, using

log = logging.getLogger(__name__)

INTAKE_TIMEOUT_S: Final = 10.0
PULSES_BUFFERED_MAX: Final = 50_000
PULSES_WRITTEN_MAX: Final = 1_000
LARGE_AT_ONCE: Final = 32


class NotActing(Exception):
    """Another scheduler acts, or the database cannot be asked."""


class Acting:
    """The process's state. `is_acting` is judged by the monotonic clock passed in."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        pool: Pool,
        reserved: Pool,
        intake: Pool,
        planner: Planner,
        authority: Authority,
        cluster_id: ClusterId,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.holder = f"{config.name}/{secrets.token_hex(4)}"
        self.pool = pool
        self.reserved = reserved
        self.intake = intake
        self.planner = planner
        self.authority = authority
        self.cluster_id = cluster_id
        self.clock = clock
        self.table: RouteTable | None = None
        self.frozen = ""
        self.unmet: tuple[tuple[str, str], ...] = ()
        self.peers: dict[tuple[PeerRole, str], Connected] = {}
        self.ended = 0
        """How many conversations have ended."""
        self.nudge_place: Callable[[], None] = _nobody
        self.nudge_publish: Callable[[], None] = _nobody
        self.unpublished: set[NodeId] | None = None
        """The nodes of which the table may not be true; None for all of it."""
        self.nudge_prefetch: Callable[[], None] = _nobody
        self.nudge_turn_away: Callable[[], None] = _nobody
        self.large = asyncio.Semaphore(LARGE_AT_ONCE)
        self.admissions = Admissions(config.admissions_per_s)
        self.line_outside = Admissions(config.admissions_per_s)
        self.fleet_size = 0
        self.turned_at = clock()
        self.next_acting_at = float("-inf")
        self.known_nodes = NodeReportCache()
        self._table_frame = b""
        self._lease: Lease | None = None
        self._renewed_at = 0.0
        self._trusted_until = 0.0
        self._heard: dict[NodeId, float] = {}
        self._back: dict[NodeId, float] = {}
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
        if is_new:
            # Whoever waited outside was told when to come.
            self.admissions = Admissions(self.config.admissions_per_s)
        self._lease = lease
        self._renewed_at = asked_at
        self.kept(lease, asked_at)
        metrics.ACTING.set(1)
        metrics.EPOCH.set(lease.epoch)
        if is_new:
            self.published(None)
            self.forget_written()
            for peer in self.peers.values():
                peer.has_reported = False
            log.info("acting", extra={"fields": {"epoch": lease.epoch}})
        return is_new

    @property
    def holds_lease(self) -> bool:
        """Say whether this process has taken the lease and not lost it, as far as it knows."""
        return self._lease is not None

    def kept(self, lease: Lease, asked_at: float) -> None:
        """Trust the lease for longer, if it is still the same; any other is for `renewed`."""
        held = self._lease
        if held is not None and held.epoch == lease.epoch:
            trusted_until = asked_at + self.config.lease_ttl_s - MARGIN_S
            self._trusted_until = max(self._trusted_until, trusted_until)

    async def step_down(self) -> None:
        """Another scheduler acts: send every peer there."""
        if self._lease is not None:
            log.warning("stepping down", extra={"fields": {"epoch": self._lease.epoch}})
        self._lease = None
        metrics.ACTING.set(0)
        refused = Refused(code=RefusedCode.NOT_ACTING, reason="another scheduler acts now")
        peers, self.peers = list(self.peers.values()), {}
        for role in PeerRole:
            metrics.PEERS.labels(role.value).set(0)
        self._heard.clear()
        self._back.clear()
        self._pulses.clear()
        async with asyncio.TaskGroup() as tasks:
            for peer in peers:
                tasks.create_task(peer.end(refused))

    def wait_outside_s(self, role: PeerRole, name: str) -> float:
        """Return 0 where a peer may register now, else how long it should wait."""
        return self.admissions.wait_s(f"{role.value} {name}", self.clock())

    def has_entered(self, role: PeerRole, name: str) -> None:
        """Let another in: this one is served, or gone."""
        self.admissions.served(f"{role.value} {name}", self.clock())

    @property
    def redial_spread_s(self) -> float:
        """Return over how long the fleet should spread its dialling when it loses this process."""
        return max(self.fleet_size, len(self.peers)) / self.config.admissions_per_s

    def table_frame(self) -> bytes:
        """Return the whole route table as a frame, encoded once however many ask for it."""
        if not self._table_frame and self.table is not None:
            self._table_frame = codec.encode(self.table)
        return self._table_frame

    def published(self, table: RouteTable | None) -> None:
        """Take a new table as the one that routers are told."""
        self.table = table
        self._table_frame = b""

    def publish(self, node_id: NodeId | None = None) -> None:
        """Have routers told what changed on a node; with none named, whatever changed."""
        if node_id is None:
            self.unpublished = None
        elif self.unpublished is not None:
            self.unpublished.add(node_id)
        self.nudge_publish()

    def forget_written(self) -> None:
        """Have every report written again: a server that broke may have lost the last of them."""
        for peer in self.peers.values():
            peer.written = None

    def add_peer(self, peer: Connected) -> Connected | None:
        """Enter a conversation and return the one it takes the place of, if any."""
        before = self.peers.get((peer.role, peer.name))
        self.peers[peer.role, peer.name] = peer
        if before is None:
            metrics.PEERS.labels(peer.role.value).inc()
        return before

    def remove_peer(self, peer: Connected) -> None:
        """Forget a conversation that ended, unless a newer one took its place."""
        self.ended += 1
        if self.peers.get((peer.role, peer.name)) is peer:
            del self.peers[peer.role, peer.name]
            metrics.PEERS.labels(peer.role.value).dec()

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
        """Tell a node everything it should run, or else have it told after its next report."""
        with self.owing([NodeId(peer.name)]):
            async with using(self.intake, INTAKE_TIMEOUT_S) as connection:
                peer.tell(
                    await read_assignment(
                        connection,
                        NodeId(peer.name),
                        cluster_id=self.cluster_id,
                        epoch=self.epoch,
                    )
                )

    async def tell_assignments(self, node_ids: Iterable[str]) -> int:
        """Tell nodes what they should run, those that have said what they do; return how many."""
        told = 0
        for node_id in node_ids:
            peer = self.agent(NodeId(node_id))
            if peer is not None and peer.has_reported:
                await self.send_assignment(peer)
                told += 1
        return told

    @contextmanager
    def owing(self, node_ids: Iterable[NodeId]) -> Iterator[None]:
        """Have nodes told what to run after their next report, should this end in an error: what
        broke may have been written all the same."""
        try:
            yield
        except BaseException:
            for node_id in node_ids:
                if (peer := self.agent(node_id)) is not None:
                    peer.has_reported = False
            raise

    def heard(self) -> Heard:
        """Return what this process alone knows of the fleet, for who decides."""
        now = self.clock()
        return Heard(
            acting_for_s=self.acting_for_s,
            silent_s={node_id: now - at for node_id, at in self._heard.items()},
            back_s={node_id: now - at for node_id, at in self._back.items()},
        )

    def heard_from(self, node_id: NodeId, pulse: Pulse | None = None) -> None:
        """Note a sign of life; a pulse also waits to be written."""
        now = self.clock()
        if now - self._heard.get(node_id, now) >= self.config.liveness.lost_after_s:
            self._back[node_id] = now
        self._heard[node_id] = now
        if pulse is not None and len(self._pulses) < PULSES_BUFFERED_MAX:
            self._pulses[node_id] = pulse

    def take_pulses(self) -> list[Pulse]:
        """Return the pulses to write, the newest of each node, and forget them.

        At most so many: a node that pulses again keeps its place, so that of a large fleet each is
        written in turn. Silence is judged by what this process heard; the store's is for the next.
        """
        names = list(islice(self._pulses, PULSES_WRITTEN_MAX))
        return [self._pulses.pop(name) for name in names]

    def silent_s(self, node_id: NodeId) -> float:
        """Return for how long a node has been silent to this process; inf where it never spoke."""
        return self.clock() - self._heard.get(node_id, -inf)


def now() -> datetime:
    """Return the wall clock: for certificates, and for what is past its keeping."""
    return datetime.now(UTC)


def _nobody() -> None:
    """Stand in for a duty until the house is put together."""
