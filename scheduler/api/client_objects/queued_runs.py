"""Workers AI's `queueRequest=true`: a batch without files of the client's, relayed by routers.

The requests of a run become a file and a batch; the poll reads the results from the batch's files.
"""

import heapq
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from operator import itemgetter
from typing import Any, Final

import msgspec
from aiohttp import web

from isochrone.service.network.http_server import json_response
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.client_objects.batch_files import check_stored
from scheduler.api.client_objects.batches import WINDOW_S, check_open
from scheduler.api.client_objects.downloads import Download, DownloadLimit, connection_end, give_up
from scheduler.api.client_objects.uploads import add_or_discard, write_upload
from scheduler.decide.batch_limits import BatchLimits
from scheduler.decide.batch_lines import RUN_PREFIX, run_response
from scheduler.state.files.batch_folder import CHUNK_BYTES, BatchFolder
from scheduler.store.client_objects.batch_files import add_file
from scheduler.store.client_objects.batches import StoredBatch, add_batch, read_batch
from scheduler.store.pool import Pool, transaction, using

BODY_BYTES_MAX: Final = 16 * 1024 * 1024
INPUT_EXPIRES_S: Final = 2 * 86_400
PURPOSE: Final = "batch"
_COUNTS: Final = {
    "prompt_tokens": "input_tokens",
    "completion_tokens": "output_tokens",
    "total_tokens": "total_tokens",
}
"""The counts of a result's usage, and their names in the results of Responses."""

_STATUS: Final = {"validating": "queued", "in_progress": "running", "finalizing": "running"}


class QueuedRuns:
    """The endpoints of queued requests, for a tenant and key that a router has authenticated."""

    def __init__(
        self, pool: Pool, folder: BatchFolder, limits: BatchLimits, downloads: DownloadLimit
    ) -> None:
        self._downloads = downloads
        self._pool = pool
        self._folder = folder
        self._limits = limits

    async def create(self, request: web.Request, tenant_id: str, key_id: str) -> web.Response:
        """Begin a batch of the lines in the body, for the model in the query."""
        async with using(self._pool) as connection:
            # A file over the tenant's limits is refused before it is written.
            size_bytes = request.content_length or 1
            await check_stored(connection, tenant_id, size_bytes, self._limits)
        file_id = f"file-{secrets.token_hex(12)}"
        folder = self._folder.of_tenant(tenant_id)
        size_bytes = await write_upload(
            folder, file_id, request.content.read, bytes_max=BODY_BYTES_MAX
        )
        model = request.query.get("model", "")
        adding = self._add(file_id, size_bytes, tenant_id, key_id, model)
        batch = await add_or_discard(self._pool, folder, file_id, adding)
        return json_response(_queued(batch))

    async def _add(
        self, file_id: str, size_bytes: int, tenant_id: str, key_id: str, model: str
    ) -> StoredBatch:
        async with transaction(self._pool) as connection:
            await check_stored(connection, tenant_id, size_bytes, self._limits)
            await check_open(connection, tenant_id, self._limits)
            await add_file(
                connection,
                file_id=file_id,
                tenant_id=tenant_id,
                purpose=PURPOSE,
                filename="queued.jsonl",
                size_bytes=size_bytes,
                expires_after_s=INPUT_EXPIRES_S,
            )
            return await add_batch(
                connection,
                batch_id=f"batch_{secrets.token_hex(12)}",
                tenant_id=tenant_id,
                key_id=key_id,
                endpoint=f"{RUN_PREFIX}{model}",
                input_file_id=file_id,
                metadata={},
                expires_after_s=WINDOW_S,
            )

    async def show(self, request: web.Request, tenant_id: str) -> web.StreamResponse:
        """Return the state of a batch, with the results once it has ended.

        Its model must be that of the query, which routers of the release before do not send.
        """
        batch_id, model = request.match_info["batch_id"], request.query.get("model")
        async with using(self._pool) as connection:
            batch = await read_batch(connection, batch_id, tenant_id=tenant_id)
        is_run = batch is not None and batch.endpoint.startswith(RUN_PREFIX)
        if batch is None or not is_run or model not in (None, _model_of(batch)):
            raise ApiError(ErrorCode.NOT_FOUND, f"cannot find the request {batch_id[:64]!r}")
        if batch.status in _STATUS:
            return json_response(_queued(batch))
        if batch.status == "failed":
            reason = "; ".join(str(error.get("message")) for error in batch.errors)
            raise ApiError(
                ErrorCode.CONFLICT, f"cannot answer the requests: {reason}; queue them again"
            )
        with self._downloads.counted(tenant_id, connection_end(request)) as download:
            return await self._send_results(request, batch, download)

    async def _send_results(
        self, request: web.Request, batch: StoredBatch, download: Download
    ) -> web.StreamResponse:
        """Send the results of a batch that has ended, a part at a time: they may be gigabytes."""
        folder = self._folder.of_tenant(batch.tenant_id)
        parts = result_parts(folder, batch)
        try:
            part = await folder.run_for_client(next, parts, b"")
        except FileNotFoundError:
            message = "cannot return the results: they were deleted"
            raise ApiError(ErrorCode.NOT_FOUND, message) from None
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        try:
            while part:
                await response.write(part)
                download.sent_bytes += len(part)
                part = await folder.run_for_client(next, parts, b"")
        except (ApiError, FileNotFoundError) as error:
            give_up(request, batch.batch_id, str(error))
        await response.write_eof()
        return response


def result_parts(folder: BatchFolder, batch: StoredBatch) -> Iterator[bytes]:
    """Yield the JSON of a batch's results, in the order of its requests. Blocks.

    Holds one result and CHUNK_BYTES at a time. Raises FileNotFoundError, and ApiError 503.
    """
    usage = dict.fromkeys(_COUNTS, 0)
    part, separator = bytearray(b'{"responses":['), b""
    with ExitStack() as files:
        # Each file has its lines in the order of the requests.
        ordered = [
            map(run_response, files.enter_context(folder.open(file_id)))
            for file_id in (batch.output_file_id, batch.error_file_id)
            if file_id is not None
        ]
        for response in heapq.merge(*ordered, key=itemgetter("id")):
            counted = (response.get("result") or {}).get("usage") or {}
            for name, other in _COUNTS.items():
                usage[name] += counted.get(name) or counted.get(other) or 0
            part += separator + msgspec.json.encode(response)
            separator = b","
            if len(part) >= CHUNK_BYTES:
                yield bytes(part)
                part.clear()
    yield bytes(part) + b'],"usage":' + msgspec.json.encode(usage) + b"}"


def _queued(batch: StoredBatch) -> dict[str, Any]:
    return {
        "status": _STATUS.get(batch.status, batch.status),
        "request_id": batch.batch_id,
        "model": _model_of(batch),
    }


def _model_of(batch: StoredBatch) -> str:
    return batch.endpoint.removeprefix(RUN_PREFIX)
