"""Fetches the prefix of a waiting request's prompt from another replica of the PoP.

Rule 1: the request begins in any case. A fetch ends within the time that computing would take.
Rule 2: what a broken fetch brought is kept. The rate is learned from it too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple, Protocol

import aiohttp
import msgspec

from isochrone.wire import headers, kv_sharing, kv_transfer
from isochrone.wire.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from nodeagent import metrics
from nodeagent.decide.handoff import PeerReplicaLost
from nodeagent.decide.kv_fetch import (
    FetchChoice,
    FetchPlan,
    FetchRate,
    LinkBudget,
    MissingPrefix,
    PrefixHolder,
    plan_fetch,
)

LOCATE_TIMEOUT_S: Final = 0.2
"""How long a holder may take to say what it has."""

NODES_MAX: Final = 256
ANSWER_BYTES_MAX: Final = 64 * 1024
FAILED: Final = "failed"

_LOCATED: Final = msgspec.json.Decoder(kv_sharing.LocatedBlocks)


class RelayToPeer(Protocol):
    """Connections to the nodes of a PoP."""

    def relay(
        self, peer: PeerReplica, path: str, body: bytes, sent: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request and yield its answer. Raises PeerReplicaLost if there is none."""


class KvHolders(NamedTuple):
    """The replicas that a router names for a prompt: the addressed one, and those that may have
    its prefix. `store` keeps a copy of it; empty if none does."""

    here: PeerReplica
    others: Sequence[PeerReplica]
    store: str


class FetchedPrefix(NamedTuple):
    """What a fetch brought: the place in KV_FOUND, and the blocks."""

    place: str
    blocks: int


class FetchRates:
    """The rate at which each node of the PoP sends blocks. Routers name the nodes, so it is
    bounded."""

    def __init__(self) -> None:
        self._rates: dict[NodeId, FetchRate] = {}

    def of(self, node_id: NodeId) -> FetchRate:
        """Return the rate of one node."""
        if node_id not in self._rates and len(self._rates) >= NODES_MAX:
            self._rates.clear()
        return self._rates.setdefault(node_id, FetchRate())


class PrefixFetcher:
    """Fetches for the requests of one replica of this node."""

    def __init__(
        self,
        engine: aiohttp.ClientSession,
        peers: RelayToPeer,
        rates: FetchRates,
        budget: LinkBudget,
        clock: Callable[[], float],
    ) -> None:
        """Fetch into `engine`. `clock` returns monotonic seconds."""
        self._engine = engine
        self._peers = peers
        self._rates = rates
        self._budget = budget
        self._clock = clock

    async def fetch(
        self, transfer: str, expected: kv_transfer.ExpectedPrompt, holders: KvHolders
    ) -> FetchedPrefix | None:
        """Fetch what the waiting prompt lacks, if that pays; return what came."""
        missing = expected.digests[expected.held_blocks :]
        if not missing:
            return None
        prompt = MissingPrefix(
            expected.held_blocks,
            expected.blocks,
            expected.block_tokens,
            expected.block_bytes,
            holders.here.token_us,
        )
        found = await asyncio.gather(
            *[self._locate(peer, missing, expected.held_blocks) for peer in holders.others]
        )
        plan = plan_fetch(prompt, found, self._budget.available(self._clock()))
        if plan.peer is None:
            metrics.KV_FETCHES.labels(plan.choice).inc()
            return None
        blocks = await self._move(transfer, expected, plan)
        metrics.KV_FETCHES.labels(FetchChoice.FETCH if blocks == plan.blocks else FAILED).inc()
        place = "store" if plan.peer.replica_id == holders.store else "peer"
        return FetchedPrefix(place, blocks) if blocks else None

    async def _locate(
        self, peer: PeerReplica, missing: Sequence[bytes], held_blocks: int
    ) -> PrefixHolder:
        """Ask a replica how much it has of the blocks that are missing here."""
        body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=tuple(missing)))
        sent = {headers.REPLICA: peer.replica_id}
        rate = self._rates.of(peer.node_id)
        try:
            async with asyncio.timeout(LOCATE_TIMEOUT_S):
                async with self._peers.relay(peer, kv_sharing.LOCATE_PATH, body, sent) as answer:
                    if answer.status != 200:
                        return PrefixHolder(peer, 0, rate)
                    located = _LOCATED.decode(await answer.content.read(ANSWER_BYTES_MAX))
        except (PeerReplicaLost, aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
            return PrefixHolder(peer, 0, rate)
        blocks = held_blocks + located.blocks if located.blocks > 0 else 0
        return PrefixHolder(peer, blocks, rate)

    async def _move(
        self, transfer: str, expected: kv_transfer.ExpectedPrompt, plan: FetchPlan
    ) -> int:
        """Pass the blocks of a holder to the engine as they come; return how many came whole."""
        assert plan.peer is not None
        first = expected.held_blocks
        wanted = expected.digests[first : first + plan.blocks]
        body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=wanted))
        sent = {headers.REPLICA: plan.peer.replica_id, kv_transfer.FIRST_BLOCK: str(first)}
        path = f"{kv_transfer.TRANSFERS_PATH}{transfer}?shared=1"
        received, began_s = _ByteCount(), self._clock()
        blocks = 0
        try:
            async with asyncio.timeout(plan.timeout_s):
                async with self._peers.relay(
                    plan.peer, kv_sharing.BLOCKS_PATH, body, sent
                ) as answer:
                    if answer.status == 200 and answer.content_type == kv_transfer.CONTENT_TYPE:
                        pieces = received.count(answer.content)
                        async with self._engine.post(path, data=pieces) as taken:
                            blocks = _blocks_of(taken.status, await taken.read())
        except (PeerReplicaLost, aiohttp.ClientError, OSError, TimeoutError):
            # Whole blocks that came are stored, and count.
            blocks = min(plan.blocks, received.total // max(1, expected.block_bytes))
        now_s = self._clock()
        self._rates.of(plan.peer.node_id).record(received.total, now_s - began_s)
        self._budget.take(received.total, now_s)
        metrics.KV_FETCH_SECONDS.observe(now_s - began_s)
        metrics.KV_FETCH_BYTES.inc(received.total)
        return blocks


class _ByteCount:
    """Counts the bytes of a stream as it is passed on."""

    def __init__(self) -> None:
        self.total = 0

    async def count(self, content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        """Yield what arrives, in pieces of any size."""
        async for piece in content.iter_any():
            self.total += len(piece)
            yield piece


def _blocks_of(status: int, body: bytes) -> int:
    """Return how many blocks the engine took; 0 if it refused them."""
    if status != 200:
        return 0
    try:
        return msgspec.json.decode(body, type=kv_transfer.ReceivedBlocks).blocks
    except msgspec.DecodeError:
        return 0


def parse_holders(sent: str, store: str) -> KvHolders | None:
    """Return the replicas that a router names; None if there are no others."""
    replicas = headers.parse_peer_replicas(sent)
    if len(replicas) < 2:
        return None
    return KvHolders(replicas[0], replicas[1:], ReplicaId(store))
