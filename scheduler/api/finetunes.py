"""`/ai/finetunes` of the public API, relayed by routers: LoRA adapters that clients upload.

An adapter is described first; then its two files are uploaded, in any order, and read while they
arrive. When both are there and fit each other and the base model, the adapter is complete: from
then on it can be used and never changes.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final, NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from isochrone.service.http_server import read_body
from isochrone.wire.adapter import (
    ADAPTER_FILES,
    CONFIG_FILE,
    WEIGHTS_FILE,
)
from isochrone.wire.adapter_files import (
    CONFIG_BYTES_MAX,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    AdapterConfig,
    BadAdapter,
    TensorShapes,
    header_length,
    read_adapter_config,
    read_tensor_shapes,
)
from isochrone.wire.codec import describe
from isochrone.wire.engine_capabilities import adapter_rank_max
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.public_bodies import NewFinetune
from scheduler.decide.adapter_fit import check_adapter
from scheduler.decide.adapter_limits import AdapterLimits
from scheduler.state.batch_folder import CHUNK_BYTES, BatchFolder
from scheduler.store.adapters import (
    ORDERS,
    AdapterFile,
    StoredAdapter,
    add_adapter,
    delete_adapter,
    find_adapter,
    list_public_adapters,
    list_tenant_adapters,
    lock_tenant_adapters,
    set_files,
)
from scheduler.store.catalogue import get_model
from scheduler.store.deployments import get_deployment_by_name
from scheduler.store.pool import Connection, Pool, transaction, using

BODY_BYTES_MAX: Final = 64 * 1024
BODY_TIMEOUT_S: Final = 10.0
FIELD_BYTES_MAX: Final = 256
PUBLIC_PAGE_MAX: Final = 1000
OFFSET_MAX: Final = 1_000_000


class _Upload(NamedTuple):
    """A file that was stored, and its beginning (of weights: at least the header)."""

    file_id: str
    size_bytes: int
    sha256: str
    start: bytes


class _TakenFile(NamedTuple):
    """An adapter after a file was added, and the files that this replaced."""

    adapter: StoredAdapter
    replaced: list[AdapterFile]


_NEW: Final = msgspec.json.Decoder(NewFinetune)


class FinetuneEndpoints:
    """The endpoints of adapters. The tenant is the one that a router has authenticated."""

    def __init__(
        self,
        pool: Pool,
        folder: BatchFolder,
        limits: AdapterLimits,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` publishes what routers know of adapters."""
        self._pool = pool
        self._folder = folder
        self._limits = limits
        self._on_change = on_change

    async def create(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Describe an adapter for the model of a deployment."""
        body = await read_body(request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        try:
            given = _NEW.decode(body)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise _invalid(describe(error)) from error
        async with transaction(self._pool) as connection:
            deployment = await get_deployment_by_name(connection, given.model)
            if deployment is None:
                raise ApiError(
                    ErrorCode.MODEL_NOT_FOUND,
                    f"cannot find the model {given.model!r}",
                    param="model",
                )
            if not adapter_rank_max(deployment.engine):
                raise ApiError(
                    ErrorCode.ADAPTERS_UNSUPPORTED,
                    f"cannot add an adapter: the model {given.model!r} does not support LoRA",
                    param="model",
                    headers={"allow": "GET"},
                )
            count = await lock_tenant_adapters(connection, tenant_id)
            if count >= self._limits.tenant_adapters_max:
                raise ApiError(
                    ErrorCode.QUOTA_EXCEEDED,
                    f"cannot add an adapter: this tenant has {count} of"
                    f" {self._limits.tenant_adapters_max}; delete one",
                )
            added = await add_adapter(
                connection,
                StoredAdapter(
                    adapter_id=f"ft-{secrets.token_hex(12)}",
                    tenant_id=tenant_id,
                    name=given.name,
                    description=(given.description or "").replace("\0", ""),
                    model_id=deployment.model_id,
                    model_name=given.model,
                    is_public=bool(given.public),
                    rank=0,
                    files=(),
                    source="",
                    digest=None,
                    created_at=0.0,
                    modified_at=0.0,
                ),
            )
        if added is None:
            raise ApiError(
                ErrorCode.CONFLICT,
                f"cannot add an adapter {given.name!r}: this tenant has one of that name",
                param="name",
            )
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
        await delete_files(self._folder, adapter.files)
        self._on_change()
        return _answer({"id": adapter.adapter_id})

    async def upload(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Take one of an adapter's files."""
        async with using(self._pool) as connection:
            adapter = await self._find(connection, request, tenant_id)
        _refuse_complete(adapter)
        if not request.content_type.startswith("multipart/"):
            raise _invalid("expected multipart/form-data with 'file_name' and 'file'")
        name, uploaded = "", None
        try:
            try:
                async for part in await request.multipart():
                    if not isinstance(part, aiohttp.BodyPartReader):
                        raise _invalid("it has a multipart part within another")
                    if part.name == "file_name":
                        name = (await part.read_chunk(FIELD_BYTES_MAX)).decode(errors="replace")
                    elif part.name != "file" or uploaded is not None:
                        raise _invalid("expected one field 'file_name' and one field 'file'")
                    else:
                        uploaded = await self._write(part)
            except ValueError as error:
                raise _invalid(str(error)[:200]) from error
            if name not in ADAPTER_FILES or uploaded is None:
                raise _invalid(
                    f"expected a field 'file' and 'file_name', one of {' and '.join(ADAPTER_FILES)}"
                )
            taken = await self._take(request, tenant_id, name, uploaded)
        except BaseException:
            if uploaded is not None:
                await self._folder.delete(uploaded.file_id)
            raise
        # What it replaces was never used.
        await delete_files(self._folder, taken.replaced)
        self._on_change()
        return _answer(finetune_body(taken.adapter))

    async def _write(self, part: aiohttp.BodyPartReader) -> _Upload:
        """Write a file to the folder while it arrives."""
        file_id = f"adapter-{secrets.token_hex(12)}"
        bytes_max = self._limits.file_bytes_max
        digest, size_bytes, start = hashlib.sha256(), 0, bytearray()
        writing = self._folder.writing(file_id)
        output: BinaryIO = await asyncio.to_thread(writing.__enter__)
        try:
            while chunk := await part.read_chunk(CHUNK_BYTES):
                size_bytes += len(chunk)
                if size_bytes > bytes_max:
                    raise ApiError(
                        ErrorCode.TOO_LARGE,
                        f"cannot store the file: it has more than {bytes_max} bytes",
                    )
                if len(start) < LENGTH_BYTES + HEADER_BYTES_MAX:
                    start += chunk
                    _drop_weights(start)
                digest.update(chunk)
                await asyncio.to_thread(output.write, chunk)
        except BaseException as error:
            writing.__exit__(type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(writing.__exit__, None, None, None)
        return _Upload(file_id, size_bytes, digest.hexdigest(), bytes(start))

    async def _take(
        self, request: web.Request, tenant_id: str, name: str, uploaded: _Upload
    ) -> _TakenFile:
        """Make an uploaded file one of the adapter's. Raises ApiError if it cannot be."""
        new = AdapterFile(
            path=name,
            size_bytes=uploaded.size_bytes,
            sha256=uploaded.sha256,
            file_id=uploaded.file_id,
        )
        async with transaction(self._pool) as connection:
            adapter = await self._find(connection, request, tenant_id, locked=True)
            _refuse_complete(adapter)
            others = [file for file in adapter.files if file.path != name]
            files = tuple(sorted((*others, new), key=lambda file: file.path))
            rank = await self._check(connection, adapter, uploaded, name, others)
            stored = await set_files(connection, adapter, files, rank)
            return _TakenFile(stored, [file for file in adapter.files if file.path == name])

    async def _check(
        self,
        connection: Connection,
        adapter: StoredAdapter,
        uploaded: _Upload,
        name: str,
        others: Sequence[AdapterFile],
    ) -> int:
        """Check what is there of an adapter; return its rank if it is complete, else 0."""
        starts = {name: (uploaded.start, uploaded.size_bytes)}
        for file in others:
            start = await asyncio.to_thread(self._read_start, file)
            starts[file.path] = (start, file.size_bytes)
        config: AdapterConfig | None = None
        shapes: TensorShapes | None = None
        try:
            if CONFIG_FILE in starts:
                start, size_bytes = starts[CONFIG_FILE]
                if size_bytes > CONFIG_BYTES_MAX:
                    raise BadAdapter(f"cannot read a config of {size_bytes} bytes")
                config = read_adapter_config(start)
                check_rank(config, self._limits.rank_max)
            if WEIGHTS_FILE in starts:
                shapes = read_tensor_shapes(*starts[WEIGHTS_FILE])
            if config is None or shapes is None:
                return 0
            model = await get_model(connection, adapter.model_id)
            check_adapter(config, shapes, model.model.shape if model is not None else None)
        except BadAdapter as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, str(error), param="file") from error
        return config.r

    def _read_start(self, file: AdapterFile) -> bytes:
        try:
            with self._folder.open(file.file_id) as source:
                start = bytearray(source.read(CONFIG_BYTES_MAX))
                if file.path == WEIGHTS_FILE:
                    length = LENGTH_BYTES + header_length(bytes(start))
                    start += source.read(max(0, length - len(start)))
        except FileNotFoundError:
            raise ApiError(
                ErrorCode.CONFLICT, f"cannot find {file.path} any more: upload it again"
            ) from None
        return bytes(start)

    async def _find(
        self, connection: Connection, request: web.Request, tenant_id: str, *, locked: bool = False
    ) -> StoredAdapter:
        """Return the adapter that a path names by its id or name. Raises ApiError 404."""
        name = request.match_info["finetune"]
        adapter = await find_adapter(connection, tenant_id, name, locked=locked)
        if adapter is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"cannot find the adapter {name[:80]!r}")
        return adapter


def check_rank(config: AdapterConfig, rank_max: int) -> None:
    """Raise BadAdapter if an adapter's rank is above the limit."""
    if config.r > rank_max:
        raise BadAdapter(f"cannot use an adapter of rank {config.r}: the limit is {rank_max}")


async def delete_files(folder: BatchFolder, files: Sequence[AdapterFile]) -> None:
    """Delete uploaded files."""
    for file in files:
        if file.file_id:
            await folder.delete(file.file_id)


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


def _drop_weights(start: bytearray) -> None:
    """Keep of the beginning of a safetensors file its header only. Configs are small."""
    if len(start) > CONFIG_BYTES_MAX:
        length = LENGTH_BYTES + int.from_bytes(start[:LENGTH_BYTES], "little")
        del start[max(CONFIG_BYTES_MAX, min(length, LENGTH_BYTES + HEADER_BYTES_MAX)) :]


def _refuse_complete(adapter: StoredAdapter) -> None:
    if adapter.digest is not None:
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot change the adapter {adapter.name!r}: its files are complete; make a new one",
        )


def _count(request: web.Request, name: str, default: int, largest: int) -> int:
    """Return a number of the query. Raises ApiError 400."""
    text = request.query.get(name, str(default)).removesuffix(".0")
    if not (text.isascii() and text.isdigit() and int(text[:9]) <= largest):
        raise _invalid(f"'{name}' is {text[:20]!r}, expected 0 to {largest}")
    return int(text)


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


def _answer(result: Any) -> web.Response:
    return web.json_response({"result": result, "success": True, "errors": [], "messages": []})


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot use the request: {reason}")
