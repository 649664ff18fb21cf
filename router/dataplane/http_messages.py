"""Requests and responses between the HTTP layer and the API surfaces."""

from typing import Protocol

from isochrone.native_class import mypyc_attr
from isochrone.wire.peers.routes import KeyEntry
from router.dataplane.http1 import HeaderFields


class UploadedBody(Protocol):
    """A body that is kept on disk, at most `bytes_max` bytes of it; `body` is then empty."""

    bytes_max: int

    def write(self, data: bytes) -> None:
        """Append a part. Raises ApiError."""

    def close(self) -> None:
        """Drop the body. A second call has no effect."""


@mypyc_attr(free_list_len=1)
class HttpRequest:
    """One client request. Header names are lower case; repeated headers are joined by commas.

    `key` is the API key, None on a route that needs none. `request_id` is unique;
    `client_request_id` is the id in the response, and two requests may share it. Both ids are empty
    until the dispatcher sets them. `sent_path` is the client's path if `path` is that of a surface
    below it, else empty. `arrived_s` is monotonic seconds. `held_bytes` are the bytes of
    the body that count against the limits of unfinished bodies.
    """

    __slots__ = (
        "arrived_s", "body", "client_request_id", "headers", "held_bytes", "is_http10",
        "keep_alive", "key", "method", "path", "query", "request_id", "sent_path", "upload",
    )  # fmt: skip

    def __init__(self) -> None:
        """Start with an empty request: the reader fills it in."""
        self.method = b""
        self.path = self.sent_path = self.query = ""
        self.headers: HeaderFields = {}
        self.body = b""
        self.key: KeyEntry | None = None
        self.upload: UploadedBody | None = None
        self.keep_alive = False
        self.is_http10 = False
        self.arrived_s = 0.0
        self.held_bytes = 0
        self.request_id = self.client_request_id = ""

    @property
    def named_path(self) -> str:
        """The path as errors name it: the client's, shortened."""
        return (self.sent_path or self.path)[:200]

    def header(self, name: bytes) -> str:
        """Return a header's value, or an empty string."""
        value = self.headers.get(name)
        return value.decode("latin-1") if value else ""


@mypyc_attr(acyclic=True, free_list_len=1)
class HttpResponse:
    """One complete response. `header_lines` are headers as they are written to the wire."""

    def __init__(
        self,
        status: int,
        body: bytes,
        header_lines: str = "",
        content_type: str = "application/json",
    ) -> None:
        self.status = status
        self.body = body
        self.header_lines = header_lines
        self.content_type = content_type


class PausableSource(Protocol):
    """The source of a stream, paused while the client reads more slowly."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Continue reading."""


class ChunkSink(Protocol):
    """A client that takes the chunks of a stream as the node framed them."""

    def idle_socket(self) -> int:
        """Return the descriptor of a socket without TLS that has sent all; -1 if it is not so."""

    def write_rest(self, data: bytes) -> None:
        """Write what was left of bytes that were written to the socket."""


class ResponseWriter(Protocol):
    """Writes one response to the client, complete or as a stream."""

    def begin(self, status: int, content_type: str, header_lines: str) -> None:
        """Write the head of a stream; `header_lines` are headers as written to the wire."""

    def send(self, data: bytes) -> None:
        """Write a part of the stream."""

    def end(self) -> None:
        """Finish the stream."""

    def reply(self, response: HttpResponse) -> None:
        """Write a complete response."""

    def set_source(self, source: PausableSource | None) -> None:
        """Pause `source` whenever the client reads more slowly than it sends."""

    async def drained(self) -> None:
        """Wait until the client has read what was written."""

    def chunk_sink(self) -> ChunkSink | None:
        """Return the client, if it gets the bytes of a stream unchanged and in chunks."""
