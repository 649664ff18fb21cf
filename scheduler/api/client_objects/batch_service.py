"""The batch service of the control listener: for routers that hold a relay token.

Routers relay the public requests of clients that they have authenticated, lease items and return
the results. Only the acting scheduler serves it, as only its routers hold a token.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from isochrone.wire.errors import ApiError
from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.peers import batches as wire
from isochrone.wire.peers import relay
from isochrone.wire.peers.batches import (
    ItemRef,
    ItemResults,
    LeasedItem,
    LeasedItems,
    LeaseItems,
)
from scheduler.api.client_objects.batch_files import FileEndpoints
from scheduler.api.client_objects.batches import BatchEndpoints
from scheduler.api.client_objects.downloads import DownloadLimit
from scheduler.api.client_objects.queued_runs import QueuedRuns
from scheduler.api.client_objects.relayed import (
    ClientTurns,
    PublicHandler,
    public_route,
    work_route,
)
from scheduler.decide.batch_limits import BatchLimits
from scheduler.decide.batch_lines import request_body
from scheduler.decide.batch_shares import share_items
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.state.peers.relay_tokens import RelayTokens
from scheduler.store.client_objects.batch_items import (
    LeasedLine,
    lease_items,
    leased_by_tenant,
    renew_leases,
    store_results,
    waiting_batches,
    without_spent_quota,
)
from scheduler.store.client_objects.batches import StoredBatch, read_batch
from scheduler.store.pool import Connection, Pool, transaction

log = logging.getLogger(__name__)

READ_TIMEOUT_S: Final = 20.0
"""The longest wait for parts of an input file: less than that of a router for the message."""

UNREADABLE_S: Final = 30.0
"""How long no items of a batch are leased after its input file could not be read."""

_LEASE: Final = msgspec.msgpack.Decoder(LeaseItems)
_RESULTS: Final = msgspec.msgpack.Decoder(ItemResults)


class BatchStorage(NamedTuple):
    """The storage of batches, and its limits. `nudge` requests a turn of their periodic job."""

    folder: BatchFolder
    limits: BatchLimits
    nudge: Callable[[], None]


class LeasedPart(NamedTuple):
    """Leased items of one batch. With `is_key_valid` its key is valid."""

    batch: StoredBatch
    lines: list[LeasedLine]
    is_key_valid: bool


class BatchService:
    """The HTTP routes of the service."""

    def __init__(
        self,
        pool: Pool,
        storage: BatchStorage,
        tokens: RelayTokens,
        turns: ClientTurns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Tenants take `turns` where a request of theirs uses the pool.

        Requests for a file itself take none: they are long, and have turns at the disk.
        """
        self._pool = pool
        self._folder, self._limits, self._nudge = storage
        self._tokens = tokens
        self._turns = turns
        self._clock = clock
        self._unreadable: dict[str, float] = {}
        """Batches whose input could not be read, and until when none of their items is leased."""

    def add_routes(self, app: web.Application) -> None:
        """Add the service to the control listener."""
        downloads = DownloadLimit()
        files = FileEndpoints(self._pool, self._folder, self._limits, downloads)
        batches = BatchEndpoints(self._pool, self._limits)
        runs = QueuedRuns(self._pool, self._folder, self._limits, downloads)

        async def create_batch(request: web.Request, tenant_id: str) -> web.StreamResponse:
            key_id = request.headers.get(relay.KEY, "")
            created = await batches.create(request, tenant_id, key_id)
            self._nudge()
            return created

        async def queue_runs(request: web.Request, tenant_id: str) -> web.StreamResponse:
            queued = await runs.create(request, tenant_id, request.headers.get(relay.KEY, ""))
            self._nudge()
            return queued

        limited = self._turns.limited
        routes: Sequence[tuple[str, str, PublicHandler]] = (
            ("POST", "/v1/files", files.create),
            ("GET", "/v1/files", limited(files.list)),
            ("GET", "/v1/files/{file_id}", limited(files.show)),
            ("GET", "/v1/files/{file_id}/content", files.content),
            ("DELETE", "/v1/files/{file_id}", files.delete),
            ("POST", "/v1/batches", limited(create_batch)),
            ("GET", "/v1/batches", limited(batches.list)),
            ("GET", "/v1/batches/{batch_id}", limited(batches.show)),
            ("POST", "/v1/batches/{batch_id}/cancel", limited(batches.cancel)),
            ("POST", "/ai/queued", queue_runs),
            ("GET", "/ai/queued/{batch_id}", runs.show),
        )
        for method, path, handler in routes:
            app.router.add_route(
                method, f"{relay.PUBLIC_PREFIX}{path}", public_route(self._tokens, handler)
            )
        app.router.add_post(wire.LEASE_PATH, work_route(self._tokens, self._lease))
        app.router.add_post(wire.RESULTS_PATH, work_route(self._tokens, self._store_results))

    async def _lease(self, body: bytes) -> LeasedItems:
        """Renew a router's leases, and lease further items to it."""
        request = _LEASE.decode(body)
        lost: list[ItemRef] = []
        leased: list[LeasedPart] = []
        async with transaction(self._pool, by_index=True) as connection:
            if request.holds:
                lost = await renew_leases(connection, request.holds, self._limits.lease_s)
            if request.wanted:
                leased = await self._lease_parts(connection, request.wanted)
        parts = await asyncio.gather(*(self._read(part) for part in leased))
        return LeasedItems(items=tuple(chain.from_iterable(parts)), lost=tuple(lost))

    async def _lease_parts(
        self, connection: Connection, wanted: Mapping[str, int]
    ) -> list[LeasedPart]:
        """Lease items, as many as a message holds with the bodies of their requests."""
        now_s = self._clock()
        self._unreadable = {
            batch_id: until_s for batch_id, until_s in self._unreadable.items() if until_s > now_s
        }
        waiting = [
            batch
            for batch in await waiting_batches(connection, list(wanted), max(wanted.values()))
            if batch.batch_id not in self._unreadable
        ]
        waiting = await without_spent_quota(connection, waiting)
        valid = {batch.batch_id for batch in waiting if batch.is_key_valid}
        of_tenants = await leased_by_tenant(connection) if waiting else {}
        bytes_left = relay.WORK_BYTES_MAX - wire.ITEM_BYTES_MAX
        parts: list[LeasedPart] = []
        for batch_id, count in share_items(waiting, of_tenants, wanted).items():
            batch = await read_batch(connection, batch_id)
            if batch is None:
                continue
            lines = await lease_items(
                connection,
                batch_id,
                count=count,
                bytes_max=bytes_left,
                lease_id=secrets.token_hex(8),
                lease_s=self._limits.lease_s,
            )
            bytes_left -= sum(line.byte_length for line in lines)
            parts.append(LeasedPart(batch, lines, batch_id in valid))
        return parts

    async def _read(self, part: LeasedPart) -> list[LeasedItem]:
        """Return leased items with the bodies of their requests.

        If they cannot be read, none: their leases run out, and they are leased again. The items of
        other batches do not wait for them.
        """
        batch = part.batch
        places = [(line.byte_offset, line.byte_length) for line in part.lines]
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                folder = self._folder.of_tenant(batch.tenant_id)
                texts = await folder.read_parts(batch.input_file_id, places)
            bodies = [request_body(text) for text in texts]
        except (ApiError, OSError, KeyError, msgspec.DecodeError) as error:
            self._unreadable[batch.batch_id] = self._clock() + UNREADABLE_S
            fields = {"batch": batch.batch_id, "file": batch.input_file_id, "reason": str(error)}
            log.warning("cannot read the items of a batch: they wait", extra={"fields": fields})
            return []
        return [
            LeasedItem(
                ref=line.ref,
                tenant_id=TenantId(batch.tenant_id),
                key_id=KeyId(batch.key_id),
                endpoint=batch.endpoint,
                body=body,
                is_key_valid=part.is_key_valid,
            )
            for line, body in zip(part.lines, bodies, strict=True)
        ]

    async def _store_results(self, body: bytes) -> None:
        request = _RESULTS.decode(body)
        async with transaction(self._pool, by_index=True) as connection:
            is_batch_answered = await store_results(connection, request.results)
        if is_batch_answered:
            self._nudge()
