"""The conversation with a router: demand and usage come up, the route table goes down."""

import logging
from contextlib import aclosing

from aiohttp import web

from isochrone.wire.control import FromRouter, PeerRole, Refused, RefusedCode
from isochrone.wire.routes import SnapshotWanted
from isochrone.wire.usage import Demand, RoundTrips, Usage, UsageAck
from scheduler.acting import INTAKE_TIMEOUT_S, Acting, Connected
from scheduler.api.peers import converse
from scheduler.store.pool import UNAVAILABLE, transaction
from scheduler.store.usage import record_demand, record_round_trips, record_usage

log = logging.getLogger(__name__)


class Routers:
    """`GET /v1/router`."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Talk with one router until either side ends it."""
        async with aclosing(
            converse(request, self._acting, PeerRole.ROUTER, FromRouter)
        ) as conversation:
            async for peer, message in conversation:
                if not await self._hear(peer, message):
                    break
        return web.Response()

    async def _hear(self, peer: Connected, message: object) -> bool:
        """Take one message; False ends the conversation."""
        match message:
            case None:
                if self._acting.table is not None:
                    self._send_table(peer)
                return True
            case SnapshotWanted():
                self._send_table(peer)
                return True
            case Demand() | Usage() | RoundTrips() if message.router_id != peer.name:
                reason = f"{peer.name} cannot speak for {message.router_id}"
                await peer.end(Refused(code=RefusedCode.IDENTITY, reason=reason, retry_after_s=30))
                return False
            case Demand() | Usage() | RoundTrips():
                await self._write(peer, message)
                return True
            case _:
                reason = "cannot register twice"
                await peer.end(Refused(code=RefusedCode.MALFORMED, reason=reason))
                return False

    async def _write(self, peer: Connected, message: Demand | Usage | RoundTrips) -> None:
        try:
            # Usage is acknowledged, and so must be on disk; demand and round trips may lag.
            acting = self._acting
            pool = acting.pool if isinstance(message, Usage) else acting.intake
            async with transaction(pool, timeout_s=INTAKE_TIMEOUT_S) as connection:
                match message:
                    case Demand():
                        await record_demand(connection, message)
                    case Usage():
                        await record_usage(connection, message)
                    case RoundTrips():
                        await record_round_trips(connection, message)
        except UNAVAILABLE as error:
            # Not acknowledged, so usage comes again; demand and round trips are renewed anyway.
            log.warning("not written", extra={"fields": {"reason": str(error)[:200]}})
            return
        if isinstance(message, Usage):
            peer.tell(UsageAck(batch_id=message.batch_id))

    def _send_table(self, peer: Connected) -> None:
        if self._acting.table is not None:
            peer.tell(self._acting.table_frame())
            peer.generation = self._acting.table.generation
