"""The parts of a response's JSON that the router reads: generated text and finish reasons."""

from typing import Any, Final

import msgspec


class ChunkDelta(msgspec.Struct):
    """The output that a frame adds to a choice, or the whole message of a complete response."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class ChunkChoice(msgspec.Struct):
    """One of the alternative answers (`n` of a request) that a response holds."""

    index: int = 0
    delta: ChunkDelta | None = None
    message: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None


class ResponseChunk(msgspec.Struct):
    """One stream frame, or a complete response."""

    choices: list[ChunkChoice] = []
    usage: Any = None


_CHUNK: Final = msgspec.json.Decoder(ResponseChunk)


def decode_chunk(data: bytes) -> ResponseChunk | None:
    """Decode a frame's data; return None if it is not a chunk."""
    try:
        return _CHUNK.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
