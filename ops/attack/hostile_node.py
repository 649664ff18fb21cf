"""A node that stands before a real one, and attacks the node that asks it, for `hostile_peer`.

It answers pings with an idle load. What it is asked for as a peer it asks the real node for, and
sends back as the current attack has it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import repeat
from typing import Final, NamedTuple

import aiohttp
import msgspec

from isochrone.wire.http import headers
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.kv.transfer_frames import (
    BLOCK,
    DIGEST_BYTES,
    FRAME_HEAD_BYTES,
    block_checksum,
    decode_head,
    encode_block,
    encode_head,
    payload_bytes,
)

HANG: Final = b""
"""In the pieces of an attack: send nothing more, and keep the connection."""

HANDED_BACK: Final = "handed off: handed back in a loop"
"""The request goes back to the node that handed it off, which may hand it off again, and so on."""

LARGE: Final = 64 * 1024
KV_HEAD: Final = f"HTTP/1.1 200 OK\r\ncontent-type: {kv_transfer.CONTENT_TYPE}\r\n".encode()
JSON_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CLOSED: Final = b"connection: close\r\n\r\n"
Pieces = Iterator[bytes]


class BlockStream(NamedTuple):
    """A stream of blocks as the real node sent it, in frames, and the one before it."""

    frames: list[bytes]
    last: list[bytes]

    @property
    def head(self) -> bytes:
        """The first frame."""
        return self.frames[0]

    @property
    def half(self) -> bytes:
        """The first half of the stream."""
        whole = b"".join(self.frames)
        return whole[: len(whole) // 2]

    def with_head(self, **fields: object) -> bytes:
        """Return the stream with a head that lies."""
        lied = msgspec.structs.replace(decode_head(self.head), **fields)
        return encode_head(lied) + b"".join(self.frames[1:])

    def with_blocks(self, change: Callable[[bytes], bytes]) -> bytes:
        """Return the stream with each block changed."""
        changed = [change(frame) if frame[0] == BLOCK else frame for frame in self.frames]
        return b"".join(changed)


def split_frames(stream: bytes) -> list[bytes]:
    """Return the frames of a stream."""
    frames = []
    while len(stream) >= FRAME_HEAD_BYTES:
        size = FRAME_HEAD_BYTES + payload_bytes(stream)
        frames.append(stream[:size])
        stream = stream[size:]
    return frames


def flipped(frame: bytes) -> bytes:
    """Return a block with one bit of its content changed."""
    return frame[:-1] + bytes((frame[-1] ^ 1,))


def forged(frame: bytes) -> bytes:
    """Return a block with content of the attacker's, and the checksum that fits it."""
    digest = frame[FRAME_HEAD_BYTES:][:DIGEST_BYTES]
    content = bytes(len(frame) - FRAME_HEAD_BYTES - DIGEST_BYTES - len(block_checksum(b"", b"")))
    return b"".join(bytes(piece) for piece in encode_block(digest, content))


def longer(frame: bytes) -> bytes:
    """Return a block that says and has a byte more."""
    size = payload_bytes(frame) + 1
    return frame[:1] + size.to_bytes(4, "little") + frame[FRAME_HEAD_BYTES:] + b"\0"


def block_attacks() -> dict[str, Callable[[BlockStream], Pieces]]:
    """Return the pieces that each attack sends in place of a stream of blocks."""
    endless = bytes((BLOCK,)) + (2**32 - 1).to_bytes(4, "little")
    return {
        "none": lambda s: iter([KV_HEAD + CLOSED, b"".join(s.frames)]),
        "nothing": lambda s: iter([KV_HEAD + CLOSED, HANG]),
        "no head": lambda s: iter([HANG]),
        "half, then closed": lambda s: iter([KV_HEAD + CLOSED, s.half]),
        "half, then nothing": lambda s: iter([KV_HEAD + CLOSED, s.half, HANG]),
        "a byte a second": lambda s: iter(
            [KV_HEAD + CLOSED, *(bytes((byte,)) for byte in b"".join(s.frames)[:600])]
        ),
        "garbage after 1.9 s": lambda s: iter([KV_HEAD + CLOSED, s.head, b"pause", b"\xff" * 99]),
        "wrong checksum": lambda s: iter([KV_HEAD + CLOSED, s.with_blocks(flipped)]),
        "a byte too long": lambda s: iter([KV_HEAD + CLOSED, s.with_blocks(longer)]),
        "other dtype": lambda s: iter([KV_HEAD + CLOSED, s.with_head(fingerprint=b"f" * 16)]),
        "other shape": lambda s: iter([KV_HEAD + CLOSED, s.with_head(block_bytes=2**40)]),
        "2^62 blocks": lambda s: iter([KV_HEAD + CLOSED, s.with_head(blocks=2**62)]),
        "-1 blocks": lambda s: iter([KV_HEAD + CLOSED, s.with_head(blocks=-1)]),
        "first block -5": lambda s: iter([KV_HEAD + CLOSED, s.with_head(first_block=-5)]),
        "blocks of another request": lambda s: iter(
            [KV_HEAD + CLOSED, b"".join(s.last or s.frames[::-1])]
        ),
        "blocks twice": lambda s: iter([KV_HEAD + CLOSED, *(2 * f for f in s.frames)]),
        "blocks in reverse": lambda s: iter(
            [KV_HEAD + CLOSED, s.head, *s.frames[-2:0:-1], s.frames[-1]]
        ),
        "more after the end": lambda s: iter(
            [KV_HEAD + CLOSED, b"".join(s.frames), *repeat(b"\0" * LARGE, 20_000)]
        ),
        "a frame of 4 GiB": lambda s: iter(
            [KV_HEAD + CLOSED, s.head, endless, *repeat(b"\0" * LARGE, 20_000)]
        ),
        "length of 10^18": lambda s: iter(
            [KV_HEAD + b"content-length: 1" + b"0" * 18 + b"\r\n\r\n", s.half, HANG]
        ),
        "a window": lambda s: iter(
            [KV_HEAD + f"{kv_transfer.WINDOW}: {'0' * 32}\r\n".encode() + CLOSED, s.head, HANG]
        ),
    }


def located(blocks: object, **fields: object) -> bytes:
    """Return an answer to how many blocks a replica has."""
    body = msgspec.json.encode({"blocks": blocks, "block_bytes": 1, **fields})
    return JSON_HEAD + CLOSED + body


def locate_attacks() -> dict[str, Pieces]:
    """Return the pieces that each attack sends in place of how many blocks it has."""
    return {
        "has 2^53 blocks": iter([located(2**53)]),
        "has 2^64 blocks": iter([located(2**64)]),
        "has -1 blocks": iter([located(-1)]),
        "has NaN blocks": iter([JSON_HEAD + CLOSED + b'{"blocks":NaN,"block_bytes":1}']),
        "has a long list": iter([JSON_HEAD + CLOSED, b"[" * 10_000_000]),
        "an answer without end": iter([JSON_HEAD + CLOSED, *repeat(b" " * LARGE, 20_000)]),
        "no answer to what it has": iter([HANG]),
    }


def handoff_attacks() -> dict[str, Pieces]:
    """Return the pieces that each attack sends to a request that was handed off to it."""
    wrong = b'data: {"id":"x","choices":[{"index":0,"text":"WRONG","finish_reason":null}]}\n\n'
    field = b"x-a: " + b"a" * 4096 + b"\r\n"
    return {
        "handed off: nothing": iter([HANG]),
        "handed off: a head, then nothing": iter([STREAM_HEAD + CLOSED, HANG]),
        "handed off: garbage": iter([b"\0\xff" * LARGE]),
        "handed off: a body of garbage": iter([STREAM_HEAD + CLOSED, b"\xff" * LARGE]),
        "handed off: breaks off": iter([STREAM_HEAD + CLOSED, wrong[:40]]),
        "handed off: 500": iter([b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"]),
        "handed off: refused": iter(
            [f"HTTP/1.1 429 No\r\n{headers.REFUSED}: busy\r\ncontent-length: 0\r\n\r\n".encode()]
        ),
        "handed off: status 101": iter([b"HTTP/1.1 101 Up\r\nupgrade: x\r\n\r\n", b"x" * LARGE]),
        "handed off: status 999": iter([b"HTTP/1.1 999 X\r\ncontent-length: 0\r\n\r\n"]),
        "handed off: bytes above 127 in fields": iter(
            [STREAM_HEAD + b"retry-after: \xff\xfe\r\nx-isochrone-load: \xe2\r\n" + CLOSED, wrong]
        ),
        "handed off: replica's name of bytes above 127": iter(
            [STREAM_HEAD + headers.READ_AT.encode() + b": \xff\xfe\r\n" + CLOSED, wrong]
        ),
        HANDED_BACK: iter([HANG]),
        "handed off: fields without end": iter([STREAM_HEAD, *repeat(field, 20_000)]),
        "handed off: interim answers without end": repeat(b"HTTP/1.1 103 E\r\n\r\n" * 1000),
        "handed off: a redirect to itself": iter(
            [b"HTTP/1.1 307 T\r\nlocation: /v1/completions\r\ncontent-length: 0\r\n\r\n"]
        ),
    }


class HostileNode:
    """Listens as a node does. `attack` is the name of the current attack."""

    def __init__(self, real: str) -> None:
        """`real` is the address of the node that has the replica `p1`."""
        self._real = real
        self._last: list[bytes] = []
        self.attack = "none"
        self.loads = "h p=0;d=0;r=0;w=0;u=0;o=0;e=0"
        self.address = self.honest = self.peers = ""
        """`honest` is the node that it attacks, `peers` how it names itself to that node."""
        self.begun = 0
        """How many times the attack was carried out."""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["HostileNode"]:
        """Serve while the context is open."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24)
        host, port = server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with suppress(OSError, EOFError, ValueError, aiohttp.ClientError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                path = lines[0].split(" ")[1]
                sent = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await reader.readexactly(int(sent.get("content-length", 0)))
                if path == "/ping":
                    pong = f"HTTP/1.1 204 No\r\n{headers.LOADS}: {self.loads}\r\n\r\n"
                    writer.write(pong.encode("latin-1"))
                    continue
                for piece in await self._pieces(path, sent, body):
                    if piece == HANG:
                        await reader.read()
                        return
                    if piece == b"pause":
                        await asyncio.sleep(1.9)
                        continue
                    if self.attack == "a byte a second" and len(piece) == 1:
                        await asyncio.sleep(1.0)
                    writer.write(piece)
                    await writer.drain()
                break
        writer.close()

    async def _pieces(self, path: str, sent: Mapping[str, str], body: bytes) -> Pieces:
        """Return what is sent back to a request."""
        if path == kv_sharing.LOCATE_PATH:
            if (pieces := locate_attacks().get(self.attack)) is not None:
                self.begun += 1
                return pieces
            return iter([JSON_HEAD + CLOSED + await self._real_answer(path, sent, body)])
        if path in (kv_sharing.BLOCKS_PATH, kv_sharing.KEEP_PATH) or kv_transfer.LEG in sent:
            frames = split_frames(await self._real_answer(path, sent, body))
            self.begun += 1
            if not frames:
                return iter([b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"])
            stream, self._last = BlockStream(frames, self._last), frames
            make = block_attacks().get(self.attack, block_attacks()["none"])
            return make(stream)
        self.begun += 1
        if self.attack == HANDED_BACK:
            return iter([STREAM_HEAD + CLOSED, await self._handed_back(path, sent, body)])
        return handoff_attacks().get(self.attack, iter([HANG]))

    async def _handed_back(self, path: str, sent: Mapping[str, str], body: bytes) -> bytes:
        """Send a request to the node that it comes from; return what that answers."""
        kept = {name: text for name, text in sent.items() if name.startswith("x-isochrone-")}
        named = {headers.PEER_REPLICAS: self.peers, "content-type": "application/json"}
        async with (
            aiohttp.ClientSession(f"http://{self.honest}") as http,
            http.post(path, data=body, headers=kept | named | {headers.REPLICA: "d"}) as answer,
        ):
            return await answer.read()

    async def _real_answer(self, path: str, sent: Mapping[str, str], body: bytes) -> bytes:
        """Return what the real node answers; b"" if it refuses."""
        kept = {name: text for name, text in sent.items() if name.startswith("x-isochrone-")}
        kept |= {headers.REPLICA: "p1", "content-type": sent.get("content-type", "")}
        async with (
            aiohttp.ClientSession(f"http://{self._real}") as http,
            http.post(path, data=body, headers=kept) as answer,
        ):
            return await answer.read() if answer.status == 200 else b""
