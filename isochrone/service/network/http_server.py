"""An aiohttp server with a deadline and a size limit on everything that clients send.

aiohttp itself waits for ever for a slow request head, keeps a megabyte of each, 32 of them for a
client that does not wait for answers, and does not limit connections. Whatever is refused here,
malformed HTTP included, gets an error in the server's own JSON form.
"""

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from ssl import SSLContext
from typing import Any, Final, cast

import msgspec
from aiohttp import ClientConnectionResetError, web
from aiohttp.http_exceptions import BadHttpMessage, ContentEncodingError
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from isochrone.service.config import ConfigError
from isochrone.service.network.connection_count import (
    ConnectionCount,
    ProtocolFactory,
    client_network,
    tls_protocol_factory,
)
from isochrone.service.network.private_socket import private_socket
from isochrone.service.rust_panic import is_rust_panic
from isochrone.wire.errors import ApiError, ErrorCode, openai_error

log = logging.getLogger(__name__)

EncodeError = Callable[[ApiError], web.Response]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BACKLOG: Final = 65_535
"""Connections that may wait to be accepted. The kernel lowers it to `net.core.somaxconn`.

While the backlog is full, the kernel drops the packets of new TCP connections. Each is delayed by a
second or more, and a fleet that connects at once gives up and tries again without end.
"""

WAITING_BYTES_MAX: Final = 64 * 1024
"""Memory for requests of a connection that wait behind another waiting one. A connection that needs
more is closed: strangers would hold as much of it as they like."""

FIELD_BYTES: Final = 200
"""The memory of a header field besides its text."""

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
    """Limits of one listener. A connection over a limit is closed, a request is refused."""

    head_timeout_s: float = 10.0
    head_bytes_max: int = 32 * 1024
    keepalive_s: float = 75.0
    connections_max: int = 20_000
    connections_per_address_max: int = 5_000
    shutdown_timeout_s: float = 5.0


def json_response(body: object, status: int = 200) -> web.Response:
    """Return a response with `body` as JSON."""
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )


def json_error(error: ApiError) -> web.Response:
    """Encode an error in this project's JSON form, which the admin and control APIs use."""
    body = {"error": {"code": error.code.value, "message": error.message, "param": error.param}}
    return error_response(error, msgspec.json.encode(body))


def openai_json_error(error: ApiError) -> web.Response:
    """Encode an error in the form of OpenAI's API, which engines use."""
    return error_response(error, msgspec.json.encode(openai_error(error)))


def error_response(error: ApiError, body: bytes) -> web.Response:
    """Return a response with the error's status and headers, and `Retry-After` in whole seconds."""
    response = web.Response(
        status=error.meaning.status,
        body=body,
        headers=error.headers,
        content_type="application/json",
    )
    if error.retry_after_s is not None:
        # Rounded up: a client that retries a moment early is refused again.
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return response


def error_middleware(encode_error: EncodeError) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return a middleware that answers every exception in the form of `encode_error`.

    It catches `Exception` and panics: internal details go to the log and not to the client.
    """

    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return encode_error(error)
        except web.HTTPException as error:
            if isinstance(error, web.HTTPMethodNotAllowed):
                return encode_error(_method_not_allowed(request, error.allowed_methods))
            return encode_error(_error_of_status(error.status, error.reason, request))
        except ClientConnectionResetError:
            # The client has left; no response reaches it.
            return web.Response(status=499)
        except ConnectionError:
            # The client does not read: aiohttp closes the connection.
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not is_rust_panic(error):
                raise
            log.exception("request failed", extra={"fields": {"path": request.path[:200]}})
            return encode_error(
                ApiError(ErrorCode.INTERNAL, "cannot answer: an internal error was logged")
            )

    return errors


FORM_ERRORS: Final = (AssertionError, ValueError, RuntimeError, BadHttpMessage)
"""The errors that aiohttp raises for a malformed form; the last is for the headers of a part."""


async def read_body(
    request: web.Request,
    *,
    bytes_max: int,
    timeout_s: float,
    check: Callable[[], None] | None = None,
) -> bytes:
    """Read a whole body. Limits apply to the bytes after decompression.

    Raises ApiError: 413 over `bytes_max`, 408 after `timeout_s`, 400 for a broken encoding.
    `check`, if given, is called before the first byte and before each further part is kept; it may
    raise to stop reading.
    """
    if check is not None:
        check()
    if (request.content_length or 0) > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                if check is not None:
                    check()
                body += chunk
                if len(body) > bytes_max:
                    raise _too_large(bytes_max)
    except TimeoutError:
        raise ApiError(
            ErrorCode.REQUEST_TIMEOUT, f"cannot read the body: incomplete after {timeout_s:g} s"
        ) from None
    except (ContentEncodingError, web.RequestPayloadError):
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "cannot read the body: broken encoding or truncated"
        ) from None
    return bytes(body)


def listen_error(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for an address that cannot be listened on."""
    # A name that cannot be resolved has a negative errno and its own strerror.
    reason = (
        os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
    )
    return ConfigError(f"cannot listen on {host}:{port}: {reason}")


@asynccontextmanager
async def serve_http(
    app: web.Application,
    host: str,
    port: int,
    *,
    limits: HttpServerLimits | None = None,
    ssl_context: SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve `app` on `host:port` and yield the bound port; raises ConfigError.

    On exit: stop accepting, wait `shutdown_timeout_s` for open requests, then cancel them.
    """
    loop = asyncio.get_running_loop()
    async with _protocol_factory(
        app, limits or HttpServerLimits(), json_error, ssl_context
    ) as factory:
        try:
            listener = await loop.create_server(factory, host, port, backlog=BACKLOG)
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
    """Serve `app` on a Unix socket that only this process's user may open; see `serve_http`."""
    loop = asyncio.get_running_loop()
    async with _protocol_factory(app, limits or HttpServerLimits(), encode_error, None) as factory:
        try:
            bound = private_socket(path)
            listener = await loop.create_unix_server(factory, sock=bound, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
        try:
            yield
        finally:
            listener.close()


@asynccontextmanager
async def _protocol_factory(
    app: web.Application,
    limits: HttpServerLimits,
    encode_error: EncodeError,
    ssl_context: SSLContext | None,
) -> AsyncIterator[ProtocolFactory]:
    """Yield a listener's protocol factory; on exit, close its open connections."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=limits.shutdown_timeout_s,
    )
    await runner.setup()
    server = runner.server
    assert server is not None
    connections = ConnectionCount(limits.connections_max, limits.connections_per_address_max)
    loop = asyncio.get_running_loop()

    def open_connections() -> Iterable[_LimitedRequestHandler]:
        return cast(list[_LimitedRequestHandler], server.connections)

    def request_handler() -> web.RequestHandler:
        connections.close_idlest(open_connections, loop.time())
        return _LimitedRequestHandler(server, loop, limits, connections, encode_error)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        factory = tls_protocol_factory(
            request_handler, ssl_context, connections, limits.head_timeout_s, open_connections
        )
        yield await stack.enter_async_context(factory)


class _LimitedRequestHandler(web.RequestHandler):
    """One connection: counted, closed unless each head is complete within `head_timeout_s`.

    The time of the first head counts from the connection, that of others from their first bytes.
    """

    __slots__ = (
        "_connections", "_encode_error", "_head_bytes", "_head_timer", "_limits", "_network",
        "_newest_body", "_waiting_bytes",
    )  # fmt: skip

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        limits: HttpServerLimits,
        connections: ConnectionCount,
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
        self._connections = connections
        self._encode_error = encode_error
        self._network: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """How much of an unfinished head has arrived."""
        self._newest_body: StreamReader = EMPTY_PAYLOAD
        self._waiting_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, and the connection is not a WebSocket."""
        return self._current_request is None and not self._upgraded

    @property
    def idle_since_s(self) -> float:
        """When the connection was made or its last request answered, on the loop's clock."""
        return self._next_keepalive_close_time - self._keepalive_timeout

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._network = client_network(transport)
        if not self._connections.add(self._network):
            self.force_close()
            return
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        # In parts, so that no head begins far from where the count of its bytes does.
        part_bytes = self._limits.head_bytes_max
        while self._newest_body.is_eof() and not self._upgraded and len(data) > part_bytes:
            self._receive(data[:part_bytes])
            data = data[part_bytes:]
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Pass bytes to the parser, and close the connection if it would hold too many of them."""
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            return  # the connection is closed once this error is sent
        heads, is_in_head = self._request_count, self._newest_body.is_eof()
        super().data_received(data)
        new = self._request_count - heads
        if new:
            self._head_bytes = 0
            self._newest_body = self._messages[-1][1]
            self._cancel_head_timer()
        elif is_in_head and not self._upgraded:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.head_bytes_max:
                self.force_close()
        if len(self._messages) > 1:
            self._waiting_bytes += len(data)
        else:
            self._waiting_bytes = 0
        for place in range(-new, 0):
            self._check_head(place)
        if self._waiting_bytes > WAITING_BYTES_MAX:
            self.force_close()
        if not new and self._waiter is not None and self._head_timer is None:
            # aiohttp cancels its keep-alive timer at the first bytes of the next head, but waits
            # for the rest of it until `keepalive_s`.
            self._start_head_timer()

    def _check_head(self, place: int) -> None:
        """Refuse a waiting request if its head is too large; count its fields if others wait."""
        message = self._messages[place][0]
        if not isinstance(message, RawRequestMessage):
            return
        texts = sum([len(name) + len(value) + 4 for name, value in message.raw_headers])
        if len(message.path) + texts > self._limits.head_bytes_max:
            text = f"the head has more than {self._limits.head_bytes_max} bytes"
            refused = _ErrInfo(status=431, exc=BadHttpMessage(text), message=text)
            self._messages[place] = (refused, EMPTY_PAYLOAD)
        if len(self._messages) > 1:
            self._waiting_bytes += FIELD_BYTES * len(message.raw_headers)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_head_timer()
        if self._network is not None:
            self._connections.remove(self._network)
            self._network = None
        self._newest_body = EMPTY_PAYLOAD
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP, which never became a request, in the server's own form."""
        if status >= 500:
            log.error("connection failed", exc_info=exc)
        text = "malformed HTTP" if status == 400 else (message or "refused")
        response = self._encode_error(_error_of_status(status, text, None))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Answer in the server's own form what aiohttp refuses before the app's middlewares."""
        if isinstance(resp, web.HTTPExpectationFailed):
            resp = self._encode_error(_error_of_status(resp.status, resp.reason, None))
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **named: Any) -> None:
        """Log an exception, except for a body that could not be read: its sender got an error."""
        if not isinstance(named.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **named)

    def _start_head_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self._limits.head_timeout_s, self.force_close)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _error_of_status(status: int, text: str, request: web.Request | None) -> ApiError:
    code = _STATUS_CODES.get(status, ErrorCode.INTERNAL if status >= 500 else None)
    if code is ErrorCode.NOT_FOUND and request is not None:
        text = f"no such path: {request.method} {request.path[:200]}"
    return ApiError(code or ErrorCode.INVALID_REQUEST, f"cannot serve: {text}")


def _method_not_allowed(request: web.Request, allowed: Collection[str]) -> ApiError:
    useful = ", ".join(sorted(set(allowed) - {"HEAD"}))
    return ApiError(
        ErrorCode.METHOD_NOT_ALLOWED,
        f"cannot use the method {request.method} for {request.path[:200]}: use {useful}",
        headers={"allow": ", ".join(sorted(allowed))},
    )


def _too_large(bytes_max: int) -> ApiError:
    return ApiError(ErrorCode.TOO_LARGE, f"cannot read the body: more than {bytes_max} bytes")
