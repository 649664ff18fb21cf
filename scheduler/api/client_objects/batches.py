"""`/v1/batches` of the public API, relayed by routers."""

import secrets
from typing import Any, Final

import msgspec
from aiohttp import web

from isochrone.service.network.http_server import json_response, read_body
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.invalid_field import decode_public
from isochrone.wire.http.public_bodies import CreateBatch
from scheduler.api.client_objects.batch_files import list_body, parse_limit, require_after
from scheduler.decide.batch_limits import BatchLimits
from scheduler.decide.batch_lines import ENDPOINTS
from scheduler.store.client_objects.batch_files import read_file
from scheduler.store.client_objects.batches import (
    StoredBatch,
    add_batch,
    cancel_batch,
    list_batches,
    open_counts,
    read_batch,
)
from scheduler.store.pool import Connection, Pool, transaction, using

WINDOW_S: Final = 86_400.0
BODY_BYTES_MAX: Final = 64 * 1024
BODY_TIMEOUT_S: Final = 10.0
LIST_LIMIT_DEFAULT: Final = 20
LIST_LIMIT_MAX: Final = 100


_CREATE: Final = msgspec.json.Decoder(CreateBatch)


class BatchEndpoints:
    """The endpoints of batches. Tenant and key are those that a router has authenticated."""

    def __init__(self, pool: Pool, limits: BatchLimits) -> None:
        self._pool = pool
        self._limits = limits

    async def create(self, request: web.Request, tenant_id: str, key_id: str) -> web.Response:
        """Begin a batch."""
        raw = await read_body(request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        given = decode_public(raw, _CREATE)
        if given.endpoint not in ENDPOINTS:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot use field 'endpoint': {given.endpoint[:60]!r} is not one of"
                f" {', '.join(ENDPOINTS)}",
                param="endpoint",
            )
        async with transaction(self._pool) as connection:
            if await read_file(connection, tenant_id, given.input_file_id) is None:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    f"cannot find the file {given.input_file_id!r}",
                    param="input_file_id",
                )
            await check_open(connection, tenant_id, self._limits)
            batch = await add_batch(
                connection,
                batch_id=f"batch_{secrets.token_hex(12)}",
                tenant_id=tenant_id,
                key_id=key_id,
                endpoint=given.endpoint,
                input_file_id=given.input_file_id,
                metadata=given.metadata or {},
                expires_after_s=WINDOW_S,
            )
        return json_response(batch_body(batch))

    async def list(self, request: web.Request, tenant_id: str) -> web.Response:
        """List a tenant's batches, the newest first."""
        limit = parse_limit(request, LIST_LIMIT_DEFAULT, LIST_LIMIT_MAX)
        async with using(self._pool) as connection:
            batches = await list_batches(
                connection, tenant_id, request.query.get("after", ""), limit + 1
            )
            if not batches and (after := request.query.get("after")):
                require_after(await read_batch(connection, after, tenant_id=tenant_id), after)
        return json_response(list_body([batch_body(batch) for batch in batches], limit))

    async def show(self, request: web.Request, tenant_id: str) -> web.Response:
        """Return a batch."""
        async with using(self._pool) as connection:
            batch = await read_batch(connection, _batch_id(request), tenant_id=tenant_id)
        return json_response(batch_body(_found(batch, request)))

    async def cancel(self, request: web.Request, tenant_id: str) -> web.Response:
        """Let a batch begin no further items. A batch that has ended is refused."""
        batch_id = _batch_id(request)
        async with transaction(self._pool) as connection:
            batch = _found(
                await read_batch(connection, batch_id, tenant_id=tenant_id, lock=True), request
            )
            if batch.status in ("completed", "failed", "expired", "finalizing"):
                raise ApiError(
                    ErrorCode.CONFLICT, f"cannot cancel the batch: its status is {batch.status!r}"
                )
            await cancel_batch(connection, batch_id)
            batch = _found(await read_batch(connection, batch_id), request)
        return json_response(batch_body(batch))


async def check_open(connection: Connection, tenant_id: str, limits: BatchLimits) -> None:
    """Raise ApiError 429 if too many batches or items of a tenant wait for their end."""
    counts = await open_counts(connection, tenant_id)
    if counts.batches >= limits.tenant_batches_max:
        raise ApiError(
            ErrorCode.QUOTA_EXCEEDED,
            f"cannot begin a batch: {counts.batches} of this tenant have not ended, and the limit"
            f" is {limits.tenant_batches_max}; begin it when some have, or put more requests into"
            " one",
        )
    if counts.unanswered >= limits.tenant_items_max:
        raise ApiError(
            ErrorCode.QUOTA_EXCEEDED,
            f"cannot begin a batch: {limits.tenant_items_max} items of this tenant wait for their"
            " answer; begin it when some are answered",
        )


def batch_body(batch: StoredBatch) -> dict[str, Any]:
    """Return OpenAI's object of a batch."""
    times = {
        name: getattr(batch, name)
        for name in StoredBatch.__struct_fields__
        if name.endswith("_at") and name != "created_at"
    }
    errors = {"object": "list", "data": batch.errors} if batch.errors else None
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.deployment or None,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        **times,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata or None,
    }


def _batch_id(request: web.Request) -> str:
    return request.match_info["batch_id"]


def _found(batch: StoredBatch | None, request: web.Request) -> StoredBatch:
    if batch is None:
        raise ApiError(ErrorCode.NOT_FOUND, f"cannot find the batch {_batch_id(request)[:64]!r}")
    return batch
