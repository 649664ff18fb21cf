"""A frame's JSON, as far as the relay reads it: what was said, and how it ended."""

from typing import Any, Final

import msgspec


class Delta(msgspec.Struct):
    """What one frame adds to one choice."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    """One of the answers that a stream carries side by side."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """One frame."""

    choices: list[Choice] = []
    usage: Any = None


CHUNKS: Final = msgspec.json.Decoder(Chunk)
