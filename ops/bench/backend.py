"""A very cheap backend: prepared OpenAI responses from a plain uvloop protocol.

`python -m ops.bench.backend PORT [REPLICA]` serves in one process. A request with `"stream":true`
in its body gets 100 chunks at once, or one chunk every N ms with `pace=Nms` in its text. With
REPLICA, each answer is preceded by the notice that this peer replica has the request.
"""

import asyncio
import json
import sys
from typing import Any

import uvloop

from isochrone.wire.http import headers

CHUNKS = 100


def _json(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": CHUNKS,
    "total_tokens": 12 + CHUNKS,
    # As an engine reports that has read the same conversation before, as all but the first are.
    "prompt_tokens_details": {"cached_tokens": 11},
}
HEAD = {"id": "c-1", "created": 1, "model": "bench"}
WHOLE = _json(
    {
        **HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "All is well here."},
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }
)
FRAMES = [
    b"data: "
    + _json(
        {
            **HEAD,
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": {"content": f"t{n} "}, "finish_reason": None}],
        }
    )
    + b"\n\n"
    for n in range(CHUNKS)
]
TAIL = [
    b"data: "
    + _json({**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
    + b"\n\n",
    b"data: [DONE]\n\n",
]

_PLAIN = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(WHOLE)
) + WHOLE
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EMPTY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_MODELS_BODY = _json({"object": "list", "data": [{"id": "bench", "object": "model"}]})
_MODELS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % len(_MODELS_BODY)
) + _MODELS_BODY


def chunk(data: bytes) -> bytes:
    """Return data as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


_CHUNKED = [chunk(frame) for frame in [*FRAMES, *TAIL]]
_AT_ONCE = _STREAM_HEAD + b"".join(_CHUNKED) + b"0\r\n\r\n"
RESPONSES = {"plain": _PLAIN, "stream": _AT_ONCE, "models": _MODELS, "empty": _EMPTY}
"""The responses by the names that relay_backend.c gives them."""


ENDS_BYTES = 4096
"""The bytes that one read takes of a body, at either end."""


class BackendProtocol(asyncio.Protocol):
    """One connection. Requests are distinguished by searching, not by parsing.

    `notice` is an interim response that precedes each answer.
    """

    def __init__(self, notice: bytes = b"") -> None:
        self._parts: list[bytes] = []
        self._missing = 0
        self._notice = notice
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        if self._missing > len(data):
            # A large body arrives in many parts.
            self._parts.append(data)
            self._missing -= len(data)
            return
        held = b"".join([*self._parts, data]) if self._parts else data
        self._parts.clear()
        self._missing = 0
        while (end := held.find(b"\r\n\r\n")) >= 0:
            head = held[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(held) < end + 4 + length:
                self._missing = end + 4 + length - len(held)
                break
            body = held[end + 4 : end + 4 + length]
            held = held[end + 4 + length :]
            self._answer(head, body)
        if held:
            self._parts.append(held)

    def _answer(self, head: bytes, body: bytes) -> None:
        # Routers that encode a body again may put `stream` behind the messages.
        body = body[:ENDS_BYTES] + body[-ENDS_BYTES:]
        if self._notice and not head.startswith(b"get"):
            self._transport.write(self._notice)
        if head.startswith(b"get"):
            self._transport.write(_MODELS if b"/v1/models" in head else _EMPTY)
        elif b'"stream":true' not in body and b'"stream": true' not in body:
            self._transport.write(_PLAIN)
        elif b"pace=" in body:
            pace_s = int(body.split(b"pace=", 1)[1].split(b"ms", 1)[0]) / 1000
            self._transport.write(_STREAM_HEAD)
            self._send(0, pace_s)
        else:
            self._transport.write(_AT_ONCE)

    def _send(self, number: int, pace_s: float) -> None:
        if self._transport.is_closing():
            return
        if number == len(_CHUNKED):
            self._transport.write(b"0\r\n\r\n")
            return
        self._transport.write(_CHUNKED[number])
        asyncio.get_running_loop().call_later(pace_s, self._send, number + 1, pace_s)


async def serve(port: int, peer: str = "") -> None:
    """Serve until killed."""
    notice = f"HTTP/1.1 103 Early Hints\r\n{headers.HANDOFF_REPLICA}: {peer}\r\n\r\n".encode()
    server = await asyncio.get_running_loop().create_server(
        lambda: BackendProtocol(notice if peer else b""), "0.0.0.0", port, backlog=8192
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), *sys.argv[2:3]))
