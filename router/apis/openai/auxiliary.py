"""OpenAI routes without inference, on aiohttp: model lists, the health check, unknown paths."""

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from isochrone.service.network.http_server import (
    Handler,
    error_middleware,
    error_response,
    json_response,
)
from isochrone.wire.errors import ApiError, ErrorCode, openai_error
from isochrone.wire.http import headers
from isochrone.wire.peers.routes import DeploymentEntry, KeyEntry
from router.apis.auxiliary_server import BYTES_MAX
from router.apis.document.openapi import document
from router.apis.document.route_paths import intended_path
from router.apis.media.surface import MEDIA_ROUTES
from router.apis.messages.errors import error_body
from router.apis.messages.models import model_info, models_page
from router.apis.messages.surface import MESSAGES_REQUEST_ID
from router.apis.openai.moderations import MODERATIONS_PATH
from router.apis.openai.surface import DECODERS, OpenAiSurface
from router.apis.request_ids import RequestIds
from router.decide.admission.authentication import may_use
from router.fleet_state import FleetState
from router.recording.metrics import Metrics

NO_TABLE: Final = (
    "cannot serve: no scheduler has sent a route table, and the state folder has none; "
    "check that a scheduler listed in `schedulers` is reachable and holds the lease"
)

ROUTES: Final = (
    f"POST {', '.join((*DECODERS, *MEDIA_ROUTES, MODERATIONS_PATH))}, /v1/responses,"
    " /v1/conversations, /v1/files, /v1/batches, /v1/messages and /ai/run/{model}, and GET"
    " /v1/models; GET /openapi.json describes them all"
)


@cache
def public_document() -> bytes:
    """Return the OpenAPI document of the public API, made once in a process."""
    return msgspec.json.encode(document(version("isochrone")))


def key_of(surface: OpenAiSurface, request: web.Request) -> KeyEntry:
    """Return the API key of an auxiliary request. Raises ApiError 401."""
    return surface.key_of({name.lower(): value for name, value in request.raw_headers})


def auxiliary_app(
    surface: OpenAiSurface, fleet: FleetState, metrics: Metrics, request_ids: RequestIds
) -> web.Application:
    """Return the application of all auxiliary routes."""

    async def list_models(request: web.Request) -> web.Response:
        key = key_of(surface, request)
        allowed = [entry for entry in fleet.directory.deployments if may_use(key, entry)]
        if headers.ANTHROPIC_VERSION in request.headers:
            chats = [entry for entry in allowed if entry.kind == "chat"]
            return json_response(models_page(chats, request.query_string, surface.unix_clock()))
        return json_response({"object": "list", "data": [model_body(entry) for entry in allowed]})

    async def show_model(request: web.Request) -> web.Response:
        key, name = key_of(surface, request), request.match_info["name"]
        entry = surface.base_deployment(name, key)
        if not entry.adapter_rank_max:
            entry = surface.deployment(name, key)
        if name != entry.name:
            adapter = name.removeprefix(f"{entry.name}:")
            fleet.directory.adapters.find(adapter, key.tenant_id, entry)
        if headers.ANTHROPIC_VERSION in request.headers:
            return json_response({**model_info(entry, surface.unix_clock()), "id": name})
        return json_response({**model_body(entry), "id": name})

    async def healthz(request: web.Request) -> web.Response:
        return _health(fleet)

    async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
        if headers.REQUEST_ID not in response.headers:
            response.headers[headers.REQUEST_ID] = request_id_of(request)

    def request_id_of(request: web.Request) -> str:
        return request_ids.next(request.headers.get(headers.REQUEST_ID, ""))[1]

    def encode_error(error: ApiError) -> web.Response:
        metrics.errors.labels(error.code.value).inc()
        return error_response(error, msgspec.json.encode(openai_error(error)))

    body = public_document()

    async def openapi(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    anthropic_form = _anthropic_form(encode_error, request_id_of)
    middlewares = [error_middleware(encode_error), anthropic_form, _explain_not_found]
    # The router has limited the body already.
    app = web.Application(middlewares=middlewares, client_max_size=BYTES_MAX)
    app.on_response_prepare.append(add_request_id)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{name:.{1,200}}", show_model)
    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/healthz", healthz)
    # Load tools and other engines' clients ask for this path.
    app.router.add_get("/health", healthz)
    return app


def _health(fleet: FleetState) -> web.Response:
    if fleet.directory.table is not None:
        return json_response({"status": "ok", "pop": fleet.pop})
    # Without a table there are no keys and no routes: load balancers should use another.
    body = {"status": "no_table", "pop": fleet.pop, "message": NO_TABLE}
    return json_response(body, status=503)


def _anthropic_form(
    encode_error: Callable[[ApiError], web.Response], request_id_of: Callable[[web.Request], str]
) -> Middleware:
    """Return what gives Anthropic's clients errors in their shape, and the request's id under
    their name."""

    @web.middleware
    async def anthropic_form(request: web.Request, handler: Handler) -> web.StreamResponse:
        if headers.ANTHROPIC_VERSION not in request.headers:
            return await handler(request)
        request_id = request_id_of(request)
        try:
            response = await handler(request)
        except ApiError as error:
            response = encode_error(error)
            response.body = msgspec.json.encode(error_body(error, request_id))
        response.headers[headers.REQUEST_ID] = request_id
        response.headers[MESSAGES_REQUEST_ID] = request_id
        return response

    return anthropic_form


@web.middleware
async def _explain_not_found(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer an unknown path with the list of routes."""
    if not isinstance(request.match_info.http_exception, web.HTTPNotFound):
        return await handler(request)
    path = request.path[:200]
    reason = f"there is no such path; the routes are {ROUTES}"
    if intended := intended_path(path):
        reason = f"there is {intended}; correct the base URL of the client"
    raise ApiError(ErrorCode.NOT_FOUND, f"cannot find {request.method} {path}: {reason}")


def model_body(entry: DeploymentEntry) -> dict[str, Any]:
    """Return one entry of the model list."""
    price = entry.price
    cached = price and price.cached_per_million
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created_at,
        "owned_by": "isochrone",
        "kind": entry.kind,
        "context_window": entry.context_tokens,
        "price": price
        and {
            "prompt_per_million": price.prompt_per_million,
            "cached_per_million": price.prompt_per_million if cached is None else cached,
            "output_per_million": price.output_per_million,
        },
    }
