"""Bytes to a checked request, and the body that goes on to the node.

The client's own bytes go on. Only where a stream does not ask for its usage is that one wish set,
for the router needs the count; the frame is then kept from the client.
"""

import re
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from isochrone.wire import codec
from isochrone.wire.errors import ApiError, ErrorCode
from router.apis.openai.schema import ChatRequest, CompletionRequest, StreamOptions

Request = ChatRequest | CompletionRequest
R = TypeVar("R", ChatRequest, CompletionRequest)

CHAT: Final = msgspec.json.Decoder(ChatRequest)
COMPLETION: Final = msgspec.json.Decoder(CompletionRequest)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r" - at `\$\.?(.{1,120})`$")
_WISH: Final = b'"stream_options":{"include_usage":true}'


def decode(body: bytes, reader: "msgspec.json.Decoder[R]") -> R:
    """Read a request, or raise ApiError 400 naming the field."""
    try:
        return codec.decode_json(body, reader, bytes_max=len(body))
    except codec.MalformedFrame as error:
        text = str(error)
        found = _AT.search(text)
        raise ApiError(
            ErrorCode.INVALID_REQUEST, text[:400], param=found.group(1) if found else None
        ) from None


def wants_usage(request: Request) -> bool:
    """Say whether the client asked for the usage frame of a stream."""
    options = request.stream_options
    return isinstance(options, StreamOptions) and options.include_usage is True


def with_usage_wish(body: bytes, request: Request) -> bytes:
    """Return the body with `stream_options.include_usage` set, all else as the client wrote it."""
    if not request.stream or wants_usage(request):
        return body
    if request.stream_options is UNSET:
        start = body.index(b"{") + 1
        return body[:start] + _WISH + b"," + body[start:]
    fields: dict[str, Any] = _FIELDS.decode(body)
    options = msgspec.json.decode(fields["stream_options"]) or {}
    fields["stream_options"] = {**options, "include_usage": True}
    return msgspec.json.encode(fields)
