"""Relays requests for what the scheduler stores, on behalf of an authenticated key.

That is files, batches, stored responses and conversations.
"""

import asyncio
import re
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from isochrone.wire.errors import ApiError, ErrorCode, method_not_allowed
from isochrone.wire.http import headers
from router.dataplane.http_messages import HttpRequest, HttpResponse, ResponseWriter
from router.dataplane.inline_task import InlineEvent
from router.dataplane.upload_spool import SpooledBody
from router.scheduler_client import SchedulerClient

_ID: Final = "[A-Za-z0-9_-]{1,64}"
_PATH: Final = re.compile(rf"/v1/(?:files|batches)(?:/{_ID}){{0,2}}")
_CONTENT: Final = re.compile(r"/v1/files/[^/]+/content")
_COMPACT: Final = "/v1/responses/compact"
"""A route of OpenAI's that is not served, and not a response with the id `compact`."""
CHUNK_BYTES: Final = 64 * 1024
T = TypeVar("T")

_METHODS: Final = {
    rf"/v1/(?:files|batches)|/v1/conversations/{_ID}/items": ("GET", "POST"),
    rf"/v1/(?:files|responses)/{_ID}|/v1/conversations/{_ID}/items/{_ID}": ("GET", "DELETE"),
    rf"/v1/files/{_ID}/content|/v1/batches/{_ID}|/v1/responses/{_ID}/input_items": ("GET",),
    rf"/v1/(?:batches|responses)/{_ID}/cancel|/v1/conversations": ("POST",),
    rf"/v1/conversations/{_ID}": ("GET", "POST", "DELETE"),
}
_ROUTES: Final = tuple((re.compile(path), methods) for path, methods in _METHODS.items())
"""The methods of each path that is relayed."""


def check_route(method: str, path: str, named_path: str) -> None:
    """Raise ApiError 404 or 405 for a route that the scheduler does not have.

    The error names the path `named_path`.
    """
    if path == _COMPACT:
        reason = "inputs are not compacted here; leave earlier items out of the input"
        raise ApiError(ErrorCode.NOT_FOUND, f"cannot find {method} {named_path}: {reason}")
    for pattern, methods in _ROUTES:
        if pattern.fullmatch(path):
            if method not in methods:
                raise method_not_allowed(method, named_path, methods)
            return
    raise ApiError(ErrorCode.NOT_FOUND, f"cannot find {method} {named_path}: there is no such path")


def is_batch_path(path: str) -> bool:
    """Return whether a path is one of files or batches."""
    return _PATH.fullmatch(path) is not None


async def relay_to_scheduler(
    client: SchedulerClient, request: HttpRequest, writer: ResponseWriter
) -> None:
    """Answer a request with the scheduler's answer. Raises ApiError. An inline task."""
    if request.header(headers.ANTHROPIC_VERSION.encode()):
        # Anthropic's files are other objects.
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"cannot serve {request.named_path} to a client of Anthropic's API: files here are"
            " OpenAI's, for batches. Send images as base64 blocks and documents as plain text",
        )
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


def stored_bytes_of(request: HttpRequest) -> int:
    """Return the size of the file that the scheduler stores for a request; 0 for none."""
    return request.upload.size_bytes if isinstance(request.upload, SpooledBody) else 0


def content_type_of(request: HttpRequest) -> dict[str, str]:
    """Return the header with the type of a request's body, if it has one."""
    given = request.headers.get(b"content-type")
    return {} if given is None else {"content-type": given.decode("latin-1")}


async def _relay(client: SchedulerClient, request: HttpRequest, writer: ResponseWriter) -> None:
    key = request.key
    assert key is not None
    check_route(request.method.decode(), request.path, request.named_path)
    if is_batch_path(request.path):
        client.require_batches()
    header_lines = f"{headers.REQUEST_ID}: {request.client_request_id}\r\n"
    with body_of(request) as body:
        async with client.relay(
            key,
            request.method.decode(),
            request.path,
            headers=content_type_of(request),
            query=request.query,
            body=body,
            stored_bytes=stored_bytes_of(request),
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
