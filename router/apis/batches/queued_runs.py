"""`POST /ai/run/{model}?queueRequest=true`: Workers AI's batches, on those of the scheduler."""

from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Meta

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from router.apis.openai.decode import decode
from router.apis.openai.surface import OpenAiSurface
from router.apis.query_flags import flag
from router.apis.relay import CHUNK_BYTES, in_a_task
from router.apis.workers_ai.surface import REJECT_IF_BUSY, model_of
from router.apis.workers_ai.translate import FIELDS_OF_QUEUE
from router.dataplane.http_messages import HttpRequest, HttpResponse, ResponseWriter
from router.scheduler_client import SchedulerClient

QUEUE_REQUEST: Final = "queueRequest"
REQUESTS_MAX: Final = 10_000
REFERENCE_CHARS_MAX: Final = 256


class QueuedRequests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The requests to queue, or the id of a queue to ask for."""

    requests: (
        Annotated[list[dict[str, msgspec.Raw]], Meta(min_length=1, max_length=REQUESTS_MAX)] | None
    ) = None
    request_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None


_ENVELOPE: Final = (b'{"result":', b',"success":true,"errors":[],"messages":[]}')
"""The parts of Workers AI's envelope before and after the scheduler's answer."""

_QUEUED: Final = msgspec.json.Decoder(QueuedRequests)
_TEXT: Final = msgspec.json.Decoder(str | None)


def is_queued_run(request: HttpRequest, path: str) -> bool:
    """Return whether a request queues runs, or asks for queued ones. Raises ApiError."""
    if not request.query or model_of(path) is None or not flag(request.query, QUEUE_REQUEST):
        return False
    if flag(request.query, REJECT_IF_BUSY):
        reason = f"a queued request waits for capacity; leave out '{REJECT_IF_BUSY}'"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot queue: {reason}", param=REJECT_IF_BUSY)
    return True


async def answer_queued_run(
    client: SchedulerClient,
    openai: OpenAiSurface,
    request: HttpRequest,
    path: str,
    writer: ResponseWriter,
) -> None:
    """Queue runs, or return the state of queued ones. Raises ApiError. An inline task."""
    assert request.key is not None
    model = model_of(path) or ""
    deployment = openai.base_deployment(model, request.key)
    client.require_batches()
    queued = _decode(request.body)
    if (queued.requests is None) == (queued.request_id is None):
        reason = "it needs either 'requests' to queue, or the 'request_id' of queued ones"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use the request body: {reason}")
    if queued.requests is not None:
        # Results of earlier runs can be read after that day, too.
        openai.refuse_retired(deployment)
    await in_a_task(_answer(client, request, queued, model, writer))


def _decode(body: bytes) -> QueuedRequests:
    """Decode a body. Raises ApiError 400, which for a single run's field says where it belongs."""
    try:
        return decode(body, _QUEUED)
    except ApiError as error:
        if error.param is None or error.param.partition("[")[0] in FIELDS_OF_QUEUE:
            raise
        where = 'put each run into the list \'requests\': {"requests": [{"prompt": "..."}]}'
        message = f"cannot use field '{error.param}' of a queued request: {where}"
        raise ApiError(ErrorCode.INVALID_REQUEST, message, param=error.param) from None


async def _answer(
    client: SchedulerClient,
    request: HttpRequest,
    queued: QueuedRequests,
    model: str,
    writer: ResponseWriter,
) -> None:
    key = request.key
    assert key is not None
    query = f"model={quote(model, safe='')}"
    method, path, body = "GET", f"/ai/queued/{queued.request_id}", None
    if queued.requests is not None:
        method, path = "POST", "/ai/queued"
        lines = [_line(number, run, model) for number, run in enumerate(queued.requests)]
        body = b"\n".join(lines)
    header_lines = f"{headers.REQUEST_ID}: {request.client_request_id}\r\n"
    async with client.relay(
        key, method, path, query=query, body=body, stored_bytes=len(body or b"")
    ) as response:
        if response.content_length is not None:
            whole = _ENVELOPE[0] + await response.read() + _ENVELOPE[1]
            writer.reply(HttpResponse(200, whole, header_lines))
            return
        # Results may be gigabytes: they are read as the client reads them.
        writer.begin(200, "application/json", header_lines)
        writer.send(_ENVELOPE[0])
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            writer.send(chunk)
            await writer.drained()
        writer.send(_ENVELOPE[1])
        writer.end()


def _line(number: int, run: dict[str, msgspec.Raw], model: str) -> bytes:
    """Return the line of a batch for one run. Raises ApiError 400."""
    try:
        reference = _TEXT.decode(run.get("external_reference", b"null")) or ""
    except msgspec.DecodeError:
        reference = "\0"
    if len(reference) > REFERENCE_CHARS_MAX or "\0" in reference:
        field = f"requests[{number}].external_reference"
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use field '{field}': expected a text of at most {REFERENCE_CHARS_MAX}"
            " characters",
            param=field,
        )
    fields: dict[str, Any] = {
        name: value for name, value in run.items() if name != "external_reference"
    }
    line = {
        "custom_id": f"{number} {reference}",
        "method": "POST",
        "url": f"/ai/run/{model}",
        "body": {**fields, "model": model},
    }
    return msgspec.json.encode(line)
