"""The OpenAI routes that do not generate, on aiohttp: lists, health, and whatever is not found."""

from typing import Any, Final

import msgspec
from aiohttp import web

from isochrone.service.http_server import Handler, error_middleware, error_response
from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode, openai_error
from isochrone.wire.routes import DeploymentEntry, KeyEntry
from router.apis.openai.hot import READERS, OpenAiSurface
from router.apis.request_ids import RequestIds
from router.decide.admit import authenticate, may_use
from router.fleet import Fleet
from router.metrics import Metrics

NO_TABLE: Final = (
    "cannot serve: no scheduler has sent a route table, and the state folder holds none; "
    "is a scheduler of `schedulers` within reach, and does one act?"
)

ROUTES: Final = f"POST {', '.join(READERS)}, /v1/responses and /ai/run/{{model}}, GET /v1/models"


def cold_app(
    surface: OpenAiSurface, fleet: Fleet, metrics: Metrics, request_ids: RequestIds
) -> web.Application:
    """Return the application of every route that is not hot."""

    def key_of(request: web.Request) -> KeyEntry:
        return authenticate(fleet.keys, request.headers.get("authorization"), surface.unix_clock())

    async def models(request: web.Request) -> web.Response:
        key = key_of(request)
        allowed = [entry for entry in fleet.deployments if may_use(key, entry.name)]
        return json_answer({"object": "list", "data": [model_body(entry) for entry in allowed]})

    async def model(request: web.Request) -> web.Response:
        key = key_of(request)
        return json_answer(model_body(surface.deployment(request.match_info["name"], key)))

    async def healthz(request: web.Request) -> web.Response:
        if fleet.table is not None:
            return json_answer({"status": "ok", "pop": fleet.pop})
        # Its keys and routes are in the table: a load balancer does well to ask another router.
        said = {"status": "no_table", "pop": fleet.pop, "message": NO_TABLE}
        return json_answer(said, status=503)

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        sent = request.headers.get(headers.REQUEST_ID, "")
        _, response.headers[headers.REQUEST_ID] = request_ids.next(sent)

    def encode_error(error: ApiError) -> web.Response:
        metrics.errors.labels(error.code.value).inc()
        return error_response(error, msgspec.json.encode(openai_error(error)))

    app = web.Application(middlewares=[error_middleware(encode_error), _name_the_routes])
    app.on_response_prepare.append(on_prepare)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.{1,200}}", model)
    app.router.add_get("/healthz", healthz)
    return app


@web.middleware
async def _name_the_routes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Say what there is to one who asks for what there is not."""
    if not isinstance(request.match_info.http_exception, web.HTTPNotFound):
        return await handler(request)
    path = request.path[:200]
    if "responses" in path.split("/"):
        words = "a response is not stored: there is POST /v1/responses alone"
    else:
        words = f"no such path: {request.method} {path}; there are {ROUTES}"
    raise ApiError(ErrorCode.NOT_FOUND, f"cannot serve: {words}")


def model_body(entry: DeploymentEntry) -> dict[str, Any]:
    """Return one entry of the list of models."""
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created_at,
        "owned_by": "isochrone",
        "context_window": entry.context_tokens,
    }


def json_answer(body: object, status: int = 200) -> web.Response:
    """Return a JSON answer."""
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )
