"""What passes between the wire and the doors: a whole request, a whole answer."""

from collections.abc import Mapping

import msgspec

from isochrone.wire.routes import KeyEntry


class Request(msgspec.Struct):
    """One whole request. Header names are in lower case; a repeated one is joined by commas."""

    method: bytes
    path: str
    query: str
    headers: Mapping[bytes, bytes]
    body: bytes
    keep_alive: bool
    is_http10: bool
    arrived_s: float
    key: KeyEntry | None

    def header(self, name: bytes) -> str:
        """Return a header's value, empty where it is absent."""
        return self.headers.get(name, b"").decode("latin-1")


class Reply(msgspec.Struct, frozen=True):
    """One whole answer. `lines` are its headers, each as it goes over the wire."""

    status: int
    body: bytes
    lines: str = ""
    content_type: str = "application/json"


def with_header(reply: Reply, name: str, value: str) -> Reply:
    """Return an answer with one header more."""
    return msgspec.structs.replace(reply, lines=f"{reply.lines}{name}: {value}\r\n")
