"""Which path is whose: hot routes go to the corridor, all others to aiohttp within.

Hot is what engines answer. Three surfaces offer it: OpenAI's as it is, and Responses and Workers AI
translated, which is all that they have of their own.
"""

import math
import re
from collections.abc import Awaitable
from typing import Final

import msgspec

from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode, openai_error, openai_error_event
from isochrone.wire.routes import KeyEntry
from router.apis.auxiliary_server import forward_to_auxiliary
from router.apis.openai.surface import READERS, OpenAiSurface
from router.apis.request_ids import RequestIds
from router.apis.responses.adapter import PATH as RESPONSES
from router.apis.responses.adapter import asked_by_response
from router.apis.workers_ai.adapter import asked_by_run, model_of
from router.apis.workers_ai.translate import error_envelope
from router.dataplane.http1 import Fields, lines_of
from router.dataplane.http_messages import HttpRequest, HttpResponse, ResponseWriter
from router.dataplane.server import ClientConnection
from router.dataplane.upstream import Upstream
from router.inference_request import InferenceRequest
from router.metrics import Metrics
from router.pipeline import RequestPipeline

HOT: Final = frozenset(READERS) | {RESPONSES}
REQUEST_ID: Final = headers.REQUEST_ID.encode()

_OPENAI_OF_WORKERS_AI: Final = re.compile(r"^(?:/client/v4/accounts/[^/]{1,64})?/ai(/v1/.+)$")
"""Where Workers AI offers OpenAI's surface: its clients change the host of their base URL alone."""


class ApiDispatcher:
    """What the listener hands each request to."""

    def __init__(
        self,
        openai: OpenAiSurface,
        corridor: RequestPipeline,
        upstream: Upstream,
        request_ids: RequestIds,
        metrics: Metrics,
    ) -> None:
        """Cold routes are met by way of `upstream`."""
        self._openai = openai
        self._corridor = corridor
        self._upstream = upstream
        self._request_ids = request_ids
        self._metrics = metrics

    def let_in(self, method: bytes, path: str, fields: Fields) -> KeyEntry | None:
        """Let a head in before its body is read, or raise ApiError."""
        return self._openai.key_of(fields) if method == b"POST" and _is_hot(path) else None

    def encode_error(self, error: ApiError, path: str, request_id: str) -> HttpResponse:
        """Count an error and write it in the shape of its surface, with its id or a new one."""
        self._metrics.errors.labels(error.code.value).inc()
        lines = lines_of(error.headers)
        if error.retry_after_s is not None:
            lines += f"retry-after: {max(1, math.ceil(error.retry_after_s))}\r\n"
        # What was refused before it was read has none yet.
        lines += f"{headers.REQUEST_ID}: {request_id or self._request_ids.next('')[1]}\r\n"
        if model_of(path) is None:
            body = msgspec.json.encode(openai_error(error))
        else:
            body = error_envelope(error.message, error.meaning.number)
        return HttpResponse(error.meaning.status, body, lines)

    def answer(self, request: HttpRequest, client: ClientConnection) -> Awaitable[None]:
        """Return the answering of one request, to be awaited."""
        path = request.path
        if path not in HOT:
            request.path = path = _plain(path)
            if not _is_hot(path):
                return forward_to_auxiliary(self._upstream, request, client)
        sent = request.header(REQUEST_ID)
        request.request_id, request.known_as = self._request_ids.next(sent)
        if request.method != b"POST":
            raise ApiError(
                ErrorCode.METHOD_NOT_ALLOWED,
                f"cannot serve: {path} takes POST, not {request.method.decode()}",
                headers={"allow": "POST"},
            )
        asked: InferenceRequest
        told: ResponseWriter = client
        if path in READERS:
            asked = self._openai.asked(request, path, request.body, openai_error_event)
        elif path == RESPONSES:
            asked, told = asked_by_response(self._openai, request, client)
        else:
            asked, told = asked_by_run(self._openai, request, client)
        return self._corridor.serve(asked, told)


def _is_hot(path: str) -> bool:
    return path in HOT or _plain(path) in HOT or model_of(path) is not None


def _plain(path: str) -> str:
    """Return the path on OpenAI's surface of one that Workers AI offers below an account."""
    found = _OPENAI_OF_WORKERS_AI.match(path)
    return found.group(1) if found else path
