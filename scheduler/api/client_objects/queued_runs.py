"""Workers AI's `queueRequest=true`: a batch without files of the client's, relayed by routers.

The requests of a run become a file and a batch; the poll reads the results from the batch's files.
"""

import secrets
from typing import Any, Final

import msgspec
from aiohttp import web

from isochrone.service.network.http_server import read_body
from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.client_objects.batches import WINDOW_S, check_unanswered
from scheduler.api.client_objects.uploads import add_or_discard, write_upload
from scheduler.decide.batch_limits import BatchLimits
from scheduler.decide.batch_lines import RUN_PREFIX, run_response
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.store.client_objects.batch_files import add_file
from scheduler.store.client_objects.batches import StoredBatch, add_batch, read_batch
from scheduler.store.pool import Pool, transaction, using

BODY_BYTES_MAX: Final = 16 * 1024 * 1024
BODY_TIMEOUT_S: Final = 30.0
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

    def __init__(self, pool: Pool, folder: BatchFolder, limits: BatchLimits) -> None:
        self._pool = pool
        self._folder = folder
        self._limits = limits

    async def create(self, request: web.Request, tenant_id: str, key_id: str) -> web.Response:
        """Begin a batch of the lines in the body, for the model in the query."""
        text = await read_body(request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        file_id = f"file-{secrets.token_hex(12)}"
        parts = iter((text,))

        async def read_chunk(_: int) -> bytes:
            return next(parts, b"")

        await write_upload(self._folder, file_id, read_chunk, bytes_max=BODY_BYTES_MAX)
        model = request.query.get("model", "")
        adding = self._add(file_id, len(text), tenant_id, key_id, model)
        batch = await add_or_discard(self._pool, self._folder, file_id, adding)
        return web.json_response(_queued(batch))

    async def _add(
        self, file_id: str, size_bytes: int, tenant_id: str, key_id: str, model: str
    ) -> StoredBatch:
        async with transaction(self._pool) as connection:
            await check_unanswered(connection, tenant_id, self._limits)
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

    async def show(self, request: web.Request, tenant_id: str) -> web.Response:
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
            return web.json_response(_queued(batch))
        body = await self._folder.run(self._results, batch)
        return web.Response(body=body, content_type="application/json")

    def _results(self, batch: StoredBatch) -> bytes:
        """Return the results of a batch that has ended, in the order of its requests."""
        responses: list[dict[str, Any]] = []
        usage = dict.fromkeys(_COUNTS, 0)
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is None:
                continue
            try:
                with self._folder.open(file_id) as source:
                    for line in source:
                        response = run_response(line)
                        responses.append(response)
                        counted = (response.get("result") or {}).get("usage") or {}
                        for name, other in _COUNTS.items():
                            usage[name] += counted.get(name) or counted.get(other) or 0
            except FileNotFoundError:
                message = "cannot return the results: they were deleted"
                raise ApiError(ErrorCode.NOT_FOUND, message) from None
        responses.sort(key=lambda response: int(response["id"]))
        return msgspec.json.encode({"responses": responses, "usage": usage})


def _queued(batch: StoredBatch) -> dict[str, Any]:
    return {
        "status": _STATUS.get(batch.status, batch.status),
        "request_id": batch.batch_id,
        "model": _model_of(batch),
    }


def _model_of(batch: StoredBatch) -> str:
    return batch.endpoint.removeprefix(RUN_PREFIX)
