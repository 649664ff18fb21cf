"""The part of the door where other nodes fetch artifacts: only whole and verified ones.

Bounds: so many at once, so many bytes a second for all together, so long for each chunk. Who may
ask is settled by the door's TLS, as for requests.
"""

import asyncio
import re
from pathlib import Path
from typing import Final

from aiohttp import web

from isochrone.wire import headers
from isochrone.wire.artifact import check_path
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent import metrics
from nodeagent.api.data_plane import refusal
from nodeagent.host.artifacts import ArtifactStore
from nodeagent.host.link import TransferLink

CHUNK_BYTES: Final = 1024 * 1024
WRITE_TIMEOUT_S: Final = 30.0
_RANGE: Final = re.compile(r"^bytes=(\d{1,15})-$")


class ArtifactUploads:
    """`GET /v1/artifacts/{digest}/{path}`, with `Range: bytes=N-` to go on from N."""

    def __init__(self, artifacts: ArtifactStore, link: TransferLink, *, uploads_max: int) -> None:
        """Send what is held over `link`."""
        self._artifacts = artifacts
        self._link = link
        self._uploads_max = uploads_max
        self._uploads = 0

    def attach(self, app: web.Application) -> None:
        """Add the route to the door."""
        app.router.add_get("/v1/artifacts/{digest}/{path:.+}", self._serve)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        digest, path = request.match_info["digest"], request.match_info["path"]
        problem = check_path(path)
        if problem:
            raise ApiError(ErrorCode.INVALID_REQUEST, problem)
        fetched_bytes = self._artifacts.fetched_bytes(digest)
        if fetched_bytes is not None:
            response = refusal("fetching", 503)
            response.headers[headers.FETCHED_BYTES] = str(fetched_bytes)
            return response
        file = self._artifacts.held_file(digest, path)
        if file is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"cannot send {digest[:64]}: not held here")
        if self._uploads >= self._uploads_max:
            return refusal("busy", 429)
        self._uploads += 1
        try:
            return await self._send(request, file)
        finally:
            self._uploads -= 1

    async def _send(self, request: web.Request, path: Path) -> web.StreamResponse:
        # Not in a thread: a client that leaves meanwhile would leave the file open.
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            offset = _offset(request, size_bytes)
            response = web.StreamResponse(status=206 if offset else 200)
            response.content_type = "application/octet-stream"
            response.content_length = size_bytes - offset
            if offset:
                response.headers["content-range"] = f"bytes {offset}-{size_bytes - 1}/{size_bytes}"
                file.seek(offset)
            await response.prepare(request)
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                await self._link.keep_pace(len(chunk))
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await response.write(chunk)
                except TimeoutError:
                    # One that does not take what it asked for must not keep others from it.
                    if request.transport is not None:
                        request.transport.abort()
                    return response
                metrics.UPLOADED.inc(len(chunk))
        await response.write_eof()
        return response


def _offset(request: web.Request, size_bytes: int) -> int:
    text = request.headers.get("range", "")
    if not text:
        return 0
    match = _RANGE.match(text)
    if match is None or int(match[1]) >= size_bytes:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot send {text[:40]!r} of {size_bytes} bytes: ask for `bytes=N-`",
        )
    return int(match[1])
