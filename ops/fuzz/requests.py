"""Fuzzes the router's request reader with mutated HTTP and compares it with h11.

`python -m ops.fuzz.requests SECONDS [SEED]`. A request that the router accepts must be one that h11
accepts too, with the same method, target and body: requests are smuggled where two parsers read the
same bytes in different ways. The reader must raise nothing but ApiError, whatever it reads.
"""

import random
import re
import sys
import time
from typing import Any, Final, NamedTuple, cast

import h11

from isochrone.wire.errors import ApiError
from isochrone.wire.peers.routes import KeyEntry
from router.dataplane.http_messages import HttpRequest
from router.dataplane.request_reader import RequestReader

SEEDS: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;a=b\r\nhel\r\n2\r\nlo\r\n0\r\nX-T: 1\r\n\r\n",
    b"GET /healthz?x=1 HTTP/1.1\r\nHost: a:80\r\nAccept: */*\r\nX: y\r\n\r\n",
    b"HEAD / HTTP/1.0\r\n\r\n",
    b"POST http://a/b HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
    b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n"
    b"\r\nabcGET / HTTP/1.1\r\nHost: a\r\n\r\n",
)
PIECES: Final = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b";", b"0", b"-", b"+", b"0x",
    b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Content-Length: 05\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n",
    b"Transfer-Encoding: chunked, chunked\r\n", b"Transfer-Encoding:\x0bchunked\r\n",
    b"Host: b\r\n", b"Connection: close\r\n", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2.0", b"5\r\n",
    b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\xff", b"%00",
)  # fmt: skip
BYTES_MAX: Final = 4096


class H11Request(NamedTuple):
    """A request as h11 reads it."""

    method: bytes
    target: bytes
    body: bytes


class RequestCollector:
    """Collects the requests that the reader accepted."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []

    def on_continue_expected(self) -> None:
        """Do nothing."""

    def on_body_held(self, request: HttpRequest, count: int) -> None:
        """Do nothing."""

    def on_request(self, request: HttpRequest) -> None:
        """Keep an accepted request."""
        self.requests.append(request)


def _allow_all(method: bytes, path: str, headers: object) -> KeyEntry | None:
    return None


def mutate_request(chance: random.Random) -> bytes:
    """Return a request with a few bytes inserted, removed, changed or repeated."""
    data = bytearray(chance.choice(SEEDS))
    if chance.random() < 0.3:
        data += chance.choice(SEEDS)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        kind = chance.random()
        if kind < 0.5:
            data[at:at] = chance.choice(PIECES)
        elif kind < 0.7:
            del data[at : at + chance.randint(1, 6)]
        elif kind < 0.85 and at < len(data):
            data[at] = chance.randrange(256)
        else:
            data[at:at] = data[max(0, at - chance.randint(1, 30)) : at]
    return bytes(data)


def read_in_pieces(data: bytes, chance: random.Random) -> list[HttpRequest]:
    """Feed the reader in random pieces; return the requests it accepted before an error.

    It parses all of a body, or only counts what the first piece left of it. Some of that is read
    into its buffer, as by the event loop.
    """
    collector = RequestCollector()
    reader = RequestReader(
        *(collector, _allow_all, lambda _: None, BYTES_MAX, lambda: 1.0),
        unparsed_bytes_min=chance.choice((1, BYTES_MAX)),
    )
    while data:
        # Whole plain requests are read apart from the parser.
        size = len(data) if chance.random() < 0.3 else chance.randint(1, len(data))
        piece = data[:size]
        if reader.buffer is not None and chance.random() < 0.7:
            piece = b""
            with memoryview(cast(Any, reader.buffer)) as view:
                size = min(size, len(view))
                view[:size] = data[:size]
            reader.buffer.advance(size)
        try:
            reader.feed(piece)
        except ApiError:
            break
        data = data[size:]
    return collector.requests


def _without_allowed_oddities(data: bytes) -> bytes:
    """Remove syntax that the router accepts on purpose and h11 does not.

    The syntax is blank lines before a request (RFC 9112, 2.2) and repeated spaces in a request
    line. This is harmless, because no client's head is forwarded.
    """
    data = re.sub(rb"^[\r\n]+", b"", data)
    return re.sub(rb"([A-Z]+) +(\S+) +(HTTP/1\.[01]\r\n)", rb"\1 \2 \3", data)


def read_with_h11(data: bytes) -> list[H11Request]:
    """Return the requests that h11 reads from `data`, up to its first error."""
    judge = h11.Connection(h11.SERVER, max_incomplete_event_size=64 * 1024)
    judge.receive_data(data.lstrip(b"\r\n"))
    judged: list[H11Request] = []
    try:
        while True:
            left, _ = judge.trailing_data
            if left[:1] in (b"\r", b"\n"):
                return judged + read_with_h11(left)
            event: Any = judge.next_event()
            if not isinstance(event, h11.Request):
                return judged
            body = b""
            while isinstance(part := judge.next_event(), h11.Data):
                body += bytes(part.data)
            if not isinstance(part, h11.EndOfMessage):
                return judged
            judged.append(H11Request(bytes(event.method), bytes(event.target), body))
            judge.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            judge.send(h11.EndOfMessage())
            judge.start_next_cycle()
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        return judged


def find_disagreement(data: bytes, accepted: list[HttpRequest]) -> str:
    """Describe how the accepted requests differ from what h11 reads; empty if they do not.

    A text within a body may look like a request line with odd spaces, so h11 reads the data both
    with and without them, and one agreement is enough.
    """
    plain = _without_allowed_oddities(data)
    return _difference(read_with_h11(data), accepted) and _difference(
        read_with_h11(plain), accepted
    )


def _difference(judged: list[H11Request], accepted: list[HttpRequest]) -> str:
    for number, request in enumerate(accepted):
        if number >= len(judged):
            return f"request {number} was accepted, h11 refuses it"
        method, target, body = judged[number]
        whole = request.path + (f"?{request.query}" if request.query else "")
        if request.method != method or request.body != body:
            return f"request {number}: {request.method!r} {request.body!r} not {method!r} {body!r}"
        if target.startswith(b"/") and not target.decode("latin-1").startswith(whole):
            return f"request {number}: target {whole!r} not {target!r}"
    return ""


def main() -> int:
    """Fuzz for some seconds; return the number of findings as the exit status."""
    seconds = float(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    chance = random.Random(seed)
    tried = accepted = 0
    findings: dict[str, bytes] = {}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and len(findings) < 20:
        data = mutate_request(chance)
        tried += 1
        requests = read_in_pieces(data, chance)
        accepted += len(requests)
        finding = find_disagreement(data, requests) if requests else ""
        if finding and findings.setdefault(finding, data) is data:
            print(f"{finding}\n  {data!r}", flush=True)
    print(f"{tried} inputs, {accepted} requests accepted, {len(findings)} findings, seed {seed}")
    return len(findings)


if __name__ == "__main__":
    raise SystemExit(main())
