"""Relays server-sent events: frames go to the client as the bytes that the node sent.

Rule 1: a frame ends at a blank line, wherever the network splits it; relayed frames are byte-exact,
except for rules 2 and 4.
Rule 2: only the usage frame is decoded, and it is rewritten or withheld if necessary.
Rule 3: a stream that ends without `[DONE]` has failed.
Rule 4: frames of a node that continues a stream get the id and the time of the first node's.
"""

import re
from collections import deque
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire.errors import ErrorCode
from isochrone.wire.http import headers
from router.dataplane.chunk import ChunkChoice, ChunkDelta, decode_chunk
from router.dataplane.generated_text import GeneratedText
from router.dataplane.partial_frame import PartialFrame, frames_end
from router.dataplane.stream_head import StreamHead
from router.dataplane.token_pump import PumpedFrame, pumped_frame
from router.dataplane.usage import UsageCount, add_cached_tokens, set_usage, usage_of

FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
UNREAD_BYTES_MAX: Final = 32 * 1024
"""The bytes of the last relayed frames that are kept undecoded. Of earlier frames only the text is
kept."""

REASONING_OPENS: Final = "<think>"
REASONING_CLOSES: Final = "</think>"
"""The marks of `nodeagent/engine/chat/reasoning.py`."""

DONE_FRAME: Final = b"data: [DONE]\n\n"
_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_SPECIAL: Final = re.compile(rb'"usage"\s*:\s*\{|\[DONE\]|"error"')


_OUTPUT_NAMES: Final = (
    *(b'"content":', b'"text":', b'"tool_calls":'),
    *(b'"reasoning_content":', b'"reasoning":'),
)
"""The fields of a frame that hold output."""

REQUEST_ERROR_CODES: Final = frozenset(
    {
        ErrorCode.INVALID_REQUEST.value,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED.value,
        HTTPStatus.BAD_REQUEST.value,
        HTTPStatus.UNPROCESSABLE_ENTITY.value,
    }
)
"""The `code` of an error event that blames the request."""


class MalformedStream(Exception):
    """The received bytes are not server-sent events of JSON objects."""


class GeneratedOutput(NamedTuple):
    """The output of a stream so far.

    `tokens` counts frames with content, or the tokens in them where the engine says how many.
    `text` is the whole output only if `is_plain`; reasoning is in it between the marks with which
    the model wrote it.
    """

    tokens: int
    text: str
    is_plain: bool
    finish_reason: str | None
    has_reasoning: bool = False


class StreamRelay:
    """One client's stream: takes a node's bytes, returns the client's bytes.

    It outlives a node that fails: after `resume` it takes the frames of the next node.
    `has_begun` means that a token has come from the current node. `has_failed` means that the node
    sent an error event, whose message is `error_message`. `is_engine_lost` means that its engine
    failed, perhaps because of this request. `declined_body` is that event as the body of a
    response, if the event says that the request is at fault; else empty.

    `takes_any_content` means that the stream may be of another content type than events.
    With `joins_reasoning` an answer goes on after its reasoning: the embedded engine takes back
    what it separated. Other engines do not.
    """

    __slots__ = (
        "_finish_reason", "_has_reasoning", "_is_continued", "_is_plain", "_is_reasoning",
        "_joins_reasoning",
        "_partial", "_skips_role", "_text", "_tokens",
        "_tokens_before", "_unread", "_unread_bytes", "_wants_usage", "declined_body",
        "error_message", "has_begun", "has_failed", "head", "is_done", "is_engine_lost",
        "takes_any_content", "usage",
    )  # fmt: skip

    def __init__(self, *, wants_usage: bool, joins_reasoning: bool = False) -> None:
        """Withhold the usage frame unless the client `wants_usage`."""
        self._joins_reasoning = joins_reasoning
        self._has_reasoning = self._is_reasoning = False
        self.has_begun = False
        self.has_failed = False
        self.takes_any_content = False
        self.is_done = False
        self.error_message = ""
        self.is_engine_lost = False
        self.declined_body = b""
        self.usage: UsageCount | None = None
        self._wants_usage = wants_usage
        self._partial = PartialFrame()
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._text = GeneratedText()
        self._tokens = 0
        self._tokens_before = 0
        self._is_plain = True
        self._finish_reason: str | None = None
        self._skips_role = False
        self.head = StreamHead()
        self._is_continued = False

    @property
    def is_over(self) -> bool:
        """Whether `[DONE]` or an error event of the node has come."""
        return self.is_done or self.has_failed

    @property
    def is_plain(self) -> bool:
        """Whether the text so far is the whole output."""
        return self._is_plain and self._text.is_kept

    def pumped_frame(self, frame: bytes) -> PumpedFrame | None:
        """Return the shape of the next tokens, if only their text differs from the last `frame`.

        None if every frame of the stream must be read here.
        """
        if not self.has_begun or self._is_continued or self.is_over or self._partial.size_bytes:
            return None
        shape = pumped_frame(frame)
        if shape is None:
            return None
        self._read_kept()
        is_same_kind = shape.is_reasoning == self._is_reasoning or not self._joins_reasoning
        return shape if is_same_kind else None

    def take_pumped(self, count: int, text: bytes) -> None:
        """Take the tokens that were relayed in the shape of `pumped_frame`."""
        self._tokens += count
        if text:
            self._text.append(msgspec.json.decode(b'"' + text + b'"', type=str))

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return the bytes that the client gets now.

        Nothing after an error event reaches the client: vLLM sends `[DONE]` even then.
        """
        if self.has_failed:
            return b""
        partial = self._partial
        whole = partial.join(data) if partial.size_bytes else data
        if not whole.endswith(b"\n\n") or b"\r" in whole:
            end = frames_end(whole)
            if end < len(whole):
                partial.hold(whole[end:])
                whole = whole[:end]
            if partial.size_bytes > FRAME_BYTES_MAX:
                raise MalformedStream(f"a frame of more than {FRAME_BYTES_MAX} bytes")
            if not whole:
                return b""
        # Nearly all frames hold only tokens; they are relayed without decoding.
        if self.has_begun and not self._skips_role and _SPECIAL.search(whole) is None:
            self._keep(whole)
            return self.head.put_on(whole) if self._is_continued else whole
        if b"\r" in whole:
            relayed = b"".join([self._relay_frame(frame) for frame in split_frames(whole)])
        else:
            relayed = b"".join(self._relay_frames(whole))
        return self.head.put_on(relayed) if self._is_continued else relayed

    def end_of_body(self) -> None:
        """Note that the node's response has ended: see rule 3."""

    def _relay_frames(self, whole: bytes) -> Iterator[bytes]:
        """Decode the frames that must be read, and relay the bytes between them undecoded."""
        start = 0
        while start < len(whole):
            begin, end = start, whole.find(b"\n\n", start) + 2
            if end < 2:
                # A frame had more than one blank line behind it.
                end = len(whole)
            if self.has_begun and not self._skips_role:
                special = _SPECIAL.search(whole, start)
                if special is None:
                    begin = end = len(whole)
                else:
                    before = whole.rfind(b"\n\n", start, special.start())
                    begin = start if before < 0 else before + 2
                    end = whole.find(b"\n\n", special.start()) + 2
            if begin > start:
                self._keep(whole[start:begin])
                yield whole[start:begin]
            if end > begin:
                yield self._relay_frame(whole[begin:end])
            start = end

    def generated(self) -> GeneratedOutput:
        """Return what was generated so far, by all nodes together."""
        self._read_kept()
        if self.usage is not None:
            self._tokens = max(self._tokens, self.usage.output_tokens)
        return GeneratedOutput(
            self._tokens,
            self._text.joined(),
            self.is_plain,
            self._finish_reason,
            self._has_reasoning,
        )

    def resume(self) -> None:
        """Expect the frames of another node, which continue the output so far."""
        self._partial.clear()
        self._tokens_before = self.generated().tokens
        self._skips_role = self._is_continued = True
        self.has_begun = False
        self.has_failed = self.is_engine_lost = False
        self.usage = None

    def _relay_frame(self, frame: bytes) -> bytes:
        """Return what the client gets of one frame."""
        if self.has_failed:
            return b""
        kind = classify(frame)
        self.head.note(frame)
        if kind.is_done:
            self.is_done = True
        elif kind.is_error:
            self.has_failed = True
            self.error_message = _error_message(kind.body)
            self.is_engine_lost = _is_engine_lost(kind.body)
            if is_request_error(kind.body):
                self.declined_body = msgspec.json.encode(kind.body)
            # Another node may continue the stream, so the pipeline decides what the client gets.
            return b""
        elif kind.usage is not None:
            self.usage = self._usage_of_all_nodes(kind.usage)
            if not kind.usage.output_tokens and b'"role"' in frame:
                # The first frame, from an engine that counts in each.
                if self._skips_role:
                    return b""
            else:
                self.has_begun = True
                self._skips_role = False
            if kind.is_usage_only and not self._wants_usage:
                return b""
            if kind.body is not None:
                is_changed = add_cached_tokens(kind.body) or self._tokens_before > 0
                if is_changed:
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

    def _usage_of_all_nodes(self, usage: UsageCount) -> UsageCount:
        """Count the tokens of earlier nodes as output: for the current node they were prompt."""
        before = self._tokens_before
        prompt = max(0, usage.prompt_tokens - before)
        return UsageCount(prompt, usage.output_tokens + before, min(prompt, usage.cached_tokens))

    def _keep(self, frames: bytes) -> None:
        """Keep relayed frames for `generated`."""
        unread = self._unread
        unread.append(frames)
        self._unread_bytes += len(frames)
        # One token in, one out: many streams that began together must not all decode at once.
        while self._unread_bytes > UNREAD_BYTES_MAX:
            oldest = unread.popleft()
            self._unread_bytes -= len(oldest)
            self._read_frames(oldest)

    def _read_kept(self) -> None:
        """Decode the kept frames for their text and tokens, and drop their bytes."""
        unread = b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        self._read_frames(unread)

    def _read_frames(self, frames: bytes) -> None:
        if (
            frames.startswith(b"data:")
            and frames.find(b"\n") == len(frames) - 2
            and b"\r" not in frames
        ):
            # One frame of one line, as nearly all come.
            self._read_data(frames[5:-2].lstrip(b" "))
            return
        for frame in split_frames(frames):
            self._read_data(frame_data(frame))

    def _read_data(self, data: bytes) -> None:
        if not data or data == b"[DONE]":
            return
        chunk = decode_chunk(data)
        if chunk is None:
            # The frame was sent to the client, but no other replica could continue from it.
            self._is_plain = False
            return
        for choice in chunk.choices:
            self._read_choice(choice)

    def _read_choice(self, choice: ChunkChoice) -> None:
        delta = choice.delta or ChunkDelta()
        text = delta.content or choice.text
        reasoning = delta.reasoning_text
        if text or reasoning or delta.tool_calls:
            self._tokens += min(FRAME_BYTES_MAX, max(0, choice.generated_tokens))
        if delta.tool_calls or choice.index or (reasoning and not self._joins_reasoning):
            self._is_plain = False
        if reasoning and self._joins_reasoning:
            if not self._is_reasoning:
                # Reasoning after the answer has begun has no mark that says so.
                self._is_plain = self._is_plain and not self._text
                self._has_reasoning = self._is_reasoning = True
                self._text.append(REASONING_OPENS)
            self._text.append(reasoning)
        if text:
            if self._is_reasoning:
                self._is_reasoning = False
                self._text.append(REASONING_CLOSES)
            self._text.append(text)
        self._finish_reason = choice.finish_reason or self._finish_reason


def split_frames(frames: bytes) -> list[bytes]:
    """Split complete frames, each with its blank line."""
    parts = []
    start = 0
    for end in _END.finditer(frames):
        parts.append(frames[start : end.end()])
        start = end.end()
    if start < len(frames):
        parts.append(frames[start:])
    return parts


def frame_data(frame: bytes) -> bytes:
    """Return a frame's data: its `data:` lines, joined, without the field name."""
    lines = frame.splitlines()
    if len(lines) >= 1 and lines[0].startswith(b"data:") and not any(lines[1:]):
        return lines[0][5:].lstrip(b" ")
    return b"\n".join([line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:")])


class FrameKind(NamedTuple):
    """The content of a frame. `body` is the decoded object of an error or usage frame."""

    is_done: bool = False
    is_error: bool = False
    is_usage_only: bool = False
    tokens: int = 0
    usage: UsageCount | None = None
    body: dict[str, Any] | None = None


def classify(frame: bytes) -> FrameKind:
    """Return what a frame holds; raise MalformedStream if it must be JSON and is not.

    A frame with a token is recognized by a search, without decoding it.
    """
    data = frame_data(frame)
    if not data:
        return FrameKind()
    if data == b"[DONE]":
        return FrameKind(is_done=True)
    has_usage = b'"usage"' in data and b'"usage":null' not in data.replace(b" ", b"")
    if not has_usage and not data.startswith((b'{"error"', b'{ "error"')):
        return FrameKind(tokens=1 if _has_content(data) else 0)
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise MalformedStream("a frame that is not JSON") from error
    if not isinstance(body, dict):
        raise MalformedStream("a frame that is not an object")
    if "error" in body and body["error"] is not None:
        return FrameKind(is_error=True, body=body)
    usage = usage_of(body)
    return FrameKind(
        is_usage_only=usage is not None and not body.get("choices"),
        tokens=1 if _has_content(data) else 0,
        usage=usage,
        body=body,
    )


def data_frame(body: Any) -> bytes:
    """Return a frame with `body` as JSON."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage_frame(usage: UsageCount, head: dict[str, Any]) -> bytes:
    """Return a usage frame such as an engine ends a stream with; `head` are its other fields."""
    body = {
        **head,
        "choices": [],
        "usage": {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}},
    }
    set_usage(body, usage)
    return data_frame(body)


def is_request_error(body: dict[str, Any] | None) -> bool:
    """Return whether an error event blames the request: no other replica could serve it.

    Our engine's events have an error code in words; vLLM's and SGLang's have the HTTP status.
    """
    error = (body or {}).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return isinstance(code, str | int) and code in REQUEST_ERROR_CODES


def _error_message(body: dict[str, Any] | None) -> str:
    error = (body or {}).get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:400]


def _is_engine_lost(body: dict[str, Any] | None) -> bool:
    error = (body or {}).get("error")
    return isinstance(error, dict) and error.get("code") == headers.ENGINE_LOST_CODE


def _has_content(data: bytes) -> bool:
    """Return whether a frame's data holds a non-empty piece of output."""
    for name in _OUTPUT_NAMES:
        position = data.find(name)
        if position >= 0:
            value = data[position + len(name) : position + len(name) + 8].lstrip()
            if not value.startswith((b'""', b"null", b"[]")):
                return True
    return False
