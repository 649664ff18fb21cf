"""What every engine answers, whatever its model does: to its agent, and of its errors.

Rule 1: health means progress: work that no step has moved for `stall_s` is an outage, whatever
the socket says.
Rule 2: what would take memory is refused where there is too little of it (`decide.ceiling`).
Rule 3: every error leaves in OpenAI's shape, with the request's id.
"""

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from isochrone.service.door import error_response, errors_as
from isochrone.service.metrics import exposition
from isochrone.wire.engine import EngineConfig, EngineHealth
from isochrone.wire.errors import ApiError, openai_error
from isochrone.wire.headers import REQUEST_ID
from isochrone.wire.ids import is_request_id
from nodeagent.engine.entrance import Entrance
from nodeagent.engine.gauges import Gauges
from nodeagent.engine.memory import MemoryWatch, uses

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GIVES_BACK: Final = frozenset({"/drain", "/v1/unload_lora_adapter"})
"""What is posted here takes no memory."""


class Progress(msgspec.Struct, frozen=True):
    """How the work moves."""

    died: bool
    has_work: bool
    idle_s: float
    steps: int
    tokens_out: int


class Served(Protocol):
    """A model being served, as its agent watches it."""

    @property
    def entrance(self) -> Entrance:
        """Whom it has taken in."""

    @property
    def kind(self) -> str:
        """What the model is for: EngineStats."""

    @property
    def context_tokens(self) -> int:
        """The longest text it takes."""

    @property
    def other_names(self) -> Sequence[str]:
        """The names beside the model's own that requests may give."""

    def progress(self) -> Progress:
        """Say how the work moves."""

    def counts(self) -> Mapping[str, float]:
        """Return counts and rates by name."""


class CommonDoors:
    """The doors that every engine has."""

    def __init__(self, config: EngineConfig, served: Served) -> None:
        """Answer for the model that is `served`."""
        self._config = config
        self._served = served
        self._created_s = int(time.time())
        self._memory = MemoryWatch(lambda: uses(config.memory_max_bytes))

    def app(self) -> web.Application:
        """Build the application, to which the model's own routes are added."""
        app = web.Application(
            middlewares=[name_requests, errors_as(_as_openai), self._within_memory],
            client_max_size=self._config.body_bytes_max,
        )
        registry = CollectorRegistry()
        registry.register(Gauges(self._counts))
        app.router.add_get("/health", self.health)
        app.router.add_get("/stats", self.stats)
        app.router.add_get("/metrics", exposition(registry))
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/drain", self.drain)
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Say whether work moves."""
        seen = self._served.progress()
        stalled = seen.died or (seen.has_work and seen.idle_s > self._config.stall_s)
        health = EngineHealth(
            status="stalled" if stalled else "draining" if self._served.entrance.draining else "ok",
            model=self._config.served_name,
            steps=seen.steps,
            tokens_out=seen.tokens_out,
            last_step_age_s=round(seen.idle_s, 3),
        )
        return as_json(health, 503 if stalled else 200)

    async def stats(self, request: web.Request) -> web.Response:
        """Tell the engine's counts and rates."""
        return as_json({"kind": self._served.kind, **self._counts()})

    async def models(self, request: web.Request) -> web.Response:
        """List the model, and its adapters by the names that requests may give."""
        name = self._config.served_name
        model: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "isochrone",
            "max_model_len": self._served.context_tokens,
        }
        others = [{**model, "id": one, "parent": name} for one in self._served.other_names]
        return as_json({"object": "list", "data": [model, *others]})

    async def drain(self, request: web.Request) -> web.Response:
        """Take nothing new from now on; what runs goes on."""
        entrance = self._served.entrance
        entrance.draining = True
        return as_json({"draining": True, "open": entrance.open})

    def _counts(self) -> Mapping[str, float]:
        return {**self._served.counts(), **self._memory.counts()}

    @web.middleware
    async def _within_memory(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST" and request.path not in _GIVES_BACK:
            self._memory.hold()
        return await handler(request)


@web.middleware
async def name_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give each request its caller's id, or one of ours, and its answer the same."""
    offered = request.headers.get(REQUEST_ID, "")
    request[REQUEST_ID] = offered if is_request_id(offered) else uuid.uuid4().hex
    response = await handler(request)
    if not response.prepared:
        response.headers[REQUEST_ID] = request[REQUEST_ID]
    return response


def as_json(body: Any, status: int = 200) -> web.Response:
    """Answer with JSON."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def _as_openai(error: ApiError) -> web.Response:
    return error_response(error, msgspec.json.encode(openai_error(error)))
