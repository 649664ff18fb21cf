"""The conversation with a node: reports and pulses come up, whole assignments go down."""

import logging
from typing import Final, NoReturn

from aiohttp import web

from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.control import FromAgent, PeerRole, RefusedCode
from isochrone.wire.ids import NodeId
from isochrone.wire.report import Pulse, Report
from scheduler import metrics
from scheduler.acting import INTAKE_TIMEOUT_S, Acting, NotActing
from scheduler.api.peers import PeerRefused, serve_peer
from scheduler.connected import Connected
from scheduler.decide.claims import claim
from scheduler.decide.news import is_news
from scheduler.store.events import record_event
from scheduler.store.lease import EpochLost
from scheduler.store.nodes import record_report
from scheduler.store.pool import BAD_DATA, UNAVAILABLE, transaction

log = logging.getLogger(__name__)

REFRESH_S: Final = 300.0


class AgentEndpoint:
    """`GET /v1/agent`."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Talk with one node until either side ends it."""
        return await serve_peer(request, self._acting, PeerRole.AGENT, FromAgent, self._hear)

    async def _hear(self, peer: Connected, message: Report | Pulse | None) -> None:
        node_id = NodeId(peer.name)
        self._acting.heard_from(node_id)
        match message:
            case Report() | Pulse() if (message.node_id, message.boot_id) != (
                node_id,
                peer.boot_id,
            ):
                await self._refuse_impostor(peer, message.node_id)
            case Pulse():
                self._acting.heard_from(node_id, message)
            case Report():
                await self._take_report(peer, message)

    async def _take_report(self, peer: Connected, report: Report) -> None:
        if self._is_known(peer, report):
            metrics.REPORTS.labels("unchanged").inc()
            return
        try:
            pool = self._acting.intake
            async with transaction(
                pool, timeout_s=INTAKE_TIMEOUT_S, async_commit=True
            ) as connection:
                effect = await record_report(connection, self._acting.epoch, report, self._believes)
            metrics.REPORTS.labels("stale" if effect.stale else "taken").inc()
            if effect.stale:
                return
            peer.generation = report.generation
            peer.written, peer.written_at = report, self._acting.clock()
            if effect.changed or effect.adopted or effect.released:
                self._acting.publish(node_id=NodeId(peer.name))
                self._acting.nudge_place()
            if not peer.has_reported or effect.adopted:
                # Only a node whose whole word was taken is told what to run.
                peer.has_reported = True
                await self._acting.send_assignment(peer)
                self._acting.has_entered(peer.role, peer.name)
        except (EpochLost, NotActing) as error:
            log.warning("report not taken", extra={"fields": {"reason": str(error)}})
        except BAD_DATA as error:
            reason = f"cannot store the report: {error}"[:300]
            raise PeerRefused(RefusedCode.MALFORMED, reason, retry_after_s=30) from error
        except UNAVAILABLE as error:
            # The node says everything again in ten seconds.
            reason = (str(error) or type(error).__name__)[:200]
            log.warning("report not written", extra={"fields": {"reason": reason}})

    def _believes(self, node_id: NodeId, spec: ReplicaSpec) -> bool:
        return self._acting.authority.verify_seal(claim(node_id, spec), spec.seal)

    def _is_known(self, peer: Connected, report: Report) -> bool:
        """Say whether the store holds all that this report says, written not long ago."""
        return (
            peer.has_reported
            and peer.written is not None
            and self._acting.clock() - peer.written_at < REFRESH_S
            and not is_news(peer.written, report)
        )

    async def _refuse_impostor(self, peer: Connected, claimed: str) -> NoReturn:
        metrics.REPORTS.labels("impostor").inc()
        reason = f"{peer.name} cannot report for {claimed}"
        async with transaction(self._acting.pool) as connection:
            await record_event(
                connection,
                actor=f"node:{peer.name}",
                kind="node.impostor",
                subject=claimed[:63],
                reason=reason[:300],
            )
        raise PeerRefused(RefusedCode.IDENTITY, reason, retry_after_s=30)
