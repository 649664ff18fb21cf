"""The public application: which path is which handler, and what every answer carries."""

from aiohttp import web

from isochrone.service.door import errors_as
from isochrone.wire import headers
from isochrone.wire.errors import ApiError
from router.apis.openai.chat import OpenAiSurface, json_answer
from router.apis.openai.encode import error_answer, model_body, models_body
from router.decide.admit import may_use
from router.fleet import Fleet
from router.metrics import Metrics


def encode_error(metrics: Metrics, error: ApiError) -> web.Response:
    """Count an error and write it in OpenAI's shape."""
    metrics.errors.labels(error.code.value).inc()
    return error_answer(error)


def public_app(surface: OpenAiSurface, fleet: Fleet, metrics: Metrics) -> web.Application:
    """Return the public listener's application."""

    async def models(request: web.Request) -> web.Response:
        key = surface.authenticate(request)
        allowed = [entry for entry in fleet.deployments if may_use(key, entry.name)]
        return json_answer(models_body(allowed))

    async def model(request: web.Request) -> web.Response:
        key = surface.authenticate(request)
        return json_answer(model_body(surface.deployment(request.match_info["name"], key)))

    async def healthz(request: web.Request) -> web.Response:
        status = "ok" if fleet.table is not None else "no_table"
        return json_answer({"status": status, "pop": fleet.pop})

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        response.headers[headers.REQUEST_ID] = surface.request_id(request)

    app = web.Application(middlewares=[errors_as(lambda error: encode_error(metrics, error))])
    app.on_response_prepare.append(on_prepare)
    app.router.add_post("/v1/chat/completions", surface.chat)
    app.router.add_post("/v1/completions", surface.completions)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.{1,200}}", model)
    app.router.add_get("/healthz", healthz)
    return app
