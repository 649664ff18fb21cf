"""Answers of engines and nodes that are no JSON, in every way that a decoder reports."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import DeploymentId, NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from nodeagent.decide.requests.kv_quota import NO_KV_LIMITS, KvQuota, KvUser
from nodeagent.decide.requests.prefill_leg import DecodeLoad, TransferRate
from nodeagent.disaggregation.handshake_leg import HandshakeLeg
from nodeagent.disaggregation.kv_fetch import FetchRates, KvHolders, PrefixFetcher
from nodeagent.disaggregation.prompt_copies import PromptForStore, StoreCopies
from nodeagent.disaggregation.transfer_leg import LegRequest, TransferLeg
from nodeagent.drivers.handshake import MooncakeHandshake, NixlHandshake
from nodeagent.host.engines.canary import has_list, tokens_read

MALFORMED = {
    "cut": b'{"usage":{"prompt_tokens":',
    "not UTF-8": b'{"kv_format":"\xff","host":"\xff","blocks":1,"usage":"\xff"}',
    "nested": b'{"x":' + b"[" * 100_000,
}
REPLICAS = [
    PeerReplica(ReplicaId(name), NodeId(name), f"{name}:1", 200, 4000, 20_000) for name in "ab"
]
USER = KvUser(DeploymentId("d"), "t")
DIGESTS = tuple(bytes([number]) * 32 for number in range(12))
EXPECTED = kv_transfer.ExpectedPrompt(
    prompt_tokens=200,
    blocks=12,
    cached_blocks=0,
    held_blocks=0,
    block_tokens=16,
    block_bytes=1000,
    digests=DIGESTS,
)

malformed = pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)


class BytesAnswer:
    """An answer with the given body."""

    status = 200
    content_type = "application/json"
    content_length = None
    url = "http://engine"
    headers: Mapping[str, str] = {}

    def __init__(self, body: bytes) -> None:
        self._body = body

    def raise_for_status(self) -> None:
        pass

    async def read(self, size: int = -1) -> bytes:
        """Return the whole body, or as a stream with `size`, what has arrived."""
        return self._body if size < 0 else self._body[:5]

    @property
    def content(self) -> "BytesAnswer":
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        # As the network cuts it.
        yield self._body[:5]
        yield self._body[5:]


class MalformedServer:
    """An engine's session, and the nodes of a PoP: all that they answer is `body`."""

    closed = False

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.requests: list[str] = []
        self.arrived: asyncio.Queue[str] = asyncio.Queue()

    @asynccontextmanager
    async def _answer(self, path: str) -> AsyncIterator[Any]:
        self.requests.append(path)
        self.arrived.put_nowait(path)
        yield BytesAnswer(self.body)

    def post(self, path: str, **sent: object) -> Any:
        return self._answer(path)

    def get(self, path: str) -> Any:
        return self._answer(path)

    def delete(self, path: str) -> Any:
        return self._answer(path)

    def relay(self, peer: PeerReplica, path: str, body: bytes, sent: object) -> Any:
        return self._answer(path)

    async def queued_tokens(self, replicas: object, timeout_s: float = 0.0) -> dict[ReplicaId, int]:
        return {ReplicaId("b"): 0}


async def announce(replica_id: ReplicaId) -> None:
    pass


def a_request() -> LegRequest:
    return LegRequest(
        transfer="f" * 32,
        deployment="chat",
        path="/v1/completions",
        body=b'{"prompt":"x"}',
        sent={},
        replicas=REPLICAS,
        load=lambda: DecodeLoad(10_000, 8),
        announce=announce,
        deadline_s=inf,
    )


@malformed
async def test_a_holder_that_answers_no_json_has_no_blocks(body: bytes) -> None:
    """The request had its answer, and then counted as one that failed."""
    nodes = MalformedServer(body)
    engine = cast(aiohttp.ClientSession, nodes)
    fetcher = PrefixFetcher(engine, nodes, FetchRates(), KvQuota(NO_KV_LIMITS), USER, lambda: 100.0)
    fetched = await fetcher.fetch("0" * 32, EXPECTED, KvHolders(REPLICAS[0], REPLICAS[1:], ""))
    assert fetched is not None
    assert (fetched.blocks, len(nodes.requests)) == (0, 1)


async def test_a_holder_whose_answer_arrives_in_pieces_has_its_blocks() -> None:
    located = msgspec.json.encode(kv_sharing.LocatedBlocks(blocks=12, block_bytes=1000))
    nodes = MalformedServer(located)
    engine = cast(aiohttp.ClientSession, nodes)
    fetcher = PrefixFetcher(engine, nodes, FetchRates(), KvQuota(NO_KV_LIMITS), USER, lambda: 100.0)
    fetched = await fetcher.fetch("0" * 32, EXPECTED, KvHolders(REPLICAS[0], REPLICAS[1:], ""))
    assert fetched is not None
    assert fetched.has_moved
    assert nodes.requests == [kv_sharing.LOCATE_PATH, kv_sharing.BLOCKS_PATH]


@malformed
async def test_a_prompt_whose_engine_describes_it_in_no_json_begins(body: bytes) -> None:
    engine = MalformedServer(body)
    leg = TransferLeg(
        cast(aiohttp.ClientSession, engine),
        cast(Any, engine),
        TransferRate(),
        a_request(),
        lambda: 0.0,
        cast(PrefixFetcher, None),
    )
    await asyncio.wait({leg._task})
    await leg.close()
    assert (leg.expected, len(engine.requests)) == (None, 2)


@malformed
@pytest.mark.parametrize("handshake", [NixlHandshake(), MooncakeHandshake()], ids=["nixl", "mc"])
async def test_a_prefill_engine_that_answers_no_json_costs_one_attempt(
    body: bytes, handshake: Any
) -> None:
    """The client got an internal error in place of this node's answer."""
    peers, posted = MalformedServer(body), []

    @asynccontextmanager
    async def post(data: bytes) -> AsyncIterator[Any]:
        posted.append(data)
        yield BytesAnswer(b"{}")

    leg = HandshakeLeg(handshake, cast(Any, peers), TransferRate(), a_request(), lambda: 0.0)
    async with leg.answer(cast(Any, post)) as answer:
        assert answer.status == 200
    assert (posted, len(peers.requests), leg.received) == ([b'{"prompt":"x"}'], 1, None)


@malformed
async def test_an_engine_that_answers_no_json_to_a_copy_gets_the_next_one(
    body: bytes,
) -> None:
    """No prompt of any engine of the node was stored after it, until the agent was restarted."""
    engine = MalformedServer(body)
    copies = StoreCopies(KvQuota(NO_KV_LIMITS), lambda: 0.0)
    for _ in range(2):
        copies.offer(PromptForStore(cast(aiohttp.ClientSession, engine), USER, DIGESTS))
    async with asyncio.timeout(5.0):
        for _ in range(2):
            await engine.arrived.get()
    await copies.close()


@malformed
def test_a_canary_takes_no_answer_for_a_list_that_is_no_json(body: bytes) -> None:
    assert not has_list(body, "choices")
    assert tokens_read(body) == 0
