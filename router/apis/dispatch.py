"""Dispatches requests by path: inference routes to the pipeline, all others to the aiohttp server.

Inference routes are those that engines answer. Four surfaces have them: OpenAI's, which goes to
the engines unchanged (with sounds and images, `media/`), and Responses, Anthropic's Messages and
Workers AI, which are translated to and from it.
"""

import math
import re
from collections.abc import Awaitable
from typing import Final

import msgspec

from isochrone.wire.errors import (
    ApiError,
    ErrorCode,
    method_not_allowed,
    openai_error,
    openai_error_event,
)
from isochrone.wire.http import headers
from isochrone.wire.peers.routes import KeyEntry
from router.apis.auxiliary_server import forward_to_auxiliary
from router.apis.batches.queued_runs import answer_queued_run, is_queued_run
from router.apis.document.query_check import check_query
from router.apis.document.route_paths import allow_line
from router.apis.media.routes import MediaRoutes
from router.apis.media.schema import MEDIA_PATHS
from router.apis.messages.errors import error_body, error_status
from router.apis.messages.surface import (
    MESSAGES_PATHS,
    MESSAGES_REQUEST_ID,
    OutputDoesNotFit,
    is_messages,
    read_messages_request,
)
from router.apis.openai.moderations import MODERATIONS_PATH, read_moderation_request
from router.apis.openai.surface import DECODERS, OpenAiSurface
from router.apis.relay import is_batch_path, relay_to_scheduler
from router.apis.request_ids import RequestIds
from router.apis.responses.counting import INPUT_TOKENS_PATH, read_input_tokens_request
from router.apis.responses.stored_routes import StoredRoutes, is_stored_path
from router.apis.responses.surface import RESPONSES_PATH, read_responses_request
from router.apis.workers_ai.auxiliary import AUXILIARY_PATHS, auxiliary_path
from router.apis.workers_ai.finetunes import finetune_path, relay_finetunes
from router.apis.workers_ai.surface import is_workers_ai, model_of, read_run_request
from router.apis.workers_ai.translate import encode_error_envelope
from router.dataplane.http1 import HeaderFields, format_headers, is_costly_body
from router.dataplane.http_messages import HttpRequest, HttpResponse, ResponseWriter
from router.dataplane.server import ClientConnection
from router.dataplane.upstream import Upstream
from router.decide.admission.limits import LimitExceeded
from router.inference_request import InferenceRequest
from router.pipeline import RequestPipeline
from router.recording.metrics import Metrics
from router.scheduler_client import SchedulerClient

INFERENCE_PATHS: Final = (
    frozenset(DECODERS)
    | MESSAGES_PATHS
    | {RESPONSES_PATH, INPUT_TOKENS_PATH, MODERATIONS_PATH}
    | MEDIA_PATHS
)
WORKERS_AI_ROUTES: Final = ", ".join(
    ("POST /ai/run/{model} and /ai/v1/...", *AUXILIARY_PATHS, "/ai/finetunes")
)
MODELS_PATH: Final = "/v1/models"
REQUEST_ID: Final = headers.REQUEST_ID.encode()
ANTHROPIC_VERSION: Final = headers.ANTHROPIC_VERSION.encode()

PREFLIGHT_LINES: Final = (
    "access-control-allow-methods: GET, POST, DELETE\r\n"
    "access-control-allow-headers: authorization, *\r\n"
    "access-control-max-age: 7200\r\n"
)
"""The answer to a browser's preflight. It allows nothing unless `cors_origin` is set, which adds
the origin to every response."""

_OPENAI_BELOW_ACCOUNT: Final = re.compile(r"^(?:/client/v4/accounts/[^/]{1,64})?/ai(/v1/.+)$")
"""The path of OpenAI's surface in Workers AI: clients only need to change the host of their URL."""


class ApiDispatcher:
    """Receives each request from the HTTP server and gives it to its surface."""

    def __init__(
        self,
        openai: OpenAiSurface,
        pipeline: RequestPipeline,
        upstream: Upstream,
        request_ids: RequestIds,
        metrics: Metrics,
        scheduler: SchedulerClient,
        stored: StoredRoutes,
        media: MediaRoutes,
    ) -> None:
        """Use the parts that the whole router shares; `upstream` reaches the auxiliary server."""
        self._scheduler = scheduler
        self._stored = stored
        self._media = media
        self._openai = openai
        self._pipeline = pipeline
        self._upstream = upstream
        self._request_ids = request_ids
        self._metrics = metrics

    def authorize(self, method: bytes, path: str, fields: HeaderFields) -> KeyEntry | None:
        """Return the API key of an inference request before its body is read.

        Other routes need no key here: None. Raises ApiError 401, and LimitExceeded for a costly
        body whose key is over a limit. The refusal closes the connection, which costs less than
        reading such a body and more than reading a small one: that is refused once it is read.
        """
        is_inference = _is_inference(path)
        # A browser's preflight has no key.
        if not is_inference and method != b"OPTIONS":
            openai_path = _openai_path(path)
            if is_batch_path(openai_path) or is_stored_path(openai_path) or finetune_path(path):
                return self._openai.key_of(fields)
        if method != b"POST" or not (is_inference or auxiliary_path(path)):
            return None
        key = self._openai.key_of(fields)
        if is_costly_body(fields):
            self._pipeline.check_limits(key, self._openai.unix_clock())
        return key

    def encode_error(self, error: ApiError, request: HttpRequest) -> HttpResponse:
        """Count an error and encode it in the format of its surface, with a request id."""
        self._metrics.errors.labels(error.code.value).inc()
        if isinstance(error, LimitExceeded):
            self._metrics.refusals.labels(error.limit).inc()
        header_lines = format_headers(error.headers)
        if error.retry_after_s is not None:
            header_lines += f"retry-after: {max(1, math.ceil(error.retry_after_s))}\r\n"
        # A request that was refused while it was read has no id yet.
        request_id = request.client_request_id or self._request_ids.next("")[1]
        header_lines += f"{headers.REQUEST_ID}: {request_id}\r\n"
        if request.key is not None and request.key.regions and _is_inference(request.path):
            header_lines += f"{headers.REGIONS}: {', '.join(request.key.regions)}\r\n"
        status, path = error.meaning.status, _openai_path(request.path)
        if is_workers_ai(path):
            body = encode_error_envelope(error.message, error.meaning.number)
        elif is_messages(path) or (
            ANTHROPIC_VERSION in request.headers and not _is_inference(request.path)
        ):
            # Also for a client of Anthropic's API that uses a path without a surface.
            status, body = error_status(error), msgspec.json.encode(error_body(error, request_id))
            header_lines += f"{MESSAGES_REQUEST_ID}: {request_id}\r\n"
        else:
            body = msgspec.json.encode(openai_error(error))
        return HttpResponse(status, body, header_lines)

    def dispatch(self, request: HttpRequest, client: ClientConnection) -> Awaitable[None]:
        """Return an awaitable that answers the request. Raises ApiError if it is invalid."""
        path = request.path
        if request.method == b"OPTIONS":
            return _answer_preflight(_openai_path(path), client)
        ids = self._request_ids.next(request.header(REQUEST_ID))
        request.request_id, request.client_request_id = ids
        if request.query:
            check_query(request.method.decode(), _openai_path(path), request.query)
        if path not in INFERENCE_PATHS:
            request.sent_path = path
            request.path = path = _openai_path(path)
            if not _is_inference(path):
                return self._dispatch_other(request, path, client)
        if request.method != b"POST":
            raise method_not_allowed(request.method.decode(), request.named_path, ("POST",))
        if request.query and is_queued_run(request, path):
            return answer_queued_run(self._scheduler, self._openai, request, path, client)
        if path in MEDIA_PATHS:
            return self._media.answer(request, path, client)
        if path == RESPONSES_PATH and self._stored.is_needed(request):
            return self._stored.create(request, client)
        inference, writer = self.read_inference(request, path, client)
        if path in MESSAGES_PATHS:
            return self._serve_message(request, inference, writer, client)
        # The body that is sent is the inference's, often a copy: this one would be kept as well.
        request.body = b""
        return self._pipeline.serve(inference, writer)

    def _dispatch_other(
        self, request: HttpRequest, path: str, client: ClientConnection
    ) -> Awaitable[None]:
        """Return an awaitable that answers a request which no engine answers."""
        if is_batch_path(path):
            return relay_to_scheduler(self._scheduler, request, client)
        if is_stored_path(path):
            return self._stored.answer(request, client)
        if finetunes := finetune_path(path):
            return relay_finetunes(self._scheduler, self._openai, finetunes, request, client)
        if listed := auxiliary_path(path):
            request.path = listed
        elif is_workers_ai(path):
            raise _not_found(request, WORKERS_AI_ROUTES)
        elif is_messages(path):
            raise _not_found(request, "POST /v1/messages and /v1/messages/count_tokens")
        elif not path.startswith(MODELS_PATH):
            # The error for an unknown path names the one that the client sent.
            request.path = request.sent_path
        return forward_to_auxiliary(self._upstream, request, client)

    async def _serve_message(
        self,
        request: HttpRequest,
        inference: InferenceRequest,
        writer: ResponseWriter,
        client: ClientConnection,
    ) -> None:
        """Answer a message; again, up to the context's end, if `max_tokens` reaches beyond it.

        Clients of this API must give `max_tokens`, and many give the most that any model has.
        """
        try:
            await self._pipeline.serve(inference, writer)
        except OutputDoesNotFit:
            request.request_id, _ = self._request_ids.next(request.header(REQUEST_ID))
            inference, writer = read_messages_request(
                self._openai, request, request.path, client, fills_context=True
            )
            await self._pipeline.serve(inference, writer)

    def read_inference(
        self, request: HttpRequest, path: str, writer: ResponseWriter
    ) -> tuple[InferenceRequest, ResponseWriter]:
        """Return an inference request, and the writer of its response, which writes to `writer`.

        Raises ApiError if the request is invalid.
        """
        if path in DECODERS:
            return self._openai.read(request, path, request.body, openai_error_event), writer
        if path == RESPONSES_PATH:
            return read_responses_request(self._openai, request, writer)
        if path == INPUT_TOKENS_PATH:
            return read_input_tokens_request(self._openai, request, writer)
        if path == MODERATIONS_PATH:
            return read_moderation_request(self._openai, request, writer)
        if path in MESSAGES_PATHS:
            return read_messages_request(self._openai, request, path, writer)
        return read_run_request(self._openai, request, writer)


def _not_found(request: HttpRequest, routes: str) -> ApiError:
    """Return the error for an unknown path of a surface, which has `routes`."""
    message = f"cannot find {request.method.decode()} {request.named_path}: the routes of this API"
    return ApiError(ErrorCode.NOT_FOUND, f"{message} are {routes}")


async def _answer_preflight(path: str, client: ClientConnection) -> None:
    client.reply(HttpResponse(200, b"", allow_line(path) + PREFLIGHT_LINES))


def _is_inference(path: str) -> bool:
    return (
        path in INFERENCE_PATHS
        or _openai_path(path) in INFERENCE_PATHS
        or model_of(path) is not None
    )


def _openai_path(path: str) -> str:
    """Return the OpenAI path of a Workers AI path that offers it; any other path unchanged."""
    match = _OPENAI_BELOW_ACCOUNT.match(path)
    return match.group(1) if match else path
