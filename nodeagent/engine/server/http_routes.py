"""What every engine answers, whatever its model does: to its agent, and of its errors.

Rule 1: health means progress: work that no step has moved for `stall_s` is an outage, whatever
the socket says.
Rule 2: what would take memory is refused where there is too little of it (`decide.ceiling`).
Rule 3: every error leaves in OpenAI's shape, with the request's id.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from isochrone.service.http_server import error_middleware, error_response, read_body
from isochrone.service.metrics import metrics_handler
from isochrone.wire.engine import EngineConfig, EngineHealth
from isochrone.wire.errors import ApiError, ErrorCode, openai_error
from isochrone.wire.headers import REQUEST_ID
from isochrone.wire.ids import is_request_id
from nodeagent.engine.core.step_thread import StepThread
from nodeagent.engine.memory import MemoryWatch, uses
from nodeagent.engine.server.inflight_limit import Entrance
from nodeagent.engine.server.metrics import Gauges

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LONG_TEXT_CHARS: Final = 16_384
"""Longer texts are tokenised off the event loop."""


class Server(ABC):
    """A model being served: the doors that every engine has, to which each kind adds its own."""

    kind = "chat"
    """What the model is for: EngineStats."""
    worker: StepThread
    context_tokens: int
    """The longest text it takes."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.entrance = Entrance(config.sequences_max + config.waiting_max)
        self._created_s = int(time.time())
        self._memory = MemoryWatch(lambda: uses(config.memory_max_bytes))

    @property
    def other_names(self) -> Sequence[str]:
        """The names beside the model's own that requests may give."""
        return ()

    @abstractmethod
    def counts(self) -> Mapping[str, float]:
        """Return counts by name, beside those of its thread."""

    @abstractmethod
    def fail_all(self, message: str) -> None:
        """End every open request with an error."""

    def close(self) -> None:
        """Keep what is to outlive the process: nothing. After the last step."""
        return

    def app(self) -> web.Application:
        """Build the application."""
        app = web.Application(
            middlewares=[name_requests, error_middleware(as_openai)],
            client_max_size=self.config.body_bytes_max,
        )
        registry = CollectorRegistry()
        registry.register(Gauges(self._counts))
        app.router.add_get("/health", self.health)
        app.router.add_get("/stats", self.stats)
        app.router.add_get("/metrics", metrics_handler(registry))
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/drain", self.drain)
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Say whether work moves."""
        worker = self.worker
        counts, idle_s = worker.counts(), worker.idle_s()
        stalled = worker.died or (worker.has_work() and idle_s > self.config.stall_s)
        health = EngineHealth(
            status="stalled" if stalled else "draining" if self.entrance.draining else "ok",
            model=self.config.served_name,
            steps=int(counts["steps_total"]),
            tokens_out=int(counts.get("tokens_out_total", 0)),
            last_step_age_s=round(idle_s, 3),
        )
        return as_json(health, 503 if stalled else 200)

    async def stats(self, request: web.Request) -> web.Response:
        """Tell the engine's counts and rates."""
        return as_json({"kind": self.kind, **self._counts()})

    async def models(self, request: web.Request) -> web.Response:
        """List the model, and its adapters by the names that requests may give."""
        name = self.config.served_name
        model: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "isochrone",
            "max_model_len": self.context_tokens,
        }
        others = [{**model, "id": one, "parent": name} for one in self.other_names]
        return as_json({"object": "list", "data": [model, *others]})

    async def drain(self, request: web.Request) -> web.Response:
        """Take nothing new from now on; what runs goes on."""
        self.entrance.draining = True
        return as_json({"draining": True, "open": self.entrance.open})

    async def body(self, request: web.Request, *, gives_back: bool = False) -> bytes:
        """Read a request's body within its limits, and memory's, unless it gives memory back."""
        hold = None if gives_back else self._memory.hold
        limit, timeout_s = self.config.body_bytes_max, self.config.client_stall_s
        return await read_body(request, bytes_max=limit, timeout_s=timeout_s, check=hold)

    def hold_alive(self) -> None:
        """Refuse where no step will come."""
        if self.worker.died:
            raise ApiError(
                ErrorCode.UNAVAILABLE, "cannot answer: this engine has failed", retry_after_s=1.0
            )

    def _counts(self) -> Mapping[str, float]:
        return {**self.worker.counts(), **self.counts(), **self._memory.counts()}


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


def as_openai(error: ApiError) -> web.Response:
    """Answer an error in OpenAI's shape."""
    return error_response(error, msgspec.json.encode(openai_error(error)))
