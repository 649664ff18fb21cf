"""The decode node passes a prefill replica's blocks to its engine, whatever that replica does.

Engine and replicas are stand-ins in this process; test_two_legs.py has the real ones.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_transfer
from nodeagent import metrics
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.decide.requests.prefill_leg import DecodeLoad, TransferRate
from nodeagent.disaggregation.transfer_leg import LegRequest, TransferLeg

TRANSFER = "0" * 32
BLOCKS = bytes(range(256)) * 4096
"""A megabyte: more than one piece on the way."""


class EngineStandIn:
    """A decode engine that waits for the KV of one request."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.lengths: list[int | None] = []
        self.broken = 0
        self.begun_alone = asyncio.Event()
        self.is_receiving = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        path = kv_transfer.TRANSFERS_PATH + TRANSFER
        app.router.add_get(path, self._describe)
        app.router.add_post(path, self._receive)
        app.router.add_delete(path, self._begin)
        return app

    async def _describe(self, request: web.Request) -> web.Response:
        expected = kv_transfer.ExpectedPrompt(
            prompt_tokens=200,
            blocks=12,
            cached_blocks=0,
            held_blocks=0,
            block_tokens=16,
            kv_format="f" * 32,
        )
        return web.Response(body=msgspec.json.encode(expected))

    async def _receive(self, request: web.Request) -> web.Response:
        self.lengths.append(request.content_length)
        self.is_receiving.set()
        try:
            body = b"".join([piece async for piece in request.content.iter_any()])
        except (aiohttp.ClientError, ConnectionError, web.HTTPException):
            self.broken += 1
            raise
        self.bodies.append(body)
        received = kv_transfer.ReceivedBlocks(blocks=12, transfer_bytes=len(body), cached_tokens=0)
        return web.Response(body=msgspec.json.encode(received))

    async def _begin(self, request: web.Request) -> web.Response:
        self.begun_alone.set()
        return web.Response(status=204)


@asynccontextmanager
async def a_replica(name: str, fault: str, engine: EngineStandIn) -> AsyncIterator[PeerReplica]:
    """Run a node whose prefill replica sends BLOCKS to `engine`, or does something else."""
    load = headers.ReportedLoad(0, 0, 0, 0, 0, 0, 0)

    async def pong(request: web.Request) -> web.Response:
        loads = headers.format_loads({ReplicaId(name): load})
        return web.Response(status=204, headers={headers.LOADS: loads})

    async def read(request: web.Request) -> web.StreamResponse:
        assert request.headers[kv_transfer.KV_FORMAT] == "f" * 32
        if fault == "other format":
            return web.Response(status=kv_transfer.OTHER_FORMAT_STATUS)
        response = web.StreamResponse(headers={"content-type": kv_transfer.CONTENT_TYPE})
        if fault != "older release":
            response.content_length = len(BLOCKS)
        await response.prepare(request)
        await response.write(BLOCKS[: len(BLOCKS) // 2])
        if fault == "cut":
            await engine.is_receiving.wait()
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(BLOCKS[len(BLOCKS) // 2 :])
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_get("/ping", pong)
    app.router.add_post("/v1/completions", read)
    async with serve_http(app, "127.0.0.1", 0) as port:
        address = f"127.0.0.1:{port}"
        yield PeerReplica(ReplicaId(name), NodeId(address), address, 200, 20, 100)


async def transferred(engine: EngineStandIn, faults: Sequence[str]) -> TransferLeg:
    """Run a leg with one prefill replica for each fault, in this order."""
    unused: Any = None

    async def announce(replica_id: ReplicaId) -> None:
        pass

    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serve_http(engine.app(), "127.0.0.1", 0))
        peers = PeerReplicaClient(None, monotonic)
        stack.push_async_callback(peers.close)
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        here = PeerReplica(ReplicaId("d"), NodeId("d"), "127.0.0.1:9", 200, 4000, 20_000)
        replicas = [
            await stack.enter_async_context(a_replica(f"p{number}", fault, engine))
            for number, fault in enumerate(faults)
        ]
        request = LegRequest(
            transfer=TRANSFER,
            deployment="chat",
            path="/v1/completions",
            body=b"{}",
            sent={},
            replicas=[here, *replicas],
            load=lambda: DecodeLoad(0, 0.0),
            announce=announce,
        )
        leg = TransferLeg(http, peers, TransferRate(), request, monotonic, unused)
        async with asyncio.timeout(60):
            await asyncio.wait({leg._task})
        await leg.close()
        return leg


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the stand-ins enough time on a busy machine."""
    monkeypatch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
    monkeypatch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_MIN_S", 30.0)


@pytest.mark.parametrize("fault", ["", "older release"])
async def test_blocks_are_passed_on_with_their_length(fault: str) -> None:
    engine = EngineStandIn()
    leg = await transferred(engine, [fault])
    assert engine.bodies == [BLOCKS]
    # A replica of an older release does not say how long its transfer is.
    assert engine.lengths == [None if fault else len(BLOCKS)]
    assert leg.received is not None
    assert not engine.begun_alone.is_set()


async def test_a_transfer_that_breaks_is_no_whole_one_and_the_next_replica_is_tried() -> None:
    engine = EngineStandIn()
    leg = await transferred(engine, ["cut", ""])
    assert engine.bodies == [BLOCKS]
    assert engine.lengths == [len(BLOCKS)] * 2
    assert leg.received is not None
    alone = EngineStandIn()
    leg = await transferred(alone, ["cut"])
    assert (alone.bodies, leg.received) == ([], None)
    assert alone.begun_alone.is_set()


async def test_a_replica_of_another_format_is_counted_and_the_next_one_is_tried() -> None:
    refused = metrics.KV_OTHER_FORMAT.labels("prefill")
    before, engine = refused._value.get(), EngineStandIn()
    leg = await transferred(engine, ["other format", ""])
    assert (engine.bodies, len(engine.lengths)) == ([BLOCKS], 1)
    assert leg.received is not None
    assert refused._value.get() == before + 1
