"""The control connection of a node agent: reports and pulses come in, assignments go out."""

import logging
from collections.abc import Callable
from time import time
from typing import Final, NoReturn

from aiohttp import web

from isochrone.service.failure_log import RepeatedWarning, error_text
from isochrone.service.trust.identity import Authority
from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import ReplicaSpec
from isochrone.wire.peers.control import FromAgent, PeerRole, RefusedCode
from isochrone.wire.peers.report import Pulse, Report
from scheduler import metrics
from scheduler.api.control.peer_frames import RETRY_REFUSED_S, PeerRefused
from scheduler.api.control.peers import PeerServer
from scheduler.decide.membership import PeerLimit, has_changed, sealed_fields
from scheduler.state.lease_state import LeaseState, NotActing
from scheduler.state.peers.assignment_outbox import AssignmentOutbox
from scheduler.state.peers.heartbeats import Heartbeats, PulseBuffer
from scheduler.state.peers.peer_admission import PeerAdmission
from scheduler.state.peers.peer_connection import PeerConnection
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.events import record_event
from scheduler.store.fleet.nodes import record_report
from scheduler.store.lease import EpochLost
from scheduler.store.pool import (
    BAD_DATA,
    INTAKE_TIMEOUT_S,
    UNAVAILABLE,
    Pool,
    storable_text,
    transaction,
)

log = logging.getLogger(__name__)

REFRESH_S: Final = 300.0
"""An unchanged report is stored again after this time."""


REGISTER_AGAIN_S: Final = 1.0
IMPOSTOR_EVENTS_MAX: Final = 10
IMPOSTOR_EVENT_EVERY_S: Final = 360.0
"""A node that reports for others is refused each time, but it must not fill the event log."""


class AgentEndpoint:
    """`GET /v1/agent`."""

    def __init__(
        self,
        *,
        server: PeerServer,
        pool: Pool,
        intake: Pool,
        authority: Authority,
        lease: LeaseState,
        heartbeats: Heartbeats,
        pulses: PulseBuffer,
        admission: PeerAdmission,
        assignments: AssignmentOutbox,
        routes: PublishedRoutes,
        nudge_place: Callable[[], None],
        unix_clock: Callable[[], float] = time,
    ) -> None:
        self._unix_clock = unix_clock
        self._untaken = RepeatedWarning(log, "report not taken")
        self._unwritten = RepeatedWarning(log, "report not written")
        self._impostors = PeerLimit(IMPOSTOR_EVENTS_MAX, IMPOSTOR_EVENT_EVERY_S)
        self._server = server
        self._pool = pool
        self._intake = intake
        self._authority = authority
        self._lease = lease
        self._heartbeats = heartbeats
        self._pulses = pulses
        self._admission = admission
        self._assignments = assignments
        self._routes = routes
        self._nudge_place = nudge_place

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one node's connection until either side ends it."""
        return await self._server.serve(request, PeerRole.AGENT, FromAgent, self._handle_message)

    async def _handle_message(self, peer: PeerConnection, message: Report | Pulse | None) -> None:
        node_id = NodeId(peer.name)
        self._heartbeats.record(node_id)
        if message is None:
            return
        if (message.node_id, message.boot_id) != (node_id, peer.boot_id):
            await self._refuse_impostor(peer, message.node_id)
        if isinstance(message, Pulse):
            peer.record_clock(message.sent_at, self._unix_clock(), self._lease.clock())
            self._pulses.add(message)
            self._heartbeats.following.record_stored(
                node_id, message.generation, message.assignment_refusal
            )
        else:
            await self._store_report(peer, message)

    async def _store_report(self, peer: PeerConnection, report: Report) -> None:
        if self._is_stored(peer, report):
            metrics.REPORTS.labels("unchanged").inc()
            return
        try:
            async with transaction(
                self._intake, timeout_s=INTAKE_TIMEOUT_S, async_commit=True
            ) as connection:
                effect = await record_report(
                    connection, self._lease.epoch, report, self._has_valid_seal
                )
            metrics.REPORTS.labels("stale" if effect.stale else "taken").inc()
            if effect.is_boot_unknown:
                _require_registration(peer)
            if effect.stale:
                return
            peer.generation = report.generation
            peer.stored_report, peer.stored_report_at = report, self._lease.clock()
            if effect.changed or effect.adopted or effect.released:
                self._routes.mark_changed(NodeId(peer.name))
                self._nudge_place()
            if not peer.has_reported or effect.adopted:
                # Only a node whose full report is stored may be sent an assignment.
                peer.has_reported = True
                await self._assignments.send(peer)
                self._admission.release(peer.role, peer.name)
        except (EpochLost, NotActing) as error:
            self._untaken.record(str(error), self._lease.clock())
        except BAD_DATA as error:
            reason = f"cannot store the report: {error}"[:300]
            raise PeerRefused(RefusedCode.MALFORMED, reason, RETRY_REFUSED_S) from error
        except UNAVAILABLE as error:
            # The node reports everything again in ten seconds.
            self._unwritten.record(error_text(error), self._lease.clock())

    def _has_valid_seal(self, node_id: NodeId, spec: ReplicaSpec) -> bool:
        return self._authority.verify_seal(sealed_fields(node_id, spec), spec.seal)

    def _is_stored(self, peer: PeerConnection, report: Report) -> bool:
        """Return whether the store already holds what this report says, recently enough."""
        return (
            peer.has_reported
            and peer.stored_report is not None
            and self._lease.clock() - peer.stored_report_at < REFRESH_S
            and not has_changed(peer.stored_report, report)
        )

    async def _refuse_impostor(self, peer: PeerConnection, claimed: str) -> NoReturn:
        """Record and refuse a node that reports under another node's name."""
        metrics.REPORTS.labels("impostor").inc()
        reason = f"{peer.name} cannot report for {storable_text(claimed)[:63]}"
        if self._impostors.take(peer.name, self._lease.clock()):
            async with transaction(self._pool) as connection:
                await record_event(
                    connection,
                    actor=f"node:{peer.name}",
                    kind="node.impostor",
                    subject=storable_text(claimed)[:63],
                    reason=reason,
                )
        raise PeerRefused(RefusedCode.IDENTITY, reason, RETRY_REFUSED_S)


def _require_registration(peer: PeerConnection) -> NoReturn:
    """Refuse a node whose reports the store takes for those of another boot.

    A registration may be lost with a crash of the database or a restored backup. Unless the node
    registers again, none of its reports would be stored.
    """
    reason = f"the store does not know boot {peer.boot_id} of {peer.name}; register again"
    log.warning("report not taken", extra={"fields": {"reason": reason}})
    raise PeerRefused(RefusedCode.BUSY, reason, REGISTER_AGAIN_S)
