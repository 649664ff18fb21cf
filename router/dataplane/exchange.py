"""One request to one node and its response, which is collected or streamed to a client.

Rule 1: every wait for a node has a deadline; it does not run while the client is not reading.
Rule 2: an exchange abandoned before its end closes its connection, so that the node sees at once
that its caller is gone.
Rule 3: if the node closed a kept connection before the first byte of the response, the node has not
failed: the request is sent again over a new connection.
Rule 4: the waiting inline task resumes as the last step of handling received bytes, see
inline_task.py.
Rule 5: a stream is held back until its first token, because until then another replica may be
tried. From then on received bytes are written to the client's connection at once, except the
last ones: the code that relays the stream writes these, after it has recorded the usage.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from isochrone.fair_shares import FairShares
from isochrone.native_class import mypyc_attr
from isochrone.wire.http import headers
from isochrone.wire.ids import NodeId, ReplicaId
from router.dataplane import sse
from router.dataplane.deadlines import NEVER
from router.dataplane.http1 import EVENT_STREAM, HeaderFields
from router.dataplane.http_messages import ChunkSink, ResponseWriter
from router.dataplane.inline_task import InlineEvent
from router.dataplane.usage import UsageCount
from router.decide.attempt import FailureCause

HELD_BYTES_MAX: Final = 256 * 1024
"""How much of a stream is held back before its first token."""

DRAIN_TIMEOUT_S: Final = 0.5
"""The time a node has to finish a body that is no longer needed."""

SLOW_CLIENT_S: Final = 1.0
"""After waiting this long in all for its client, a stream that breaks is not the node's fault: an
engine ends one whose tokens are not read."""


class AttemptFailed(Exception):
    """The attempt came to nothing. `refusal` is the node's own word for a refusal, else empty."""

    def __init__(self, cause: FailureCause, message: str, refusal: str = "") -> None:
        super().__init__(message)
        self.cause = cause
        self.refusal = refusal

    def again(self) -> "AttemptFailed":
        """Return the same failure without the frames that the first one was raised in.

        A failure that an exchange holds would hold those frames, and they the exchange: a cycle
        that only the garbage collector frees. With thousands of unreachable nodes there were a
        hundred thousand such objects a minute.
        """
        return AttemptFailed(self.cause, str(self), self.refusal)


@mypyc_attr(acyclic=True, free_list_len=1)
class NodeRequest:
    """A request to a node. `header_lines` are headers as written to the wire."""

    __slots__ = ("body", "header_lines", "method", "path")

    def __init__(self, method: str, path: str, header_lines: str, body: bytes) -> None:
        self.method = method
        self.path = path
        self.header_lines = header_lines
        self.body = body


@mypyc_attr(acyclic=True, free_list_len=1)
class ResponseHead:
    """The head of a node's response.

    `load` is the replica's load after this request. `refusal` says why the node declined, `resumed`
    how it continues a text, `handed_off_to` which peer replica answers; empty where that is not so.
    """

    __slots__ = ("content_type", "fields", "handed_off_to", "load", "refusal", "resumed", "status")

    def __init__(self, status: int, fields: HeaderFields) -> None:
        self.status = status
        self.fields = fields
        self.content_type = fields.get(b"content-type", b"application/json").decode("latin-1")
        load = fields.get(_LOAD)
        self.load = headers.parse_load(load.decode("latin-1")) if load else None
        self.resumed = fields.get(_RESUMED, b"").decode("latin-1")
        self.refusal = fields.get(_REFUSED, b"").decode("latin-1")[:64]
        self.handed_off_to = ReplicaId(fields.get(_HANDOFF_REPLICA, b"").decode("latin-1"))


_LOAD: Final = headers.LOAD.encode()
_RESUMED: Final = headers.RESUMED.encode()
_REFUSED: Final = headers.REFUSED.encode()
_PREFILL_REPLICA: Final = headers.PREFILL_REPLICA.encode()
_HANDOFF_REPLICA: Final = headers.HANDOFF_REPLICA.encode()


class ExchangeConnection(Protocol):
    """The connection that an exchange uses."""

    exchange: "NodeExchange | None"
    due_s: float

    def start(self, exchange: "NodeExchange") -> None:
        """Send the exchange's request."""

    def close(self) -> None:
        """Close the connection at once."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Continue reading."""

    def stop_pumping(self) -> None:
        """Take back a stream that is relayed in C, with what was relayed there."""

    def update_due(self) -> bool:
        """Let `due_s` count what was relayed in C; return whether anything was since the last."""


class Dialer(Protocol):
    """Opens connections to nodes."""

    clock: Callable[[], float]
    answers: FairShares

    async def connect(self, node_id: NodeId, address: str) -> ExchangeConnection:
        """Open a connection; raise AttemptFailed if that is not possible."""


@mypyc_attr(free_list_len=1)
class NodeExchange:
    """One request to a node and its response.

    Await `opened`, then call `response_head` and, for a stream, `relay_to`. Call `abandon` in every
    case: after the end of the response it has no effect.
    """

    __slots__ = (
        "_address", "_bytes_max", "_connection", "_counted_bytes", "_dialing", "_failure", "_held",
        "_held_bytes", "_is_resumption", "_node_id", "_paused_at_s", "_paused_s", "_pool",
        "_stream_ended", "_writer", "body", "due_s", "ending", "head", "is_answered",
        "is_draining", "is_over", "is_paused", "is_stream", "on_handoff", "on_prefill", "opened",
        "relay", "request_body", "request_head", "timeout_s", "usage",
    )  # fmt: skip

    def __init__(
        self,
        pool: Dialer,
        node_id: NodeId,
        address: str,
        request_head: bytes,
        request_body: bytes,
        bytes_max: int,
        relay: sse.StreamRelay | None = None,
        *,
        is_resumption: bool = False,
    ) -> None:
        """Expect a stream if there is a `relay`, else a body of at most `bytes_max` bytes.

        With `is_resumption`, refuse a stream that does not continue the text sent to the node.
        """
        self.request_head = request_head
        self.request_body = request_body
        self.relay = relay
        self.head: ResponseHead | None = None
        self.body = b""
        self.ending = b""
        """The last bytes of a stream, which `relay_to` has not written."""
        self.usage: UsageCount | None = None
        self.is_stream = self.is_over = self.is_paused = self.is_draining = False
        self.timeout_s = self.due_s = NEVER
        self._paused_at_s = self._paused_s = 0.0
        self._pool = pool
        self._node_id = node_id
        self._address = address
        self._bytes_max = bytes_max
        self._is_resumption = is_resumption
        self.on_handoff: Callable[[ReplicaId], None] | None = None
        """Called with the replica that has the request, if the node hands it off or takes it back
        before it answers. May raise AttemptFailed."""
        self.on_prefill: Callable[[ReplicaId], None] | None = None
        """Called with the replica that reads the prompt, each time the node changes it."""
        self.is_answered = False
        """Whether a first token or a complete response has arrived."""
        self._failure: AttemptFailed | None = None
        self.opened = InlineEvent()
        """Set when the exchange is answered or has failed."""
        self._stream_ended: InlineEvent | None = None
        self._writer: ResponseWriter | None = None
        self._held: list[bytes] = []
        self._held_bytes = self._counted_bytes = 0
        self._connection: ExchangeConnection | None = None
        self._dialing: asyncio.Task[None] | None = None

    @property
    def is_relaying(self) -> bool:
        """Whether the tokens of a stream go to a client as they come."""
        return self._writer is not None

    def response_head(self) -> ResponseHead:
        """Return the response's head once `opened` is set; raise AttemptFailed if it failed."""
        if self._failure is not None:
            raise self._failure.again()
        assert self.head is not None
        return self.head

    async def relay_to(self, writer: ResponseWriter) -> None:
        """Write the stream to `writer` until `[DONE]` or an error event, or raise AttemptFailed.

        The last bytes, with `[DONE]`, are left in `ending`.
        """
        relay = self.relay
        assert relay is not None
        self._writer = writer
        received = b"".join(self._held)
        self._held.clear()
        if relay.is_done:
            self.ending = received
        elif received:
            writer.send(received)
        if not relay.is_over and self._failure is None:
            self._stream_ended = InlineEvent()
            try:
                await self._stream_ended
            finally:
                if self._connection is not None:
                    self._connection.stop_pumping()
        if self._failure is not None and not relay.is_over:
            raise self._failure.again()

    def chunk_sink(self) -> ChunkSink | None:
        """Return the client, if it gets the bytes of the stream unchanged and in chunks."""
        return self._writer.chunk_sink() if self._writer is not None else None

    def start(self, connection: ExchangeConnection) -> None:
        """Send the request over `connection`."""
        self._connection = connection
        connection.start(self)

    def dial(self) -> None:
        """Open a connection and send the request over it."""
        self._dialing = asyncio.get_running_loop().create_task(self._dial())

    def set_timeout(self, timeout_s: float) -> None:
        """Require the next byte within `timeout_s`, and each later one after the byte before."""
        self.timeout_s = timeout_s
        self.due_s = self._pool.clock() + timeout_s
        if self._connection is not None and not self.is_paused:
            self._connection.due_s = self.due_s

    def abandon(self) -> None:
        """Release the connection: it is closed, unless the response has ended."""
        self._pool.answers.give_back(self._node_id, self._counted_bytes)
        self._counted_bytes = 0
        connection, self._connection = self._connection, None
        if self._dialing is not None:
            self._dialing.cancel()
        if connection is not None:
            connection.exchange = None
            connection.close()

    def drain(self) -> None:
        """Discard the rest of the body, so that the connection can be kept."""
        if not self.is_over:
            self.is_draining = True
            self.resume()
            self.set_timeout(DRAIN_TIMEOUT_S)

    def pause(self) -> None:
        """Stop reading, and the deadline with it: the node is not at fault for a slow client."""
        if not self.is_paused:
            self._paused_at_s = self._pool.clock()
        self.is_paused = True
        if self._connection is not None:
            self._connection.pause()
            self._connection.due_s = NEVER

    def resume(self) -> None:
        """Continue reading."""
        if self.is_paused:
            self._paused_s += self._pool.clock() - self._paused_at_s
        self.is_paused = False
        if self._connection is not None:
            self._connection.due_s = self._pool.clock() + self.timeout_s
            self._connection.resume()

    # Called by the connection.

    def on_interim_head(self, fields: HeaderFields) -> None:
        """Take a notice of a handoff, or of a prefill leg, from an interim response (1xx)."""
        replica_id = fields.get(_HANDOFF_REPLICA)
        if replica_id and self.on_handoff is not None:
            self.on_handoff(ReplicaId(replica_id.decode("latin-1")))
        reader_id = fields.get(_PREFILL_REPLICA)
        if reader_id and self.on_prefill is not None:
            self.on_prefill(ReplicaId(reader_id.decode("latin-1")))

    def on_head(self, head: ResponseHead) -> None:
        """Store the head, which tells whether a stream follows. AttemptFailed ends the exchange."""
        self.head = head
        if head.handed_off_to and self.on_handoff is not None:
            self.on_handoff(head.handed_off_to)
        if self.relay is None or head.status != 200:
            return
        if not (self.relay.takes_any_content or head.content_type.startswith(EVENT_STREAM)):
            raise AttemptFailed(FailureCause.BROKEN, f"{self._node_id} sent no event stream")
        if self._is_resumption and not head.resumed:
            raise AttemptFailed(
                FailureCause.CANNOT_RESUME, f"{self._node_id} cannot continue a text"
            )
        self.is_stream = True

    def on_body(self, data: bytes) -> None:
        """Collect a part of the body, or relay its frames. AttemptFailed ends the exchange."""
        if self.is_draining:
            return
        relay = self.relay
        if not self.is_stream or relay is None:
            self._hold(data)
            is_small = self._held_bytes <= self._bytes_max
            if not is_small or not self._pool.answers.take(self._node_id, len(data)):
                most = f"{self._bytes_max} bytes, or than all its answers may take"
                raise AttemptFailed(FailureCause.BROKEN, f"{self._node_id} sent more than {most}")
            self._counted_bytes += len(data)
            return
        try:
            visible = relay.feed(data)
        except sse.MalformedStream as error:
            raise AttemptFailed(FailureCause.BROKEN, f"{self._node_id} sent {error}") from error
        if self._writer is not None:
            if relay.is_done:
                self.ending += visible
            elif visible:
                self._writer.send(visible)
            return
        # Hold everything back until there is a token in it.
        if relay.declined_body:
            self._decline(relay.declined_body)
            return
        if relay.has_failed:
            cause = FailureCause.ENGINE_LOST if relay.is_engine_lost else FailureCause.ERROR
            raise AttemptFailed(cause, f"{self._node_id} reported an error")
        self._hold(visible)
        if relay.has_begun or relay.is_over or self._held_bytes > HELD_BYTES_MAX:
            self.is_answered = True

    def _decline(self, body: bytes) -> None:
        """Turn a stream whose first event blames the request into a complete response 400."""
        assert self.head is not None
        self.head.status = 400
        self.body = body
        self._held = [body]
        self.is_stream = False
        self.is_answered = self.is_draining = True

    def on_end(self) -> None:
        """Handle the end of the response; the connection is free again.

        A stream has ended well only if `[DONE]` came before.
        """
        self.is_over = True
        self._connection = None
        relay = self.relay
        if not self.is_stream:
            self.body = b"".join(self._held)
            self.is_answered = True
            return
        if relay is None:
            return
        relay.end_of_body()
        if relay.is_over:
            self.is_answered = True
        else:
            when = "early" if relay.has_begun else "before its first token"
            self._failure = AttemptFailed(
                FailureCause.BROKEN, f"{self._node_id} ended the stream {when}"
            )

    def notify(self) -> None:
        """Resume the waiting task if what it waits for has arrived."""
        has_failed, relay = self._failure is not None, self.relay
        if self.is_answered or has_failed:
            self.opened.set()
        if self._stream_ended is not None and (has_failed or (relay is not None and relay.is_over)):
            self._stream_ended.set()

    def on_connection_lost(self, *, was_unused: bool) -> None:
        """Handle a connection that closed before the response ended.

        With `was_unused` the node closed a kept connection before it saw the request: send again.
        """
        self._connection = None
        if was_unused:
            self.dial()
        else:
            is_slow = self._paused_s >= SLOW_CLIENT_S
            cause = FailureCause.SLOW_CLIENT if is_slow else FailureCause.BROKEN
            self.fail(AttemptFailed(cause, f"{self._node_id} broke off"))

    def on_timeout(self) -> None:
        """Fail: the node sent nothing for `timeout_s`."""
        self.fail(
            AttemptFailed(
                FailureCause.SILENT, f"{self._node_id} sent nothing for {self.timeout_s:g} s"
            )
        )

    def last_heard_s(self) -> float:
        """Return when bytes came last or the wait began; NEVER while the client is not reading."""
        if self._connection is None or self.is_paused:
            return NEVER
        self._connection.update_due()
        return self._connection.due_s - self.timeout_s

    def fail(self, failure: AttemptFailed) -> None:
        """End the exchange with a failure, unless it is over already."""
        if self.is_over:
            return
        self.is_over = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.exchange = None
            connection.close()
        self._failure = failure.again()
        self.notify()

    async def _dial(self) -> None:
        connection: ExchangeConnection | None = None
        try:
            connection = await self._pool.connect(self._node_id, self._address)
        except AttemptFailed as failure:
            self.fail(failure)
        finally:
            self._dialing = None
            if connection is None and not self.is_over:
                # Nothing else would end the wait for an answer after an unexpected error.
                what = f"cannot reach {self._node_id}"
                self.fail(AttemptFailed(FailureCause.UNREACHABLE, what))
        if connection is not None:
            self.start(connection)

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
