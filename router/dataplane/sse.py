"""Server-sent events as a relay sees them: frames are passed as the bytes they are.

Rule 1: a frame ends at a blank line, wherever the network cuts it; what is passed is byte-exact.
Rule 2: only the usage frame is read, rewritten or held back.
Rule 3: a stream that ends without `[DONE]` did not end well.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from router.dataplane.chunk import ChunkChoice, ChunkDelta, chunk_of
from router.dataplane.usage import UsageCount, set_usage, usage_of, with_cached_tokens

FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
KEPT_BYTES_MAX: Final = 32 * 1024
"""StreamRelay are kept as they came until so many; then only their text is."""

DONE_FRAME: Final = b"data: [DONE]\n\n"
_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_SPECIAL: Final = re.compile(rb'"usage"\s*:\s*\{|\[DONE\]|"error"')


class BrokenStream(Exception):
    """What arrives is not server-sent events."""


class GeneratedOutput(NamedTuple):
    """What a stream has said so far: tokens counted by frames, and the text where it is plain."""

    tokens: int
    text: str
    is_plain: bool
    finish_reason: str | None


class StreamRelay:
    """One client's stream: a node's bytes in, the client's bytes out.

    It outlives a node that dies: `go_on` lets the frames of the next one follow.
    """

    __slots__ = (
        "_finish_reason", "_held", "_is_plain", "_kept", "_kept_bytes", "_skips_role", "_text",
        "_tokens", "_tokens_before", "_wants_usage", "has_begun", "has_failed", "is_done", "reason",
        "usage",
    )  # fmt: skip

    def __init__(self, *, wants_usage: bool) -> None:
        """Show the usage frame only to who wants it."""
        self.has_begun = False
        self.has_failed = False
        self.is_done = False
        self.reason = ""
        self.usage: UsageCount | None = None
        self._wants_usage = wants_usage
        self._held = b""
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._text: list[str] = []
        self._tokens = 0
        self._tokens_before = 0
        self._is_plain = True
        self._finish_reason: str | None = None
        self._skips_role = False

    @property
    def is_over(self) -> bool:
        """Whether `[DONE]` or the node's own error event has come."""
        return self.is_done or self.has_failed

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they come; return what of them the client sees now."""
        held = self._held + data if self._held else data
        if held.endswith(b"\n\n") and b"\r" not in held:
            whole, self._held = held, b""
        else:
            whole, self._held = _cut(held)
            if len(self._held) > FRAME_BYTES_MAX:
                raise BrokenStream(f"a frame of more than {FRAME_BYTES_MAX} bytes")
            if not whole:
                return b""
        # StreamRelay that hold nothing but tokens go on unread: nearly all of them.
        if self.has_begun and not self._skips_role and _SPECIAL.search(whole) is None:
            self._keep(whole)
            return whole
        if b"\r" in whole:
            return b"".join([self._one(frame) for frame in split(whole)])
        return b"".join(self._some(whole))

    def _some(self, whole: bytes) -> Iterator[bytes]:
        """Read the frames that must be read, and pass what lies between them unread."""
        at = 0
        while at < len(whole):
            begin, end = at, whole.find(b"\n\n", at) + 2
            if self.has_begun and not self._skips_role:
                found = _SPECIAL.search(whole, at)
                if found is None:
                    begin = end = len(whole)
                else:
                    before = whole.rfind(b"\n\n", at, found.start())
                    begin = at if before < 0 else before + 2
                    end = whole.find(b"\n\n", found.start()) + 2
            if begin > at:
                self._keep(whole[at:begin])
                yield whole[at:begin]
            if end > begin:
                yield self._one(whole[begin:end])
            at = end

    def said(self) -> GeneratedOutput:
        """Return what was said so far."""
        self._collapse()
        return GeneratedOutput(
            self._tokens, "".join(self._text), self._is_plain, self._finish_reason
        )

    def go_on(self) -> None:
        """Let another node's frames follow: they continue what was said."""
        self._held = b""
        self._tokens_before = self.said().tokens
        self._skips_role = True
        self.has_begun = False
        self.has_failed = False
        self.usage = None

    def _one(self, frame: bytes) -> bytes:
        """Return what the client sees of one frame."""
        kind = classify(frame)
        if kind.is_done:
            self.is_done = True
        elif kind.is_error:
            self.has_failed = True
            self.reason = _reason_of(kind.body)
            # Whether another node goes on is not known yet: the corridor tells the client.
            return b""
        elif kind.usage is not None:
            self.usage = self._whole_usage(kind.usage)
            self.has_begun = True
            if kind.is_usage_only and not self._wants_usage:
                return b""
            if kind.body is not None:
                changed = with_cached_tokens(kind.body) or self._tokens_before > 0
                if changed:
                    set_usage(kind.body, self.usage)
                    frame = data_frame(kind.body)
            self._keep(frame)
        elif kind.tokens:
            self.has_begun = True
            self._skips_role = False
            self._keep(frame)
        elif self._skips_role and b'"role"' in frame:
            return b""
        else:
            self._keep(frame)
        return frame

    def _whole_usage(self, usage: UsageCount) -> UsageCount:
        """Count what nodes before this one said as output, not as prompt."""
        before = self._tokens_before
        prompt = max(0, usage.prompt_tokens - before)
        return UsageCount(prompt, usage.output_tokens + before, min(prompt, usage.cached_tokens))

    def _keep(self, whole: bytes) -> None:
        self._kept.append(whole)
        self._kept_bytes += len(whole)
        if self._kept_bytes > KEPT_BYTES_MAX:
            self._collapse()

    def _collapse(self) -> None:
        """Read what was kept for its text and its tokens, and let go of the bytes."""
        kept = b"".join(self._kept)
        self._kept.clear()
        self._kept_bytes = 0
        for frame in split(kept):
            data = data_of(frame)
            if not data or data == b"[DONE]":
                continue
            chunk = chunk_of(data)
            if chunk is None:
                # Passed on as it came; of what it says nothing can be gone on from.
                self._is_plain = False
                continue
            for choice in chunk.choices:
                self._take(choice)

    def _take(self, choice: ChunkChoice) -> None:
        delta = choice.delta or ChunkDelta()
        text = delta.content or choice.text
        others = bool(delta.reasoning_content or delta.tool_calls)
        if text or others:
            self._tokens += 1
        if others or choice.index:
            self._is_plain = False
        if text:
            self._text.append(text)
        self._finish_reason = choice.finish_reason or self._finish_reason


def split(whole: bytes) -> list[bytes]:
    """Cut whole frames apart, their blank lines included."""
    frames = []
    start = 0
    for found in _END.finditer(whole):
        frames.append(whole[start : found.end()])
        start = found.end()
    if start < len(whole):
        frames.append(whole[start:])
    return frames


def _cut(held: bytes) -> tuple[bytes, bytes]:
    """Return the whole frames of `held`, and what follows the last of them."""
    end = 0
    for blank in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        at = held.rfind(blank)
        if at >= 0:
            end = max(end, at + len(blank))
    return held[:end], held[end:]


def data_of(frame: bytes) -> bytes:
    """Return a frame's data: its `data:` lines without the field name, joined."""
    lines = frame.splitlines()
    if len(lines) >= 1 and lines[0].startswith(b"data:") and not any(lines[1:]):
        return lines[0][5:].lstrip(b" ")
    return b"\n".join([line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:")])


class FrameKind(NamedTuple):
    """What a frame is to the relay."""

    is_done: bool = False
    is_error: bool = False
    is_usage_only: bool = False
    tokens: int = 0
    usage: UsageCount | None = None
    body: dict[str, Any] | None = None


def classify(frame: bytes) -> FrameKind:
    """Say what a frame is. Most hold one token and are told by a search, not by decoding."""
    data = data_of(frame)
    if not data:
        return FrameKind()
    if data == b"[DONE]":
        return FrameKind(is_done=True)
    holds_usage = b'"usage"' in data and b'"usage":null' not in data.replace(b" ", b"")
    if not holds_usage and not data.startswith((b'{"error"', b'{ "error"')):
        return FrameKind(tokens=1 if _holds_content(data) else 0)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BrokenStream("a frame that is not JSON") from error
    if not isinstance(body, dict):
        raise BrokenStream("a frame that is not an object")
    if "error" in body and body["error"] is not None:
        return FrameKind(is_error=True, body=body)
    usage = usage_of(body)
    return FrameKind(
        is_usage_only=usage is not None and not body.get("choices"),
        tokens=1 if _holds_content(data) else 0,
        usage=usage,
        body=body,
    )


def data_frame(body: Any) -> bytes:
    """Write one frame."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage_frame(usage: UsageCount, head: dict[str, Any]) -> bytes:
    """Write the frame that an engine would have ended with."""
    body = {
        **head,
        "choices": [],
        "usage": {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}},
    }
    set_usage(body, usage)
    return data_frame(body)


def _reason_of(body: dict[str, Any] | None) -> str:
    """Return an error event's message."""
    error = (body or {}).get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:400]


def _holds_content(data: bytes) -> bool:
    for name in (b'"content":', b'"reasoning_content":', b'"text":', b'"tool_calls":'):
        at = data.find(name)
        if at >= 0:
            value = data[at + len(name) : at + len(name) + 8].lstrip()
            if not value.startswith((b'""', b"null", b"[]")):
                return True
    return False
