"""Running streams whose tokens are relayed in C, from the node's socket to the client's.

Most tokens of a stream come in frames that are equal except for the text of the token. Relaying
such a frame needs no decision, so the compiled request path has a thread in C for it
(`stream_pump.c`), which serves all ready sockets in one wake-up. Every other frame, the end of the
stream, an error, a client that reads slowly: with any of them the stream comes back to its
connection, which goes on as if it had relayed those tokens itself. Without the compiled request
path no stream is ever there.
"""

import asyncio
import importlib
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from router.dataplane.chunk import ChunkDelta, decode_chunk


class PumpedFrame:
    """The frame of a stream, in which only the text differs from token to token.

    `before` ends with the text's opening quote, `behind` begins with its closing quote.
    """

    __slots__ = ("before", "behind", "is_reasoning")

    def __init__(self, before: bytes, behind: bytes, *, is_reasoning: bool) -> None:
        self.before = before
        self.behind = behind
        self.is_reasoning = is_reasoning


class PumpedTokens:
    """Tokens that were relayed in C: their number, and their text as it is written in JSON."""

    __slots__ = ("count", "heard_s", "text")

    def __init__(self, count: int, text: bytes, heard_s: float) -> None:
        self.count = count
        self.text = text
        self.heard_s = heard_s


class StreamPump(Protocol):
    """See stream_pump.c."""

    def attach(
        self,
        node_fd: int,
        client_fd: int,
        before: bytes,
        behind: bytes,
        keeps_text: bool,
    ) -> int:
        """Relay a stream from here on; return its slot. Raises OSError."""

    def take(self, slot: int) -> tuple[int, bytes, float]:
        """Stop relaying a stream; return its tokens, their text, and when bytes came last.

        Times are those of the monotonic clock.
        """

    def heard_s(self, slot: int) -> float:
        """Return when bytes of a stream came last."""

    def returned(self) -> list[tuple[int, bytes, bytes]]:
        """Return the streams that it cannot go on with, since the last call.

        Of each its slot, the bytes that it read and did not take, and those that the client's
        socket did not take.
        """

    def fileno(self) -> int:
        """Return the descriptor that is readable when a stream is returned."""

    def __len__(self) -> int:
        """Return the number of streams."""


class PumpedConnection(Protocol):
    """The connection that a stream came from, to which it returns."""

    def on_returned(self, unread: bytes, unsent: bytes) -> None:
        """Go on with the stream: write what was not sent, then handle what was not read."""


new_pump: Callable[[float], StreamPump] | None = None

with suppress(ImportError):
    new_pump = importlib.import_module("router.dataplane.stream_pump").StreamPump


class TokenPump:
    """The streams of this process that are relayed in C."""

    def __init__(self, gather_s: float) -> None:
        """Let tokens gather for at most `gather_s`; 0: never."""
        self._gather_s = gather_s
        self._pump: StreamPump | None = None
        self._connections: dict[int, PumpedConnection] = {}

    def __len__(self) -> int:
        """Return the number of streams."""
        return len(self._connections)

    @property
    def is_there(self) -> bool:
        """Whether streams can be relayed in C."""
        return new_pump is not None

    def attach(
        self,
        connection: PumpedConnection,
        node_fd: int,
        client_fd: int,
        frame: PumpedFrame,
        *,
        keeps_text: bool,
    ) -> int:
        """Relay the stream of a connection from here on; return its slot, -1 if that fails.

        Until `take`, nothing else may read from the node's socket or write to the client's.
        """
        pump = self._pump
        if pump is None:
            pump = self._start()
            if pump is None:
                return -1
        try:
            slot = pump.attach(node_fd, client_fd, frame.before, frame.behind, keeps_text)
        except OSError:
            return -1
        self._connections[slot] = connection
        return slot

    def take(self, slot: int) -> PumpedTokens:
        """Stop relaying a stream; return what was relayed of it."""
        assert self._pump is not None
        del self._connections[slot]
        count, text, heard_s = self._pump.take(slot)
        return PumpedTokens(count, text, heard_s)

    def heard_s(self, slot: int) -> float:
        """Return when bytes of a stream came last."""
        assert self._pump is not None
        return self._pump.heard_s(slot)

    def close(self) -> None:
        """Stop watching the sockets. All streams have been taken."""
        pump, self._pump = self._pump, None
        if pump is not None:
            asyncio.get_running_loop().remove_reader(pump.fileno())

    def _start(self) -> StreamPump | None:
        if new_pump is None:
            return None
        try:
            pump = self._pump = new_pump(self._gather_s)
        except OSError:
            return None
        asyncio.get_running_loop().add_reader(pump.fileno(), self._on_ready)
        return pump

    def _on_ready(self) -> None:
        pump = self._pump
        if pump is None:
            return
        for slot, unread, unsent in pump.returned():
            # One that came back before this one may have ended the other's exchange.
            connection = self._connections.get(slot)
            if connection is not None:
                connection.on_returned(unread, unsent)


_TEXT: Final = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning)"\s*:\s*"((?:[^"\\]|\\.)+)"'
)
_OTHER_TEXT: Final = "another text"


def pumped_frame(frame: bytes) -> PumpedFrame | None:
    """Return a token's frame without its text; None if a token of this stream is more than that.

    Frames of other tokens must differ in their text only, and this frame must not end anything.
    """
    found = _TEXT.search(frame)
    if found is None or not frame.startswith(b"data:") or frame.find(b"\n") != len(frame) - 2:
        return None
    before, behind = frame[: found.start(1)], frame[found.end(1) :]
    chunk = decode_chunk(before[5:] + _OTHER_TEXT.encode() + behind)
    if chunk is None or len(chunk.choices) != 1 or chunk.usage is not None:
        return None
    if b"\r" in frame or b'"error"' in before or b'"error"' in behind:
        return None
    choice = chunk.choices[0]
    delta = choice.delta or ChunkDelta()
    texts = (delta.content, choice.text, delta.reasoning_content, delta.reasoning)
    if choice.index or choice.finish_reason or delta.tool_calls or choice.generated_tokens != 1:
        return None
    if [text for text in texts if text] != [_OTHER_TEXT]:
        return None
    return PumpedFrame(before, behind, is_reasoning=bool(delta.reasoning_text))
