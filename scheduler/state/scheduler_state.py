"""All of the in-memory state, made together. Only the composition holds it whole."""

from collections.abc import Callable

from isochrone.service.network.connection_count import ConnectionCount
from isochrone.wire.ids import ClusterId
from scheduler.state.key_use_exchange import KeyUseExchange
from scheduler.state.leadership import Leadership
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.assignment_outbox import AssignmentOutbox
from scheduler.state.peers.first_reports import FirstReports
from scheduler.state.peers.heartbeats import Heartbeats, PulseBuffer
from scheduler.state.peers.peer_admission import PeerAdmission
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.state.placement_status import PlacementStatus
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.pool import Pool


class SchedulerState:
    """The parts of the state, each independent of the HTTP servers and the periodic jobs."""

    def __init__(
        self,
        *,
        holder: str,
        lease_ttl_s: float,
        admissions_per_s: float,
        lost_after_s: float,
        hear_first_s: float,
        unregistered: ConnectionCount,
        intake: Pool,
        cluster_id: ClusterId,
        clock: Callable[[], float],
        nudge_publish: Callable[[], None],
    ) -> None:
        """Begin as a standby that no peer is connected to."""
        self.lease = LeaseState(holder=holder, ttl_s=lease_ttl_s, clock=clock)
        self.peers = PeerRegistry()
        self.unregistered = unregistered
        self.heartbeats = Heartbeats(self.lease, lost_after_s=lost_after_s)
        self.pulses = PulseBuffer()
        self.key_use = KeyUseExchange()
        self.routes = PublishedRoutes(nudge_publish)
        self.placement = PlacementStatus(self.lease)
        self.admission = PeerAdmission(per_s=admissions_per_s, lease=self.lease, peers=self.peers)
        self.first_reports = FirstReports(
            lease=self.lease, peers=self.peers, hear_first_s=hear_first_s, lost_after_s=lost_after_s
        )
        self.leadership = Leadership(
            lease=self.lease,
            peers=self.peers,
            admission=self.admission,
            routes=self.routes,
            heartbeats=self.heartbeats,
            pulses=self.pulses,
        )
        self.assignments = AssignmentOutbox(
            pool=intake,
            peers=self.peers,
            lease=self.lease,
            following=self.heartbeats.following,
            cluster_id=cluster_id,
        )
