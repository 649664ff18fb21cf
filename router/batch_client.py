"""The router's client for objects that schedulers store: HTTP beside the control connection.

The objects are files, batches, stored responses and conversations.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any, Final

import aiohttp
import msgspec

from isochrone.service.trust import identity as identities
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers import batches as wire

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 60.0
ERROR_BYTES_MAX: Final = 64 * 1024


class BatchAccess(msgspec.Struct, frozen=True, tag="batch_access"):
    """The acting scheduler's address, and the token for it.

    With an empty token the scheduler stores nothing; without `has_batches` no files and batches.
    """

    url: str = ""
    token: str = ""
    has_batches: bool = True


class BatchClient:
    """Sends requests to the acting scheduler. Each process of a router has one."""

    def __init__(self, ssl: SSLContext | None) -> None:
        """Use the TLS context `ssl` for an https URL."""
        self.access = BatchAccess()
        self._ssl = ssl
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()

    def require_batches(self) -> None:
        """Raise ApiError 503 if the scheduler stores no files and batches."""
        if self.access.token and not self.access.has_batches:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot use files and batches: the operator must set `batch_folder` or"
                " `batch_bucket` in the configuration of all schedulers",
            )

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        query: str = "",
        body: Any = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; raises ApiError if the service refuses it or cannot be reached."""
        access = self.access
        if not access.token:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot use what is stored (files, batches, responses, conversations): no scheduler"
                " is connected",
                retry_after_s=5.0,
            )
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S
                ),
                auto_decompress=False,
            )
        target = f"{access.url}{path}?{query}" if query else f"{access.url}{path}"
        try:
            async with self._http.request(
                method,
                target,
                data=body,
                headers={**headers, wire.RELAY_TOKEN: access.token},
                ssl=self._ssl if self._ssl is not None else True,
                server_hostname=identities.SCHEDULER_NAME if self._ssl is not None else None,
            ) as response:
                if response.status >= 400:
                    raise _refusal(await response.content.read(ERROR_BYTES_MAX), response)
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                f"cannot reach the scheduler, which stores it ({type(error).__name__})",
                retry_after_s=2.0,
            ) from error

    async def post(self, path: str, message: msgspec.Struct) -> bytes:
        """Send a message of work; return the answer. Raises ApiError."""
        body = msgspec.msgpack.encode(message)
        async with self.request("POST", path, headers={}, body=body) as response:
            return await response.read()


def _refusal(body: bytes, response: aiohttp.ClientResponse) -> ApiError:
    """Return the scheduler's error, to be encoded again for the client."""
    try:
        error = msgspec.json.decode(body)["error"]
        code = ErrorCode(error["code"])
        message, param = str(error["message"]), error.get("param")
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        code, param = ErrorCode.UPSTREAM, None
        message = f"cannot answer: the scheduler answered {response.status}"
    retry_after = response.headers.get("retry-after", "")
    return ApiError(
        code,
        message,
        param=param,
        retry_after_s=float(retry_after) if retry_after.isdigit() else None,
    )
