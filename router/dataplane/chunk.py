"""The parts of a response's JSON that the router reads: generated text and finish reasons."""

from typing import Any, Final

import msgspec


class ChunkDelta(msgspec.Struct):
    """The output that a frame adds to a choice, or the whole message of a complete response.

    vLLM 0.12 and later name the reasoning `reasoning`; earlier ones, and other engines,
    `reasoning_content`.
    """

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def reasoning_text(self) -> str:
        """The reasoning, whatever the engine calls it."""
        return self.reasoning_content or self.reasoning or ""


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
