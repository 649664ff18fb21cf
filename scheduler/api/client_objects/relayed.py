"""Routes of the control listener for routers that hold a relay token: their clients' and their own.

A router has authenticated its client, and names its tenant. Only the acting scheduler serves these
routes, as only its routers hold a token.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Final

import msgspec
from aiohttp import web

from isochrone.service.network.http_server import read_body
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers import relay as wire
from scheduler.state.files.file_threads import FairTurns
from scheduler.state.peers.relay_tokens import RelayTokens
from scheduler.store.pool import BAD_DATA, UNAVAILABLE

WORK_TIMEOUT_S: Final = 30.0

LARGE_BYTES: Final = 1024 * 1024
LARGE_AT_ONCE: Final = 4
"""The most bodies of LARGE_BYTES or more in memory at a time: a router sends up to 64 MiB each.
Others are not read until it is their turn; after a minute the router sends the request again."""

TURNS_MAX: Final = 12
"""Requests of clients that use the database at a time: some of its connections for clients are left
for messages of routers, and for files that are sent, which take long and use it for a moment."""

BUSY_RETRY_AFTER_S: Final = 2.0

PublicHandler = Callable[[web.Request, str], Awaitable[web.StreamResponse]]
"""(request, tenant id) to the response."""

WorkHandler = Callable[[bytes], Awaitable[msgspec.Struct | None]]


class LargeBodies:
    """Limits the large bodies of some routes that are in memory together."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(LARGE_AT_ONCE)

    def turn(self, request: web.Request) -> AbstractAsyncContextManager[None]:
        """Wait, with a large body, until it may be read."""
        size_bytes = request.content_length
        is_small = size_bytes is not None and size_bytes < LARGE_BYTES
        return nullcontext() if is_small else self._slots

    def limited(self, handler: PublicHandler) -> PublicHandler:
        """Return a handler that waits for its turn."""

        async def handle(request: web.Request, tenant_id: str) -> web.StreamResponse:
            async with self.turn(request):
                return await handler(request, tenant_id)

        return handle


class ClientTurns:
    """Lets tenants take turns where their requests use the database.

    One that sends many, or whose objects are large, waits for its own.
    """

    def __init__(self) -> None:
        self._turns = FairTurns(TURNS_MAX)

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait until a request of the tenant may use the database. Raises ApiError 429."""
        try:
            await self._turns.take(tenant_id)
        except TimeoutError:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot answer now: too many requests of this tenant for what is stored wait",
                retry_after_s=BUSY_RETRY_AFTER_S,
            ) from None
        try:
            yield
        finally:
            self._turns.give_back(tenant_id)

    def limited(self, handler: PublicHandler) -> PublicHandler:
        """Return a handler that waits for its turn."""

        async def handle(request: web.Request, tenant_id: str) -> web.StreamResponse:
            async with self.turn(tenant_id):
                return await handler(request, tenant_id)

        return handle


def public_route(
    tokens: RelayTokens, handler: PublicHandler
) -> Callable[[web.Request], Awaitable[Any]]:
    """Return the aiohttp handler of a client's request that a router relays."""

    async def handle(request: web.Request) -> web.StreamResponse:
        tokens.peer_of(request.headers.get(wire.RELAY_TOKEN, ""))
        tenant_id = request.headers.get(wire.TENANT, "")
        if not tenant_id:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot answer without {wire.TENANT}")
        try:
            return await handler(request, tenant_id)
        except UNAVAILABLE as error:
            raise _unreachable() from error
        except BAD_DATA as error:
            raise _unusable() from error

    return handle


def work_route(
    tokens: RelayTokens, handler: WorkHandler, bytes_max: int = wire.WORK_BYTES_MAX
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the aiohttp handler of a message of a router's own work."""
    large = LargeBodies()

    async def handle(request: web.Request) -> web.Response:
        tokens.peer_of(request.headers.get(wire.RELAY_TOKEN, ""))
        async with large.turn(request):
            return await answer(request)

    async def answer(request: web.Request) -> web.Response:
        body = await read_body(request, bytes_max=bytes_max, timeout_s=WORK_TIMEOUT_S)
        try:
            answer = await handler(body)
        except msgspec.DecodeError as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, str(error)[:300]) from error
        except UNAVAILABLE as error:
            raise _unreachable() from error
        except BAD_DATA as error:
            raise _unusable() from error
        return web.Response(body=b"" if answer is None else msgspec.msgpack.encode(answer))

    return handle


def _unreachable() -> ApiError:
    return ApiError(
        ErrorCode.UNAVAILABLE, "cannot answer: the database is unreachable", retry_after_s=2
    )


def _unusable() -> ApiError:
    return ApiError(
        ErrorCode.INVALID_REQUEST,
        "cannot use the request: a text contains a NUL or is too long, or a number is too large",
    )
