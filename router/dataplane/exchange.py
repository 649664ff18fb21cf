"""One request to one node and its answer, whole or a stream, on its way back to a client.

Rule 1: every wait for a node has its deadline; a client that does not read stops the clock.
Rule 2: an exchange left before its end closes its connection: a node whose caller is gone must see
it at once.
Rule 3: a kept connection that its node closed before one byte of an answer is no failure of the
node: the request goes out again on a fresh one.
Rule 4: whoever waits for it goes on as the last act of what came: see errand.py.
Rule 5: until its first token a stream is held, for another replica may still be tried; from it on
bytes go from the node's connection to the client's without a stop on the way.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Protocol

from isochrone.wire import headers
from isochrone.wire.ids import NodeId, ReplicaId
from router.dataplane import sse
from router.dataplane.deadlines import NEVER
from router.dataplane.errand import Signal
from router.dataplane.http1 import EVENT_STREAM, Fields
from router.dataplane.message import Client
from router.dataplane.usage import UsageCount

HELD_BYTES_MAX: Final = 256 * 1024
END_TIMEOUT_S: Final = 0.5


class Failure(StrEnum):
    """Why an attempt came to nothing."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    UNFIT = "unfit"
    BROKEN = "broken"
    SILENT = "silent"
    GONE = "gone"
    """Its node answers no ping; the retry was paid for when it was let go."""
    ERROR = "error"


class AttemptFailed(Exception):
    """This attempt came to nothing; `failure` says how, the message in words."""

    def __init__(self, failure: Failure, message: str, refused: str = "") -> None:
        super().__init__(message)
        self.failure = failure
        self.refused = refused


class Head:
    """The head of a node's answer."""

    __slots__ = ("content_type", "fields", "load", "passed", "refused", "resumed", "status")

    def __init__(self, status: int, fields: Fields) -> None:
        self.status = status
        self.fields = fields
        self.content_type = fields.get(b"content-type", b"application/json").decode("latin-1")
        load = fields.get(_LOAD)
        self.load = headers.parse_load(load.decode("latin-1")) if load else None
        self.resumed = fields.get(_RESUMED, b"").decode("latin-1")
        self.refused = fields.get(_REFUSED, b"").decode("latin-1")[:64]
        self.passed = ReplicaId(fields.get(_PASSED, b"").decode("latin-1"))


_LOAD: Final = headers.LOAD.encode()
_RESUMED: Final = headers.RESUMED.encode()
_REFUSED: Final = headers.REFUSED.encode()
_PASSED: Final = headers.HANDOFF_REPLICA.encode()


class Connection(Protocol):
    """What an exchange needs of the connection it is on."""

    exchange: "Exchange | None"
    due_s: float

    def begin(self, exchange: "Exchange") -> None:
        """Send its request."""

    def close(self) -> None:
        """Close it at once."""

    def pause(self) -> None:
        """Read no more."""

    def resume(self) -> None:
        """Read on."""


class Dialler(Protocol):
    """Whence connections come."""

    clock: Callable[[], float]

    async def connect(self, node_id: NodeId, address: str) -> Connection:
        """Open a connection, or raise AttemptFailed."""


class Exchange:
    """One attempt. Await `opened`, take the `answer`, let a stream `flow`; `leave` in any case."""

    __slots__ = (
        "_address", "_bytes_max", "_client", "_connection", "_dialling", "_ended", "_failure",
        "_held", "_held_bytes", "_is_rest", "_node_id", "_pool", "body", "due_s", "frames",
        "has_begun", "head", "is_over", "is_paused", "is_stream", "is_unwanted", "opened",
        "patience_s", "request", "usage",
    )  # fmt: skip

    def __init__(
        self,
        pool: Dialler,
        node_id: NodeId,
        address: str,
        request: tuple[bytes, bytes],
        bytes_max: int,
        frames: sse.Frames | None = None,
        *,
        is_rest: bool = False,
    ) -> None:
        """Expect a stream where there are `frames` to take it, else a body of `bytes_max`.

        With `is_rest` it goes on from what was said; one that would begin anew is refused.
        """
        self.request = request
        self.frames = frames
        self.head: Head | None = None
        self.body = b""
        self.usage: UsageCount | None = None
        self.is_stream = self.is_over = self.is_paused = self.is_unwanted = False
        self.patience_s = self.due_s = NEVER
        self._pool = pool
        self._node_id = node_id
        self._address = address
        self._bytes_max = bytes_max
        self._is_rest = is_rest
        self.has_begun = False
        """Whether there is a first token, or a whole answer."""
        self._failure: AttemptFailed | None = None
        self.opened = Signal()
        """Given when there is something to `answer`."""
        self._ended: Signal | None = None
        self._client: Client | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._connection: Connection | None = None
        self._dialling: asyncio.Task[None] | None = None

    def answer(self) -> Head:
        """Return the head of an answer that is whole, or whose first token is there; or raise
        AttemptFailed.
        """
        if self._failure is not None:
            raise self._failure
        assert self.head is not None
        return self.head

    async def flow(self, client: Client) -> None:
        """Let the stream flow to `client` until `[DONE]` or an error event; AttemptFailed else."""
        frames = self.frames
        assert frames is not None
        self._client = client
        first = b"".join(self._held)
        self._held.clear()
        if first:
            client.send(first)
        if not frames.is_over and self._failure is None:
            self._ended = Signal()
            await self._ended
        if self._failure is not None and not frames.is_over:
            raise self._failure

    def begin(self, connection: Connection) -> None:
        """Send the request over `connection`."""
        self._connection = connection
        connection.begin(self)

    def dial(self) -> None:
        """Send it over a connection that is yet to be opened."""
        self._dialling = asyncio.get_running_loop().create_task(self._dial())

    def wait(self, patience_s: float) -> None:
        """From now on the next byte must come within `patience_s`."""
        self.patience_s = patience_s
        self.due_s = self._pool.clock() + patience_s
        if self._connection is not None and not self.is_paused:
            self._connection.due_s = self.due_s

    def leave(self) -> None:
        """Be done with it: at its end the connection is kept, before it is closed."""
        connection, self._connection = self._connection, None
        if self._dialling is not None:
            self._dialling.cancel()
        if connection is not None:
            connection.exchange = None
            connection.close()

    def let_end(self) -> None:
        """Read what is left of a body nobody needs, so that the connection can be kept."""
        if not self.is_over:
            self.is_unwanted = True
            self.resume()
            self.wait(END_TIMEOUT_S)

    def pause(self) -> None:
        """Read no more for now: the client reads slower. The node is not to blame for the wait."""
        self.is_paused = True
        if self._connection is not None:
            self._connection.pause()
            self._connection.due_s = NEVER

    def resume(self) -> None:
        """Read on."""
        self.is_paused = False
        if self._connection is not None:
            self._connection.due_s = self._pool.clock() + self.patience_s
            self._connection.resume()

    # The connection's side.

    def on_head(self, head: Head) -> None:
        """Take the head: it says whether a stream follows. AttemptFailed ends the exchange."""
        self.head = head
        if self.frames is None or head.status != 200:
            return
        if not head.content_type.startswith(EVENT_STREAM):
            raise AttemptFailed(Failure.BROKEN, f"{self._node_id} sent no event stream")
        if self._is_rest and not head.resumed:
            raise AttemptFailed(Failure.UNFIT, f"{self._node_id} cannot go on from a text")
        self.is_stream = True

    def on_body(self, data: bytes) -> None:
        """Take bytes: collect them, or pass their frames on. AttemptFailed ends the exchange."""
        if self.is_unwanted:
            return
        frames = self.frames
        if not self.is_stream or frames is None:
            self._hold(data)
            if self._held_bytes > self._bytes_max:
                raise AttemptFailed(
                    Failure.BROKEN, f"{self._node_id} answered more than {self._bytes_max} bytes"
                )
            return
        try:
            shown = frames.feed(data)
        except sse.BrokenStream as error:
            raise AttemptFailed(Failure.BROKEN, f"{self._node_id} sent {error}") from error
        if self._client is not None:
            if shown:
                self._client.send(shown)
            return
        # Nothing goes out until there is a token in it.
        if frames.has_failed:
            raise AttemptFailed(Failure.ERROR, f"{self._node_id} reported an error")
        self._hold(shown)
        if frames.has_begun or frames.is_over or self._held_bytes > HELD_BYTES_MAX:
            self.has_begun = True

    def on_end(self) -> None:
        """Take the end: of a stream it is one only after `[DONE]`. The connection is free again."""
        self.is_over = True
        self._connection = None
        frames = self.frames
        if not self.is_stream:
            self.body = b"".join(self._held)
            self.has_begun = True
        elif frames is not None and not frames.is_over:
            when = "early" if frames.has_begun else "before a token"
            self._failure = AttemptFailed(
                Failure.BROKEN, f"{self._node_id} ended the stream {when}"
            )

    def tell(self) -> None:
        """Let whoever waits go on, where what came is what he waits for."""
        has_failed, frames = self._failure is not None, self.frames
        if self.has_begun or has_failed:
            self.opened.give()
        if self._ended is not None and (has_failed or (frames is not None and frames.is_over)):
            self._ended.give()

    def on_lost(self, *, is_stale: bool) -> None:
        """The connection broke before the answer was whole."""
        self._connection = None
        if is_stale:
            self.dial()
        else:
            self.fail(AttemptFailed(Failure.BROKEN, f"{self._node_id} broke off"))

    def on_silence(self) -> None:
        """The node said nothing for as long as may be."""
        self.fail(
            AttemptFailed(Failure.SILENT, f"{self._node_id} fell silent for {self.patience_s:g} s")
        )

    def heard_s(self) -> float:
        """Return when bytes came last, or the wait began; NEVER while the client does not read."""
        if self._connection is None or self.is_paused:
            return NEVER
        return self._connection.due_s - self.patience_s

    def fail(self, failure: AttemptFailed) -> None:
        """End the exchange badly, if it is not over; nothing follows."""
        if self.is_over:
            return
        self.is_over = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.exchange = None
            connection.close()
        self._failure = failure
        self.tell()

    async def _dial(self) -> None:
        try:
            connection = await self._pool.connect(self._node_id, self._address)
        except AttemptFailed as failure:
            self._dialling = None
            self.fail(failure)
        else:
            self._dialling = None
            self.begin(connection)

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
