"""The changes in memory when this process begins to act, and when it stops."""

import logging
from dataclasses import dataclass

from isochrone.wire.peers.control import RefusedCode, RegistrationRefused
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.heartbeats import Heartbeats, PulseBuffer
from scheduler.state.peers.peer_admission import PeerAdmission
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.lease import Lease

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Leadership:
    """Takes and drops the lease together with everything that belongs to one term."""

    lease: LeaseState
    peers: PeerRegistry
    admission: PeerAdmission
    routes: PublishedRoutes
    heartbeats: Heartbeats
    pulses: PulseBuffer

    def take(self, lease: Lease, requested_at: float) -> bool:
        """Hold `lease`; say whether a new term begins with it."""
        if not self.lease.take(lease, requested_at):
            return False
        self.admission.reset()
        self.routes.replace(None)
        self.peers.forget_stored_reports()
        self.peers.require_reports()
        log.info("acting", extra={"fields": {"epoch": lease.epoch}})
        return True

    async def step_down(self) -> None:
        """Stop acting and send every peer to the other scheduler."""
        epoch = self.lease.drop()
        if epoch is not None:
            log.warning("stepping down", extra={"fields": {"epoch": epoch}})
        self.heartbeats.clear()
        self.pulses.clear()
        self.admission.dismiss()
        await self.peers.refuse_all(
            RegistrationRefused(code=RefusedCode.NOT_ACTING, reason="another scheduler acts now")
        )
