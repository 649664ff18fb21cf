"""The conversation with a router: demand and usage come up, the route table goes down."""

import logging
from collections.abc import Mapping
from typing import assert_never

from aiohttp import web

from isochrone.wire.control import FromRouter, PeerRole, RefusedCode
from isochrone.wire.ids import PopId
from isochrone.wire.routes import SnapshotWanted
from isochrone.wire.usage import Demand, RoundTrips, Usage, UsageAck
from scheduler import metrics
from scheduler.acting import INTAKE_TIMEOUT_S, Acting
from scheduler.api.peers import PeerRefused, serve_peer
from scheduler.connected import Connected
from scheduler.decide.intake import take_demand, take_round_trips, take_trials, take_usage
from scheduler.store.pool import BAD_DATA, UNAVAILABLE, Connection, transaction
from scheduler.store.rollouts import record_trials
from scheduler.store.usage import record_demand, record_round_trips, record_usage

log = logging.getLogger(__name__)


class RouterEndpoint:
    """`GET /v1/router`."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Talk with one router until either side ends it."""
        return await serve_peer(request, self._acting, PeerRole.ROUTER, FromRouter, self._hear)

    async def _hear(
        self, peer: Connected, message: Demand | Usage | RoundTrips | SnapshotWanted | None
    ) -> None:
        if message is None or isinstance(message, SnapshotWanted):
            self._send_table(peer)
        elif message.router_id != peer.name:
            reason = f"{peer.name} cannot speak for {message.router_id}"
            raise PeerRefused(RefusedCode.IDENTITY, reason, retry_after_s=30)
        else:
            await self._write(peer, message)

    async def _write(self, peer: Connected, message: Demand | Usage | RoundTrips) -> None:
        """Store a message and acknowledge it; what the store can never hold is acknowledged too."""
        try:
            # What is acknowledged is forgotten by the router, and so must be on disk.
            async_commit = isinstance(message, RoundTrips)
            pool = self._acting.intake
            async with transaction(
                pool, timeout_s=INTAKE_TIMEOUT_S, async_commit=async_commit
            ) as connection:
                refused = await _store(connection, peer.pop, message)
        except UNAVAILABLE as error:
            # Not acknowledged, so it comes again; round trips are renewed anyway.
            reason = (str(error) or type(error).__name__)[:200]
            log.warning("not written", extra={"fields": {"reason": reason}})
            return
        except BAD_DATA as error:
            refused = {f"cannot store the batch: {error}"[:200]: len(message.rows)}
        kind = type(message).__name__.lower()
        for reason, rows in refused.items():
            metrics.REFUSED_ROWS.labels(kind).inc(rows)
            fields = {"router": peer.name, "kind": kind, "rows": rows, "reason": reason}
            log.warning("rows refused", extra={"fields": fields})
        if isinstance(message, Demand) and any(row.no_replica for row in message.rows):
            # Somebody waits for a first replica.
            self._acting.nudge_place()
        if not isinstance(message, RoundTrips):
            peer.tell(_acknowledged(message, refused))

    def _send_table(self, peer: Connected) -> None:
        if self._acting.table is not None:
            peer.tell(self._acting.table_frame())
            peer.generation = self._acting.table.generation


async def _store(
    connection: Connection, city: PopId, message: Demand | Usage | RoundTrips
) -> Mapping[str, int]:
    """Write a message; return what was refused of it for good: reason -> rows."""
    match message:
        case Demand():
            taken = take_demand(city, message)
            unknown = await record_demand(connection, message, taken)
            metrics.DEMAND_BATCHES.labels("repeated" if unknown is None else "counted").inc()
            if unknown is None:
                return {}
            await record_trials(connection, take_trials(city, message))
            nowhere = "cannot count a row: there is no such deployment or PoP"
            return {**taken.refused, **({nowhere: unknown} if unknown else {})}
        case Usage():
            usage = take_usage(message)
            await record_usage(connection, usage.rows)
            return usage.refused
        case RoundTrips():
            await record_round_trips(connection, city, take_round_trips(message.rows))
            return {}
        case _:
            assert_never(message)


def _acknowledged(message: Demand | Usage, refused: Mapping[str, int]) -> UsageAck:
    """Return what tells a router to forget a batch."""
    count, said = sum(refused.values()), "; ".join(sorted(refused))[:500]
    if isinstance(message, Usage):
        return UsageAck(batch_id=message.batch_id, refused=count, reason=said)
    return UsageAck(
        batch_id="",
        refused=count,
        reason=said,
        demand_boot=message.boot_id,
        demand_seq=message.seq,
    )
