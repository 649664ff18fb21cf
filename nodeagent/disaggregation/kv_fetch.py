"""Fetches the prefix of a waiting request's prompt from another replica of the PoP.

Rule 1: the request begins in any case. A fetch is given up once the rest would be computed sooner,
and early enough for the request's deadline.
Rule 2: blocks that a broken fetch brought are kept, and the node is not used for a while. Its rate
is also learned from a fetch that is given up. If the engine here failed, nothing is learned.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    nullcontext,
    suppress,
)
from math import inf
from typing import Final, NamedTuple, Protocol

import aiohttp
import msgspec

from isochrone.service.http_responses import read_response
from isochrone.service.tracing import names
from isochrone.service.tracing.recorder import current_span
from isochrone.wire import codec
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from nodeagent import metrics
from nodeagent.decide.requests.handoff import PeerReplicaLost
from nodeagent.decide.requests.kv_fetch import (
    FetchChoice,
    FetchLimits,
    FetchPlan,
    FetchRate,
    MissingPrefix,
    PrefixHolder,
    plan_fetch,
)
from nodeagent.decide.requests.kv_quota import KvQuota, KvUser
from nodeagent.disaggregation.kv_windows import WindowLease
from nodeagent.disaggregation.store_fetch import STORE, StoreFetch
from nodeagent.host.engines.open_session import open_session, read_answer

NODES_MAX: Final = 256
ANSWER_BYTES_MAX: Final = 64 * 1024
FAILED: Final = "failed"

_LOCATED: Final = msgspec.json.Decoder(kv_sharing.LocatedBlocks)
_RECEIVED: Final = msgspec.json.Decoder(kv_transfer.ReceivedBlocks)


class RelayToPeer(Protocol):
    """Connections to the nodes of a PoP."""

    def relay(
        self, peer: PeerReplica, path: str, body: bytes, sent: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request and yield its answer. Raises PeerReplicaLost if there is none."""


LeaseWindow = Callable[[ReplicaId], AbstractContextManager[WindowLease]]


class KvHolders(NamedTuple):
    """The replicas that a router names for a prompt: the addressed one, and those that may have
    its prefix. `keeper` keeps a copy of it; empty if none does."""

    here: PeerReplica
    others: Sequence[PeerReplica]
    keeper: str


class FetchedPrefix(NamedTuple):
    """The result of a fetch: the place in KV_FOUND, the blocks, and how long the request waited."""

    place: str
    blocks: int
    waited_s: float = 0.0
    has_moved: bool = False
    """Whether blocks were requested: a fetch that failed may have brought some."""


class FetchRates:
    """The rate at which each node of the PoP sends blocks, and the fetches that run. Routers name
    the nodes, so it is bounded."""

    def __init__(self) -> None:
        self._rates: dict[NodeId, FetchRate] = {}
        self.store = FetchRate()
        """The rate of the PoP's store."""
        self.running = 0

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
        quota: KvQuota,
        user: KvUser,
        clock: Callable[[], float],
        lease_window: LeaseWindow = lambda _: nullcontext(WindowLease()),
        store: StoreFetch | None = None,
    ) -> None:
        """Fetch into `engine` for `user`. `clock` returns monotonic seconds.

        `lease_window` leases a window to a transfer from a replica of this node. `store` is
        the PoP's store, if the engine belongs to one.
        """
        self._lease_window = lease_window
        self._store = store
        self._engine = engine
        self._peers = peers
        self._rates = rates
        self._quota = quota
        self._user = user
        self._clock = clock

    async def fetch(
        self,
        transfer: str,
        expected: kv_transfer.ExpectedPrompt,
        holders: KvHolders,
        deadline_s: float = inf,
    ) -> FetchedPrefix | None:
        """Fetch what the waiting prompt lacks, if that pays; return what came.

        `deadline_s` is the time until which the request must have begun to answer, on the clock.
        """
        began_s = self._clock()
        prompt = MissingPrefix(
            expected.held_blocks,
            expected.blocks,
            expected.block_tokens,
            expected.block_bytes,
            holders.here.token_us,
        )
        found = await self._find_holders(expected, holders, prompt.locate_timeout_s)
        if not found:
            return None
        plan, span = plan_fetch(prompt, found, self._limits(deadline_s)), current_span()
        if plan.peer is None:
            metrics.KV_FETCHES.labels(plan.choice).inc()
            span.set(names.KV_OUTCOME, plan.choice.value)
            return FetchedPrefix("peer", 0, self._clock() - began_s)
        span.set(names.REPLICA, plan.peer.replica_id)
        self._rates.running += 1
        try:
            is_stored = plan.peer is STORE
            move = self._move_from_store if is_stored else self._move
            blocks = await move(transfer, expected, plan)
        finally:
            self._rates.running -= 1
        outcome = FetchChoice.FETCH.value if blocks == plan.blocks else FAILED
        metrics.KV_FETCHES.labels(outcome).inc()
        place = "store" if is_stored or plan.peer.replica_id == holders.keeper else "peer"
        span.set(names.KV_OUTCOME, outcome)
        span.set(names.KV_PLACE, place)
        span.set(names.KV_BLOCKS, blocks)
        return FetchedPrefix(place, blocks, self._clock() - began_s, has_moved=True)

    async def _find_holders(
        self, expected: kv_transfer.ExpectedPrompt, holders: KvHolders, timeout_s: float
    ) -> list[PrefixHolder]:
        """Ask the replicas and the store what they have of the blocks that are missing here."""
        missing, now_s = expected.digests[expected.held_blocks :], self._clock()
        if not missing:
            return []
        questions = [
            self._locate(peer, missing, expected, timeout_s)
            for peer in holders.others
            if self._rates.of(peer.node_id).may_ask(now_s)
        ]
        if self._store is not None and self._store.may_ask():
            questions.append(self._store.locate(missing, expected.held_blocks, timeout_s))
        return [
            holder._replace(keeps_copy=True) if holder.peer.replica_id == holders.keeper else holder
            for holder in await asyncio.gather(*questions)
        ]

    def _limits(self, deadline_s: float) -> FetchLimits:
        now_s = self._clock()
        return FetchLimits(
            self._quota.link_bytes(now_s),
            self._quota.user_bytes(self._user, now_s),
            self._rates.running,
            deadline_s - now_s,
            now_s,
        )

    async def _locate(
        self,
        peer: PeerReplica,
        missing: Sequence[bytes],
        expected: kv_transfer.ExpectedPrompt,
        timeout_s: float,
    ) -> PrefixHolder:
        """Ask a replica how much it has of the blocks that are missing here.

        Blocks of another model or KV format count as none.
        """
        body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=tuple(missing)))
        sent: dict[str, str] = {headers.REPLICA: peer.replica_id}
        current_span().add_to(sent)
        rate = self._rates.of(peer.node_id)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._peers.relay(peer, kv_sharing.LOCATE_PATH, body, sent) as answer:
                    if answer.status != 200:
                        return PrefixHolder(peer, 0, rate)
                    body = await read_response(answer, ANSWER_BYTES_MAX)
                    located = codec.decode_json(body, _LOCATED)
        except (PeerReplicaLost, aiohttp.ClientError, OSError, codec.MalformedFrame):
            return PrefixHolder(peer, 0, rate)
        if located.kv_format and expected.kv_format not in ("", located.kv_format):
            metrics.KV_OTHER_FORMAT.labels("fetch").inc()
            return PrefixHolder(peer, 0, rate)
        blocks = expected.held_blocks + located.blocks if located.blocks > 0 else 0
        return PrefixHolder(peer, blocks, rate)

    async def _move_from_store(
        self, transfer: str, expected: kv_transfer.ExpectedPrompt, plan: FetchPlan
    ) -> int:
        """Have the engine fetch blocks from the PoP's store; return how many came."""
        assert self._store is not None
        began_s = self._clock()
        blocks = await self._store.move(transfer, expected.block_bytes, plan)
        now_s, moved_bytes = self._clock(), blocks * expected.block_bytes
        self._quota.take(self._user, moved_bytes, now_s)
        metrics.KV_FETCH_SECONDS.observe(now_s - began_s)
        metrics.KV_FETCH_BYTES.inc(moved_bytes)
        current_span().set(names.KV_BYTES, moved_bytes)
        return blocks

    async def _move(
        self, transfer: str, expected: kv_transfer.ExpectedPrompt, plan: FetchPlan
    ) -> int:
        """Pass the blocks of a holder to the engine as they come; return how many came whole."""
        assert plan.peer is not None
        with self._lease_window(plan.peer.replica_id) as lease:
            arriving = _ArrivingBlocks(plan, lease, expected.block_bytes, self._clock)
            try:
                moved = await self._relay(transfer, expected, plan, arriving)
            except (PeerReplicaLost, aiohttp.ClientError, OSError, TimeoutError) as error:
                is_late = isinstance(error, TimeoutError)
                is_senders = is_late or isinstance(error, PeerReplicaLost) or arriving.is_broken
                moved = _Moved(arriving.kept_blocks, is_senders, is_late)
            except asyncio.CancelledError:
                # The request is gone, which says nothing about the node.
                self._quota.take(self._user, arriving.total, self._clock())
                raise
            if moved.blocks < plan.blocks and moved.tells_of_sender:
                arriving.lease.record_failure()
        self._record(plan, arriving, moved)
        return moved.blocks

    async def _relay(
        self,
        transfer: str,
        expected: kv_transfer.ExpectedPrompt,
        plan: FetchPlan,
        arriving: "_ArrivingBlocks",
    ) -> "_Moved":
        """Request the blocks, and pass them to the engine while the plan's time lasts."""
        assert plan.peer is not None
        first = expected.held_blocks
        wanted = expected.digests[first : first + plan.blocks]
        body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=wanted))
        sent = {
            headers.REPLICA: plan.peer.replica_id,
            kv_transfer.FIRST_BLOCK: str(first),
            **arriving.lease.to_sender,
        }
        current_span().add_to(sent)
        path = f"{kv_transfer.TRANSFERS_PATH}{transfer}?shared=1"
        async with (
            asyncio.timeout(plan.timeout_s) as limit,
            self._peers.relay(plan.peer, kv_sharing.BLOCKS_PATH, body, sent) as answer,
        ):
            if answer.status != 200 or answer.content_type != kv_transfer.CONTENT_TYPE:
                return _Moved(0, tells_of_sender=True)
            lease = arriving.lease = arriving.lease.answered_with(answer.headers)
            pieces = arriving.count(answer.content, None if lease.name else limit)
            engine = open_session(self._engine)
            async with (
                lease.passed_on(answer, pieces, expected.block_bytes) as sent_on,
                engine.post(path, data=sent_on.pieces, headers=sent_on.headers) as taken,
            ):
                blocks = _blocks_of(taken.status, await read_answer(taken))
                return _Moved(blocks, taken.status not in kv_transfer.RECEIVER_STATUSES)

    def _record(self, plan: FetchPlan, arriving: "_ArrivingBlocks", moved: "_Moved") -> None:
        """Learn the node's rate, and count the bytes against the limits of the link."""
        assert plan.peer is not None
        now_s, rate = self._clock(), self._rates.of(plan.peer.node_id)
        took_s = now_s - arriving.began_s
        moved_bytes = arriving.moved_bytes(moved.blocks)
        is_whole = moved.blocks >= plan.blocks
        if moved.tells_of_sender and (is_whole or moved.is_late):
            learn = rate.record if is_whole else rate.record_late
            first_s = min(took_s, arriving.first_at_s - arriving.began_s)
            learn(moved_bytes, took_s, first_s, now_s)
        elif moved.tells_of_sender:
            rate.record_failure(took_s, now_s)
        # Blocks that go through a window do not use the link.
        self._quota.take(self._user, arriving.total, now_s)
        metrics.KV_FETCH_SECONDS.observe(took_s)
        metrics.KV_FETCH_BYTES.inc(moved_bytes)
        current_span().set(names.KV_BYTES, moved_bytes)


class _Moved(NamedTuple):
    """The outcome of a fetch: the whole blocks that the engine has.

    `tells_of_sender` is false if this node's engine was at fault. `is_late` says that the fetch was
    given up.
    """

    blocks: int
    tells_of_sender: bool
    is_late: bool = False


class _ArrivingBlocks:
    """The stream of a fetch as it is passed on: what came, and when the first block did."""

    def __init__(
        self, plan: FetchPlan, lease: WindowLease, block_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._plan = plan
        self.began_s = clock()
        self.lease = lease
        self._block_bytes = block_bytes
        self._clock = clock
        self.total = 0
        """All bytes."""
        self.blocks = 0
        """Whole blocks."""
        self.first_at_s = inf
        self.is_broken = False
        """Whether the sender's stream broke."""

    @property
    def kept_blocks(self) -> int:
        """The whole blocks that the engine keeps of a stream that broke.

        The last one does not count: the engine did not say that it has all. Those of a window are
        not seen here.
        """
        return 0 if self.lease.name else min(self._plan.blocks - 1, self.blocks)

    def moved_bytes(self, blocks: int) -> int:
        """Return the bytes of `blocks` in a window; else those that came, with the first block."""
        if self.lease.name:
            return blocks * self._block_bytes
        return self.total if self.first_at_s < inf else 0

    async def count(
        self, content: aiohttp.StreamReader, limit: asyncio.Timeout | None
    ) -> AsyncIterator[bytes]:
        """Yield what arrives, in pieces of any size; move `limit` with each block.

        There is no limit to move for a window, which has the blocks: its stream is only their head
        and end. Other heads come before the sender has a block to read, and say nothing about it.
        """
        head_bytes = 0 if limit is None else kv_transfer.HEAD_BYTES_MAX
        try:
            async for piece in content.iter_any():
                self.total += len(piece)
                if self.first_at_s == inf and self.total > head_bytes:
                    self.first_at_s = self._clock()
                blocks = min(self.total // max(1, self._block_bytes), self._plan.blocks)
                if limit is not None and blocks > self.blocks:
                    self.blocks = blocks
                    self._move(limit)
                yield piece
        except (aiohttp.ClientError, OSError):
            self.is_broken = True
            raise

    def _move(self, limit: asyncio.Timeout) -> None:
        """Let the fetch go on as long as the plan allows after this block."""
        now_s, first_s = self._clock() - self.began_s, self.first_at_s - self.began_s
        left_s = self._plan.give_up_at_s(self.blocks, first_s, now_s) - now_s
        # The fetch may have been given up while this piece came.
        with suppress(RuntimeError):
            limit.reschedule(asyncio.get_running_loop().time() + left_s)


def _blocks_of(status: int, body: bytes) -> int:
    """Return how many blocks the engine took; 0 if it refused them."""
    if status != 200:
        return 0
    try:
        return codec.decode_json(body, _RECEIVED).blocks
    except codec.MalformedFrame:
        return 0


def parse_holders(sent: str, keeper: str) -> KvHolders | None:
    """Return the replicas that a router names; None if there are no others."""
    replicas = headers.parse_peer_replicas(sent)
    if len(replicas) < 2:
        return None
    return KvHolders(replicas[0], replicas[1:], ReplicaId(keeper))
