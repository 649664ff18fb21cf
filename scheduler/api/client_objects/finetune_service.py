"""The routes of adapters on the control listener: for clients of routers, and for nodes."""

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers import relay as wire
from scheduler.api.client_objects.adapter_intake import AdapterIntake
from scheduler.api.client_objects.downloads import send_file
from scheduler.api.client_objects.finetunes import FinetuneEndpoints
from scheduler.api.client_objects.relayed import ClientTurns, PublicHandler, public_route
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.state.peers.relay_tokens import RelayTokens
from scheduler.store.client_objects.adapters import AdapterFile, get_adapter
from scheduler.store.pool import UNAVAILABLE, Pool, using

_RANGE: Final = re.compile(r"bytes=(\d{1,15})-")


class FinetuneTokens(NamedTuple):
    """The tokens of the peers that may use the routes of clients and those of nodes."""

    routers: RelayTokens
    agents: RelayTokens


def add_finetune_routes(
    app: web.Application,
    pool: Pool,
    folder: BatchFolder,
    intake: AdapterIntake,
    tokens: FinetuneTokens,
    turns: ClientTurns,
    on_change: Callable[[], None],
) -> None:
    """Add all routes. `on_change` publishes what routers know of adapters.

    Tenants take `turns` where a request of theirs uses the pool, except for uploads: these are
    long, and use it for a moment.
    """
    finetunes = FinetuneEndpoints(pool, intake, on_change)
    finetune = "/ai/finetunes/{finetune}"
    routes: tuple[tuple[str, str, PublicHandler], ...] = (
        ("POST", "/ai/finetunes", turns.limited(finetunes.create)),
        ("GET", "/ai/finetunes", turns.limited(finetunes.list)),
        ("GET", "/ai/finetunes/public", turns.limited(finetunes.list_public)),
        ("POST", f"{finetune}/finetune-assets", finetunes.upload),
        ("DELETE", finetune, turns.limited(finetunes.delete)),
    )
    for method, path, handler in routes:
        relayed = f"{wire.PUBLIC_PREFIX}{path}"
        app.router.add_route(method, relayed, public_route(tokens.routers, handler))
    files = AdapterFiles(pool, folder, tokens.agents)
    app.router.add_get(f"{wire.ADAPTER_FILE_PATH}/adapters/{{adapter_id}}/{{path}}", files.send)


class AdapterFiles:
    """Sends the files of complete adapters to nodes."""

    def __init__(self, pool: Pool, folder: BatchFolder, tokens: RelayTokens) -> None:
        self._pool = pool
        self._folder = folder
        self._tokens = tokens

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Stream one file, from the byte at which the `range` header begins."""
        self._tokens.peer_of(request.headers.get(wire.RELAY_TOKEN, ""))
        file = await self._file(request.match_info["adapter_id"], request.match_info["path"])
        given = _RANGE.fullmatch(request.headers.get("range", ""))
        first = int(given[1]) if given else 0
        if first > file.size_bytes:
            raise web.HTTPRequestRangeNotSatisfiable
        response = web.StreamResponse(status=206 if given else 200)
        if given:
            last = file.size_bytes - 1
            response.headers["content-range"] = f"bytes {first}-{last}/{file.size_bytes}"
        try:
            return await send_file(
                request,
                self._folder,
                file.file_id,
                response,
                first=first,
                count=file.size_bytes - first,
            )
        except FileNotFoundError:
            raise _not_found(file.path) from None

    async def _file(self, adapter_id: str, path: str) -> AdapterFile:
        try:
            async with using(self._pool) as connection:
                adapter = await get_adapter(connection, adapter_id)
        except UNAVAILABLE as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                "cannot send the file: the database is unreachable",
                retry_after_s=2,
            ) from error
        file: Any = adapter.file(path) if adapter is not None and adapter.digest else None
        if file is None or not file.file_id:
            raise _not_found(path)
        assert isinstance(file, AdapterFile)
        return file


def _not_found(path: str) -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, f"cannot find {path[:80]!r} of this adapter")
