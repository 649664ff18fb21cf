"""The route of the data-plane server from which other nodes fetch complete, verified artifacts.

Limits: `uploads_max` uploads at once, the link's rate for all of them together, and WRITE_TIMEOUT_S
for each chunk. TLS authenticates the caller, as for requests.
"""

import asyncio
import re
from pathlib import Path
from typing import Final

from aiohttp import web

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from isochrone.wire.models.artifact import check_path
from nodeagent import metrics
from nodeagent.api.request.answer_relay import refusal
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.link import TransferLink

CHUNK_BYTES: Final = 1024 * 1024
WRITE_TIMEOUT_S: Final = 30.0
_RANGE: Final = re.compile(r"^bytes=(\d{1,15})-$")


class ArtifactUploads:
    """Serves `GET /v1/artifacts/{digest}/{path}`; `Range: bytes=N-` resumes from byte N."""

    def __init__(self, artifacts: ArtifactStore, link: TransferLink, *, uploads_max: int) -> None:
        """Send files of `artifacts` over `link`."""
        self._artifacts = artifacts
        self._link = link
        self._uploads_max = uploads_max
        self._uploads = 0

    def attach(self, app: web.Application) -> None:
        """Add the route to an application."""
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
        file = self._artifacts.file_of(digest, path)
        if file is None:
            raise ApiError(
                ErrorCode.NOT_FOUND, f"cannot send {digest[:64]}: this node does not hold it"
            )
        if self._uploads >= self._uploads_max:
            return refusal("busy", 429)
        self._uploads += 1
        try:
            return await self._send(request, file)
        finally:
            self._uploads -= 1

    async def _send(self, request: web.Request, path: Path) -> web.StreamResponse:
        # Opened in this coroutine: a thread would leave the file open if the client disconnects.
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            offset = _range_start(request, size_bytes)
            response = web.StreamResponse(status=206 if offset else 200)
            response.content_type = "application/octet-stream"
            response.content_length = size_bytes - offset
            if offset:
                response.headers["content-range"] = f"bytes {offset}-{size_bytes - 1}/{size_bytes}"
                file.seek(offset)
            await response.prepare(request)
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                await self._link.throttle(len(chunk))
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await response.write(chunk)
                except TimeoutError:
                    # A client that does not read must not occupy an upload slot.
                    if request.transport is not None:
                        request.transport.abort()
                    return response
                metrics.UPLOADED.inc(len(chunk))
        await response.write_eof()
        return response


def _range_start(request: web.Request, size_bytes: int) -> int:
    """Return the first byte that the request asks for. Raises ApiError if it is not in the file."""
    text = request.headers.get("range", "")
    if not text:
        return 0
    match = _RANGE.match(text)
    if match is None or int(match[1]) >= size_bytes:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot send range {text[:40]!r} of {size_bytes} bytes: write it as `bytes=N-`",
        )
    return int(match[1])
