"""An answer's JSON, as far as it is read here: what was said, and how it ended."""

from typing import Any, Final

import msgspec


class ChunkDelta(msgspec.Struct):
    """What one frame adds to one choice; of a whole answer, all that it said."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class ChunkChoice(msgspec.Struct):
    """One of the answers that there are side by side."""

    index: int = 0
    delta: ChunkDelta | None = None
    message: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None


class ResponseChunk(msgspec.Struct):
    """One frame, or a whole answer."""

    choices: list[ChunkChoice] = []
    usage: Any = None


_CHUNK: Final = msgspec.json.Decoder(ResponseChunk)


def chunk_of(data: bytes) -> ResponseChunk | None:
    """Read a frame's data; None where it is none of these."""
    try:
        return _CHUNK.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
