"""Blocks go from an engine's window to another node, and there through a window to its engine.

The agents' part is real, and so are both ends' windows, threads and checks; the engines compute
nothing, and both nodes are in this process.
"""

import asyncio
import hashlib
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
import torch
from aiohttp import web

from isochrone.service.network.http_server import serve_http, serve_http_unix
from isochrone.service.trust.identity import Authority, Identity, make_csr, new_key_pem
from isochrone.service.trust.tls import client_context, node_server_context
from isochrone.service.windows.received_window import received_window
from isochrone.wire.ids import ClusterId, DeploymentId, PopId, ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.kv.transfer_frames import (
    SMALL_FRAME_BYTES_MAX,
    TransferEnd,
    TransferHead,
    WrongTransfer,
    encode_head,
)
from isochrone.wire.peers.control import PeerRole
from nodeagent.api.request.window_relay import head_frame, relayed_answer, window_headers
from nodeagent.disaggregation.kv_windows import WindowLeases
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.transfer_reader import ReceivedBlock, TransferReader
from nodeagent.engine.server.kv.kv_reading import read_blocks
from nodeagent.engine.server.kv.kv_windows import KvWindows
from nodeagent.engine.server.kv.kv_writing import BlockWriter
from tests.system.harness import until

BLOCK_BYTES = 1 << 20
FORM: Any = SimpleNamespace(block_bytes=BLOCK_BYTES, dtype=torch.uint8, shape=(BLOCK_BYTES,))
BLOCKS = 40
"""More than two windows, and than the buffers of a connection."""

DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(BLOCKS)]
NAME = ReplicaId("p")
PATH = kv_sharing.BLOCKS_PATH


def head_of(block_bytes: int, blocks: int) -> bytes:
    head = TransferHead(fingerprint=b"f", block_bytes=block_bytes, first_block=0, blocks=blocks)
    return encode_head(head)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x01" + (SMALL_FRAME_BYTES_MAX + 1).to_bytes(4, "little"),
        head_of(-BLOCK_BYTES, 1),
        head_of(0, 1),
        head_of(2**40, 1),
        head_of(BLOCK_BYTES, -1),
    ],
    ids=["long", "negative blocks", "empty blocks", "large blocks", "negative count"],
)
async def test_a_head_that_cannot_go_on_is_refused_before_more_is_read(sent: bytes) -> None:
    """A first frame could say that it has 4 GiB, which the agent then held."""
    content = asyncio.StreamReader()
    content.feed_data(sent)
    with pytest.raises(WrongTransfer):
        async with asyncio.timeout(10.0):
            await head_frame(cast(Any, content))


class SendingEngine:
    """An engine that sends blocks whose bytes are their number, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "engine.sock"
        socket_path = folder / kv_transfer.WINDOW_SOCKET_NAME
        self.windows = KvWindows(FORM, socket_path, StagingMemory(0))
        self.dies_at = BLOCKS
        self.stall_s = 30.0
        self.failed = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post(PATH, self._send)
        return app

    async def _send(self, request: web.Request) -> web.StreamResponse:
        lease_name = request.headers.get(kv_transfer.WINDOW, "")
        head = TransferHead(
            fingerprint=b"f" * 16, block_bytes=BLOCK_BYTES, first_block=0, blocks=BLOCKS
        )
        async with self.windows.lease(lease_name) as lease:
            writer = BlockWriter(request, self.windows, lease, self.stall_s)
            try:
                await writer.begin(head)
                await writer.write_all(lambda: self._read(writer))
                await writer.end(TransferEnd(cached_tokens=3))
            except (OSError, ConnectionError):
                self.failed += 1
                raise
            return writer.response

    def _read(self, writer: BlockWriter) -> None:
        sent = 0
        while sent < BLOCKS:
            if sent >= self.dies_at:
                raise ConnectionResetError("the engine died")
            destination = writer.next_destination(BLOCKS - sent)
            for number, slot in enumerate(destination.out, sent):
                slot.fill_(number)
            writer.put(DIGESTS[sent:], destination.out, destination)
            sent += destination.blocks


class Nodes:
    """A node that sends blocks of its engine, and the agent's part of one that takes them."""

    def __init__(self, engine: SendingEngine, leases: WindowLeases, taking: WindowLeases) -> None:
        self.engine = engine
        self.leases = leases
        self.taking = taking
        self.url = ""
        self.http: Any = None
        self.tls: dict[str, Any] = {}
        self.outcomes: list[str] = []

    def ask(self) -> Any:
        return self.http.post(self.url + PATH, **self.tls)

    async def is_clean(self) -> bool:
        found = [self.engine.windows.pool.counts(), self.taking.pool.counts()]
        return not any(one["kv_windows_leased"] for one in found)


def a_replica(engine_socket: Path, name: str = NAME) -> Any:
    command = SimpleNamespace(socket=str(engine_socket))
    engine = SimpleNamespace(sends_kv=True, record=SimpleNamespace(command=command))
    spec = SimpleNamespace(replica_id=ReplicaId(name), deployment_id=DeploymentId("d"))
    return SimpleNamespace(engine=engine, spec=spec)


@asynccontextmanager
async def two_nodes(server_tls: ssl.SSLContext | None = None) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wr")))
        engine = SendingEngine(folder)
        (folder / "agent").mkdir()
        replica = a_replica(engine.socket)

        def find_replica(name: ReplicaId) -> Any:
            return replica if name == NAME else None

        leases = WindowLeases(find_replica, lambda: 0.0, folder / "agent")
        taking = WindowLeases(lambda _: None, lambda: 0.0, folder / "agent")
        nodes = Nodes(engine, leases, taking)
        await engine.windows.start()
        stack.push_async_callback(engine.windows.close)
        await taking.pool.start()
        stack.push_async_callback(taking.pool.close)
        await stack.enter_async_context(serve_http_unix(engine.app(), engine.socket))
        unix = aiohttp.UnixConnector(str(engine.socket))
        to_engine = await stack.enter_async_context(
            aiohttp.ClientSession("http://engine", connector=unix)
        )

        async def relay(request: web.Request) -> web.StreamResponse:
            sent = window_headers(request, leases, NAME)
            response: web.StreamResponse | None = None
            try:
                async with to_engine.post(PATH, headers=sent) as answer:
                    response, pieces = await relayed_answer(request, answer, ("content-type",))
                    await response.prepare(request)
                    async for piece in pieces:
                        await response.write(piece)
                    await response.write_eof()
                    nodes.outcomes.append("sent")
                    return response
            except (aiohttp.ClientError, OSError) as error:
                nodes.outcomes.append(type(error).__name__)
                if response is not None and request.transport is not None:
                    request.transport.abort()
                raise

        app = web.Application()
        app.router.add_post(PATH, relay)
        port = await stack.enter_async_context(
            serve_http(app, "127.0.0.1", 0, ssl_context=server_tls)
        )
        nodes.url = f"{'https' if server_tls else 'http'}://127.0.0.1:{port}"
        nodes.http = await stack.enter_async_context(aiohttp.ClientSession())
        yield nodes


@asynccontextmanager
async def a_taking_engine(
    nodes: Nodes, store: Callable[[Sequence[ReceivedBlock]], None]
) -> AsyncIterator[aiohttp.ClientSession]:
    """Run an engine that takes blocks from the window that the request names."""

    async def take(request: web.Request) -> web.Response:
        path = request.headers[kv_transfer.WINDOW_SOCKET]
        async with received_window(path, request.headers[kv_transfer.WINDOW]) as window:
            reader = TransferReader(b"f" * 16, BLOCK_BYTES, DIGESTS, 0, window=window.memory)

            def store_and_release(blocks: Sequence[ReceivedBlock]) -> None:
                store(blocks)
                window.release(len(blocks))

            end = await read_blocks(request.content, reader, 4, store_and_release, 1, window)
            return web.json_response(end.cached_tokens)

    app = web.Application()
    app.router.add_post("/take", take)
    folder = nodes.taking.pool.path.parent
    async with (
        serve_http_unix(app, folder / "taking.sock"),
        aiohttp.ClientSession(
            "http://engine", connector=aiohttp.UnixConnector(str(folder / "taking.sock"))
        ) as http,
    ):
        # It has a socket for windows of its own, so that its agent knows that it takes them.
        with socket.socket(socket.AF_UNIX) as own:
            (folder / "engine").mkdir()
            own.bind(str(folder / "engine" / kv_transfer.WINDOW_SOCKET_NAME))
            yield http


async def move(nodes: Nodes, engine: aiohttp.ClientSession) -> int:
    """Pass the blocks of the other node to the engine; return what that says."""
    folder = nodes.taking.pool.path.parent
    receiver = a_replica(folder / "engine" / "engine.sock", "d")
    with nodes.taking.lease(NAME, receiver) as lease:
        async with (
            nodes.ask() as answer,
            lease.passed_on(answer, answer.content.iter_any(), BLOCK_BYTES) as sent_on,
            engine.post("/take", data=sent_on.pieces, headers=sent_on.headers) as taken,
        ):
            assert kv_transfer.WINDOW in sent_on.headers
            taken.raise_for_status()
            return int(await taken.json())


async def test_blocks_pass_two_windows_and_one_connection() -> None:
    numbers = list[int]()

    def store(blocks: Sequence[ReceivedBlock]) -> None:
        for block in blocks:
            assert block.content[0] == block.content[-1] == block.number
            numbers.append(block.number)

    async with two_nodes() as nodes, a_taking_engine(nodes, store) as engine:
        for _ in range(3):
            assert await move(nodes, engine) == 3
            assert numbers == list(range(BLOCKS))
            numbers.clear()
        await until("nothing is held", nodes.is_clean, 10.0)
        assert nodes.engine.windows.pool.leases_total == nodes.taking.pool.leases_total == 3


async def test_blocks_are_encrypted_from_the_window(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    authority = Authority.create(tmp_path / "authority", "test", now)
    key_pem = new_key_pem()
    certificate = authority.issue(
        make_csr(key_pem, "n1"), role=PeerRole.AGENT, name="n1", pop=PopId("ams"), now=now
    )
    identity = Identity(
        name="n1",
        role=PeerRole.AGENT,
        pop=PopId("ams"),
        cluster_id=ClusterId("c"),
        key_pem=key_pem,
        certificate_pem=certificate,
        ca_pem=authority.ca_pem,
    )
    async with two_nodes(node_server_context(identity)) as nodes:
        nodes.tls = {"ssl": client_context(identity), "server_hostname": "n1"}
        reader = TransferReader(b"f" * 16, BLOCK_BYTES, DIGESTS, 0)
        async with nodes.ask() as answer:
            pieces = [piece async for piece in answer.content.iter_any()]
        blocks = [block for piece in pieces for block in reader.feed(piece)]
        assert [block.content[5] for block in blocks] == list(range(BLOCKS))
        assert reader.end is not None
        await until("nothing is held", nodes.is_clean, 10.0)
        assert nodes.engine.windows.pool.leases_total == 1


async def test_a_window_that_fails_is_not_used_for_a_while() -> None:
    async with two_nodes() as nodes:
        await nodes.engine.windows.close()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(nodes.engine.windows.pool.path))
            with pytest.raises(aiohttp.ClientError):
                async with nodes.ask() as answer:
                    await answer.read()
            async with nodes.ask() as answer:
                assert len(await answer.read()) == answer.content_length
        assert nodes.outcomes == ["ClientPayloadError", "sent"]


async def test_an_engine_of_a_release_without_windows_is_named_none() -> None:
    async with two_nodes() as nodes:
        # It has no socket of that name.
        nodes.engine.windows.pool.path.unlink()
        async with nodes.ask() as answer:
            assert len(await answer.read()) == answer.content_length
        assert nodes.engine.windows.pool.lacking_total == 0
        assert nodes.engine.windows.pool.leases_total == 0
        with nodes.taking.lease(NAME, a_replica(nodes.engine.socket, "d")) as lease:
            assert lease.pool is None


async def test_an_engine_that_dies_breaks_the_stream_off() -> None:
    async with two_nodes() as nodes:
        nodes.engine.dies_at = 21
        with pytest.raises(aiohttp.ClientError):
            async with nodes.ask() as answer:
                await answer.read()
        await until("nothing is held", nodes.is_clean, 10.0)
        nodes.engine.dies_at = BLOCKS
        async with nodes.ask() as answer:
            assert len(await answer.read()) == answer.content_length


async def test_a_node_that_reads_nothing_holds_a_window_only_until_the_engine_gives_up() -> None:
    async with two_nodes() as nodes:
        nodes.engine.stall_s = 0.2
        async with nodes.ask() as answer:
            await until("nothing is held", nodes.is_clean, 10.0)
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        assert nodes.engine.failed == 1


async def test_an_engine_that_stops_taking_ends_the_transfer() -> None:
    def fail(blocks: Sequence[ReceivedBlock]) -> None:
        raise RuntimeError("no block is free")

    async with two_nodes() as nodes, a_taking_engine(nodes, fail) as engine:
        with suppress(aiohttp.ClientError):
            await move(nodes, engine)
        await until("nothing is held", nodes.is_clean, 10.0)


async def test_abandoned_transfers_leave_nothing() -> None:
    async with two_nodes() as nodes, a_taking_engine(nodes, lambda blocks: None) as engine:

        async def abandon(number: int) -> None:
            moving = asyncio.create_task(move(nodes, engine))
            for _ in range(number % 50):
                await asyncio.sleep(0)
            moving.cancel()
            with suppress(asyncio.CancelledError, aiohttp.ClientError):
                await moving

        for number in range(50):
            await abandon(number)
        await until("nothing is held", nodes.is_clean, 20.0)
        before, tasks = len(list(Path("/proc/self/fd").iterdir())), len(asyncio.all_tasks())
        for number in range(200):
            await abandon(number)
        await until("nothing is held", nodes.is_clean, 20.0)

        async def is_flat() -> bool:
            found = len(list(Path("/proc/self/fd").iterdir()))
            # Idle connections are kept, but not one for each of 200 transfers.
            return found <= before + 20 and len(asyncio.all_tasks()) <= tasks + 20

        await until("no descriptor and no task is left", is_flat, 20.0)
        assert nodes.taking.pool.counts()["kv_windows"] <= 4
        assert await move(nodes, engine) == 3
