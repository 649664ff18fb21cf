"""Workers AI routes without inference, on aiohttp. Errors have Workers AI's envelope."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from isochrone.service.network.http_server import error_response, json_response
from isochrone.wire.errors import ApiError, method_not_allowed
from isochrone.wire.http.invalid_field import invalid_field
from isochrone.wire.peers.routes import DeploymentEntry, KeyEntry
from router.apis.openai.auxiliary import key_of
from router.apis.openai.surface import OpenAiSurface
from router.apis.workers_ai.catalog import (
    ModelQuery,
    PageQuery,
    SchemaQuery,
    author_page,
    envelope,
    model_page,
    model_schema,
    task_page,
)
from router.apis.workers_ai.translate import encode_error_envelope
from router.decide.admission.authentication import may_use
from router.fleet_state import FleetState
from router.recording.metrics import Metrics

AUXILIARY_PATHS: Final = (
    "/ai/models/search",
    "/ai/models/schema",
    "/ai/tasks/search",
    "/ai/authors/search",
    "/ai/tomarkdown",
    "/ai/tomarkdown/supported",
)

_BELOW_ACCOUNT: Final = re.compile(r"^(?:/client/v4/accounts/[^/]{1,64})?(/ai/[a-z/]{1,40})$")

Q = TypeVar("Q")


class WorkersAiReply(msgspec.Struct, frozen=True):
    """The body of an answer."""

    body: object


Answer = Callable[[web.Request, KeyEntry], Awaitable[WorkersAiReply]]


def auxiliary_path(path: str) -> str:
    """Return the path of such a route without the account before it; empty for other paths."""
    match = _BELOW_ACCOUNT.match(path)
    return match.group(1) if match and match.group(1) in AUXILIARY_PATHS else ""


@dataclass(eq=False)
class EnvelopeRoutes:
    """Adds routes to the auxiliary server; each authenticates its request first.

    `clock` returns monotonic seconds.
    """

    app: web.Application
    surface: OpenAiSurface
    metrics: Metrics
    clock: Callable[[], float]

    def add(self, method: str, path: str, answer: Answer) -> None:
        """Answer `method` on `path`, and refuse other methods."""

        async def handle(request: web.Request) -> web.Response:
            try:
                if request.method != method:
                    raise method_not_allowed(request.method, path, (method,))
                reply = await answer(request, key_of(self.surface, request))
                return json_response(reply.body)
            except ApiError as error:
                return self._refuse(error)

        self.app.router.add_route("*", path, handle)

    def _refuse(self, error: ApiError) -> web.Response:
        self.metrics.errors.labels(error.code.value).inc()
        body = encode_error_envelope(error.message, error.meaning.number)
        return error_response(error, body)


def add_catalog_routes(routes: EnvelopeRoutes, surface: OpenAiSurface, fleet: FleetState) -> None:
    """Add the lists of what a key may use."""

    def usable(key: KeyEntry) -> list[DeploymentEntry]:
        return [entry for entry in fleet.directory.deployments if may_use(key, entry)]

    async def models(request: web.Request, key: KeyEntry) -> WorkersAiReply:
        query = _query(request, ModelQuery)
        return WorkersAiReply(model_page(usable(key), query, surface.unix_clock()))

    async def schema(request: web.Request, key: KeyEntry) -> WorkersAiReply:
        entry = surface.deployment(_query(request, SchemaQuery).model, key)
        return WorkersAiReply(envelope(model_schema(entry)))

    async def tasks(request: web.Request, key: KeyEntry) -> WorkersAiReply:
        return WorkersAiReply(task_page(usable(key), _query(request, PageQuery)))

    async def authors(request: web.Request, key: KeyEntry) -> WorkersAiReply:
        return WorkersAiReply(author_page(usable(key), _query(request, PageQuery)))

    for path, answer in zip(AUXILIARY_PATHS, (models, schema, tasks, authors), strict=False):
        routes.add("GET", path, answer)


def _query(request: web.Request, struct: type[Q]) -> Q:
    """Return the query parameters as a struct. Raises ApiError 400."""
    try:
        return msgspec.convert(dict(request.query), struct, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), struct) from error
