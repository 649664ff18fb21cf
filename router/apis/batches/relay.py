"""`/v1/files` and `/v1/batches`: relayed to the scheduler, on behalf of an authenticated key."""

import asyncio
import re
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from isochrone.wire import batches as wire
from isochrone.wire import headers
from router.batch_client import BatchClient
from router.dataplane.http_messages import HttpRequest, HttpResponse, ResponseWriter
from router.dataplane.inline_task import InlineEvent
from router.dataplane.upload_spool import SpooledBody

_PATH: Final = re.compile(r"/v1/(?:files|batches)(?:/[A-Za-z0-9_-]{1,64}){0,2}")
_CONTENT: Final = re.compile(r"/v1/files/[^/]+/content")
CHUNK_BYTES: Final = 64 * 1024
T = TypeVar("T")


def is_batch_path(path: str) -> bool:
    """Return whether a path is one of files or batches."""
    return _PATH.fullmatch(path) is not None


async def relay_to_batch_service(
    client: BatchClient, request: HttpRequest, writer: ResponseWriter
) -> None:
    """Answer a request with the scheduler's answer. Raises ApiError. An inline task."""
    await in_a_task(_relay(client, request, writer))


async def in_a_task(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, run in an asyncio task: an inline task cannot await HTTP."""
    done = InlineEvent()
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda _: done.set())
    try:
        await done
    finally:
        task.cancel()
    return task.result()


@contextmanager
def body_of(request: HttpRequest) -> Iterator[Any]:
    """Return the body to relay: an upload as a file, which is closed at the end."""
    if isinstance(request.upload, SpooledBody):
        with request.upload.reader() as body:
            yield body
    else:
        yield request.body or None


async def _relay(client: BatchClient, request: HttpRequest, writer: ResponseWriter) -> None:
    key = request.key
    assert key is not None
    if is_batch_path(request.path):
        client.require_batches()
    sent = {wire.TENANT: key.tenant_id, wire.KEY: key.key_id}
    if b"content-type" in request.headers:
        sent["content-type"] = request.headers[b"content-type"].decode("latin-1")
    header_lines = f"{headers.REQUEST_ID}: {request.client_request_id}\r\n"
    with body_of(request) as body:
        async with client.request(
            request.method.decode(),
            f"{wire.PUBLIC_PREFIX}{request.path}",
            headers=sent,
            query=request.query,
            body=body,
        ) as response:
            if not _CONTENT.fullmatch(request.path):
                answer = await response.read()
                writer.reply(HttpResponse(response.status, answer, header_lines))
                return
            # The chunks of a file are written as the client reads them.
            writer.begin(200, "application/octet-stream", header_lines)
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                writer.send(chunk)
                await writer.drained()
            writer.end()
