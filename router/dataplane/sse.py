"""Server-sent events as a relay sees them: frames are passed as the bytes they are.

Rule 1: a frame ends at a blank line, wherever the network cuts it; what is passed is byte-exact.
Rule 2: only the usage frame is read, rewritten or held back.
Rule 3: a stream that ends without `[DONE]` did not end well.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
DONE_FRAME: Final = b"data: [DONE]\n\n"
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


class BrokenStream(Exception):
    """What arrives is not server-sent events."""


class UsageCount(NamedTuple):
    """What an engine says that a request used."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class FrameSplitter:
    """Cuts a stream of bytes into whole frames, their blank lines included."""

    def __init__(self) -> None:
        """Begin at a frame's beginning."""
        self._held = bytearray()
        self._searched = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take bytes as they come and yield every frame they complete."""
        held = self._held
        held += chunk
        while (end := self._find_end()) >= 0:
            frame = bytes(held[:end])
            del held[:end]
            self._searched = 0
            yield frame
        self._searched = max(0, len(held) - 3)
        if len(held) > FRAME_BYTES_MAX:
            raise BrokenStream(f"a frame of more than {FRAME_BYTES_MAX} bytes")

    @property
    def rest(self) -> bytes:
        """What came after the last whole frame."""
        return bytes(self._held)

    def _find_end(self) -> int:
        found = [
            at + len(end) for end in _ENDS if (at := self._held.find(end, self._searched)) >= 0
        ]
        return min(found, default=-1)


def data_of(frame: bytes) -> bytes:
    """Return a frame's data: its `data:` lines without the field name, joined."""
    lines = frame.splitlines()
    if len(lines) >= 1 and lines[0].startswith(b"data:") and not any(lines[1:]):
        return lines[0][5:].lstrip(b" ")
    return b"\n".join(line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:"))


class Kind(NamedTuple):
    """What a frame is to the relay."""

    is_done: bool = False
    is_error: bool = False
    is_usage_only: bool = False
    tokens: int = 0
    usage: UsageCount | None = None
    body: dict[str, Any] | None = None


def classify(frame: bytes) -> Kind:
    """Say what a frame is. Most hold one token and are told by a search, not by decoding."""
    data = data_of(frame)
    if not data:
        return Kind()
    if data == b"[DONE]":
        return Kind(is_done=True)
    holds_usage = b'"usage"' in data and b'"usage":null' not in data.replace(b" ", b"")
    if not holds_usage and not data.startswith((b'{"error"', b'{ "error"')):
        return Kind(tokens=1 if _holds_content(data) else 0)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BrokenStream("a frame that is not JSON") from error
    if not isinstance(body, dict):
        raise BrokenStream("a frame that is not an object")
    if "error" in body and body["error"] is not None:
        return Kind(is_error=True, body=body)
    usage = usage_of(body)
    return Kind(
        is_usage_only=usage is not None and not body.get("choices"),
        tokens=1 if _holds_content(data) else 0,
        usage=usage,
        body=body,
    )


def usage_of(body: dict[str, Any]) -> UsageCount | None:
    """Read the usage of an answer or a frame, where it has one."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return UsageCount(
        _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")), _count(cached)
    )


def with_cached_tokens(body: dict[str, Any]) -> bool:
    """Add `usage.prompt_tokens_details.cached_tokens` where it is missing; True if it was."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return False
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        return False
    usage["prompt_tokens_details"] = {
        **(details if isinstance(details, dict) else {}),
        "cached_tokens": 0,
    }
    return True


def data_frame(body: Any) -> bytes:
    """Write one frame."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _holds_content(data: bytes) -> bool:
    for name in (b'"content":', b'"reasoning_content":', b'"text":', b'"tool_calls":'):
        at = data.find(name)
        if at >= 0:
            value = data[at + len(name) : at + len(name) + 8].lstrip()
            if not value.startswith((b'""', b"null", b"[]")):
                return True
    return False


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0
