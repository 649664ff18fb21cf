"""A node's answer as the corridor waits for it: whole, or a stream open from its first token on.

What arrives before that moment is held, for another replica may still be tried; from it on bytes
go from the node's connection to the client's without a stop on the way.
"""

import asyncio
from typing import Final, Protocol

from router.dataplane import sse
from router.dataplane.exchange import AttemptFailed, Failure, Head
from router.dataplane.http1 import EVENT_STREAM
from router.dataplane.usage import UsageCount

HELD_BYTES_MAX: Final = 256 * 1024


class Writer(Protocol):
    """Where a stream goes."""

    def send(self, data: bytes) -> None:
        """Send bytes."""


class Answer:
    """One attempt's answer. Await `opened`, then for a stream `flow`."""

    __slots__ = (
        "_bytes_max", "_failure", "_first", "_is_open", "_is_rest", "_is_stream", "_node",
        "_waiter", "_whole", "_writer", "body", "frames", "head", "usage",
    )  # fmt: skip

    def __init__(
        self, node: str, frames: sse.Frames | None, bytes_max: int, *, is_rest: bool = False
    ) -> None:
        """Expect a stream where there are `frames` to take it, else a body of `bytes_max`.

        With `is_rest` it goes on from what was said; one that would begin anew is refused.
        """
        self._is_rest = is_rest
        self.head: Head | None = None
        self.body = b""
        self.usage: UsageCount | None = None
        self.frames = frames
        self._node = node
        self._bytes_max = bytes_max
        self._is_stream = False
        self._is_open = False
        self._failure: AttemptFailed | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writer: Writer | None = None
        self._first: list[bytes] = []
        self._whole = 0

    @property
    def is_stream(self) -> bool:
        """Whether what comes is a stream of events."""
        return self._is_stream

    async def opened(self) -> Head:
        """Return when the answer is whole, or its first token is there; raise AttemptFailed."""
        if not self._is_open and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        assert self.head is not None
        return self.head

    async def flow(self, writer: Writer) -> None:
        """Let the stream flow to `writer` until `[DONE]` or an error event; AttemptFailed else."""
        frames = self.frames
        assert frames is not None
        self._writer = writer
        first = b"".join(self._first)
        self._first.clear()
        if first:
            writer.send(first)
        if not frames.is_over and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None and not frames.is_over:
            raise self._failure

    # The exchange's side.

    def on_head(self, head: Head) -> None:
        """Take the head: it says whether a stream follows."""
        self.head = head
        if self.frames is None or head.status != 200:
            return
        if not head.content_type.startswith(EVENT_STREAM):
            raise AttemptFailed(Failure.BROKEN, f"{self._node} sent no event stream")
        if self._is_rest and not head.resumed:
            raise AttemptFailed(Failure.UNFIT, f"{self._node} cannot go on from a text")
        self._is_stream = True

    def on_body(self, data: bytes) -> None:
        """Take bytes: collect them, or pass their frames on."""
        if not self._is_stream:
            self._collect(data)
            return
        frames = self.frames
        assert frames is not None
        try:
            shown = frames.feed(data)
        except sse.BrokenStream as error:
            raise AttemptFailed(Failure.BROKEN, f"{self._node} sent {error}") from error
        if self._writer is not None:
            if shown:
                self._writer.send(shown)
            if frames.is_over:
                self._wake()
            return
        self._hold(shown, frames)

    def on_end(self) -> None:
        """Take the end: of a stream it is one only after `[DONE]`."""
        frames = self.frames
        if not self._is_stream:
            self.body = b"".join(self._first)
            self._is_open = True
        elif frames is not None and not frames.is_over:
            when = "early" if frames.has_begun else "before a token"
            self._failure = AttemptFailed(Failure.BROKEN, f"{self._node} ended the stream {when}")
        self._wake()

    def on_failure(self, failure: AttemptFailed) -> None:
        """Take the break."""
        self._failure = failure
        self._wake()

    def _collect(self, data: bytes) -> None:
        self._first.append(data)
        self._whole += len(data)
        if self._whole > self._bytes_max:
            raise AttemptFailed(
                Failure.BROKEN, f"{self._node} answered more than {self._bytes_max} bytes"
            )

    def _hold(self, shown: bytes, frames: sse.Frames) -> None:
        """Hold what came until there is a token in it."""
        if frames.has_failed:
            raise AttemptFailed(Failure.ERROR, f"{self._node} reported an error")
        self._first.append(shown)
        self._whole += len(shown)
        if frames.has_begun or frames.is_over or self._whole > HELD_BYTES_MAX:
            self._is_open = True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
