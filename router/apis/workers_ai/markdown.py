"""`/ai/tomarkdown`: documents in, Markdown out; and the list of formats."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec
from aiohttp import BodyPartReader, web

from isochrone.service.network.form_parts import form_parts
from isochrone.service.network.http_server import FORM_ERRORS
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import TenantId
from isochrone.wire.peers.routes import KeyEntry
from router.apis.workers_ai.auxiliary import EnvelopeRoutes, WorkersAiReply
from router.apis.workers_ai.catalog import envelope
from router.decide.admission.limits import KeyLimiter
from router.decide.choice.deployment_routing import BYTES_PER_TOKEN_DEFAULT
from router.documents.converter import ConvertedDocument, DocumentConverter
from router.documents.formats import FORMATS
from router.fleet_state import FleetState

TO_MARKDOWN_PATH: Final = "/ai/tomarkdown"
SUPPORTED_PATH: Final = "/ai/tomarkdown/supported"
OPTIONS: Final = "conversionOptions"
FILES_FIELD: Final = re.compile(r"files(?:\[\d{0,4}\])?")
"""Cloudflare's SDKs name each file of a list `files[]`."""

CHARSET: Final = re.compile(r"[\w.:-]{1,40}", re.ASCII)
FILES_MAX: Final = 8
NAME_BYTES_MAX: Final = 255
ANSWER_S: Final = 55.0
"""The longest time for all documents of a request: the router waits 60 s for an answer."""


class UploadedDocument(NamedTuple):
    """A file of a form. `charset` is what its content-type names, or ""."""

    name: str
    content: bytes
    charset: str = ""


def add_markdown_routes(
    routes: EnvelopeRoutes,
    limiter: KeyLimiter,
    fleet: FleetState,
) -> None:
    """Add the routes. Each request for a conversion counts as one of its key's requests."""
    directory = fleet.directory
    converter = DocumentConverter()

    async def supported(_: web.Request, key: KeyEntry) -> WorkersAiReply:
        rows = [
            {"extension": extension, "mimeType": known.media_type}
            for extension, known in FORMATS.items()
        ]
        return WorkersAiReply(envelope(rows))

    async def convert(request: web.Request, key: KeyEntry) -> WorkersAiReply:
        _check_region(key, fleet)
        budget = directory.budget_of(key)
        admitted = limiter.admit(key, 0, routes.clock(), routes.surface.unix_clock(), budget=budget)
        try:
            documents = [document async for document in _uploads(request)]
            if not documents:
                raise _invalid("it has no field 'files' with a document")
            converted = await convert_all(converter, key.tenant_id, documents)
        finally:
            admitted.settle(0, routes.clock())
        return WorkersAiReply(envelope([*map(_row, documents, converted)]))

    routes.add("GET", SUPPORTED_PATH, supported)
    routes.add("POST", TO_MARKDOWN_PATH, convert)


async def convert_all(
    converter: DocumentConverter,
    tenant_id: TenantId,
    documents: Sequence[UploadedDocument],
    within_s: float = ANSWER_S,
) -> list[ConvertedDocument]:
    """Convert documents; those that are not read `within_s` have an error.

    Raises ApiError if one cannot be taken now, and ends the others then.
    """
    begun = [asyncio.create_task(converter.convert(tenant_id, *document)) for document in documents]
    try:
        await asyncio.wait(begun, timeout=within_s, return_when=asyncio.FIRST_EXCEPTION)
        error = f"not read within {within_s:g} s beside other documents: send it again by itself"
        late = ConvertedDocument(error=error)
        return [task.result() if task.done() else late for task in begun]
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


def _check_region(key: KeyEntry, fleet: FleetState) -> None:
    """Raise ApiError 403 if this router, which converts by itself, is outside the key's regions."""
    if key.regions and fleet.pop not in fleet.directory.pops_inside(key.regions):
        raise ApiError(
            ErrorCode.FORBIDDEN,
            f"cannot convert documents in {fleet.pop!r}: this key is limited to"
            f" {', '.join(key.regions)}; connect to an endpoint there",
        )


async def _uploads(request: web.Request) -> AsyncIterator[UploadedDocument]:
    """Yield the documents of a form. Raises ApiError 400."""
    try:
        reader = form_parts(request)
    except FORM_ERRORS as error:
        raise _invalid("it must be a form (multipart/form-data) with fields 'files'") from error
    count = 0
    try:
        async for part in reader:
            if not isinstance(part, BodyPartReader):
                raise _invalid("a part of the form is a form itself")
            if part.name != OPTIONS and not FILES_FIELD.fullmatch(part.name or ""):
                raise _invalid(f"there is no field {str(part.name)[:60]!r}")
            content = bytes(await part.read(decode=True))
            if part.name == OPTIONS:
                _check_options(content)
                continue
            count += 1
            if count > FILES_MAX:
                raise _invalid(f"it has more than {FILES_MAX} files")
            name = (part.filename or "")[:NAME_BYTES_MAX]
            if not name:
                raise _invalid("each file needs a file name, whose ending says what it is")
            yield UploadedDocument(name, content, _charset_of(part))
    except FORM_ERRORS as error:
        raise _invalid(f"the form is malformed: {str(error)[:200]}") from error


def _charset_of(part: BodyPartReader) -> str:
    """Return the charset that a part's content-type names, or "". Raises ApiError 400."""
    charset = part.get_charset("")
    if charset and not CHARSET.fullmatch(charset):
        raise _invalid(f"a content-type has the charset {charset[:60]!r}")
    return charset


def _check_options(content: bytes) -> None:
    """Raise ApiError 400 unless there are no options: none of Workers AI's exists here."""
    try:
        options = msgspec.json.decode(content, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise _invalid("'conversionOptions' is not a JSON object") from error
    if options:
        raise _invalid(f"'conversionOptions' has {sorted(options)[0][:60]!r}, which does not exist")


def _row(document: UploadedDocument, converted: ConvertedDocument) -> dict[str, Any]:
    suffix = document.name[document.name.rfind(".") :].lower()
    known = FORMATS.get(suffix)
    row = {
        "id": str(uuid4()),
        "name": document.name,
        "mimeType": known.media_type if known else "application/octet-stream",
    }
    if converted.error:
        return {**row, "format": "error", "error": f"cannot convert: {converted.error}"}
    tokens = round(len(converted.data.encode(errors="replace")) / BYTES_PER_TOKEN_DEFAULT)
    return {**row, "format": "markdown", "tokens": tokens, "data": converted.data}


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot use the request body: {reason}")
