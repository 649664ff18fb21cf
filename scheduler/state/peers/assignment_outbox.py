"""Sends nodes their assignments, and sends them again where it is unknown what was written."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from isochrone.wire.ids import ClusterId, Generation, NodeId
from scheduler.decide.membership import AssignmentFollowing
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.peer_connection import PeerConnection
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.store.fleet.nodes import read_assignment
from scheduler.store.pool import INTAKE_TIMEOUT_S, Pool, using


@dataclass(eq=False, kw_only=True)
class AssignmentOutbox:
    """Reads assignments from the store and queues them for connected nodes."""

    pool: Pool
    peers: PeerRegistry
    lease: LeaseState
    following: AssignmentFollowing
    cluster_id: ClusterId
    newest_generation: Generation = field(default=Generation(0), init=False)
    """The newest generation of all assignments that were sent."""

    async def send(self, peer: PeerConnection) -> None:
        """Queue a node's whole assignment. After an error it is sent after the node's next report.

        Assignments are read one after another, because a node keeps the last of two with the same
        generation.
        """
        node_id = NodeId(peer.name)
        with self.resend_on_error([node_id]):
            async with peer.assigning:
                async with using(self.pool, INTAKE_TIMEOUT_S) as connection:
                    assignment = await read_assignment(
                        connection, node_id, cluster_id=self.cluster_id, epoch=self.lease.epoch
                    )
                self.newest_generation = max(self.newest_generation, assignment.generation)
                peer.enqueue(assignment)
                self.following.record_sent(node_id, assignment.generation, self.lease.clock())

    async def send_to(self, node_ids: Iterable[str]) -> int:
        """Queue the assignments of those nodes that are connected and have reported; count them."""
        sent = 0
        for node_id in node_ids:
            peer = self.peers.agent(NodeId(node_id))
            if peer is not None and peer.has_reported:
                await self.send(peer)
                sent += 1
        return sent

    @contextmanager
    def resend_on_error(self, node_ids: Iterable[NodeId]) -> Iterator[None]:
        """If the block raises, send these nodes their assignments after their next reports.

        A transaction that failed may have been committed all the same.
        """
        try:
            yield
        except BaseException:
            self.peers.require_reports(node_ids)
            raise
