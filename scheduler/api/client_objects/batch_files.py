"""`/v1/files` of the public API, relayed by routers: uploads and downloads are streamed."""

import secrets
from typing import Any, Final

import aiohttp
from aiohttp import web

from isochrone.service.network.form_parts import form_parts
from isochrone.service.network.http_server import FORM_ERRORS, json_response
from isochrone.wire.digits import parse_digits
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.client_objects.downloads import DownloadLimit, connection_end, send_file
from scheduler.api.client_objects.uploads import add_or_discard, write_upload
from scheduler.decide.batch_limits import BatchLimits
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.store.client_objects.batch_files import (
    BatchFile,
    add_file,
    delete_file,
    list_files,
    read_file,
    stored_files,
)
from scheduler.store.pool import Connection, Pool, storable_text, transaction, using

PURPOSES: Final = ("batch",)
FIELD_BYTES_MAX: Final = 4096
ANCHOR: Final = "expires_after[anchor]"
SECONDS: Final = "expires_after[seconds]"
FIELDS: Final = ("purpose", ANCHOR, SECONDS)
"""The fields of an upload beside the file."""
LIST_LIMIT_MAX: Final = 10_000
EXPIRES_MIN_S: Final = 3600
EXPIRES_MAX_S: Final = 30 * 86_400


class FileEndpoints:
    """The endpoints of files. The tenant is the one that a router has authenticated."""

    def __init__(
        self, pool: Pool, folder: BatchFolder, limits: BatchLimits, downloads: DownloadLimit
    ) -> None:
        self._downloads = downloads
        self._pool = pool
        self._folder = folder
        self._limits = limits

    async def create(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Store an uploaded file."""
        if not request.content_type.startswith("multipart/"):
            raise _invalid("expected multipart/form-data with 'purpose' and 'file'")
        async with using(self._pool) as connection:
            # A file over the tenant's limits is refused before it is written.
            await check_stored(connection, tenant_id, 1, self._limits)
        file_id = f"file-{secrets.token_hex(12)}"
        folder = self._folder.of_tenant(tenant_id)
        fields: dict[str, str] = {}
        filename, size_bytes = "", -1
        try:
            async for part in form_parts(request):
                if not isinstance(part, aiohttp.BodyPartReader):
                    raise _invalid("it has a multipart part within another")
                if part.name != "file":
                    name = (part.name or "")[:64]
                    if name not in FIELDS:
                        raise _invalid(f"there is no field {name!r}", name)
                    fields[name] = (await part.read_chunk(FIELD_BYTES_MAX)).decode(errors="replace")
                elif size_bytes >= 0:
                    raise _invalid("it has two fields 'file'", "file")
                else:
                    # Bytes that are not UTF-8 arrive as lone surrogates, which Postgres refuses.
                    given_name = (part.filename or "file").encode(errors="replace").decode()
                    filename = storable_text(given_name)
                    size_bytes = await write_upload(
                        folder,
                        file_id,
                        part.read_chunk,
                        bytes_max=self._limits.file_bytes_max,
                    )
            if size_bytes < 0:
                raise _invalid("field 'file' is required", "file")
        except BaseException as error:
            if size_bytes >= 0:
                # With a negative size nothing was stored, or `write_upload` has deleted it.
                await folder.discard(file_id)
            if isinstance(error, FORM_ERRORS):
                raise _invalid(str(error)[:200]) from error
            raise
        adding = self._add(file_id, tenant_id, filename, size_bytes, fields)
        file = await add_or_discard(self._pool, folder, file_id, adding)
        return json_response(file_body(file))

    async def _add(
        self, file_id: str, tenant_id: str, filename: str, size_bytes: int, fields: dict[str, str]
    ) -> BatchFile:
        purpose = fields.get("purpose", "")
        if purpose not in PURPOSES:
            raise _invalid(f"field 'purpose' is {purpose[:40]!r}, expected 'batch'", "purpose")
        async with transaction(self._pool) as connection:
            await check_stored(connection, tenant_id, size_bytes, self._limits)
            return await add_file(
                connection,
                file_id=file_id,
                tenant_id=tenant_id,
                purpose=purpose,
                filename=filename,
                size_bytes=size_bytes,
                expires_after_s=_expiry(fields),
            )

    async def list(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """List a tenant's files."""
        limit = parse_limit(request, LIST_LIMIT_MAX, LIST_LIMIT_MAX)
        async with using(self._pool) as connection:
            files = await list_files(
                connection,
                tenant_id,
                purpose=request.query.get("purpose", ""),
                after=request.query.get("after", ""),
                limit=limit + 1,
                newest=not parse_order(request),
            )
            if not files and (after := request.query.get("after")):
                require_after(await read_file(connection, tenant_id, after), after)
        return json_response(list_body([file_body(file) for file in files], limit))

    async def show(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Return a file's description."""
        return json_response(file_body(await self._file(request, tenant_id)))

    async def content(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Stream a file's contents."""
        file = await self._file(request, tenant_id)
        response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
        try:
            with self._downloads.counted(tenant_id, connection_end(request)) as download:
                return await send_file(
                    request,
                    self._folder.of_tenant(tenant_id),
                    file.file_id,
                    response,
                    first=0,
                    count=file.size_bytes,
                    download=download,
                )
        except FileNotFoundError:
            raise _not_found(file.file_id) from None

    async def delete(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Delete a file that no open batch reads."""
        file = await self._file(request, tenant_id)
        folder = self._folder.of_tenant(tenant_id)
        async with folder.transaction_turn(), transaction(self._pool) as connection:
            if not await delete_file(connection, tenant_id, file.file_id):
                raise ApiError(
                    ErrorCode.CONFLICT,
                    f"cannot delete {file.file_id}: a batch is reading it; cancel that first",
                )
            # Before the commit: the row stays while the contents cannot be deleted.
            await folder.delete(file.file_id)
        return json_response({"id": file.file_id, "object": "file", "deleted": True})

    async def _file(self, request: web.Request, tenant_id: str) -> BatchFile:
        file_id = request.match_info["file_id"]
        async with using(self._pool) as connection:
            file = await read_file(connection, tenant_id, file_id)
        if file is None:
            raise _not_found(file_id)
        return file


async def check_stored(
    connection: Connection, tenant_id: str, size_bytes: int, limits: BatchLimits
) -> None:
    """Raise ApiError 429 if a tenant may not store a further file of so many bytes."""
    stored = await stored_files(connection, tenant_id)
    if stored.size_bytes + size_bytes > limits.tenant_bytes_max:
        raise ApiError(
            ErrorCode.QUOTA_EXCEEDED,
            f"cannot store {size_bytes} bytes: this tenant has {stored.size_bytes} of"
            f" {limits.tenant_bytes_max} bytes in files; delete some",
        )
    if stored.files >= limits.tenant_files_max:
        raise ApiError(
            ErrorCode.QUOTA_EXCEEDED,
            f"cannot store the file: this tenant has {stored.files} of {limits.tenant_files_max}"
            " files; delete some",
        )


def file_body(file: BatchFile) -> dict[str, Any]:
    """Return OpenAI's object of a file."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def list_body(bodies: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return OpenAI's list of the first `limit` objects."""
    page = bodies[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(bodies) > limit,
    }


def parse_limit(request: web.Request, default: int, largest: int) -> int:
    """Return how many objects a page may have. Raises ApiError 400."""
    text = request.query.get("limit", str(default))
    limit = parse_digits(text)
    if limit is None or not 1 <= limit <= largest:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use 'limit': expected 1 to {largest}, got {text[:20]!r}",
            param="limit",
        )
    return limit


def parse_order(request: web.Request) -> bool:
    """Return whether a list is wanted with its oldest item first. Raises ApiError 400."""
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use 'order': expected asc or desc, got {order[:20]!r}",
            param="order",
        )
    return order == "asc"


def require_after(named: object | None, after: str) -> None:
    """Raise ApiError 400 if a page is wanted after an object that does not exist.

    An empty page would end the client's loop over all pages. This happens if it deletes objects
    while it lists them.
    """
    if named is None:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use 'after': there is no {after[:64]!r}; list again from the start",
            param="after",
        )


def _expiry(fields: dict[str, str]) -> int | None:
    """Return after how many seconds a file expires. Raises ApiError 400."""
    anchor = fields.get(ANCHOR, "created_at")
    if anchor != "created_at":
        reason = f"'expires_after.anchor' is {anchor[:40]!r}, expected 'created_at'"
        raise _invalid(reason, "expires_after")
    text = fields.get(SECONDS, "")
    if not text:
        return None
    seconds = parse_digits(text)
    if seconds is None or not EXPIRES_MIN_S <= seconds <= EXPIRES_MAX_S:
        reason = f"'expires_after.seconds' is {text[:20]!r}"
        raise _invalid(f"{reason}, expected {EXPIRES_MIN_S} to {EXPIRES_MAX_S}", "expires_after")
    return seconds


def _not_found(file_id: str) -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, f"cannot find the file {file_id[:64]!r}")


def _invalid(reason: str, param: str | None = None) -> ApiError:
    return ApiError(
        ErrorCode.INVALID_REQUEST, f"cannot use the request body: {reason}", param=param
    )
