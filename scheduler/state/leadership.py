"""The changes in memory when this process begins to act, and when it stops."""

import logging

from isochrone.wire.peers.control import RefusedCode, RegistrationRefused
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.heartbeats import Heartbeats, PulseBuffer
from scheduler.state.peers.peer_admission import PeerAdmission
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.lease import Lease

log = logging.getLogger(__name__)


class Leadership:
    """Takes and drops the lease together with everything that belongs to one term."""

    def __init__(
        self,
        *,
        lease: LeaseState,
        peers: PeerRegistry,
        admission: PeerAdmission,
        routes: PublishedRoutes,
        heartbeats: Heartbeats,
        pulses: PulseBuffer,
    ) -> None:
        self._lease = lease
        self._peers = peers
        self._admission = admission
        self._routes = routes
        self._heartbeats = heartbeats
        self._pulses = pulses

    def take(self, lease: Lease, requested_at: float) -> bool:
        """Hold `lease`; say whether a new term begins with it."""
        if not self._lease.take(lease, requested_at):
            return False
        self._admission.reset()
        self._routes.replace(None)
        self._peers.forget_stored_reports()
        self._peers.require_reports()
        log.info("acting", extra={"fields": {"epoch": lease.epoch}})
        return True

    async def step_down(self) -> None:
        """Stop acting and send every peer to the other scheduler."""
        epoch = self._lease.drop()
        if epoch is not None:
            log.warning("stepping down", extra={"fields": {"epoch": epoch}})
        self._heartbeats.clear()
        self._pulses.clear()
        self._admission.dismiss()
        await self._peers.refuse_all(
            RegistrationRefused(code=RefusedCode.NOT_ACTING, reason="another scheduler acts now")
        )
