"""The routes that every engine serves, whatever its model does: health, stats, models and drain.

Rule 1: health means progress. An engine with work and no finished step for `stall_s` is stalled,
even if its socket answers.
Rule 2: requests that need memory are refused while memory is short (`memory.memory_ceiling`).
Rule 3: every error is answered in OpenAI's shape, with the request's id.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry

from isochrone.service.metrics import metrics_handler
from isochrone.service.network.http_server import (
    error_middleware,
    json_response,
    openai_json_error,
    read_body,
)
from isochrone.wire.engines.engine import EngineConfig, EngineHealth
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.headers import REQUEST_ID
from isochrone.wire.ids import is_request_id
from nodeagent.engine.core.step_thread import StepThread
from nodeagent.engine.kernels.layer_count import layers_computed
from nodeagent.engine.memory.memory_watch import MemoryWatch, memory_uses
from nodeagent.engine.server.inflight_limit import InflightLimit
from nodeagent.engine.server.metrics import EngineStatsCollector

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LONG_TEXT_CHARS: Final = 16_384
"""Longer texts are tokenised in a thread: they would block the event loop."""


class ModelServer(ABC):
    """The routes that every engine has; each kind of model adds its own in a subclass."""

    kind = "chat"
    """The kind of the model in `/stats`."""
    worker: StepThread
    context_tokens: int
    """The length limit of a prompt with its answer."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.inflight = InflightLimit(config.sequences_max + config.waiting_max)
        self._created_s = int(time.time())
        self._memory = MemoryWatch(lambda: memory_uses(config.memory_max_bytes))

    @property
    def other_names(self) -> Sequence[str]:
        """The names other than the model's own that requests may give as `model`."""
        return ()

    @abstractmethod
    def counts(self) -> Mapping[str, float]:
        """Return this server's counts by name, without those of its step thread."""

    @abstractmethod
    def fail_all(self, message: str) -> None:
        """End every open request with an error."""

    def close(self) -> None:
        """Save what is to outlive the process. Called after the last step."""
        return

    def app(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(
            middlewares=[assign_request_id, error_middleware(openai_json_error)],
            client_max_size=self.config.body_bytes_max,
        )
        registry = CollectorRegistry()
        registry.register(EngineStatsCollector(self._all_counts))
        app.router.add_get("/health", self.health)
        app.router.add_get("/stats", self.stats)
        app.router.add_get("/metrics", metrics_handler(registry))
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/drain", self.drain)
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Report whether the engine makes progress; status 503 if it is stalled."""
        worker = self.worker
        counts, idle_s = worker.counts(), worker.idle_s()
        stalled = worker.died or (worker.has_work() and idle_s > self.config.stall_s)
        health = EngineHealth(
            status="stalled" if stalled else "draining" if self.inflight.draining else "ok",
            model=self.config.served_name,
            steps=int(counts["steps_total"]),
            tokens_out=int(counts.get("tokens_out_total", 0)),
            last_step_age_s=round(idle_s, 3),
        )
        return json_response(health, 503 if stalled else 200)

    async def stats(self, request: web.Request) -> web.Response:
        """Report the engine's counts and rates."""
        return json_response({"kind": self.kind, **self._all_counts()})

    async def models(self, request: web.Request) -> web.Response:
        """List the model and its adapters."""
        name = self.config.served_name
        model: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "isochrone",
            "max_model_len": self.context_tokens,
        }
        others = [{**model, "id": other, "parent": name} for other in self.other_names]
        return json_response({"object": "list", "data": [model, *others]})

    async def drain(self, request: web.Request) -> web.Response:
        """Refuse new requests from now on; open requests continue."""
        self.inflight.draining = True
        return json_response({"draining": True, "open": self.inflight.in_flight})

    async def body(self, request: web.Request, *, frees_memory: bool = False) -> bytes:
        """Read a request's body within its limits.

        Raises ApiError, also while memory is short, unless the request `frees_memory`.
        """
        check_memory = None if frees_memory else self._memory.check
        limit, timeout_s = self.config.body_bytes_max, self.config.client_stall_s
        return await read_body(request, bytes_max=limit, timeout_s=timeout_s, check=check_memory)

    def check_alive(self) -> None:
        """Raise ApiError if the step thread has died."""
        if self.worker.died:
            raise ApiError(
                ErrorCode.UNAVAILABLE, "cannot answer: this engine has failed", retry_after_s=1.0
            )

    def _all_counts(self) -> Mapping[str, float]:
        counts = {**self.worker.counts(), **self.counts(), **self._memory.counts()}
        return {**counts, "layers_computed_total": layers_computed()}


@web.middleware
async def assign_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give each request the id in its header, or a new one, and return it with the response."""
    offered = request.headers.get(REQUEST_ID, "")
    request[REQUEST_ID] = offered if is_request_id(offered) else uuid.uuid4().hex
    response = await handler(request)
    if not response.prepared:
        response.headers[REQUEST_ID] = request[REQUEST_ID]
    return response
