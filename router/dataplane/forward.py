"""One attempt at one node: the request goes out, and what comes back is told apart.

Every wait here has its deadline. Leaving `Upstream.ask` closes the connection unless the answer
was read to its end: a node whose caller is gone must see it at once.
"""

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from ssl import SSLContext
from typing import Final

import aiohttp

from isochrone.wire import headers
from isochrone.wire.routes import Route
from router.config import RouterConfig

CHUNK_BYTES: Final = 64 * 1024
LARGE_BYTES: Final = 512 * 1024
KEEPALIVE_S: Final = 20.0
"""Shorter than a node's own 75 s: a connection is never taken up just as the node closes it."""


class Failure(StrEnum):
    """Why an attempt came to nothing."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    BROKEN = "broken"
    SILENT = "silent"
    ERROR = "error"


class AttemptFailed(Exception):
    """This attempt came to nothing; `failure` says how, the message in words."""

    def __init__(self, failure: Failure, message: str, refused: str = "") -> None:
        super().__init__(message)
        self.failure = failure
        self.refused = refused


class Upstream:
    """The connections to nodes, kept alive between requests."""

    def __init__(self, config: RouterConfig, ssl_context: SSLContext | None = None) -> None:
        """Open no connection yet. Must be made inside the event loop."""
        self._config = config
        self._ssl = ssl_context
        source = (config.source_address, 0) if config.source_address else None
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                local_addr=source,
                keepalive_timeout=KEEPALIVE_S,
                ttl_dns_cache=60,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
            auto_decompress=False,
            read_bufsize=CHUNK_BYTES,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self.http.close()

    def url(self, address: str, path: str) -> str:
        """Return where `path` is at a node."""
        if "://" in address:
            return address.rstrip("/") + path
        return f"{'https' if self._ssl else 'http'}://{address}{path}"

    def get(
        self, address: str, path: str, sent: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Ask a node for something small, such as `/ping`."""
        return self.http.get(
            self.url(address, path),
            headers=sent,
            ssl=self._ssl if self._ssl is not None else True,
            allow_redirects=False,
        )

    @asynccontextmanager
    async def ask(
        self, route: Route, path: str, body: bytes, sent: Mapping[str, str]
    ) -> AsyncIterator["Answer"]:
        """Send a request to a route and yield its answer, whose head has arrived."""
        try:
            async with asyncio.timeout(self._config.first_byte_timeout_s):
                response = await self.http.post(
                    self.url(route.address, path),
                    # As a file where it is large: aiohttp then sends it in pieces.
                    data=io.BytesIO(body) if len(body) > LARGE_BYTES else body,
                    headers={
                        "content-type": "application/json",
                        "accept-encoding": "identity",
                        **sent,
                    },
                    ssl=self._ssl if self._ssl is not None else True,
                    allow_redirects=False,
                )
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise AttemptFailed(Failure.UNREACHABLE, f"cannot reach {route.node_id}") from error
        except TimeoutError as error:
            raise AttemptFailed(Failure.SILENT, f"{route.node_id} sent no answer") from error
        except (aiohttp.ClientError, OSError) as error:
            raise AttemptFailed(Failure.BROKEN, f"{route.node_id} broke off") from error
        answer = Answer(route, response, self._config)
        try:
            yield answer
        finally:
            # `close`, not `release`: unless it was read to its end, the node must stop working.
            response.close()


class Answer:
    """A node's answer, its head read and its body still coming."""

    def __init__(
        self, route: Route, response: aiohttp.ClientResponse, config: RouterConfig
    ) -> None:
        self.route = route
        self.status = response.status
        self.content_type = response.headers.get("content-type", "application/json")
        self.load = headers.parse_load(response.headers.get(headers.LOAD, ""))
        self.refused = response.headers.get(headers.REFUSED, "")[:64]
        self.retry_after = response.headers.get("retry-after", "")
        self.patience_s = config.first_byte_timeout_s
        self._response = response

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes; raise AttemptFailed where it breaks or stops coming.

        `patience_s` is how long each wait may be: the first token takes longer than the next.
        """
        while True:
            try:
                async with asyncio.timeout(self.patience_s):
                    chunk = await self._response.content.readany()
            except TimeoutError as error:
                raise AttemptFailed(
                    Failure.SILENT, f"{self.route.node_id} fell silent for {self.patience_s:g} s"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                raise AttemptFailed(Failure.BROKEN, f"{self.route.node_id} broke off") from error
            if not chunk:
                return
            yield chunk

    async def whole(self, bytes_max: int) -> bytes:
        """Read the whole body, at most `bytes_max`."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > bytes_max:
                raise AttemptFailed(
                    Failure.BROKEN, f"{self.route.node_id} answered more than {bytes_max} bytes"
                )
        return bytes(body)
