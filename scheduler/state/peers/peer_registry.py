"""The peers that are connected to this process, at most one connection for each name."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.control import PeerRole, RegistrationRefused
from scheduler import metrics
from scheduler.decide.membership import clock_problem
from scheduler.state.peers.peer_connection import PeerConnection

LARGE_FRAMES_AT_ONCE: Final = 32
"""How many large frames (route tables above all) are in memory for sending at the same time."""


class PeerRegistry:
    """Connections by role and name."""

    def __init__(self) -> None:
        self.by_name: dict[tuple[PeerRole, str], PeerConnection] = {}
        self.closed_count = 0
        """How many connections have been removed since the process began."""
        self.large_frame_slots = asyncio.Semaphore(LARGE_FRAMES_AT_ONCE)

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[PeerConnection]:
        return iter(self.by_name.values())

    def add(self, peer: PeerConnection) -> PeerConnection | None:
        """Register a connection; return the older one of the same name, if there is one."""
        previous = self.by_name.get((peer.role, peer.name))
        self.by_name[peer.role, peer.name] = peer
        if previous is None:
            metrics.PEERS.labels(peer.role.value).inc()
        return previous

    def remove(self, peer: PeerConnection) -> None:
        """Remove a closed connection, unless a newer one has replaced it."""
        self.closed_count += 1
        if self.by_name.get((peer.role, peer.name)) is peer:
            del self.by_name[peer.role, peer.name]
            metrics.PEERS.labels(peer.role.value).dec()

    def agent(self, node_id: NodeId) -> PeerConnection | None:
        """Return the connection of a node's agent."""
        return self.by_name.get((PeerRole.AGENT, node_id))

    def agents(self) -> list[PeerConnection]:
        """Return the connections of node agents."""
        return [peer for peer in self if peer.role is PeerRole.AGENT]

    def routers(self) -> list[PeerConnection]:
        """Return the connections of routers."""
        return [peer for peer in self if peer.role is PeerRole.ROUTER]

    def clock_problems(self) -> list[str]:
        """Return in words whose clocks are wrong."""
        words = {PeerRole.AGENT: "node", PeerRole.ROUTER: "router"}
        problems = (
            clock_problem(f"{words[peer.role]} {peer.name}", peer.clock.behind_s) for peer in self
        )
        return sorted(filter(None, problems))

    def wrong_clocks(self) -> dict[PeerRole, int]:
        """Return how many peers of each role have wrong clocks."""
        counts = dict.fromkeys(PeerRole, 0)
        for peer in self:
            counts[peer.role] += bool(peer.clock.behind_s)
        return counts

    def forget_stored_reports(self) -> None:
        """Store every node's next report in full: a database that broke may have lost the last."""
        for peer in self:
            peer.stored_report = None

    def require_reports(self, node_ids: Iterable[NodeId] | None = None) -> None:
        """Send these nodes (by default all peers) assignments only after another stored report."""
        peers = self if node_ids is None else map(self.agent, node_ids)
        for peer in peers:
            if peer is not None:
                peer.has_reported = False

    async def refuse_all(self, refused: RegistrationRefused) -> None:
        """Remove every connection, send each the reason and close it."""
        peers, self.by_name = list(self.by_name.values()), {}
        for role in PeerRole:
            metrics.PEERS.labels(role.value).set(0)
        async with asyncio.TaskGroup() as tasks:
            for peer in peers:
                tasks.create_task(peer.refuse(refused))
