"""The router's HTTP client of the acting scheduler, beside the control connection.

It relays clients' requests for what schedulers store (files, batches, stored responses,
conversations, adapters), and sends messages of the router's own work.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ssl import SSLContext
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import msgspec

from isochrone.fair_shares import FairShares
from isochrone.service.trust import identity as identities
from isochrone.wire.digits import parse_digits
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers import relay as wire
from isochrone.wire.peers.routes import KeyEntry
from router.scheduler_silence import SilenceWatch

CONNECT_TIMEOUT_S: Final = 5.0
BUSY_RETRY_AFTER_S: Final = 2.0
READ_TIMEOUT_S: Final = 60.0
"""How long a scheduler may take for the next bytes, once it has the whole request. It may take
longer if it stores a file before it answers (`wire.store_timeout_s`). A scheduler that hangs is
noticed earlier (`scheduler_silence.py`)."""

ERROR_BYTES_MAX: Final = 64 * 1024

RELAYED_MAX: Final = 256
"""Requests of clients that a process relays at a time. A tenant has at most as many as are free, so
one alone has half: its clients may read files as slowly as they like."""

WORK_CONNECTIONS_MAX: Final = 100
"""Connections for messages of the router's own, which are short. Clients' requests have others, so
that no message waits for a client."""

ASKING_CONNECTIONS_MAX: Final = 4
"""Connections for asking schedulers whether they run, one at a time each."""


class SchedulerAccess(msgspec.Struct, frozen=True, tag="scheduler_access"):
    """The acting scheduler's address, and the token for it.

    With an empty token the scheduler stores nothing; without `has_batches` no files and batches.
    """

    url: str = ""
    token: str = ""
    has_batches: bool = True


class SchedulerClient:
    """Sends requests to the acting scheduler. Each process of a router has one."""

    def __init__(self, ssl: SSLContext | None, read_timeout_s: float = READ_TIMEOUT_S) -> None:
        """Use the TLS context `ssl` for an https URL."""
        self._read_timeout_s = read_timeout_s
        self.access = SchedulerAccess()
        self._ssl = ssl
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        """By the most connections that each may have."""
        self._relayed = FairShares(RELAYED_MAX)
        """One for each request of a client."""
        self._silence = SilenceWatch(self._is_answering)

    async def close(self) -> None:
        """Close all connections."""
        await self._silence.close()
        for session in self._sessions.values():
            await session.close()

    def require_batches(self) -> None:
        """Raise ApiError 503 if the scheduler stores no files and batches."""
        if self.access.token and not self.access.has_batches:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot use files and batches: the operator must set `batch_folder` or"
                " `batch_bucket` in the configuration of all schedulers",
            )

    @asynccontextmanager
    async def relay(
        self,
        key: KeyEntry,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        query: str = "",
        body: Any = None,
        stored_bytes: int = 0,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a client's request on behalf of its key. Raises ApiError, as `request` does.

        The scheduler stores a file of `stored_bytes` before it answers. Raises ApiError 429 while
        as many requests of its tenant are relayed as it may have.
        """
        if not self._relayed.take(key.tenant_id, 1):
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot answer now: too many requests of this tenant for what is stored are being"
                " answered",
                retry_after_s=BUSY_RETRY_AFTER_S,
            )
        try:
            of_key = {wire.TENANT: key.tenant_id, wire.KEY: key.key_id}
            async with self.request(
                method,
                f"{wire.PUBLIC_PREFIX}{path}",
                headers={**headers, **of_key},
                query=query,
                body=body,
                connections_max=0,
                stored_bytes=stored_bytes,
            ) as response:
                yield response
        finally:
            self._relayed.give_back(key.tenant_id, 1)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        query: str = "",
        body: Any = None,
        connections_max: int = WORK_CONNECTIONS_MAX,
        stored_bytes: int = 0,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, over one of `connections_max` connections.

        The scheduler stores a file of `stored_bytes` before it answers, which takes its time.
        Raises ApiError if the service refuses it or cannot be reached.
        """
        access = self.access
        if not access.token:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot use what is stored (files, batches, responses, conversations): no scheduler"
                " is connected",
                retry_after_s=5.0,
            )
        target = f"{access.url}{path}?{query}" if query else f"{access.url}{path}"
        try:
            async with (
                self._silence.watched(access.url),
                self._session(connections_max).request(
                    method,
                    target,
                    data=body,
                    headers={**headers, wire.RELAY_TOKEN: access.token},
                    timeout=self._timeout(stored_bytes),
                    **self._tls_options(),
                ) as response,
            ):
                if response.status >= 400:
                    raise _refusal(await response.content.read(ERROR_BYTES_MAX), response)
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                f"cannot reach the scheduler, which stores it ({type(error).__name__})",
                retry_after_s=2.0,
            ) from error

    def _session(self, connections_max: int) -> aiohttp.ClientSession:
        """Return the session with so many connections at most, 0 for any number."""
        session = self._sessions.get(connections_max)
        if session is None:
            session = self._sessions[connections_max] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=connections_max), auto_decompress=False
            )
        return session

    def _timeout(self, stored_bytes: int) -> aiohttp.ClientTimeout:
        """Return the limits of a request. None counts while its body is being sent."""
        storing_s = wire.store_timeout_s(stored_bytes) if stored_bytes else 0.0
        return aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._read_timeout_s + storing_s
        )

    async def _is_answering(self, url: str, timeout_s: float) -> bool:
        """Return whether the scheduler `url` answers within a time."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session(ASKING_CONNECTIONS_MAX).get(
                f"{url}/healthz", timeout=timeout, **self._tls_options()
            ):
                return True
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def _tls_options(self) -> dict[str, Any]:
        if self._ssl is None:
            return {}
        return {"ssl": self._ssl, "server_hostname": identities.SCHEDULER_NAME}

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
    except (ValueError, KeyError, TypeError):
        code, param = ErrorCode.UPSTREAM, None
        message = f"cannot answer: the scheduler answered {response.status}"
    return ApiError(
        code,
        message,
        param=param,
        retry_after_s=parse_digits(response.headers.get("retry-after", "")),
    )
