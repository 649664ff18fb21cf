"""`/v1/chat/completions` and `/v1/completions`: HTTP in, the corridor, HTTP out."""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp import web

from isochrone.service.door import read_body
from isochrone.wire import headers
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import RequestId, is_request_id
from isochrone.wire.routes import DeploymentEntry, KeyEntry
from router.apis.openai.decode import (
    CHAT,
    COMPLETION,
    Request,
    decode,
    wants_usage,
    with_usage_wish,
)
from router.apis.openai.encode import error_event
from router.config import RouterConfig
from router.decide.admit import authenticate, may_use
from router.decide.affinity import SESSION_BYTES_MAX, seed_of
from router.decide.prefixes import keys_of
from router.fleet import Fleet
from router.record import Asked
from router.serve import ClientGone, Corridor

OUTPUT_TOKENS_FLOOR: Final = 1
REQUEST_ID: Final = web.RequestKey("request_id", str)


class HttpClient:
    """The client's end of one request, as the corridor writes to it."""

    def __init__(self, request: web.Request, write_timeout_s: float) -> None:
        self._request = request
        self._timeout_s = write_timeout_s
        self.response: web.StreamResponse | None = None

    async def begin(self, status: int, content_type: str, extra: dict[str, str]) -> None:
        """Send the head."""
        self.response = web.StreamResponse(status=status, headers=extra)
        self.response.headers["content-type"] = content_type
        if content_type.startswith("text/event-stream"):
            self.response.headers["cache-control"] = "no-cache"
            self.response.headers["x-accel-buffering"] = "no"
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def send(self, data: bytes) -> None:
        """Send bytes; a client that does not read for `write_timeout_s` is cut."""
        assert self.response is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from error
        except ConnectionError as error:
            raise ClientGone from error

    async def end(self) -> None:
        """End the answer."""
        assert self.response is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write_eof()
        except (ConnectionError, TimeoutError) as error:
            raise ClientGone from error

    def error_event(self, error: ApiError) -> bytes:
        """Write an error as an event within a stream."""
        return error_event(error)


class OpenAiSurface:
    """The handlers of the OpenAI surface that generate."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        fleet: Fleet,
        corridor: Corridor,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        """Take what the house shares; clocks and ids are made at the edge, here."""
        self._config = config
        self._fleet = fleet
        self._corridor = corridor
        self._clock = clock
        self._unix_clock = unix_clock
        self._new_id = new_id

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/chat/completions`."""
        key, body, arrived_s = await self._enter(request)
        return await self._serve(request, key, body, decode(body, CHAT), arrived_s)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/completions`."""
        key, body, arrived_s = await self._enter(request)
        return await self._serve(request, key, body, decode(body, COMPLETION), arrived_s)

    def authenticate(self, request: web.Request) -> KeyEntry:
        """Return whose request this is, or raise ApiError 401."""
        authorization = request.headers.get("authorization")
        return authenticate(self._fleet.keys, authorization, self._unix_clock())

    def deployment(self, name: str, key: KeyEntry) -> DeploymentEntry:
        """Return the deployment of that name, or raise ApiError 404, also where it is forbidden."""
        entry = self._fleet.deployment(name)
        if entry is None or not may_use(key, name):
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                f"cannot find the model {name!r}: it does not exist, or this key may not use it",
                param="model",
            )
        return entry

    def request_id(self, request: web.Request) -> RequestId:
        """Return the client's request id where it is well formed, else a new one."""
        found = request.get(REQUEST_ID)
        if found is None:
            sent = request.headers.get(headers.REQUEST_ID, "")
            found = sent if is_request_id(sent) else self._new_id()
            request[REQUEST_ID] = found
        return RequestId(found)

    async def _enter(self, request: web.Request) -> tuple[KeyEntry, bytes, float]:
        arrived_s = self._clock()
        key = self.authenticate(request)
        body = await read_body(
            request,
            bytes_max=self._config.body_bytes_max,
            timeout_s=self._config.body_timeout_s,
        )
        return key, body, arrived_s

    async def _serve(
        self,
        request: web.Request,
        key: KeyEntry,
        body: bytes,
        asked: Request,
        arrived_s: float,
    ) -> web.StreamResponse:
        deployment = self.deployment(asked.model, key)
        client = HttpClient(request, self._config.write_timeout_s)
        await self._corridor.serve(
            Asked(
                request_id=self.request_id(request),
                key=key,
                deployment=deployment,
                path=request.path,
                body=with_usage_wish(body, asked),
                text_bytes=asked.text_bytes,
                output_tokens_max=self._output_tokens(asked, deployment),
                is_stream=bool(asked.stream),
                wants_usage=wants_usage(asked),
                session=_session(request, key),
                reject_if_busy=asked.options is not None and asked.options.reject_if_busy,
                arrived_s=arrived_s,
                started_at=self._unix_clock(),
                # Caches are kept apart by tenant: so are the keys.
                prefix_keys=keys_of(
                    asked.rendered, seed_of(f"{key.tenant_id}\0{deployment.deployment_id}")
                ),
            ),
            client,
        )
        assert client.response is not None
        return client.response

    def _output_tokens(self, asked: Request, deployment: DeploymentEntry) -> int:
        wanted = asked.output_tokens_max or self._config.output_tokens_assumed
        bounded = min(wanted, deployment.context_tokens) * (asked.n or 1)
        return max(OUTPUT_TOKENS_FLOOR, bounded)


def _session(request: web.Request, key: KeyEntry) -> str:
    session = request.headers.get(headers.SESSION_AFFINITY, "").strip()
    if len(session.encode(errors="replace")) > SESSION_BYTES_MAX:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use {headers.SESSION_AFFINITY}: more than {SESSION_BYTES_MAX} bytes",
            param=headers.SESSION_AFFINITY,
        )
    # A tenant's session names are its own: nobody is seated by another's.
    return f"{key.tenant_id}/{session}" if session else ""


def json_answer(body: object) -> web.Response:
    """Return a JSON answer."""
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
