"""A client that does not read pauses its node, and delays no other client."""

import asyncio
import resource
import socket
from contextlib import suppress
from pathlib import Path

from isochrone.wire.peers.usage import RequestOutcome
from router.dataplane.exchange import SLOW_CLIENT_S
from router.decide.liveness.outlier_ejection import FAILURES_MAX
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, Bench, a_bench
from tests.integration.router.test_serving import frames, usage, words

TOKENS = 20_000
BODY = b'{"model":"tiny","stream":true,"max_tokens":%d,"messages":[{"role":"user","content":"x"}]}'


def a_node() -> FakeNode:
    node = FakeNode()
    node.filler = "x" * 1000 + " "
    return node


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_unread_stream(bench: Bench) -> Client:
    """Request a stream of 20 MB and read nothing."""
    return await open_unread(bench, BODY % TOKENS)


async def open_unread(bench: Bench, body: bytes) -> Client:
    """Send a request and read nothing."""
    client = socket.socket()
    # Before it connects: otherwise the kernel lets it grow to megabytes.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", bench.app.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (KEY.encode(), len(body))
    )
    writer.write(body)
    return reader, writer


async def wait_until_paused(node: FakeNode) -> int:
    """Wait until the node stops sending; return the number of frames it sent."""
    before = 0
    while node.sent != before or not node.sent:
        before = node.sent
        await asyncio.sleep(0.3)
    return before


async def test_a_client_that_does_not_read_pauses_the_node(tmp_path: Path) -> None:
    node = a_node()
    async with a_bench(tmp_path, [node], stream_idle_timeout_s=0.5, write_timeout_s=30) as bench:
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        reader, writer = await open_unread_stream(bench)
        await node.until(lambda: node.running == 1)
        sent = await wait_until_paused(node)
        # Only as much as socket buffers hold: by default 4 MB where sent, 6 MB where received.
        assert 0 < sent < TOKENS * 3 // 4
        # Longer than the timeout of a silent node, which does not run while the client is slow.
        await asyncio.sleep(1.0)
        assert node.running == 1
        async with bench.chat(max_tokens=1) as response:
            assert response.status == 200
        received = bytearray()
        while chunk := await reader.read(1 << 20):
            received += chunk
        text = b"".join(
            part for part in received.split(b"\r\n") if part.startswith(b"data: ")
        ).decode()
        numbers = [word for word in words(frames(text)).split() if word.startswith("t")]
        assert len(numbers) == TOKENS
        assert numbers == [f"t{n}" for n in range(TOKENS)]
        writer.close()
        after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert after_kib - before_kib < 200 * 1024


async def test_a_client_that_never_reads_is_disconnected(tmp_path: Path) -> None:
    node = a_node()
    async with a_bench(tmp_path, [node], write_timeout_s=0.5, usage_interval_s=3600) as bench:
        _, writer = await open_unread_stream(bench)
        await node.until(lambda: node.cancelled == 1)
        (row,) = await usage(bench)
        assert row.outcome is RequestOutcome.CANCELLED
        assert 0 < row.output_tokens < TOKENS
        writer.close()


async def test_a_stream_that_arrives_byte_by_byte_is_relayed_whole(tmp_path: Path) -> None:
    node = FakeNode()
    node.splits_bytes = True
    async with a_bench(tmp_path, [node]) as bench, bench.chat(stream=True) as response:
        assert words(frames(await response.text())) == "t0 t1 t2 t3 t4 t5 t6 t7 "


async def test_connections_to_nodes_are_reused(tmp_path: Path) -> None:
    async with a_bench(tmp_path, probe_interval_s=3600) as bench:
        for number in range(20):
            async with bench.chat(stream=bool(number % 2)) as response:
                await response.read()
        assert len(bench.app.upstream) <= 2


async def test_a_client_that_reads_slowly_ejects_no_replica(tmp_path: Path) -> None:
    """An engine breaks off a stream that is not read. Three such clients ejected a healthy one."""
    node = a_node()
    node.filler *= 20
    async with a_bench(tmp_path, [node], write_timeout_s=30) as bench:
        clients = [await open_unread_stream(bench) for _ in range(FAILURES_MAX)]
        await node.until(lambda: node.running == len(clients))
        await wait_until_paused(node)
        await asyncio.sleep(SLOW_CLIENT_S)
        node.cuts_all = True
        for reader, writer in clients:
            while await reader.read(1 << 20):
                pass
            writer.close()
        await node.until(lambda: node.running == 0)
        assert not bench.app.fleet.health.unhealthy()
        # The same without a slow client.
        node.cuts_all, node.itl_s, node.sent = False, 0.02, 0

        async def read_all() -> None:
            async with bench.chat(stream=True, max_tokens=1_000) as response:
                await response.read()

        reading = [asyncio.create_task(read_all()) for _ in range(FAILURES_MAX)]
        await node.until(lambda: node.running == len(reading))
        await asyncio.sleep(0.3)
        node.cuts_all = True
        await asyncio.gather(*reading)
        assert bench.app.fleet.health.unhealthy()


ANSWER_TOKENS = 1_200_000
"""They make an answer of nine megabytes, more than the buffers of sockets hold."""


async def answer_bytes(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Read an answer to its end; return how many bytes its body has, and how many it should."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    got = 0
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            got += len(data)
    return got, int(length.partition(b":")[2])


async def test_a_tenants_unread_answers_use_limited_memory(tmp_path: Path) -> None:
    node = FakeNode()
    async with a_bench(
        *(tmp_path, [node]),
        answers_held_bytes_max=32 * 2**20,
        first_byte_timeout_s=30,
        write_timeout_s=60,
    ) as bench:
        unread = bench.app.server.bodies.unread
        body = BODY.replace(b'"stream":true,', b"") % ANSWER_TOKENS
        clients = []
        for number in range(1, 5):
            clients.append(await open_unread(bench, body))
            async with asyncio.timeout(30):
                while node.requests < number or bench.app.fleet.in_flight.requests:
                    await asyncio.sleep(0.05)
            assert unread.total <= 24 * 2**20
        assert unread.total > 4 * 2**20
        answers = [await answer_bytes(reader) for reader, _ in clients]
        whole = [got == length for got, length in answers]
        assert whole[0] and not whole[-1], answers
        async with asyncio.timeout(30):
            while unread.total:
                await asyncio.sleep(0.05)
        for _, writer in clients:
            writer.close()


async def test_the_bodies_of_one_tenants_streams_take_limited_memory(tmp_path: Path) -> None:
    """With 80 streams whose bodies had 8 MiB a key took 1.3 GiB of a router."""
    node = FakeNode()
    node.hang_at = 1
    text = "x" * 2**19
    async with a_bench(
        *(tmp_path, [node]),
        route={"tokens_in_flight_max": 10**9},
        answers_held_bytes_max=4 * 2**20,
        stream_idle_timeout_s=60,
    ) as bench:
        open_streams = []
        for _ in range(4):
            response = await bench.chat(text, stream=True)
            assert response.status == 200
            open_streams.append(response)
        async with bench.chat(text, stream=True) as refused:
            assert refused.status == 429, await refused.text()
            assert "fill its share of the router's memory" in await refused.text()
        async with bench.chat("short", stream=True) as response:
            assert response.status == 200
        for response in open_streams:
            response.close()
        await node.until(lambda: node.cancelled >= len(open_streams))
        async with bench.chat(text, stream=True) as response:
            assert response.status == 200
