"""Workers AI routes without inference, on aiohttp: the lists of models, tasks and authors."""

import re
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.routes import KeyEntry
from router.apis.openai.surface import OpenAiSurface
from router.apis.workers_ai.catalog import (
    ModelQuery,
    SchemaQuery,
    author_list,
    envelope,
    model_page,
    model_schema,
    task_list,
)
from router.apis.workers_ai.translate import encode_error_envelope
from router.decide.authentication import authenticate, may_use
from router.fleet_state import FleetState
from router.metrics import Metrics

CATALOG_PATHS: Final = (
    "/ai/models/search",
    "/ai/models/schema",
    "/ai/tasks/search",
    "/ai/authors/search",
)

_BELOW_ACCOUNT: Final = re.compile(r"^(?:/client/v4/accounts/[^/]{1,64})?(/ai/[a-z/]{1,40})$")

Q = TypeVar("Q")


class CatalogReply(msgspec.Struct, frozen=True):
    """The body of a list's answer."""

    body: object


Answer = Callable[[web.Request, KeyEntry], CatalogReply]


def catalog_path(path: str) -> str:
    """Return the path of a list without the account before it; empty if it is no such path."""
    match = _BELOW_ACCOUNT.match(path)
    return match.group(1) if match and match.group(1) in CATALOG_PATHS else ""


def add_catalog_routes(
    app: web.Application, surface: OpenAiSurface, fleet: FleetState, metrics: Metrics
) -> None:
    """Add the routes, which answer errors in Workers AI's envelope."""

    def key_of(request: web.Request) -> KeyEntry:
        authorization = request.headers.get("authorization")
        return authenticate(fleet.directory.keys, authorization, surface.unix_clock())

    def models(request: web.Request, key: KeyEntry) -> CatalogReply:
        query = _query(request, ModelQuery)
        entries = [entry for entry in fleet.directory.deployments if may_use(key, entry.name)]
        return CatalogReply(model_page(entries, query, surface.unix_clock()))

    def schema(request: web.Request, key: KeyEntry) -> CatalogReply:
        entry = surface.deployment(_query(request, SchemaQuery).model, key)
        return CatalogReply(envelope(model_schema(entry)))

    def tasks(_: web.Request, key: KeyEntry) -> CatalogReply:
        entries = [entry for entry in fleet.directory.deployments if may_use(key, entry.name)]
        return CatalogReply(envelope(task_list(entries)))

    def authors(_: web.Request, key: KeyEntry) -> CatalogReply:
        entries = [entry for entry in fleet.directory.deployments if may_use(key, entry.name)]
        return CatalogReply(envelope(author_list(entries)))

    def handler(answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                if request.method != "GET":
                    raise ApiError(
                        ErrorCode.METHOD_NOT_ALLOWED,
                        f"cannot use the method {request.method} for {request.path}: use GET",
                        headers={"allow": "GET"},
                    )
                body = msgspec.json.encode(answer(request, key_of(request)).body)
                return web.Response(body=body, content_type="application/json")
            except ApiError as error:
                metrics.errors.labels(error.code.value).inc()
                return web.Response(
                    status=error.meaning.status,
                    body=encode_error_envelope(error.message, error.meaning.number),
                    content_type="application/json",
                    headers=error.headers,
                )

        return handle

    for path, answer in zip(CATALOG_PATHS, (models, schema, tasks, authors), strict=True):
        app.router.add_route("*", path, handler(answer))


def _query(request: web.Request, struct: type[Q]) -> Q:
    """Return the query parameters as a struct. Raises ApiError 400."""
    try:
        return msgspec.convert(dict(request.query), struct, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(
            ErrorCode.INVALID_REQUEST, f"cannot use the query of {request.path}: {error}"
        ) from error
