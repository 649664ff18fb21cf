"""`/ai/finetunes` of the public API, relayed by routers: LoRA adapters that clients upload."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from isochrone.service.network.form_parts import form_parts
from isochrone.service.network.http_server import FORM_ERRORS, json_response, read_body
from isochrone.wire.digits import parse_digits
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.invalid_field import decode_public
from isochrone.wire.http.public_bodies import NewFinetune
from isochrone.wire.peers.adapter import ADAPTER_FILES
from scheduler.api.client_objects.adapter_intake import (
    NAMES,
    AdapterIntake,
    NewAdapter,
    TakenFile,
    UploadedFile,
    refuse_complete,
)
from scheduler.store.client_objects.adapters import (
    ORDERS,
    StoredAdapter,
    delete_adapter,
    find_adapter,
    list_public_adapters,
    list_tenant_adapters,
)
from scheduler.store.pool import Connection, Pool, transaction, using

BODY_BYTES_MAX: Final = 64 * 1024
BODY_TIMEOUT_S: Final = 10.0
FIELD_BYTES_MAX: Final = 256
PUBLIC_PAGE_MAX: Final = 1000
OFFSET_MAX: Final = 1_000_000


_NEW: Final = msgspec.json.Decoder(NewFinetune)


class FinetuneEndpoints:
    """The endpoints of adapters. The tenant is the one that a router has authenticated."""

    def __init__(self, pool: Pool, intake: AdapterIntake, on_change: Callable[[], None]) -> None:
        """`on_change` publishes what routers know of adapters."""
        self._pool = pool
        self._intake = intake
        self._on_change = on_change

    async def create(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Describe an adapter for the model of a deployment."""
        body = await read_body(request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        given = decode_public(body, _NEW)
        new = NewAdapter(
            tenant_id, given.model, given.name, given.description or "", bool(given.public)
        )
        async with transaction(self._pool) as connection:
            added = await self._intake.add(connection, new)
        self._on_change()
        return _answer(finetune_body(added))

    async def list(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """List a tenant's adapters."""
        async with using(self._pool) as connection:
            adapters = await list_tenant_adapters(connection, tenant_id)
        return _answer([finetune_body(adapter) for adapter in adapters])

    async def list_public(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """List the public adapters of all tenants."""
        order = request.query.get("orderBy", request.query.get("order_by", ORDERS[0]))
        if order not in ORDERS:
            raise _invalid(f"'orderBy' is {order[:40]!r}, expected one of {', '.join(ORDERS)}")
        limit = _count(request, "limit", PUBLIC_PAGE_MAX, PUBLIC_PAGE_MAX)
        offset = _count(request, "offset", 0, OFFSET_MAX)
        async with using(self._pool) as connection:
            adapters = await list_public_adapters(
                connection, order_by=order, limit=limit, offset=offset
            )
        return _answer([finetune_body(adapter) for adapter in adapters])

    async def delete(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Delete an adapter; requests that run with it end as they would have."""
        async with transaction(self._pool) as connection:
            adapter = await self._find(connection, request, tenant_id, locked=True)
            await delete_adapter(connection, adapter.adapter_id)
        await self._intake.delete_files(adapter.files)
        self._on_change()
        return _answer({"id": adapter.adapter_id})

    async def upload(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Take one of an adapter's files."""
        async with using(self._pool) as connection:
            adapter = await self._find(connection, request, tenant_id)
        refuse_complete(adapter)
        if not request.content_type.startswith("multipart/"):
            raise _invalid("expected multipart/form-data with 'file_name' and 'file'")
        name = ""
        uploaded: UploadedFile | None = None
        try:
            try:
                async for part in form_parts(request):
                    if not isinstance(part, aiohttp.BodyPartReader):
                        raise _invalid("it has a multipart part within another")
                    if part.name == "file_name":
                        name = (await part.read_chunk(FIELD_BYTES_MAX)).decode(errors="replace")
                    elif part.name != "file" or uploaded is not None:
                        raise _invalid("expected one field 'file_name' and one field 'file'")
                    else:
                        uploaded = await self._intake.write(tenant_id, part.read_chunk)
            except FORM_ERRORS as error:
                raise _invalid(str(error)[:200]) from error
            if name not in ADAPTER_FILES or uploaded is None:
                raise _invalid(f"expected a field 'file' and 'file_name', one of {NAMES}")
        except BaseException:
            if uploaded is not None:
                await self._intake.discard(uploaded)
            raise

        async def take(new: UploadedFile) -> TakenFile:
            turn = self._intake.transaction_turn(tenant_id)
            async with turn, transaction(self._pool) as connection:
                adapter = await self._find(connection, request, tenant_id, locked=True)
                return await self._intake.take(connection, adapter, name, new)

        taken = await self._intake.add_or_discard(self._pool, uploaded, take(uploaded))
        # The replaced files were never used: the adapter was not complete.
        await self._intake.delete_files(taken.replaced)
        self._on_change()
        return _answer(finetune_body(taken.adapter))

    async def _find(
        self, connection: Connection, request: web.Request, tenant_id: str, *, locked: bool = False
    ) -> StoredAdapter:
        """Return the adapter that a path names by its id or name. Raises ApiError 404."""
        name = request.match_info["finetune"]
        adapter = await find_adapter(connection, tenant_id, name, locked=locked)
        if adapter is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"cannot find the adapter {name[:80]!r}")
        return adapter


def finetune_body(adapter: StoredAdapter) -> dict[str, Any]:
    """Return Workers AI's object of an adapter."""
    return {
        "id": adapter.adapter_id,
        "model": adapter.model_name,
        "name": adapter.name,
        "description": adapter.description,
        "public": adapter.is_public,
        "created_at": _time(adapter.created_at),
        "modified_at": _time(adapter.modified_at),
    }


def _count(request: web.Request, name: str, default: int, largest: int) -> int:
    """Return a number of the query. Raises ApiError 400."""
    text = request.query.get(name, str(default)).removesuffix(".0")
    number = parse_digits(text)
    if number is None or number > largest:
        raise _invalid(f"'{name}' is {text[:20]!r}, expected 0 to {largest}")
    return number


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


def _answer(result: Any) -> web.Response:
    return json_response({"result": result, "success": True, "errors": [], "messages": []})


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot use the request: {reason}")
