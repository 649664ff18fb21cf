"""The batch service of the control listener: for routers that hold a relay token.

Routers relay the public requests of clients that they have authenticated, lease items and return
the results. Only the acting scheduler serves it, as only its routers hold a token.
"""

import secrets
from collections.abc import Callable, Sequence, Set
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.peers import batches as wire
from isochrone.wire.peers.batches import (
    ItemRef,
    ItemResults,
    LeasedItem,
    LeasedItems,
    LeaseItems,
)
from scheduler.api.client_objects.batch_files import FileEndpoints
from scheduler.api.client_objects.batches import BatchEndpoints
from scheduler.api.client_objects.queued_runs import QueuedRuns
from scheduler.api.client_objects.relayed import PublicHandler, public_route, work_route
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
from scheduler.store.pool import Pool, transaction

_LEASE: Final = msgspec.msgpack.Decoder(LeaseItems)
_RESULTS: Final = msgspec.msgpack.Decoder(ItemResults)


class BatchStorage(NamedTuple):
    """The storage of batches, and its limits. `nudge` requests a turn of their periodic job."""

    folder: BatchFolder
    limits: BatchLimits
    nudge: Callable[[], None]


class BatchService:
    """The HTTP routes of the service."""

    def __init__(self, pool: Pool, storage: BatchStorage, tokens: RelayTokens) -> None:
        self._pool = pool
        self._folder, self._limits, self._nudge = storage
        self._tokens = tokens

    def add_routes(self, app: web.Application) -> None:
        """Add the service to the control listener."""
        files = FileEndpoints(self._pool, self._folder, self._limits)
        batches = BatchEndpoints(self._pool, self._limits)
        runs = QueuedRuns(self._pool, self._folder, self._limits)

        async def create_batch(request: web.Request, tenant_id: str) -> web.StreamResponse:
            key_id = request.headers.get(wire.KEY, "")
            created = await batches.create(request, tenant_id, key_id)
            self._nudge()
            return created

        async def queue_runs(request: web.Request, tenant_id: str) -> web.StreamResponse:
            queued = await runs.create(request, tenant_id, request.headers.get(wire.KEY, ""))
            self._nudge()
            return queued

        routes: Sequence[tuple[str, str, PublicHandler]] = (
            ("POST", "/v1/files", files.create),
            ("GET", "/v1/files", files.list),
            ("GET", "/v1/files/{file_id}", files.show),
            ("GET", "/v1/files/{file_id}/content", files.content),
            ("DELETE", "/v1/files/{file_id}", files.delete),
            ("POST", "/v1/batches", create_batch),
            ("GET", "/v1/batches", batches.list),
            ("GET", "/v1/batches/{batch_id}", batches.show),
            ("POST", "/v1/batches/{batch_id}/cancel", batches.cancel),
            ("POST", "/ai/queued", queue_runs),
            ("GET", "/ai/queued/{batch_id}", runs.show),
        )
        for method, path, handler in routes:
            app.router.add_route(
                method, f"{wire.PUBLIC_PREFIX}{path}", public_route(self._tokens, handler)
            )
        app.router.add_post(wire.LEASE_PATH, work_route(self._tokens, self._lease))
        app.router.add_post(wire.RESULTS_PATH, work_route(self._tokens, self._store_results))

    async def _lease(self, body: bytes) -> LeasedItems:
        """Renew a router's leases, and lease further items to it."""
        request = _LEASE.decode(body)
        lost: list[ItemRef] = []
        lines: list[LeasedLine] = []
        batches: dict[str, StoredBatch] = {}
        async with transaction(self._pool, by_index=True) as connection:
            if request.holds:
                lost = await renew_leases(connection, request.holds, self._limits.lease_s)
            waiting = (
                await waiting_batches(
                    connection, list(request.wanted), max(request.wanted.values())
                )
                if request.wanted
                else []
            )
            waiting = await without_spent_quota(connection, waiting) if waiting else []
            leased = await leased_by_tenant(connection) if waiting else {}
            for batch_id, count in share_items(waiting, leased, request.wanted).items():
                batch = await read_batch(connection, batch_id)
                if batch is not None:
                    batches[batch_id] = batch
                    lines += await lease_items(
                        connection,
                        batch_id,
                        count=count,
                        lease_id=secrets.token_hex(8),
                        lease_s=self._limits.lease_s,
                    )
        valid = {batch.batch_id for batch in waiting if batch.is_key_valid}
        items = await self._items(lines, batches, valid)
        return LeasedItems(items=items, lost=tuple(lost))

    async def _items(
        self, lines: Sequence[LeasedLine], batches: dict[str, StoredBatch], valid: Set[str]
    ) -> tuple[LeasedItem, ...]:
        """Return leased items with the bodies of their requests, as many as a message holds.

        The leases of the others run out, and they are leased again. `valid` are the batches whose
        key is valid.
        """
        items: list[LeasedItem] = []
        size_bytes = 0
        for batch_id, batch in batches.items():
            own = [line for line in lines if line.ref.batch_id == batch_id]
            parts = [(line.byte_offset, line.byte_length) for line in own]
            texts = await self._folder.read_parts(batch.input_file_id, parts)
            for line, text in zip(own, texts, strict=True):
                size_bytes += len(text)
                if size_bytes > wire.WORK_BYTES_MAX - wire.ITEM_BYTES_MAX:
                    break
                items.append(
                    LeasedItem(
                        ref=line.ref,
                        tenant_id=TenantId(batch.tenant_id),
                        key_id=KeyId(batch.key_id),
                        endpoint=batch.endpoint,
                        body=request_body(text),
                        is_key_valid=batch_id in valid,
                    )
                )
        return tuple(items)

    async def _store_results(self, body: bytes) -> None:
        request = _RESULTS.decode(body)
        async with transaction(self._pool, by_index=True) as connection:
            is_batch_answered = await store_results(connection, request.results)
        if is_batch_answered:
            self._nudge()
