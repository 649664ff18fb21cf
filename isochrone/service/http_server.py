"""The guarded HTTP door: aiohttp's server with a deadline and a bound on everything that enters.

aiohttp by itself waits for ever on a slow head and has no bound on connections. What is refused
here, malformed HTTP included, is answered in the door's own error shape.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from ssl import SSLContext
from typing import Any, Final

import msgspec
from aiohttp import ClientConnectionResetError, web
from aiohttp.http_exceptions import ContentEncodingError

from isochrone.service.config import ConfigError
from isochrone.service.connection_count import (
    ConnectionCount,
    ProtocolFactory,
    remote_address,
    tls_protocol_factory,
)
from isochrone.wire.errors import ApiError, ErrorCode

log = logging.getLogger(__name__)

EncodeError = Callable[[ApiError], web.Response]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BACKLOG: Final = 1024
"""One more that comes at once is sent away from a Unix socket, and waits at any other."""

_STATUS_CODES: Final = {
    400: ErrorCode.INVALID_REQUEST,
    401: ErrorCode.INVALID_KEY,
    403: ErrorCode.FORBIDDEN,
    404: ErrorCode.NOT_FOUND,
    405: ErrorCode.METHOD_NOT_ALLOWED,
    408: ErrorCode.REQUEST_TIMEOUT,
    413: ErrorCode.TOO_LARGE,
    417: ErrorCode.INVALID_REQUEST,
}


class HttpServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a door lets in. A connection past a bound is closed; a request past one is refused."""

    head_timeout_s: float = 10.0
    keepalive_s: float = 75.0
    body_timeout_s: float = 30.0
    body_bytes_max: int = 8 * 1024 * 1024
    connections_max: int = 20_000
    connections_per_address_max: int = 5_000
    shutdown_timeout_s: float = 5.0


def json_error(error: ApiError) -> web.Response:
    """Encode an error in this project's own shape, that of the admin and control doors."""
    body = {"error": {"code": error.code.value, "message": error.message, "param": error.param}}
    return error_response(error, msgspec.json.encode(body))


def error_response(error: ApiError, body: bytes) -> web.Response:
    """Give an encoded error its status, its headers and `Retry-After`, in whole seconds."""
    response = web.Response(
        status=error.meaning.status,
        body=body,
        headers=error.headers,
        content_type="application/json",
    )
    if error.retry_after_s is not None:
        # Rounded up: who comes back a moment early is refused again.
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return response


def error_middleware(encode_error: EncodeError) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware that turns whatever is raised below it into this door's shape.

    One of the two places that catch `Exception`: nothing internal leaks, nothing is lost from logs.
    """

    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return encode_error(error)
        except web.HTTPException as error:
            return encode_error(_of_status(error.status, error.reason, request))
        except ClientConnectionResetError:
            # The client left; whatever is answered goes nowhere.
            return web.Response(status=499)
        except ConnectionError:
            # A client that does not read is let go: the connection ends here.
            raise
        except Exception:
            log.exception("request failed", extra={"fields": {"path": request.path[:200]}})
            return encode_error(
                ApiError(ErrorCode.INTERNAL, "cannot answer: an internal error was logged")
            )

    return errors


async def read_body(
    request: web.Request,
    *,
    bytes_max: int,
    timeout_s: float,
    hold: Callable[[], None] | None = None,
) -> bytes:
    """Read a whole body within its limits; bytes count after decompression.

    Raises ApiError: 413 past `bytes_max`, 408 past `timeout_s`, 400 where the encoding is broken;
    and what `hold` raises, which is asked first, and before each piece is kept.
    """
    if hold is not None:
        hold()
    if (request.content_length or 0) > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                if hold is not None:
                    hold()
                body += chunk
                if len(body) > bytes_max:
                    raise _too_large(bytes_max)
    except TimeoutError:
        raise ApiError(
            ErrorCode.REQUEST_TIMEOUT, f"cannot read the body: not whole after {timeout_s:g} s"
        ) from None
    except (ContentEncodingError, web.RequestPayloadError):
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "cannot read the body: broken encoding or cut short"
        ) from None
    return bytes(body)


def listen_error(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error that says which address cannot be had, and why."""
    # A name that is not found has a number below 0, and words of its own.
    why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
    return ConfigError(f"cannot listen on {host}:{port}: {why}")


@asynccontextmanager
async def serve_http(
    app: web.Application,
    host: str,
    port: int,
    *,
    limits: HttpServerLimits | None = None,
    encode_error: EncodeError = json_error,
    ssl_context: SSLContext | None = None,
    reuse_port: bool = False,
) -> AsyncIterator[int]:
    """Serve `app` on `host:port` and yield the bound port, or raise ConfigError.

    On exit: stop accepting, give open requests `shutdown_timeout_s`, then cut them.
    """
    loop = asyncio.get_running_loop()
    async with _guarded(app, limits or HttpServerLimits(), encode_error, ssl_context) as connection:
        try:
            listener = await loop.create_server(
                connection, host, port, backlog=_BACKLOG, reuse_port=reuse_port or None
            )
        except OSError as error:
            raise listen_error(host, port, error) from error
        try:
            yield listener.sockets[0].getsockname()[1]
        finally:
            listener.close()


@asynccontextmanager
async def serve_http_unix(
    app: web.Application,
    path: Path,
    *,
    limits: HttpServerLimits | None = None,
    encode_error: EncodeError = json_error,
) -> AsyncIterator[None]:
    """Serve `app` at a socket that only this process's user may open; else as `serve_http`."""
    loop = asyncio.get_running_loop()
    async with _guarded(app, limits or HttpServerLimits(), encode_error, None) as connection:
        # Created closed to everyone else: between bind and chmod there is no open moment.
        mask = os.umask(0o177)
        try:
            listener = await loop.create_unix_server(connection, str(path), backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
        finally:
            os.umask(mask)
        try:
            yield
        finally:
            listener.close()


@asynccontextmanager
async def _guarded(
    app: web.Application,
    limits: HttpServerLimits,
    encode_error: EncodeError,
    ssl_context: SSLContext | None,
) -> AsyncIterator[ProtocolFactory]:
    """Yield what a listener makes its connections with; on exit, end those that are open."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=limits.shutdown_timeout_s,
    )
    await runner.setup()
    server = runner.server
    assert server is not None
    census = ConnectionCount(limits.connections_max, limits.connections_per_address_max)
    loop = asyncio.get_running_loop()

    def connection() -> web.RequestHandler:
        return _GuardedHandler(server, loop, limits, census, encode_error)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        shaking = tls_protocol_factory(connection, ssl_context, census, limits.head_timeout_s)
        yield await stack.enter_async_context(shaking)


class _GuardedHandler(web.RequestHandler):
    """One connection: counted, given `head_timeout_s` for its first head, then kept alive."""

    __slots__ = ("_address", "_census", "_encode_error", "_head_timer", "_limits")

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        limits: HttpServerLimits,
        census: ConnectionCount,
        encode_error: EncodeError,
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=limits.keepalive_s,
            lingering_time=1.0,
        )
        self._limits = limits
        self._census = census
        self._encode_error = encode_error
        self._address: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._address = remote_address(transport)
        if not self._census.enter(self._address):
            self.force_close()
            return
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self._limits.head_timeout_s, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._address is not None:
            self._census.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never became a request (malformed HTTP) in this door's shape."""
        if status >= 500:
            log.error("connection failed", exc_info=exc)
        text = "malformed HTTP" if status == 400 else (message or "refused")
        response = self._encode_error(_of_status(status, text, None))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Answer in this door's shape what aiohttp refuses before any of the app's middlewares."""
        if isinstance(resp, web.HTTPExpectationFailed):
            resp = self._encode_error(_of_status(resp.status, resp.reason, None))
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **named: Any) -> None:
        """Log what went wrong here; of a body that cannot be read its sender was told."""
        if not isinstance(named.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **named)

    def _head_is_late(self) -> None:
        if self._request_count == 0 and self._current_request is None:
            self.force_close()


def _of_status(status: int, text: str, request: web.Request | None) -> ApiError:
    code = _STATUS_CODES.get(status, ErrorCode.INTERNAL if status >= 500 else None)
    if code is ErrorCode.NOT_FOUND and request is not None:
        text = f"no such path: {request.method} {request.path[:200]}"
    elif code is ErrorCode.METHOD_NOT_ALLOWED and request is not None:
        text = f"{request.path[:200]} does not take {request.method}"
    return ApiError(code or ErrorCode.INVALID_REQUEST, f"cannot serve: {text}")


def _too_large(bytes_max: int) -> ApiError:
    return ApiError(
        ErrorCode.TOO_LARGE, f"cannot read the body: more than the {bytes_max} bytes allowed"
    )
