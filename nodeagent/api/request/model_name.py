"""Puts an engine's own name of the model into a request, and the deployment's into the answer.

A request is JSON, or a form with a file; an answer is JSON or a stream of events. The engine's name
may be a path on this node, which no client should see.

Rule 1: only the field `model` changes. The bytes of files are not looked at.
Rule 2: a form that cannot be read is left as it is; the engine refuses it.
Rule 3: an answer's `model` changes if it begins with the engine's name: servers add a revision.
"""

import re
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from aiohttp import web

from nodeagent.drivers.request_body import with_fields

_BOUNDARY: Final = re.compile(r'boundary="?([^";,]{1,200})"?', re.IGNORECASE)
_MODEL: Final = re.compile(
    rb'^content-disposition:[^\r\n]*;\s*name="?model"?\s*(;|$)', re.IGNORECASE | re.MULTILINE
)
HEAD_BYTES_MAX: Final = 4096
JSON: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream"


def with_model_name(body: bytes, content_type: str, name: str) -> bytes:
    """Return a request body that names the model `name`. Raises ApiError 400 for broken JSON."""
    if not content_type.lower().startswith("multipart/"):
        return with_fields(body, {"model": name})
    found = _BOUNDARY.search(content_type)
    if found is None:
        return body
    delimiter = b"--" + found[1].strip().encode()
    start = body.find(delimiter)
    while start >= 0:
        head_start = start + len(delimiter)
        head_end = body.find(b"\r\n\r\n", head_start, head_start + HEAD_BYTES_MAX)
        if head_end < 0:
            return body
        following = body.find(b"\r\n" + delimiter, head_end + 2)
        if following < 0:
            return body
        head = body[head_start:head_end].replace(b"\r\n", b"\n")
        if _MODEL.search(head):
            return b"".join((body[: head_end + 4], name.encode(), body[following:]))
        start = following + 2
    return body


def with_deployment_name(
    response: web.StreamResponse, chunks: AsyncIterator[bytes], engine_name: str, name: str
) -> AsyncIterator[bytes]:
    """Return an answer's body that calls the model `name` where it began with `engine_name`.

    The length of `response` is no longer known. Answers of other types are not changed.
    """
    if response.content_type not in (JSON, EVENT_STREAM) or engine_name == name:
        return chunks
    response.content_length = None
    quoted = re.escape(msgspec.json.encode(engine_name)[1:-1])
    pattern = re.compile(rb'("model"\s{0,8}:\s{0,8}")' + quoted + rb'[^"\\]{0,128}(?=")')
    renamed = rb"\g<1>" + msgspec.json.encode(name)[1:-1].replace(b"\\", rb"\\")
    return _renamed(chunks, pattern, renamed, is_stream=response.content_type == EVENT_STREAM)


async def _renamed(
    chunks: AsyncIterator[bytes], pattern: re.Pattern[bytes], renamed: bytes, *, is_stream: bool
) -> AsyncIterator[bytes]:
    """Yield a stream's events as their lines end, and other answers whole."""
    # An answer with embeddings or images has many megabytes: none of them is copied per chunk.
    unsent = bytearray()
    async for chunk in chunks:
        end = chunk.rfind(b"\n") + 1 if is_stream else 0
        if not end:
            unsent += chunk
            continue
        yield pattern.sub(renamed, bytes(unsent) + chunk[:end])
        unsent = bytearray(chunk[end:])
    if unsent:
        yield pattern.sub(renamed, bytes(unsent))
