"""The control connection of a router: demand and usage come in, the route table goes out."""

import logging
from collections.abc import Callable, Mapping
from time import time
from typing import assert_never

from aiohttp import web

from isochrone.service.failure_log import RepeatedWarning, error_text
from isochrone.wire.client_keys.key_use import FleetKeyUse
from isochrone.wire.ids import PopId
from isochrone.wire.peers.control import TABLE_PARTS, FromRouter, PeerRole, RefusedCode
from isochrone.wire.peers.routes import SnapshotWanted
from isochrone.wire.peers.suspicions import FleetSuspicions
from isochrone.wire.peers.usage import Demand, RoundTrips, Usage, UsageAck
from scheduler import metrics
from scheduler.api.control.peer_frames import RETRY_REFUSED_S, PeerRefused
from scheduler.api.control.peers import PeerServer
from scheduler.decide.demand import accept_demand, accept_round_trips, accept_trials, accept_usage
from scheduler.state.key_use_exchange import KeyUseExchange
from scheduler.state.peers.peer_connection import PeerConnection
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.accounts.usage import record_demand, record_round_trips, record_usage
from scheduler.store.pool import (
    BAD_DATA,
    INTAKE_TIMEOUT_S,
    UNAVAILABLE,
    Connection,
    Pool,
    transaction,
)
from scheduler.store.rollouts import record_trials

log = logging.getLogger(__name__)


RouterMessage = Demand | Usage | RoundTrips | SnapshotWanted | FleetSuspicions | FleetKeyUse


class RouterEndpoint:
    """`GET /v1/router`."""

    def __init__(
        self,
        *,
        server: PeerServer,
        intake: Pool,
        routes: PublishedRoutes,
        nudge_place: Callable[[], None],
        key_use: KeyUseExchange,
        clock: Callable[[], float],
        unix_clock: Callable[[], float] = time,
    ) -> None:
        """`clock` returns monotonic seconds."""
        self._key_use = key_use
        self._clock = clock
        self._unix_clock = unix_clock
        self._unwritten = RepeatedWarning(log, "batch not written")
        self._server = server
        self._intake = intake
        self._routes = routes
        self._nudge_place = nudge_place

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one router's connection until either side ends it."""
        return await self._server.serve(request, PeerRole.ROUTER, FromRouter, self._handle_message)

    async def _handle_message(
        self,
        peer: PeerConnection,
        message: RouterMessage | None,
    ) -> None:
        if message is None:
            self._routes.following.record_registered(
                peer.name,
                peer.generation,
                reports=TABLE_PARTS in peer.capabilities,
                last_error=peer.last_error,
            )
            self._routes.send_table(peer)
        elif isinstance(message, SnapshotWanted):
            peer.keys_held = message.keys_held
            self._routes.send_table(peer)
        elif isinstance(message, FleetSuspicions):
            self._server.pass_to_other_routers(peer, message)
        elif isinstance(message, FleetKeyUse):
            self._key_use.add(peer.name, message.rows)
        elif message.router_id != peer.name:
            reason = f"{peer.name} cannot speak for {message.router_id}"
            raise PeerRefused(RefusedCode.IDENTITY, reason, RETRY_REFUSED_S)
        else:
            await self._store_batch(peer, message)

    async def _store_batch(self, peer: PeerConnection, batch: Demand | Usage | RoundTrips) -> None:
        """Store a batch and acknowledge it, including rows that can never be stored."""
        if isinstance(batch, Demand) and batch.boot_id == peer.boot_id:
            # Only the router's main process reports its table.
            peer.record_clock(batch.sent_at, self._unix_clock(), self._clock())
            following = self._routes.following
            following.record_served(peer.name, batch.table_generation, batch.table_refusal)
        # The router forgets acknowledged rows, so these must be on disk.
        async_commit = isinstance(batch, RoundTrips)
        try:
            async with transaction(
                self._intake, timeout_s=INTAKE_TIMEOUT_S, async_commit=async_commit
            ) as connection:
                refused = await _store(connection, peer.pop, batch)
        except UNAVAILABLE as error:
            # Unacknowledged, so it is sent again; round trips are measured again anyway.
            self._unwritten.record(error_text(error), self._clock())
            return
        except BAD_DATA as error:
            refused = {f"cannot store the batch: {error}"[:200]: len(batch.rows)}
        kind = type(batch).__name__.lower()
        for reason, rows in refused.items():
            metrics.REFUSED_ROWS.labels(kind).inc(rows)
            fields = {"router": peer.name, "kind": kind, "rows": rows, "reason": reason}
            log.warning("rows refused", extra={"fields": fields})
        if isinstance(batch, Demand) and any(row.no_replica for row in batch.rows):
            # Requests wait for a deployment's first replica.
            self._nudge_place()
        if not isinstance(batch, RoundTrips):
            peer.enqueue(_acknowledgement(batch, refused))


async def _store(
    connection: Connection, pop: PopId, batch: Demand | Usage | RoundTrips
) -> Mapping[str, int]:
    """Write a batch; return the rows that no retry can store: reason -> number of rows."""
    match batch:
        case Demand():
            taken = accept_demand(pop, batch)
            unknown = await record_demand(connection, batch, taken)
            metrics.DEMAND_BATCHES.labels("repeated" if unknown is None else "counted").inc()
            if unknown is None:
                return {}
            await record_trials(connection, accept_trials(pop, batch))
            reason = "cannot count a row: there is no such deployment or PoP"
            return {**taken.refused, **({reason: unknown} if unknown else {})}
        case Usage():
            usage = accept_usage(batch)
            await record_usage(connection, usage.rows)
            return usage.refused
        case RoundTrips():
            await record_round_trips(connection, pop, accept_round_trips(batch.rows))
            return {}
        case _:
            assert_never(batch)


def _acknowledgement(batch: Demand | Usage, refused: Mapping[str, int]) -> UsageAck:
    """Return the message by which a router forgets a batch."""
    count, reason = sum(refused.values()), "; ".join(sorted(refused))[:500]
    if isinstance(batch, Usage):
        return UsageAck(batch_id=batch.batch_id, refused=count, reason=reason)
    return UsageAck(
        batch_id="",
        refused=count,
        reason=reason,
        demand_boot=batch.boot_id,
        demand_seq=batch.seq,
    )
