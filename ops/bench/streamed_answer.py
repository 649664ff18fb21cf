"""Reads the events of a streamed answer, with the times of its tokens."""

import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, NamedTuple

import msgspec


class StreamedChat(NamedTuple):
    """When the first and the last token of a chat's answer came, and its usage.

    The times are those of `time.monotonic`.
    """

    first_at_s: float
    last_at_s: float
    usage: dict[str, Any]


async def stream_frames(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield each event of a stream (`data: {...}`), from its lines."""
    async for line in lines:
        if line.startswith(b"data: {"):
            yield msgspec.json.decode(line[6:])


async def read_chat(lines: AsyncIterable[bytes]) -> StreamedChat:
    """Read a streamed answer of `/v1/chat/completions`; end the program if it has no text."""
    first_at_s = last_at_s = 0.0
    usage: dict[str, Any] = {}
    async for frame in stream_frames(lines):
        usage = frame.get("usage") or usage
        if any(choice["delta"].get("content") for choice in frame["choices"]):
            last_at_s = time.monotonic()
            first_at_s = first_at_s or last_at_s
    if not first_at_s:
        raise SystemExit("cannot measure: an answer has no text")
    return StreamedChat(first_at_s, last_at_s, usage)
