"""What passes between the wire and the doors: whole requests and answers, and streams."""

from typing import Protocol

from isochrone.wire.routes import KeyEntry
from router.dataplane.http1 import Fields


class HttpRequest:
    """One request. Header names are in lower case; a repeated one is joined by commas."""

    __slots__ = (
        "arrived_s", "body", "headers", "is_http10", "keep_alive", "key", "known_as", "method",
        "path", "query", "request_id",
    )  # fmt: skip

    def __init__(self) -> None:
        """Begin as one of which nothing was read yet. Its ids are its door's to give."""
        self.method = b""
        self.path = self.query = ""
        self.headers: Fields = {}
        self.body = b""
        self.key: KeyEntry | None = None
        self.keep_alive = False
        self.is_http10 = False
        self.arrived_s = 0.0
        self.request_id = self.known_as = ""

    def header(self, name: bytes) -> str:
        """Return a header's value, empty where it is absent."""
        value = self.headers.get(name)
        return value.decode("latin-1") if value else ""


class HttpResponse:
    """One whole answer. `lines` are its headers, each as it goes over the wire."""

    def __init__(
        self, status: int, body: bytes, lines: str = "", content_type: str = "application/json"
    ) -> None:
        self.status = status
        self.body = body
        self.lines = lines
        self.content_type = content_type


class PausableSource(Protocol):
    """Whence a stream flows: it stops while the client reads slower."""

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self) -> None:
        """Read on."""


class ResponseWriter(Protocol):
    """The caller's end, whichever public surface it came by."""

    def begin(self, status: int, content_type: str, lines: str) -> None:
        """Send the head of a stream; `lines` are headers as they go over the wire."""

    def send(self, data: bytes) -> None:
        """Send a part of it."""

    def end(self) -> None:
        """End it well."""

    def reply(self, reply: HttpResponse) -> None:
        """Send a whole answer."""

    def reads_from(self, source: PausableSource | None) -> None:
        """Tie a stream's source, which flows no faster than the client reads."""

    async def drained(self) -> None:
        """Return when the client has read what was sent."""
