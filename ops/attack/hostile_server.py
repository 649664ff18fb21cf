"""A model's server that attacks the agent and the router which use it, for `hostile_engine`.

    hostile_server.py PORT

A request whose `user` names an attack gets it as the answer, and so do the next requests of
`/metrics`; other requests get a short answer. Uses the standard library alone: it runs confined.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, repeat

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LARGE = 64 * 1024
PAGE_BYTES = 1 << 30
NUMBERS = count()


def message(**fields: object) -> bytes:
    """Return the body of a short answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "1"},
        "finish_reason": "stop",
    }
    body = {"object": "chat.completion", "choices": [choice], **fields}
    return json.dumps(body).encode()


def answer(body: bytes, more: bytes = b"") -> bytes:
    """Return a whole answer."""
    return HEAD + more + b"content-length: %d\r\n\r\n" % len(body) + body


def chunk(data: bytes) -> bytes:
    """Return a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def attacks(port: int) -> dict[str, Iterator[bytes]]:
    """Return what each attack sends."""
    lies = {"prompt_tokens": -5, "completion_tokens": 10**18, "total_tokens": "many"}
    error = {"error": {"message": "\x1b]52;c;ZXZpbA==\x07\r\nx-evil: 1\0", "code": "\x1b[2J"}}
    refused = json.dumps(error).encode()
    elsewhere = b"location: http://127.0.0.1:%d/elsewhere\r\n" % port
    field = b"x-a: " + b"a" * 4096 + b"\r\n"
    names = (next(NUMBERS) for _ in range(100))
    cookies = (b"set-cookie: n%d=%b; path=/\r\n" % (name, b"c" * 4000) for name in names)
    braces = [chunk(b"{" * LARGE)] * 100_000
    return {
        "head without end": iter([HEAD, *repeat(field, 100_000)]),
        "field without end": iter([HEAD + b"x-a: ", *repeat(b"a" * LARGE, 10_000)]),
        "status without end": iter([b"HTTP/1.1 200 ", *repeat(b"a" * LARGE, 10_000)]),
        "interim answers without end": repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        "another protocol": iter([b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n", b"x" * LARGE]),
        "redirect": iter([b"HTTP/1.1 307 There\r\ncontent-length: 0\r\n" + elsewhere + b"\r\n"]),
        "cookies": iter([answer(message(), b"".join(cookies))]),
        "negative length": iter([HEAD + b"content-length: -5\r\n\r\n" + message()]),
        "two lengths": iter([answer(message(), b"content-length: 5\r\n")]),
        "length of 10^30": iter([HEAD + b"content-length: 1" + b"0" * 30 + b"\r\n\r\n{}"]),
        "wrong chunk": iter([STREAM + b"zz\r\n"]),
        "negative chunk": iter([STREAM + b"-1\r\n"]),
        "extension without end": iter([STREAM + b"1;", *repeat(b"a" * LARGE, 10_000)]),
        "trailers without end": iter(
            [STREAM + chunk(b"data: 1\n\n") + b"0\r\n", *repeat(field, 9999)]
        ),
        "HTTP/1.0 without end": iter([b"HTTP/1.0 200 OK\r\n\r\n", *repeat(b"{" * LARGE, 100_000)]),
        "answers nobody asked for": repeat(answer(message(stolen=1)) + b"garbage\r\n\r\n"),
        "answer without end": iter([HEAD + b"transfer-encoding: chunked\r\n\r\n", *braces]),
        "frame without end": iter(
            [STREAM + chunk(b"data: "), *repeat(chunk(b"{" * LARGE), 99_999)]
        ),
        "false usage": iter([answer(message(usage=lies))]),
        "terminal escapes": iter(
            [b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n" % len(refused) + refused]
        ),
        "metrics of 1 GB": iter([answer(message())]),
        "metrics of short lines": iter([answer(message())]),
    }


class Server:
    """Answers requests, some with an attack."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._attack = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with suppress(OSError, EOFError, ValueError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
                body = await reader.readexactly(size)
                if b" /metrics " in head and self._attack.startswith("metrics"):
                    await self._send_page(writer)
                    continue
                name = json.loads(body).get("user") if body else ""
                pieces = attacks(self._port).get(name or "")
                if pieces is None:
                    writer.write(answer(message()))
                    continue
                self._attack = str(name)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
        writer.close()

    async def _send_page(self, writer: asyncio.StreamWriter) -> None:
        if self._attack == "metrics of short lines":
            page = b"a 1\n" * (1023 * 1024)
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(page) + page)
            await writer.drain()
            return
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % PAGE_BYTES)
        for _ in range(PAGE_BYTES // LARGE):
            writer.write(b"a" * LARGE)
            await writer.drain()


async def run(port: int) -> None:
    """Serve on a loopback port."""
    server = await asyncio.start_server(Server(port).serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1])))
