"""Large bodies reach the node whole, however they arrive, and those that do not are given up."""

import asyncio
import gc
import json
import ssl
from pathlib import Path
from random import Random
from typing import Any

import pytest

from router.dataplane.body_receiver import BodyReceiver
from router.dataplane.server import ClientConnection
from tests.integration.router.fleet_of import KEY, Bench, a_bench
from tests.integration.router.test_tls import certified
from tests.system.harness import until

SIZES = (70_000, 300_000, 1_200_000, 3_000_000)
CONTINUED = 1_500_000


def a_body(size: int) -> bytes:
    """Return a chat of `size` bytes."""
    head, tail = b'{"model":"tiny","messages":[{"role":"user","content":"', b'"}]}'
    letters = Random(size).choices("abcdefgh ", k=size - len(head) - len(tail))
    return head + "".join(letters).encode() + tail


def a_request(body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    return (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body


async def connect(bench: Bench, trust: ssl.SSLContext | None = None) -> Any:
    return await asyncio.open_connection("127.0.0.1", bench.app.port, ssl=trust)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
    body = await reader.readexactly(int(length.split(b":")[1]))
    return int(head.split(b" ")[1]), json.loads(body)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_large_bodies_reach_the_node_as_they_are(tmp_path: Path, is_tls: bool) -> None:
    settings, trust = certified(tmp_path)
    bodies = [a_body(size) for size in SIZES]
    chance = Random(1)
    async with (
        asyncio.timeout(60),
        a_bench(tmp_path, body_timeout_s=30, **(settings if is_tls else {})) as bench,
    ):
        reader, writer = await connect(bench, trust if is_tls else None)
        # Each is followed by a small one at once, and cut where the one before it did not end.
        data = b"".join(a_request(body) + a_request(a_body(200)) for body in bodies)
        while data:
            size = chance.choice((1, 100, 65_000, 400_000))
            writer.write(data[:size])
            await writer.drain()
            data = data[size:]
        for _ in range(2 * len(bodies)):
            assert (await read_answer(reader))[0] == 200
        writer.close()
        assert bench.nodes[0].bodies[::2] == bodies
        assert set(bench.nodes[0].bodies[1::2]) == {a_body(200)}


async def test_what_is_left_of_a_large_body_has_the_deadline_of_a_body(tmp_path: Path) -> None:
    async with asyncio.timeout(60), a_bench(tmp_path, body_timeout_s=0.3) as bench:
        reader, writer = await connect(bench)
        writer.write(a_request(a_body(CONTINUED))[:-1])
        status, answer = await read_answer(reader)
        assert status == 408 and "the body" in answer["error"]["message"]
        # What comes after the answer is dropped.
        writer.write(b"}" + a_request(a_body(CONTINUED)))
        assert not await reader.read()
        writer.close()
        async with bench.chat() as response:
            assert response.status == 200
        assert bench.nodes[0].requests == 1


async def test_a_large_body_over_a_limit_is_refused_while_it_arrives(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"held_bytes_per_key_max": 2_000_000, "body_bytes_max": 2_000_000}
    async with asyncio.timeout(60), a_bench(tmp_path, body_timeout_s=30, **limits) as bench:
        _, first = await connect(bench)
        first.write(a_request(a_body(CONTINUED))[:-1])

        async def is_held() -> bool:
            return bench.app.server.bodies.held.total == CONTINUED - 1

        await until("the first body is held", is_held, 20.0)
        reader, second = await connect(bench)
        second.write(a_request(a_body(CONTINUED)))
        status, _ = await read_answer(reader)
        assert status == 429
        first.write(b"}")
        second.close()
        first.close()


async def test_a_connection_that_is_lost_within_a_large_body_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(60), a_bench(tmp_path, body_timeout_s=30) as bench:
        monkeypatch.setattr(gc, "collect", lambda: 0)
        monkeypatch.setattr(gc, "freeze", lambda: None)
        gc.disable()
        try:
            for _ in range(5):
                _, writer = await connect(bench)
                writer.write(a_request(a_body(CONTINUED))[:-1])
                await writer.drain()

                async def has_begun() -> bool:
                    return bench.app.server.bodies.held.total == CONTINUED - 1

                await until("the body is held", has_begun, 20.0)
                writer.transport.abort()

                async def is_free() -> bool:
                    left = [type(thing) for thing in gc.get_objects()]
                    is_left = left.count(ClientConnection) + left.count(BodyReceiver)
                    return not bench.app.server.bodies.held.total and not is_left

                await until("the connection is freed", is_free, 20.0)
        finally:
            gc.enable()
